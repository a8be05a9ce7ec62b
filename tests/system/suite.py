#!/usr/bin/env python3
"""The mpi4py test suite with a rank killed in each of its modules: the outcomes of all tests are
those of an undisturbed run.

What enters: the suite of `make wheels`, module by module, each in a job of its own, on one node and
over two clusters. What leaves: exit code 0 if each job ends with the same outcomes as without a
kill, or says why the killed rank cannot be restarted; the latter are counted at the end.
"""

import random
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import common
import recovery

sys.path.insert(0, str(common.ROOT / "tests"))
import mpi4py_suite  # noqa: E402
from support import paths, process  # noqa: E402

RANKS, LIMIT_S = 2, 120.0
PLACES = {"one node": [], "two clusters": recovery.TWO_CLUSTERS}
# The latest moment of a kill, as a part of the time from the first test to the last one.
LATEST = 0.7
# Largest part of the modules whose killed rank may be refused.
REFUSED_MAX = 0.1


def main() -> int:
    options = common.arguments(__doc__, common.add_cases)
    if not paths.SUITE.exists():
        print(f"skipped: {paths.SUITE} is not there (make wheels)")
        return common.SKIPPED
    process.adopt_orphans()
    checks = common.Checks(options)
    tests = mpi4py_suite.unfold(mpi4py_suite.baseline_file("mpich", RANKS).read_text().splitlines())
    refused = ran = 0
    for place, words in PLACES.items():
        for module in sorted({test.partition(".")[0] for test in tests}):
            name = f"{module}, {place}"
            if checks.wants(name):
                ran += 1
                own = sorted(test for test in tests if test.startswith(module + "."))
                refused += check(checks, options, own, name, words)
    if ran > 10:
        checks.check("modules whose killed rank cannot be restarted are rare", refused <= REFUSED_MAX * ran, f"{refused} of {ran}")
    return checks.end()


def check(checks, options, tests: list[str], name: str, words: list[str]) -> bool:
    """Whether the killed rank could not be restarted."""
    wanted, _, seconds = run(options, tests, words, None)
    # The seed includes the name, so a case is the same one with `--only`.
    chance = random.Random(f"{options.seed} {name}")
    kill = (chance.randrange(RANKS), chance.uniform(0.0, LATEST * seconds))
    found, output, _ = run(options, tests, words, kill)
    restarts = output.count(": restarted")
    why = re.search(r"cannot be restarted: .*|this process cannot go on: .*", output)
    differ = sorted(test for test in wanted.keys() | found.keys() if wanted.get(test) != found.get(test))
    is_refused = bool(why) and "ends" not in found
    measured = f"{len(wanted) - 1} tests, rank {kill[0]} killed {kill[1]:.2f} s after the first of {seconds:.2f} s, {restarts} restarts"
    if is_refused:
        measured += f"; refused: {why[0]}"
    elif differ:
        measured += f"; other outcomes of {', '.join(differ[:5])}"
    has_end = "ends" in wanted and seconds > 0
    checks.check(name, has_end and (is_refused or not differ and restarts == 1), measured, output)
    return is_refused


def run(options, tests: list[str], words: list[str], kill) -> tuple[dict[str, str], str, float]:
    """The outcomes of these tests, with `ends` if all ranks have come to their ends; all
    output; and the seconds from the first test to the last one. `kill`: a rank, and seconds after
    the first test."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "skip").write_text("")
        (folder / "only").write_text("\n".join(tests))
        program = [common.python(options), str(common.ROOT / "tests" / "mpi4py_rank.py"), str(paths.SUITE), scratch]
        command = common.landbridge_run(options, RANKS, "--recover", *words)
        is_over = threading.Event()
        seen: list[float] = []
        watcher = threading.Thread(target=watch, args=(folder, kill, is_over, seen))
        watcher.start()
        environment = {"PYTHONPATH": str(paths.SUITE), "TMPDIR": scratch}
        finished = process.run([*command, *program, str(folder / "skip"), str(folder / "only")], LIMIT_S, environment)
        is_over.set()
        watcher.join()
        outcomes, _, is_complete = mpi4py_suite.read_records(folder, RANKS)
        if is_complete and finished.ok:
            outcomes["ends"] = "pass"
        return outcomes, finished.output + finished.why, seen[-1] - seen[0] if seen else 0.0


def watch(folder: Path, kill, is_over: threading.Event, seen: list[float]) -> None:
    """Notes when the records of the ranks change, and kills a rank."""
    before = 0
    while not is_over.wait(0.005):
        now = sum(file.stat().st_size for file in folder.glob("rank-*"))
        if now != before:
            before = now
            seen.append(time.monotonic())
        if kill and seen and time.monotonic() >= seen[0] + kill[1]:
            recovery.kill_rank(kill[0])
            kill = None


if __name__ == "__main__":
    sys.exit(main())
