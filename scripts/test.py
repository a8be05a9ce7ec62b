#!/usr/bin/env python3
"""Everything `make test` does, as a list of named steps with a summary at the end.

    scripts/test.py                 all steps but the slow ones
    scripts/test.py --slow          those too
    scripts/test.py --list          the steps, and the command that runs each alone
    scripts/test.py NAME ...        only these

Each step is a command with a time limit; its whole output is in build/results/test-NAME.log, and the
end of it is shown when it fails, and again below the summary: of a long run often only the end is
kept. A step that cannot run here is skipped, which is said with its reason. So is, in the summary,
what passed only when it was run again. The whole has a budget of time; a step that it does not
reach counts as failed. The exit code is 0 only if nothing failed.
"""

import argparse
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths, process  # noqa: E402

# An exit code with which a step says that it cannot run here; its last line is the reason.
SKIPPED = 77
# Seconds for all steps that are not slow: an hour and a bit, so that with the build and the wheels a loaded machine stays
# within an hour and a half. 
BUDGET_S = 76 * 60.0
# Lines of a failed step's log below the summary.
END_LINES = 25


@dataclass
class Step:
    name: str
    what: str
    command: list[str]
    limit_s: float = 300
    slow: bool = False
    again: bool = False  # whether a second run may make good for a first that failed
    env: dict[str, str] = field(default_factory=dict)


def main() -> int:
    options = arguments()
    steps = every_step(options.slow)
    if options.list:
        for step in steps:
            note = "  (slow: only in make test-all)" if step.slow else ""
            print(f"{step.name:28} {' '.join(step.command)}{note}")
        return 0
    unknown = set(options.names) - {step.name for step in steps}
    if unknown:
        print(f"test: no step is called {', '.join(sorted(unknown))}; see scripts/test.py --list")
        return 2
    wanted = [s for s in steps if (s.name in options.names if options.names else True)]
    chosen = [s for s in wanted if options.slow or options.names or not s.slow]
    return run_all(chosen, [step for step in wanted if step not in chosen], options.slow)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the steps and their commands")
    parser.add_argument("--slow", action="store_true", help="run the slow steps too")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these steps")
    return parser.parse_args()


def every_step(is_slow: bool) -> list[Step]:
    return [*rust_steps(), *other_steps(), *system_steps(), *imb_steps(), *mpi4py_steps(is_slow), *lossy_steps()]


def rust_steps() -> list[Step]:
    # With cargo-nextest those tests that watch clocks get a second chance one by one
    # (.config/nextest.toml), with plain cargo all together.
    has_nextest = shutil.which("cargo-nextest")
    runner = ["nextest", "run"] if has_nextest else ["test", "--no-fail-fast"]
    clippy = ["cargo", "clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]
    fuzz = ["cargo", "test", "--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target/fuzz"]
    venvs = {"LANDBRIDGE_TEST_VENVS": str(paths.BUILD / "venv")}
    return [
        Step("fmt", "rustfmt", ["cargo", "fmt", "--all", "--check"]),
        Step("clippy", "clippy, warnings denied", clippy, 600),
        # It may have to build cargo-deny first.
        python_step("deny", "licences, bans and sources", "scripts/deny.py", limit_s=900),
        # Unit, property and simulation tests, layering, launcher, lab, ssh, hostile connections.
        Step(
            "rust",
            "tests of the crates",
            ["cargo", *runner, "--workspace"],
            1200,
            again=not has_nextest,
            env=venvs,
        ),
        *simulator_steps(),
        Step("corpus", "every parser on the corpus of the fuzz targets", fuzz, 400),
    ]


def simulator_steps() -> list[Step]:
    """Thousands of seeds: the release build runs many times as many in a second as the tests do."""
    ways = [("", SEEDS, "endpoints against each other"), ("-hostile", SEEDS_HOSTILE, "and against liars")]
    return [
        Step(
            f"simulator{way}",
            f"{seeds} seeds of the simulator, {what}",
            [str(paths.RELEASE / "landbridge-lab"), "simulate", "--seeds", f"0..{seeds}"]
            + ["--hostile"] * bool(way),
            300,
        )
        for way, seeds, what in ways
    ]


SEEDS, SEEDS_HOSTILE = 4000, 1000


def mpi4py_steps(is_slow: bool) -> list[Step]:
    """The suite where `make test` wants it: both libraries directly, MPICH also across clusters."""
    # Single ranks keep one core busy each, so they run side by side.
    ways = [("mpich ompi", "own", 1)]
    ways += [(mpi, "own", n) for mpi in ("mpich", "ompi") for n in (2, 4)]
    ways += [("mpich", "clusters", n) for n in (2, 4)]
    return [
        python_step(
            f"mpi4py-{mpi.replace(' ', '-')}-{via}-np{n}",
            f"mpi4py suite, {mpi.replace(' ', ' and ')}, {n} rank{'s'[: n > 1]}, {PLACES[via]}",
            "tests/mpi4py_suite.py",
            *("--mpi", *mpi.split(), "--via", via, "--np", str(n)),
            *(("--slow", "--limit", "1500") if is_slow else ()),
            limit_s=1800 if is_slow else 1200,
            # Six processes on two cores: ten minutes and more. Open MPI with 4 ranks: five, and its 2 ranks stay.
            slow=(via, n) == ("clusters", 4) or (mpi, n) == ("ompi", 4),
        )
        for mpi, via, n in ways
    ]


PLACES = {"own": "one cluster", "run": "one cluster", "clusters": "two clusters"}


def imb_steps() -> list[Step]:
    ways = [(mpi, via) for mpi in ("mpich", "impi") for via in ("run", "clusters")]
    return [
        python_step(
            f"imb-{mpi}-{via}",
            f"IMB-MPI1 whole, {mpi}, {PLACES[via]}",
            "tests/imb_suite.py",
            *("--mpi", mpi, "--via", via),
            limit_s=600,
        )
        for mpi, via in ways
    ]


def lossy_steps() -> list[Step]:
    """Whole suites while the network between two hosts loses, damages and reorders all the time: one of them in `make test`."""
    over_udp = ("--set", "udp=on")
    suite, patterns = "tests/mpi4py_suite.py", "tests/imb_suite.py"
    rows = [
        ("mpi4py-mpich-lossy", "mpi4py suite, MPICH", suite, "mpich", "2", ()),
        ("imb-mpich-lossy-udp", "IMB-MPI1 whole, MPICH", patterns, "mpich", "4", over_udp),
        ("mpi4py-mpich-lossy-udp", "mpi4py suite, MPICH", suite, "mpich", "2", over_udp),
        ("mpi4py-ompi-lossy", "mpi4py suite, Open MPI", suite, "ompi", "2", ()),
        ("mpi4py-ompi-lossy-udp", "mpi4py suite, Open MPI", suite, "ompi", "2", over_udp),
        ("imb-mpich-lossy", "IMB-MPI1 whole, MPICH", patterns, "mpich", "4", ()),
        ("imb-impi-lossy", "IMB-MPI1 whole, Intel MPI", patterns, "impi", "4", ()),
    ]
    return [
        python_step(
            name,
            f"{what}, {np} ranks, two rails with 1 % loss, corruption, reordering{', UDP' if extra else ''}",
            script,
            *("--mpi", mpi, "--via", "lossy", "--np", np),
            *extra,
            limit_s=1200,
            slow=number != 1,
        )
        for number, (name, what, script, mpi, np, extra) in enumerate(rows)
    ]


def other_steps() -> list[Step]:
    heat = [
        *(str(paths.LANDBRIDGE), "run", "--clusters", "2", "-n", "4", "--"),
        *(paths.python("mpich"), "examples/heat.py", "--check", "--size", "128", "--steps", "200"),
    ]
    what = "heat equation, two clusters, against a serial run"
    drawing = python_step(
        "pictures", "what the scripts draw and say can be read", "scripts/support/self_test.py", limit_s=60
    )
    return [Step("heat", what, heat, 120, again=True), drawing]


def system_steps() -> list[Step]:
    """Whole jobs on the built binaries, each driver with its own checks."""
    where = ["--bin", str(paths.RELEASE), "--venvs", str(paths.BUILD / "venv")]
    longer = {
        "kills": ("the same, the whole matrix", "--all"),
        "files": ("the same, all kinds of kills, each with images and without, in one cluster and in two", "--all"),
        "random_files": ("thousands of the same", "--runs", "12000"),
    }
    steps = [
        python_step(
            f"system-{name}",
            what,
            f"tests/system/{name}.py",
            *where,
            *words,
            limit_s=LIMITS_S.get(name, 400),
            again=name not in ("soak", "punish", "kills", "files", "random_files"),
        )
        for name, what, *words in SYSTEM
        if (paths.ROOT / "tests" / "system" / f"{name}.py").exists()
    ]
    for name, (what, *words) in longer.items():
        behind = next(place for place, step in enumerate(steps, 1) if step.name == f"system-{name}")
        command = (f"tests/system/{name}.py", *where, *words)
        steps.insert(behind, python_step(f"system-{name}-all", what, *command, limit_s=5400, slow=True))
    return steps


SYSTEM = [
    ("libraries", "every MPI library, under our launcher and its own", "--repeat", "4"),
    ("messages", "random messages and one-sided operations, checked", "--np", "2", "4"),
    ("own", "messages of a process to itself, and operations on its own window"),
    ("addresses", "a program sees the same addresses whatever the network does"),
    ("waiting", "what waiting costs"),
    ("killing", "a rank is killed in the middle of a job"),
    ("recovery", "ranks that are killed come back"),
    ("unrecorded", "killed ranks that print or send what nobody records, or have threads"),
    ("nodes", "ranks that are killed on other nodes and behind links that fail, and nodes that are lost"),
    ("checkpoint", "ranks that are killed go on from images of them"),
    ("records", "ranks that read more of clocks, chance and files than a record holds"),
    ("kills", "programs of every kind, killed at random moments, from images and over bad networks, too"),
    ("files", "what ranks that are killed have written is there once, and they read what they read before"),
    ("random_files", "random file programs whose ranks are killed"),
    ("punish", "minutes of killing ranks at random, in one cluster and over two"),
    ("spawn", "ranks spawn processes, in one and in two clusters"),
    ("network", "networks that lose, damage and reorder; links, interfaces and relays that fail"),
    ("interfaces", "interfaces that lead nowhere"),
    ("soak", "three minutes of random faults under unmodified programs"),
]
# What passes only at the second attempt is told as flaky, and is a fault to be found.
LIMITS_S = {"network": 900, "recovery": 900, "nodes": 900, "checkpoint": 900, "kills": 900, "soak": 420, "punish": 900, "files": 900}


def python_step(name, what, script, *arguments, limit_s, **options) -> Step:
    return Step(name, what, [sys.executable, script, *arguments], limit_s, **options)


def run_all(steps: list[Step], left_out: list[Step], is_slow: bool) -> int:
    process.adopt_orphans()
    started, rows = time.monotonic(), []
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {step.name}: {step.what}", flush=True)
        left_s = BUDGET_S - (time.monotonic() - started)
        rows.append((step, *run_step(step, step.limit_s if is_slow else left_s)))
        print(f"    {rows[-1][1]} in {rows[-1][3]:.0f} s  {rows[-1][2]}", flush=True)
    seconds = time.monotonic() - started
    for pid in process.end_descendants():
        print(f"test: ended process {pid}, which a step had left behind")
    return summarise(rows, seconds, left_out)


def run_step(step: Step, left_s: float) -> tuple[str, str, float]:
    """(passed, failed or skipped; the reason or last line; seconds)."""
    if left_s <= 0:
        return "failed", "not reached in time: the machine is too busy", 0.0
    log = paths.RESULTS / f"test-{step.name}.log"
    done = run_once(step, min(step.limit_s, left_s), log)
    seconds, note = done.seconds, ""
    if step.again and not done.ok and done.code != SKIPPED and left_s > 2 * seconds:
        print(process.tail(done.output, 30))
        kept = log.rename(log.with_suffix(".first.log"))
        note = f"flaky: failed at first, log {kept.relative_to(paths.ROOT)}; "
        print(f"    {step.name} failed, and is run again", flush=True)
        done = run_once(step, min(step.limit_s, left_s - seconds), log)
        seconds += done.seconds
    last = process.tail(done.output, 1)
    if done.ok:
        return "passed", note + remark(step, done.output), seconds
    if done.code == SKIPPED:
        return "skipped", last, seconds
    print(process.tail(done.output, 30))
    reason = done.why or f"exit code {done.code}"
    return "failed", f"{reason}, log {log.relative_to(paths.ROOT)}", seconds


def run_once(step: Step, limit_s: float, log) -> process.Finished:
    return process.run(step.command, limit_s, step.env, cwd=paths.ROOT, log=log)


def remark(step: Step, output: str) -> str:
    """What a step that passed has to say: how much it did, what it skipped, what needed two runs."""
    if step.command[0] == sys.executable:
        return process.tail(output, 1).strip()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    said = re.findall(r"^ *Summary \[.*?\] *(.*)$", plain, re.MULTILINE)
    said += sorted(set(re.findall(r"^ *(FLAKY .*)$", plain, re.MULTILINE)))
    said += re.findall(r"^(seeds .*: nothing found)$", plain, re.MULTILINE)
    return "; ".join(said)


def summarise(rows, seconds: float, left_out: list[Step]) -> int:
    print(f"\n{'step':28} {'result':8} {'time':>6}  note")
    for step, result, note, took in rows:
        print(f"{step.name:28} {result:8} {took:5.0f}s  {note}")
    for step in left_out:
        print(f"{step.name:28} {'left out':8} {'':>6}  slow; only in make test-all")
    count = {key: sum(r[1] == key for r in rows) for key in ("passed", "failed", "skipped")}
    load = os.getloadavg()[2]
    print(f"\n{', '.join(f'{n} {key}' for key, n in count.items())} in {seconds / 60:.1f} minutes")
    print(f"load of the machine in the last quarter of an hour: {load:.1f} on {os.cpu_count()} cores")
    failed = [step for step, result, *_ in rows if result == "failed"]
    for step in failed:
        print(end_of_log(step))
    for step in failed:
        print(f"again alone: python3 scripts/test.py {step.name}")
    return 1 if count["failed"] else 0


def end_of_log(step: Step) -> str:
    log = paths.RESULTS / f"test-{step.name}.log"
    if not log.exists():
        return f"\n{step.name} has no log"
    end = process.tail(log.read_text(errors="replace"), END_LINES)
    return f"\nthe end of {log.relative_to(paths.ROOT)}:\n{end}\n"


if __name__ == "__main__":
    sys.exit(main())
