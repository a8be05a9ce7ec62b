#!/usr/bin/env python3
"""Every stock MPI library, under Landbridge's launcher and under its own, on Landbridge's provider.

Each job says hello, sends messages in both directions, reduces, and accesses remote memory; the
provider's own log messages show that this provider carried the data. `--repeat N` runs Intel MPI N
more times, because its ranks end without waiting for each other.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import common

RANKS = [2, 4]
BASICS = str(common.PROGRAMS / "basics.py")


def main() -> int:
    options = common.arguments(__doc__, add_options)
    common.quiet_environment()
    checks = common.Checks(options)
    for ranks in RANKS:
        mpich(checks, ranks)
        intel(checks, ranks)
        open_mpi(checks, ranks)
        debian_open_mpi(checks, ranks)
    other_transports(checks)
    sockets(checks)
    partings(checks)
    windows(checks)
    return checks.end()


def add_options(parser):
    parser.add_argument("--repeat", type=int, default=10, help="runs of the parting check")


def mpich(checks, ranks):
    options = checks.options
    program = [common.python(options, "mpich"), BASICS]
    job(checks, f"MPICH, landbridge run, {ranks}", [*common.landbridge_run(options, ranks), *program])
    two = common.landbridge_run(options, ranks, "--clusters", "2")
    job(checks, f"MPICH, landbridge run, two clusters, {ranks}", [*two, *program])
    own = [options.venvs / "mpich" / "bin" / "mpiexec", "-n", ranks, *program]
    job(checks, f"MPICH, mpiexec, {ranks}", own, common.settings(options, "mpich"))


def other_transports(checks):
    """The environment chooses another transport, as module files do: messages pass by ours, also
    between two clusters, and the launcher says so."""
    options, two = checks.options, ("--clusters", "2")
    tcp = {"FI_PROVIDER": "tcp"}
    for library, program, chosen in [
        ("MPICH", "mpich", tcp | {"MPIR_CVAR_CH4_NETMOD": "ucx"}),
        ("Intel MPI", "impi", intel_root(options) | tcp | {"I_MPI_OFI_PROVIDER": "tcp", "I_MPI_FABRICS": "shm:tcp"}),
    ]:
        command = [*common.landbridge_run(options, 4, *two), common.python(options, program), BASICS]
        job(checks, f"{library}, FI_PROVIDER=tcp, two clusters, 4", command, chosen, says="ranks get FI_PROVIDER=landbridge")


SOCKETS = """
import os, re
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]
own = {link[8:-1] for link in links if link.startswith("socket:[")}
rows = [line.split() for name in ("tcp", "tcp6", "udp", "udp6") for line in open(f"/proc/self/net/{name}")]
print(*(f"socket: {row[1].partition(':')[0]}" for row in rows if row[9:] and row[9] in own), sep=chr(10), flush=True)
MPI.COMM_WORLD.barrier()
"""


def sockets(checks):
    """The ranks of a job of one host have no socket at another address than the loopback's."""
    name, options = "sockets of the ranks of one host", checks.options
    if not checks.wants(name):
        return
    for path in ("tcp", "shm,tcp"):
        command = [*common.landbridge_run(options, 2), common.python(options), "-c", SOCKETS]
        finished = common.run(options, command, {"LANDBRIDGE_PATHS": path})
        seen = common.values(finished.output, "socket")
        is_ok = finished.ok and len(seen) >= 2 and set(seen) == {"0100007F"}
        checks.check(f"{name}, {path}", is_ok, f"{len(seen)} sockets at {set(seen)}", finished.output)


WINDOWS = str(common.PROGRAMS / "windows.py")


def windows(checks):
    """Which ranks share memory by the MPI library itself: the ranks of a node if each has a core,
    and never those of two clusters."""
    options, cores = checks.options, len(os.sched_getaffinity(0))
    library, two = ("--set", "local=library"), ("--clusters", "2")
    cases = [
        ("by default, a core each", min(2, cores), (), min(2, cores)),
        ("by default, more ranks than cores", cores + 1, (), 1),
        ("left to the library, more ranks than cores", cores + 1, library, cores + 1),
        ("left to the library, two clusters on one machine", 4, (*two, *library), 2),
        ("by our provider", 2, ("--set", "local=own"), 1),
    ]
    for name, ranks, words, neighbours in cases:
        if not checks.wants(f"windows, MPICH, {name}"):
            continue
        command = [*common.landbridge_run(options, ranks, *words), common.python(options, "mpich"), WINDOWS]
        # Empty: the setting of a user who sets nothing.
        finished = common.run(options, command, {"LANDBRIDGE_LOCAL": ""})
        seen = sorted(common.values(finished.output, "shared"))
        wanted = [f"{rank},{','.join(map(str, neighbours_of(rank, neighbours)))}" for rank in range(ranks)]
        checks.check(f"windows, MPICH, {name}", finished.ok and seen == wanted, f"{seen}", finished.output)
    intel_windows(checks)


def neighbours_of(rank: int, count: int) -> range:
    first = rank - rank % count
    return range(first, first + count)


def intel_windows(checks):
    """Intel MPI has shared windows over any fabric; over `shm:ofi` it uses the name of the host."""
    options = checks.options
    for name, ranks, words in [("one cluster", 2, ()), ("two clusters", 4, ("--clusters", "2", "--set", "local=library"))]:
        if not checks.wants(f"windows, Intel MPI, {name}"):
            continue
        command = [*common.landbridge_run(options, ranks, *words), common.python(options, "impi"), WINDOWS]
        finished = common.run(options, command, intel_root(options) | {"LANDBRIDGE_LOCAL": ""})
        seen = sorted(common.values(finished.output, "shared"))
        wanted = [f"{rank},{','.join(map(str, neighbours_of(rank, 2)))}" for rank in range(ranks)]
        checks.check(f"windows, Intel MPI, {name}", finished.ok and seen == wanted, f"{seen}", finished.output)


def intel_root(options) -> dict[str, str]:
    return {"I_MPI_ROOT": str(options.venvs / "impi")}


def intel(checks, ranks):
    options = checks.options
    program = [common.python(options, "impi"), BASICS]
    root = intel_root(options)
    ours = [*common.landbridge_run(options, ranks), *program]
    job(checks, f"Intel MPI, landbridge run, {ranks}", ours, root)
    two = common.landbridge_run(options, ranks, "--clusters", "2")
    job(checks, f"Intel MPI, landbridge run, two clusters, {ranks}", [*two, *program], root)
    own = [options.venvs / "impi" / "bin" / "mpirun", "-n", ranks, *program]
    # The variables that Intel MPI's vars.sh sets.
    root["PATH"] = f"{options.venvs / 'impi' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    root["I_MPI_HYDRA_BOOTSTRAP"] = "fork"
    job(checks, f"Intel MPI, mpirun, {ranks}", own, root | common.settings(options, "impi"))


AS_ROOT = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def open_mpi(checks, ranks):
    options = checks.options
    program = [common.python(options, "ompi"), BASICS]
    own = [options.venvs / "ompi" / "bin" / "mpirun", *AS_ROOT, "-n", ranks, *program]
    job(checks, f"Open MPI 5, mpirun, {ranks}", own, common.settings(options, "openmpi"))


def debian_open_mpi(checks, ranks):
    """The test program is compiled here: the distribution has no mpi4py for every Python."""
    name = f"Open MPI of the distribution, mpirun, {ranks}"
    if not checks.wants(name):
        return
    compiler, launcher = shutil.which("mpicc.openmpi"), shutil.which("mpirun.openmpi")
    if not (compiler and launcher):
        print(f"skip   {name}: openmpi-bin and libopenmpi-dev are not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "basics"
        build = [compiler, "-O1", "-o", program, common.PROGRAMS / "basics.c"]
        built = common.run(checks.options, build)
        if not built.ok:
            checks.check(name, False, "does not compile", built.output)
            return
        command = [launcher, *AS_ROOT, "-n", ranks, program]
        job(checks, name, command, common.settings(checks.options, "openmpi"))


def job(checks, name, command, environment=None, says=""):
    """Runs a job, and determines which processes Landbridge's provider served. `says`: words that
    the job must print."""
    if not checks.wants(name):
        return
    ranks = int(re.search(r"(\d+)$", name)[1])
    spoken = {"LANDBRIDGE_LOG": "info"}
    finished = common.run(checks.options, command, (environment or {}) | spoken)
    done = common.values(finished.output, "done") == [str(ranks)]
    served, paths = served_by_us(finished.output)
    mapped = common.values(finished.output, "mapped")
    library = common.values(finished.output, "library")
    is_ok = finished.ok and done and len(served) >= ranks and not complaints(finished.output) and says in finished.output
    measured = f"{library[0] if library else 'no library'}; our provider in {len(served)} processes"
    measured += f" ({', '.join(sorted(paths)) or 'no path'}), mapped in {mapped or ['none'][0]}"
    checks.check(name, is_ok, f"{measured}; {common.how(finished)}", finished.output)


def served_by_us(output: str) -> tuple[set[str], set[str]]:
    """Processes that report a path to a peer, and the kinds of path."""
    peers = re.findall(r"landbridge\[(\d+)\]: Info: (?:a process|rank|relay)[^:\n]*: ([a-z ]+)$", output, re.M)
    return {process for process, _ in peers}, {path for _, path in peers}


def complaints(output: str) -> list[str]:
    return [line for line in output.splitlines() if ": Warn: " in line or "Abort(" in line]


def partings(checks):
    """Repeats the end of a job: no rank may take a peer that has ended for a lost one."""
    options = checks.options
    for path in ("tcp", "shm,tcp"):
        name = f"Intel MPI parts in peace, {path}"
        if not checks.wants(name):
            continue
        bad = []
        for number in range(options.repeat):
            ranks = 2 + 2 * (number % 2)
            command = [*common.landbridge_run(options, ranks), common.python(options, "impi"), BASICS]
            environment = intel_root(options) | {"LANDBRIDGE_PATHS": path, "LANDBRIDGE_LOG": "warn"}
            finished = common.run(options, command, environment)
            if not finished.ok or complaints(finished.output):
                bad.append(finished)
        output = bad[0].output if bad else ""
        checks.check(name, not bad, f"{options.repeat} runs, {len(bad)} bad", output)


if __name__ == "__main__":
    sys.exit(main())
