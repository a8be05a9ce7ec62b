#!/usr/bin/env python3
"""Runs the mpi4py test suite in a chosen configuration and compares it with a baseline.

What enters: the suite's sources (`make wheels` unpacks them under build/), an MPI library, a
provider and a launcher. What leaves: build/results/mpi4py-NAME.json with every outcome, a
comparison with tests/baseline/mpi4py-MPI-npN.txt, and an exit code that is 0 only if every test
that passes over libfabric's own tcp provider passes here as well.
A test that hangs or kills the job is recorded, and the run continues after it: one bad test never
hides the rest. A test that fails unexpectedly is repeated alone before it counts, and the
repetition is printed: on a busy machine a delay looks like a hang.
"""

import argparse
import fnmatch
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from support import paths, process  # noqa: E402
from support.launch import LaunchConfig  # noqa: E402

HERE = Path(__file__).resolve().parent
# Seconds without a record from any rank after which the job counts as hanging. Providers that spin
# need more of them than Landbridge when ranks outnumber cores. The slowest test takes 5 s on two
# idle cores.
STALL_S = 40.0
# The same on a network that loses 1 %: a test of many lone round trips (testGetAccumulate, Open MPI) takes
# 47 to 63 s there. Without loss it takes 15 to 29 s in that lab, and 22 to 33 s over libfabric's tcp,
# which crashes where packets are corrupted. Measured on 2026-11-25.
STALL_LOSSY_S = 150.0
# Largest factor by which a busy machine extends STALL_S.
CROWDING_MAX = 4.0
# After this many hangs and crashes the provider is broken as a whole; each hang costs STALL_S.
ATTEMPTS_MAX = 8
# Number of runs that an unexpectedly failed test gets alone; more such tests than ALONE_TESTS_MAX
# are no noise.
ALONE_RUNS = 2
ALONE_TESTS_MAX = 12
# Seconds for one test alone beyond those without an outcome: the start of the job.
ALONE_START_S = 20.0
# Beginning of the reason for tests that run only with --slow.
SLOW = "slow"
# Exit code by which scripts/test.py recognizes "cannot run here", and the reason if there is no
# baseline.
SKIPPED = 77
NO_BASELINE = "has not been run over the tcp provider yet (--provider tcp --write-baseline makes a baseline)"
# The outcome of a test is the worst one of all ranks.
WORST = {"pass": 0, "skip": 1, "fail": 2, "hang": 3, "crash": 4}


def main() -> int:
    options = arguments()
    if len(options.mpi) > 1:
        return side_by_side(options.mpi)
    options.mpi = options.mpi[0]
    way = LaunchConfig(options.mpi, options.provider, options.via, tuple(options.set))
    name = f"{way.name}-np{options.np}"
    absent = paths.missing([*way.needs(), paths.SUITE])
    if absent:
        print(f"mpi4py {name}: cannot run, missing: {', '.join(absent)} (make build wheels)")
        return 2
    if why_not := way.why_not():
        print(f"skipped: no lab can be built here: {why_not}")
        return SKIPPED
    if not options.write_baseline and not baseline_file(options.mpi, options.np).exists():
        print(f"no baseline: {options.mpi} with {options.np} ranks {NO_BASELINE}")
        return SKIPPED
    outcomes, seconds, trouble = run_suite(way, options, name)
    if not options.write_baseline:
        trouble += run_lost_alone(way, options, name, outcomes)
    write_results(name, outcomes, seconds)
    count = {key: sum(o == key for o in outcomes.values()) for key in WORST}
    summary = " ".join(f"{key} {number}" for key, number in count.items() if number)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s = used.ru_utime + used.ru_stime
    print(f"mpi4py {name}: {summary} in {seconds:.0f} s, {busy_s:.0f} s of processor time")
    for line in trouble:
        print(f"  {line}")
    if options.write_baseline:
        return write_baseline(options.mpi, options.np, outcomes)
    return compare(way, options, outcomes)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mpi",
        choices=["mpich", "ompi", "impi"],
        nargs="+",
        default=["mpich"],
        help="several: side by side, which is for single ranks",
    )
    parser.add_argument("--provider", default="landbridge")
    parser.add_argument("--via", choices=["own", "run", "clusters", "lossy"], default="own")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of our provider")
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1080, help="seconds for the whole suite")
    parser.add_argument("--stall", type=float, help=f"seconds without an outcome [{STALL_S:.0f}, lossy {STALL_LOSSY_S:.0f}]")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS_MAX, help="hangs and crashes")
    parser.add_argument("--slow", action="store_true", help="run what is left out as slow too")
    parser.add_argument("--write-baseline", action="store_true")
    options = parser.parse_args()
    options.stall = options.stall or (STALL_LOSSY_S if options.via == "lossy" else STALL_S)
    return options


def side_by_side(libraries: list[str]) -> int:
    """Runs each library at the same time with the remaining arguments; returns 0 if none failed.

    The outputs are printed one after the other, and the last line of each output a second time at
    the end.
    """
    at = sys.argv.index("--mpi") + 1
    rest = [*sys.argv[1 : at - 1], *sys.argv[at + len(libraries) :]]
    runs = [
        subprocess.Popen(
            [sys.executable, __file__, "--mpi", library, *rest], stdout=subprocess.PIPE, text=True
        )
        for library in libraries
    ]
    said = [run.communicate()[0].rstrip() for run in runs]
    print("\n".join(said))
    last = [text.rpartition("\n")[2].strip() for text in said]
    print("; ".join(f"{library}: {line}" for library, line in zip(libraries, last)))
    codes = [run.returncode for run in runs]
    return next((code for code in codes if code not in (0, SKIPPED)), min(codes))


def run_suite(way: LaunchConfig, options, name: str):
    """Runs until every test has an outcome: (id -> outcome, seconds, problems)."""
    records = paths.RESULTS / f"mpi4py-{name}"
    shutil.rmtree(records, ignore_errors=True)
    left_out = excluded(way, options)
    outcomes, trouble, barren, started = {}, [], 0, time.monotonic()
    for attempt in range(options.attempts):
        left_s = options.limit - (time.monotonic() - started)
        folder = records / str(attempt)
        finished = run_once(way, options, left_s, folder, outcomes | left_out, what_to_run(options))
        found, unfinished, complete = read_records(folder, options.np)
        outcomes |= found
        if complete:
            if finished.why:
                trouble.append(f"after the last test: {finished.why}, log {folder}/log")
            break
        kind = "hang" if finished.why else "crash"
        if finished.why == "time limit":
            trouble.append(f"not through in {options.limit:.0f} s, log {folder}/log")
            break
        # If one rank failed a test that others passed, the ranks are out of step: tests that hang
        # later are its victims and run once more.
        if "fail" in found.values() and len(unfinished) != 1:
            trouble.append(f"{kind} after a failure on some ranks, log {folder}/log")
        else:
            outcomes |= {test: kind for test in unfinished}
            trouble.append(f"{kind} in {' '.join(unfinished) or 'no test'}, log {folder}/log")
        barren = 0 if found or unfinished else barren + 1
        if barren > 1:
            break
    else:
        trouble.append(f"given up after {options.attempts} attempts")
    return outcomes, time.monotonic() - started, trouble


def run_lost_alone(way: LaunchConfig, options, name: str, outcomes: dict[str, str]) -> list[str]:
    """Repeats tests that failed unexpectedly, each in a job of its own; returns those that needed
    it.

    Outcomes of tests that pass are corrected.
    """
    lost = unknown_losses(way, options, outcomes)
    if not 0 < len(lost) <= ALONE_TESTS_MAX:
        return []
    said = []
    for number, test in enumerate(lost):
        first = outcomes.get(test, "not run")
        for run in range(1, ALONE_RUNS + 1):
            folder = paths.RESULTS / f"mpi4py-{name}" / f"alone-{number}-{run}"
            run_once(way, options, options.stall + ALONE_START_S, folder, {}, [test])
            found, _, _ = read_records(folder, options.np)
            if found.get(test) == "pass":
                outcomes[test] = "pass"
                said.append(f"{first}, and passed in run {run} alone: {test}")
                break
    return said


def unknown_losses(way: LaunchConfig, options, outcomes) -> list[str]:
    """Tests that pass over tcp, did not pass here, and are neither excluded nor known
    exceptions."""
    expected = unfold(baseline_file(options.mpi, options.np).read_text().splitlines())
    passed = {test for test, outcome in outcomes.items() if outcome == "pass"}
    left_out = excluded(way, options)
    lost = sorted(expected - passed)
    return [t for t in lost if not exclusion(left_out, t) and not exception(options, t)]


def excluded(way: LaunchConfig, options) -> dict[str, str]:
    """Tests that are not run (ids or patterns), each with its reason."""
    lines = (HERE / "baseline" / "excluded.txt").read_text().splitlines()
    np, via = options.np, way.via
    places = ("*", way.mpi, f"{way.mpi}/{via}", f"{way.mpi}/*/{np}", f"{way.mpi}/{via}/{np}")
    rows = [line.split(" ", 1) for line in lines if line and not line.startswith("#")]
    pairs = (rest.partition(": ") for which, rest in rows if which in places)
    return {p: why for p, _, why in pairs if not (options.slow and why.startswith(SLOW))}


def exclusion(left_out: dict[str, str], test: str) -> str:
    """The reason why `test` is not run; empty if it is run."""
    if test in left_out:
        return left_out[test]
    return next((why for p, why in left_out.items() if fnmatch.fnmatchcase(test, p)), "")


def what_to_run(options) -> list[str]:
    """Tests to run: for a baseline all, else those in the baseline, because no other test can be
    compared."""
    if options.write_baseline:
        return ["*"]
    return sorted(unfold(baseline_file(options.mpi, options.np).read_text().splitlines()))


def run_once(way, options, limit_s, folder, done, wanted) -> process.Finished:
    """Runs one job: all tests that match one of `wanted`, without those that match a key of
    `done`."""
    folder.mkdir(parents=True)
    skip, only = folder / "skip", folder / "only"
    skip.write_text("\n".join(done))
    only.write_text("\n".join(wanted))
    program = [paths.python(way.mpi), str(HERE / "mpi4py_rank.py"), str(paths.SUITE), str(folder)]
    # A daemon of Open MPI names its folder by its process id, which repeats in a lab, and does not
    # start where an attempt that was ended has left such a folder.
    with tempfile.TemporaryDirectory() as own:
        return process.run(
            way.command(options.np, [*program, str(skip), str(only)]),
            limit_s,
            # Workers that the suite spawns import its modules.
            way.environment() | {"PYTHONPATH": str(paths.SUITE), "TMPDIR": own},
            stalled=lambda: time.time() - last_change(folder) > options.stall * crowding(),
            log=folder / "log",
        )


def crowding() -> float:
    """Factor by which the machine is slower than an idle one: at least 1, and at most
    CROWDING_MAX."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), CROWDING_MAX)


def last_change(folder: Path) -> float:
    return max(entry.stat().st_mtime for entry in [folder, *folder.glob("rank-*")])


def read_records(folder: Path, ranks: int):
    """(id -> worst outcome of the ranks, tests in which the job hangs, whether all ranks ended).

    A test that not all ranks have run has no outcome unless it failed: it runs once more. If ranks
    hang in different tests, the job hangs in those that other ranks have left, because the later
    tests wait for them.
    """
    seen, unfinished, ended = {}, set(), 0
    for file in folder.glob("rank-*"):
        begun = ""
        for line in file.read_text().splitlines():
            kind, test, *_ = [*line.split(), ""]
            if kind == "end":
                ended += 1
            elif kind == "start":
                begun = test
            else:
                begun = ""
                seen.setdefault(test, []).append(kind)
        unfinished |= {begun} - {""}
    full = {test: kinds for test, kinds in seen.items() if len(kinds) >= ranks or "fail" in kinds}
    outcomes = {test: max(kinds, key=WORST.get) for test, kinds in full.items()}
    unfinished -= outcomes.keys()
    return outcomes, sorted(unfinished & seen.keys() or unfinished), ended == ranks


def write_results(name, outcomes, seconds):
    file = paths.RESULTS / f"mpi4py-{name}.json"
    document = {"name": name, "seconds": round(seconds, 1), "outcomes": outcomes}
    file.write_text(json.dumps(document, indent=0, sort_keys=True))


def baseline_file(mpi: str, ranks: int) -> Path:
    return HERE / "baseline" / f"mpi4py-{mpi}-np{ranks}.txt"


def write_baseline(mpi, ranks, outcomes) -> int:
    passing = sorted(test for test, outcome in outcomes.items() if outcome == "pass")
    file = baseline_file(mpi, ranks)
    file.parent.mkdir(exist_ok=True)
    lines = fold(passing)
    for kind in ("fail", "hang", "crash"):
        lost = sorted(test for test, outcome in outcomes.items() if outcome == kind)
        lines += [f"# {kind} over tcp: {line}" for line in fold(lost)]
    file.write_text("\n".join(lines) + "\n")
    print(f"  wrote {len(passing)} passing tests to {file.relative_to(paths.ROOT)}")
    return 0


def fold(tests: list[str]) -> list[str]:
    """One line for each class: `module.Class: test test ...` keeps a baseline to a screen or
    two."""
    classes: dict[str, list[str]] = {}
    for test in tests:
        prefix, _, method = test.rpartition(".")
        classes.setdefault(prefix, []).append(method)
    return [f"{prefix}: {' '.join(methods)}" for prefix, methods in classes.items()]


def unfold(lines: list[str]) -> set[str]:
    pairs = (line.split(": ", 1) for line in lines if ": " in line and not line.startswith("#"))
    return {f"{prefix}.{method}" for prefix, methods in pairs for method in methods.split()}


def exception(options, test: str) -> str:
    """The reason why `test` may fail: lines `MPI VIA NP PATTERN: reason` in exceptions.txt."""
    for line in (HERE / "baseline" / "exceptions.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            *patterns, rest = line.split(" ", 3)
            pattern, _, reason = rest.partition(": ")
            asked = (options.mpi, options.via, str(options.np), test)
            if all(map(fnmatch.fnmatchcase, asked, [*patterns, pattern])):
                return reason
    return ""


def compare(way: LaunchConfig, options, outcomes) -> int:
    """0 if every test passes here that passes over tcp, except excluded and known ones."""
    expected = unfold(baseline_file(options.mpi, options.np).read_text().splitlines())
    passed = {test for test, outcome in outcomes.items() if outcome == "pass"}
    print_left_out(way, options, expected)
    lost = sorted(expected - passed)
    unknown = unknown_losses(way, options, outcomes)
    for test in lost:
        if reason := exception(options, test):
            print(f"  known to fail: {test}  [{reason}]")
    never = [test for test in unknown if test not in outcomes]
    if never:
        print(f"  pass over tcp, and were not reached here: {len(never)} tests, first {never[0]}")
    for test in unknown:
        if test in outcomes:
            print(f"  passes over tcp, not here ({outcomes[test]}): {test}  [NOT KNOWN]")
    print(
        f"  np {options.np}: {len(passed)} pass; of {len(expected)} that pass over tcp "
        f"{len(unknown)} lost, {len(lost) - len(unknown)} left out or known"
    )
    return 1 if unknown else 0


def print_left_out(way: LaunchConfig, options, expected: set[str]) -> None:
    """Prints the tests that are not run though they pass over tcp, with the reason."""
    left_out, reasons = excluded(way, options), {}
    for test in sorted(expected):
        if reason := exclusion(left_out, test):
            reasons.setdefault(reason, []).append(test)
    for reason, tests in reasons.items():
        print(f"  not run, {len(tests)} tests ({tests[0]} ...): {reason}")


if __name__ == "__main__":
    sys.exit(main())
