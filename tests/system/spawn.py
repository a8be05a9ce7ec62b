#!/usr/bin/env python3
"""Ranks spawn processes: their ranks, their communication, refusals, and the end of the job.

In one cluster and over two, with MPICH and Intel MPI. Open MPI has its own launcher.
"""

import sys

import common
from support import process

PROGRAM = str(common.PROGRAMS / "spawn.py")
# (clusters, ranks)
PLACES = ((1, 1), (1, 2), (2, 2))
LIBRARIES = {"mpich": "MPICH", "impi": "Intel MPI"}


def main() -> int:
    options = common.arguments(__doc__)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    for mpi in LIBRARIES:
        for clusters, ranks in PLACES:
            everything(checks, mpi, clusters, ranks)
            crash(checks, mpi, clusters, ranks)
    return checks.end()


def everything(checks, mpi: str, clusters: int, ranks: int):
    name = f"{LIBRARIES[mpi]}: {ranks} ranks in {clusters} clusters spawn"
    if not checks.wants(name):
        return
    finished = run(checks.options, mpi, clusters, ranks, [])
    output, left = finished.output, len(process.end_descendants())
    expected = {
        "rounds": "3",
        "commands": "[(0, 3, 0), (1, 3, 1), (2, 3, 1)]",
        "info": f"[('/', '{clusters - 1}')]",
        "nested": "2",
        "refused": "5 of 5",
        "end": "well",
    }
    said = {key: common.values(output, key) for key in expected}
    wrong = [f"{key}: {said[key]}" for key, value in expected.items() if said[key] != [value]]
    # Which groups communicated: the groups spawned first, the group below a spawned one, the last
    # group.
    places = common.values(output, "clusters")
    if len(places) != 5 or " ".join(map(str, range(clusters))) not in places:
        wrong.append(f"clusters: {places}")
    is_ok = finished.ok and not wrong and not left
    checks.check(name, is_ok, "; ".join([common.how(finished), f"{left} left", *wrong]), output)


def crash(checks, mpi: str, clusters: int, ranks: int):
    name = f"{LIBRARIES[mpi]}: a rank spawned by {ranks} ranks in {clusters} clusters dies"
    if not checks.wants(name):
        return
    finished = run(checks.options, mpi, clusters, ranks, ["crash"])
    output, left = finished.output, len(process.end_descendants())
    is_named = "rank 1 of spawned group 1 on node" in output and "SIGSEGV" in output
    is_ok = finished.code == 139 and not finished.why and is_named and not left
    named = "named" if is_named else "not named"
    checks.check(name, is_ok, f"{common.how(finished)}; {named}; {left} left", output)


def run(options, mpi: str, clusters: int, ranks: int, words):
    cut = ["--clusters", clusters] if clusters > 1 else []
    command = [*common.landbridge_run(options, ranks, *cut), common.python(options, mpi), PROGRAM]
    # A single cluster has another name than the last of several.
    last = f"c{clusters - 1}" if clusters > 1 else "hosts"
    environment = {"LANDBRIDGE_TEST_LAST_CLUSTER": last, "I_MPI_ROOT": str(options.venvs / "impi")}
    return common.run(options, [*command, *words], environment)


if __name__ == "__main__":
    sys.exit(main())
