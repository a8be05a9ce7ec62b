#!/usr/bin/env python3
"""The mpi4py test suite with a rank killed in each of its modules: the outcomes of all tests are
those of an undisturbed run.

What enters: the suite of `make wheels`, module by module, each in a job of its own, on one node and
over two clusters, with logs of the senders, as by default, and of relays. What leaves: exit code 0 if
each job ends with the same outcomes as without a kill, or says why the killed rank cannot be restarted;
the latter are counted at the end. All modules run under `--recover`; of these a killed rank may not
come back:

| module | why |
|---|---|
| test_dynproc | binds and connects sockets, which are not recorded |
| test_threads, test_util_pool | several threads, whose order differs, so the main thread reads clocks at other points |
"""

import random
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import common
import recovery

sys.path.insert(0, str(common.ROOT / "tests"))
import mpi4py_suite  # noqa: E402
from support import paths, process  # noqa: E402

# On a machine with a load of four for each core the slowest module (test_io, logs of relays) takes 90 s,
# and more than 120 s with a kill.
RANKS, LIMIT_S = 2, 300.0
PLACES = {
    "one node": [],
    "two clusters": recovery.TWO_CLUSTERS,
    "one node, logs of relays": recovery.RELAY,
    "two clusters, logs of relays": [*recovery.TWO_CLUSTERS, *recovery.RELAY],
}
# The latest moment of a kill: after this part of the lines in the records of all ranks, and then
# this part of the time of a test. Lines, not seconds: the same module can take 8 s or 20 s.
LATEST_LINE, LATEST_IN_TEST = 0.7, 0.3
# A module that takes some milliseconds may be over before its kill. Then it is run again.
ATTEMPTS = 3
# Largest part of the modules whose killed rank may be refused.
REFUSED_MAX = 0.1


class Kill(NamedTuple):
    """`rank` is killed `delay` seconds after the records of all ranks have `line` lines."""

    rank: int
    line: int
    delay: float


def main() -> int:
    options = common.arguments(__doc__, common.add_cases)
    if not paths.SUITE.exists():
        return common.skipped(f"{paths.SUITE} is not there (make wheels)")
    common.quiet_environment()
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
    wanted, _, lines, seconds = run(options, tests, words, None)
    # The seed includes the name, so a case is the same one with `--only`.
    chance = random.Random(f"{options.seed} {name}")
    kill = Kill(
        rank=chance.randrange(RANKS),
        line=1 + chance.randrange(max(1, int(LATEST_LINE * lines))),
        delay=chance.uniform(0.0, LATEST_IN_TEST * seconds / len(tests)),
    )
    for _ in range(ATTEMPTS):
        found, output, _, _ = run(options, tests, words, kill)
        restarts = output.count(": restarted")
        why = re.search(r"cannot be restarted: .*|this process cannot go on: .*", output)
        differ = sorted(test for test in wanted.keys() | found.keys() if wanted.get(test) != found.get(test))
        if restarts or why or differ:
            break
    is_refused = bool(why) and "ends" not in found
    moment = f"rank {kill.rank} killed {kill.delay:.2f} s after line {kill.line} of {lines}"
    measured = f"{len(wanted) - 1} tests in {seconds:.2f} s, {moment}, {restarts} restarts"
    if is_refused:
        measured += f"; refused: {why[0]}"
    elif differ:
        measured += f"; other outcomes of {', '.join(differ[:5])}"
    has_end = "ends" in wanted and lines > 0
    checks.check(name, has_end and (is_refused or not differ and restarts == 1), measured, output)
    return is_refused


def run(options, tests: list[str], words: list[str], kill: Kill | None) -> tuple[dict[str, str], str, int, float]:
    """The outcomes of these tests, with `ends` if all ranks have come to their ends; all
    output; the lines in the records; and the seconds from the first test to the last one."""
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
        lines = count_lines(folder)
        outcomes, _, is_complete = mpi4py_suite.read_records(folder, RANKS)
        if is_complete and finished.ok:
            outcomes["ends"] = "pass"
        return outcomes, finished.output + finished.why, lines, seen[-1] - seen[0] if seen else 0.0


def watch(folder: Path, kill: Kill | None, is_over: threading.Event, seen: list[float]) -> None:
    """Notes when the records of the ranks grow, and kills a rank."""
    before, due = 0, None
    while not is_over.wait(0.005):
        lines = count_lines(folder)
        if lines != before:
            before = lines
            seen.append(time.monotonic())
        if kill and due is None and lines >= kill.line:
            due = seen[-1] + kill.delay
        if kill and due is not None and time.monotonic() >= due:
            recovery.kill_rank(kill.rank)
            kill = None


def count_lines(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("rank-*"))


if __name__ == "__main__":
    sys.exit(main())
