#!/usr/bin/env python3
"""Runs `make test`: a list of named steps, with a summary at the end.

    scripts/test.py                 all steps but the slow ones, and a sample of each slow family
    scripts/test.py --slow          everything
    scripts/test.py --slow --resume everything that has not passed on this commit yet
    scripts/test.py --list          the steps, and the command that runs each alone
    scripts/test.py NAME ...        only these
    scripts/test.py --prepare       first what `make test` needs: tools, build, wheels, CRIU, moto

Each step is a command with a time limit. Its whole output is in build/results/test-NAME.log. If the
step fails, the end of the output is shown at once and again below the summary, because of a long
run often only the end is kept. A step that cannot run here is skipped and its reason is shown; so are
single tests and cases inside a step. The summary also names the steps, and the tests of crates,
that passed only in a second run. Steps that wait more than they
compute run three at a time, after the others; each step ends the processes that it has started. All
steps together have a time budget; a step that is not reached within the budget counts as failed.
The exit code is 0 only if nothing failed.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths, process  # noqa: E402
from support.passed import Passed, present_commit  # noqa: E402

# Exit code of a step that cannot run here; the last line of its output is the reason.
SKIPPED = 77
# Seconds for all steps that are not slow. With the build and the wheels, a loaded machine takes at
# most an hour and a half.
BUDGET_S = 76 * 60.0
# Number of steps that run at the same time, of those that wait more than they compute: a job whose
# rank is killed leaves a core idle most of the time. Two of them keep two cores busy for 70 % of
# the time.
AT_ONCE = 3
# Number of lines of a failed step's log below the summary.
END_LINES = 50
# What `make test` needs before the first step, and whether it needs it at all: without the others,
# the steps that use them are skipped.
PREPARATIONS = [
    ("setup", ["make", "--no-print-directory", "setup"], True),
    ("build", ["make", "--no-print-directory", "build"], True),
    ("wheels", ["make", "--no-print-directory", "wheels"], True),
    # Debian keeps only the newest version of each package, so an older one may be out of reach.
    ("setup-test", [sys.executable, "scripts/setup.py", "--test"], False),
    ("criu", [sys.executable, "scripts/criu.py"], False),
    ("moto", [sys.executable, "scripts/moto.py"], False),
]


@dataclass
class Step:
    name: str
    what: str
    command: list[str]
    limit_s: float = 300
    slow: bool = False
    again: bool = False  # whether the step passes if only its second run passes
    # whether it computes more than it waits, measures time, or looks for leftovers
    is_alone: bool = True
    env: dict[str, str] = field(default_factory=dict)
    # whether a run that resumes leaves out the cases of the step that have passed, and their file
    by_case: bool = False
    cases: Path | None = None


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
    prepared = prepare() if options.prepare else []
    if any(row.result == "failed" for row in prepared):
        return 1
    return run_all(prepared, chosen, [step for step in wanted if step not in chosen], options)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the steps and their commands")
    parser.add_argument("--slow", action="store_true", help="run the slow steps too")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed on this commit in an earlier run; the table has it all the same")
    parser.add_argument("--prepare", action="store_true", help="first install and build what the steps need")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help="steps that run at the same time [%(default)s]")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these steps")
    return parser.parse_args()


def every_step(is_slow: bool) -> list[Step]:
    return [*rust_steps(), *other_steps(), *system_steps(is_slow), *imb_steps(), *mpi4py_steps(is_slow), *lossy_steps()]


def rust_steps() -> list[Step]:
    # cargo-nextest repeats the failed tests that measure time one by one (.config/nextest.toml);
    # plain cargo repeats all tests.
    has_nextest = shutil.which("cargo-nextest")
    # Many tests only wait, so twice as many run at a time as there are cores.
    at_once = 2 * (os.cpu_count() or 1)
    runner = ["nextest", "run", "--test-threads", str(at_once)] if has_nextest else ["test", "--no-fail-fast"]
    clippy = ["cargo", "clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]
    fuzz = ["cargo", "test", "--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target/fuzz"]
    # A test that cannot run here says `skipped: REASON`, which `remark` counts: output of tests that pass is kept.
    venvs = {"LANDBRIDGE_TEST_VENVS": str(paths.BUILD / "venv"), "NEXTEST_SUCCESS_OUTPUT": "immediate"}
    shown = [] if has_nextest else ["--", "--show-output"]
    return [
        Step("fmt", "rustfmt", ["cargo", "fmt", "--all", "--check"]),
        Step("clippy", "clippy, warnings denied", clippy, 600),
        # After a change of dependencies the step may have to build cargo-deny: one core for two minutes.
        python_step("deny", "licences, bans and sources", "scripts/deny.py", limit_s=900, is_alone=False),
        # Unit, property and simulation tests, layering, launcher, lab, ssh, hostile connections.
        Step(
            "rust",
            "tests of the crates",
            ["cargo", *runner, "--workspace", *shown],
            1200,
            again=not has_nextest,
            env=venvs,
        ),
        sanitizer_step(),
        *simulator_steps(),
        Step("corpus", "every parser on the corpus of the fuzz targets", fuzz, 400),
    ]


def sanitizer_step() -> Step:
    """The crates with unsafe code under AddressSanitizer, whose runtime comes with each toolchain."""
    about = subprocess.run(["rustc", "-vV"], capture_output=True, text=True).stdout
    host = re.search(r"^host: (.*)$", about, re.M)
    # The sanitizer itself needs more address space than the first allows. The model checker of the
    # second switches between stacks of its own, which the sanitizer does not know.
    without = ("where_there_is_no_room_at_all_it_says_so", "sync::wakeup_gate::tests")
    left_out = ["--", *(word for name in without for word in ("--skip", name))]
    return Step(
        "sanitizer",
        "rings, logs and registered memory under AddressSanitizer",
        ["cargo", "test", "--target", host[1] if host else "x86_64-unknown-linux-gnu", "--lib"]
        + ["-p", "landbridge-drive", "-p", "landbridge-provider", *left_out],
        1200,
        slow=True,
        # The option is not stable: the compiler takes it from those who ask in this way. Without the
        # last one, variables would not lie on the stack that the provider has chosen.
        env={
            "RUSTC_BOOTSTRAP": "1",
            "RUSTFLAGS": "-Zsanitizer=address",
            "CARGO_TARGET_DIR": str(paths.ROOT / "target" / "asan"),
            "ASAN_OPTIONS": "detect_stack_use_after_return=0",
        },
    )


def simulator_steps() -> list[Step]:
    """Thousands of seeds: the release build runs many times as many seeds a second as the tests
    do."""
    ways = [
        ("", "endpoints against each other", SEEDS),
        ("-hostile", "and against liars", SEEDS),
        ("-recovery", "processes that are killed, with logs of the relays", SEEDS),
        # Every fourth seed loses nodes, and every fourth begins nodes again together.
        ("-sender-logs", "processes that are killed, with logs of the senders", 4 * SEEDS),
    ]
    simulate = [str(paths.RELEASE / "landbridge-lab"), "simulate", "--jobs", str(os.cpu_count() or 1)]
    return [
        Step(
            f"simulator{way}",
            f"{seeds} seeds of the simulator, {what}",
            [*simulate, "--seeds", f"0..{seeds}"] + [f"-{way}"] * bool(way),
            300,
        )
        for way, what, seeds in ways
    ]


# Of each kind.
SEEDS = 4000


def mpi4py_steps(is_slow: bool) -> list[Step]:
    """The mpi4py suite: `make test` runs it with two ranks of MPICH, and with one of Open MPI."""
    ways = [(mpi, "own", n) for mpi in ("mpich", "ompi") for n in (1, 2, 4)]
    ways += [("mpich", "clusters", n) for n in (2, 4)]
    return [
        python_step(
            f"mpi4py-{mpi}-{via}-np{n}",
            f"mpi4py suite, {mpi}, {n} rank{'s'[: n > 1]}, {PLACES[via]}",
            "tests/mpi4py_suite.py",
            *("--mpi", mpi, "--via", via, "--np", str(n)),
            *(("--slow", "--limit", "1500") if is_slow else ()),
            limit_s=1800 if is_slow else 1200,
            # Four ranks on two cores take five to ten minutes; IMB has four ranks in every run, and
            # runs over two clusters.
            slow=(mpi, via, n) not in (("ompi", "own", 1), ("mpich", "own", 2)),
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
            slow=mpi == "impi",
        )
        for mpi, via in ways
    ]


def lossy_steps() -> list[Step]:
    """Whole suites on a network that loses, corrupts and reorders packets; `make test` runs one."""
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
            # A lossy network leaves half of the processors idle.
            is_alone=number == 1,
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


def system_steps(is_slow: bool) -> list[Step]:
    """Whole jobs with the built binaries, checked by each driver: a sample of the slow families, or
    all."""
    steps = [system_step(driver, is_slow) for driver in SYSTEM]
    return steps + [system_step(driver, True, "relay") for driver in SYSTEM if driver.also_relay]


def system_step(driver: "Driver", is_slow: bool, logger: str = "") -> Step:
    """`logger`: who logs messages instead of the default, always with all cases."""
    return python_step(
        f"system-{driver.name}{'-' if logger else ''}{logger}",
        f"{driver.what}{f', recover_log={logger}' if logger else ''}",
        f"tests/system/{driver.name}.py",
        *("--bin", str(paths.RELEASE), "--venvs", str(paths.BUILD / "venv")),
        *(driver.whole if is_slow else driver.sample),
        *(("--set", f"recover_log={logger}") if logger else ()),
        limit_s=driver.whole_s if is_slow else driver.sample_s,
        again=driver.again,
        is_alone=driver.is_alone,
        slow=bool(logger),
        by_case=driver.by_case,
    )


@dataclass
class Driver:
    """A file of tests/system: its arguments in `make test` and in `make test-all`, and its limits
    there in seconds."""

    name: str
    what: str
    sample: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    # Alone most take half of 400 s; beside others on a slow machine more than all of it.
    sample_s: float = 900
    whole_s: float = 1800
    again: bool = True  # False: a schedule is random, so a failure of the first run is a finding
    is_alone: bool = False
    # Whether `make test-all` runs it once more with `recover_log=relay`.
    also_relay: bool = False
    # Whether a run that resumes leaves out its cases that have passed: those of hours.
    by_case: bool = False


SAMPLE = ("--sample",)
# Of the drivers that run side by side, the longest comes first, so that no core waits for it at the
# end.
SYSTEM = [
    Driver("libraries", "every MPI library, under our launcher and its own", ("--repeat", "4"), ("--repeat", "4"), is_alone=True),
    Driver("messages", "random messages and one-sided operations, checked", ("--np", "4"), ("--np", "2", "4"), is_alone=True),
    Driver("own", "messages of a process to itself, and operations on its own window", is_alone=True),
    Driver("guide", "every sh block of docs/GUIDE.md, in order", is_alone=True),
    Driver("addresses", "a program sees the same addresses whatever the network does", is_alone=True),
    Driver("waiting", "what waiting costs", is_alone=True),
    Driver("killing", "a rank is killed in the middle of a job", is_alone=True),
    Driver("spawn", "ranks spawn processes, in one and in two clusters", is_alone=True),
    Driver("files", "what ranks that are killed have written is there once, and they read what they read before", (), ("--all",), 900, 7800, again=False, by_case=True),
    Driver("soak", "minutes of random faults under unmodified programs", ("--minutes", "1"), (), 420, 420, again=False),
    Driver("recovery", "ranks that are killed come back", SAMPLE, also_relay=True, by_case=True),
    Driver("nodes", "ranks that are killed on other nodes and behind links that fail, and nodes that are lost", SAMPLE, also_relay=True, by_case=True),
    Driver("any_moment", "nodes that are lost and ranks that are killed at any moment of a job", (), ("--runs", "120"), 600, 3600, again=False),
    Driver("failing_paths", "ranks that are killed while the paths between their nodes fail", SAMPLE, by_case=True),
    Driver("checkpoint", "ranks that are killed go on from images of them", SAMPLE, also_relay=True, by_case=True),
    Driver("network", "networks that lose, damage and reorder; links, interfaces and relays that fail", SAMPLE, by_case=True),
    Driver("kills", "programs of every kind, killed at random moments, from images and over bad networks, too", SAMPLE, ("--all",), 1500, 5400, again=False, also_relay=True, by_case=True),
    Driver("aimed", "ranks that are killed at chosen points, or for want of memory, and logs on full disks", SAMPLE, by_case=True),
    Driver("records", "ranks that read more of clocks, chance and files than a record holds", SAMPLE),
    Driver("calls", "single system calls under the interposer alone: seen, compared, interrupted"),
    Driver("interrupted", "kills within one system call while another rank acts on the file", ("--only", "^(append|claim-removal|exclusive|long-append|open|truncate|write), answered")),
    Driver("random_files", "random file programs whose ranks are killed", (), ("--runs", "12000"), 1500, 5400, again=False),
    Driver("punish", "minutes of killing ranks at random, in one cluster and over two", ("--minutes", "0.3"), (), 900, 900, again=False, also_relay=True),
    Driver("suite", "the mpi4py suite, module by module, with a rank killed in each", SAMPLE, (), 360, 7200, by_case=True),
    Driver("unrecorded", "killed ranks that print or send what nobody records, or have threads"),
    Driver("interfaces", "interfaces that lead nowhere"),
]


def python_step(name, what, script, *arguments, limit_s, **options) -> Step:
    return Step(name, what, [sys.executable, script, *arguments], limit_s, **options)


def prepare() -> list["Row"]:
    """Installs and builds what the steps need, with its output on the terminal; ends at the first
    failure of a part that is needed."""
    rows = []
    for name, command, is_needed in PREPARATIONS:
        started = time.monotonic()
        code = subprocess.run(command, cwd=paths.ROOT).returncode
        result = "passed" if code == 0 else "failed" if is_needed else "skipped"
        rows.append(Row(Step(name, "", command), result, f"exit code {code}" if code else "", time.monotonic() - started))
        print(f"{result:7} {name} in {rows[-1].seconds:.0f} s", flush=True)
        if result == "failed":
            break
    return rows


def run_all(prepared: list["Row"], steps: list[Step], left_out: list[Step], options) -> int:
    process.adopt_orphans()
    started = time.monotonic()
    deadline = None if options.slow else started + BUDGET_S
    passed = Passed(paths.RESULTS / "passed.json", present_commit(paths.ROOT))
    rows = earlier_rows(steps, passed) if options.resume else []
    steps, every = [step for step in steps if all(row.step is not step for row in rows)], steps
    if options.resume:
        for step in (step for step in steps if step.by_case and passed.commit):
            step.cases = paths.RESULTS / f"passed-{step.name}-{passed.commit[:12]}.txt"
        print(f"{len(rows)} steps have passed on this commit before", flush=True)
    print(f"{len(steps)} steps; those that wait more than they work run {options.at_once} at a time", flush=True)
    for step in (step for step in steps if step.is_alone):
        rows += run_at_once([step], deadline, 1, passed)
    beside = [step for step in steps if not step.is_alone]
    if options.slow:
        # No core waits for the longest one at the end.
        beside.sort(key=lambda step: -step.limit_s)
    rows += run_at_once(beside, deadline, options.at_once, passed)
    seconds = time.monotonic() - started
    for pid in process.end_descendants():
        print(f"test: ended process {pid}, which a step had left behind")
    rows.sort(key=lambda row: every.index(row.step))
    return summarise(prepared, rows, seconds, left_out)


def earlier_rows(steps: list[Step], passed: Passed) -> list["Row"]:
    """The outcomes of the steps that have passed on this commit before."""
    found = [(step, passed.find(step.name, portable(step))) for step in steps]
    return [
        Row(step, "passed", f"{it['note']} (earlier, {it['at']})", it["seconds"], it["busy_s"], it["repeated"], it["skipped"])
        for step, it in found
        if it
    ]


def portable(step: Step) -> list[str]:
    """The command of a step in any checkout."""
    return [word.replace(str(paths.ROOT), ".") for word in step.command]


def run_at_once(steps: list[Step], deadline: float | None, at_once: int, passed: Passed) -> list["Row"]:
    """Runs the steps, a bounded number at a time. Each step has a process of its own, which ends all
    processes that the step leaves behind."""
    waiting, running, rows = list(steps), {}, []
    while waiting or running:
        while waiting and len(running) < at_once:
            step = waiting.pop(0)
            left_s = step.limit_s if deadline is None else deadline - time.monotonic()
            receiver, sender = multiprocessing.Pipe(duplex=False)
            worker = multiprocessing.Process(target=run_step_apart, args=(step, left_s, sender))
            print(f"begins  {step.name}: {step.what}", flush=True)
            worker.start()
            sender.close()
            running[receiver] = (step, worker)
        for receiver in multiprocessing.connection.wait(list(running)):
            step, worker = running.pop(receiver)
            try:
                row = receiver.recv()
            except EOFError:
                row = Row(step, "failed", "its process ended without a result", 0.0)
            worker.join()
            rows.append(row)
            if row.result == "passed":
                outcome = {"note": row.note, "seconds": row.seconds, "busy_s": row.busy_s, "repeated": row.repeated}
                at = time.strftime("%Y-%m-%d %H:%M")
                passed.note(step.name, portable(step), {**outcome, "skipped": row.skipped, "at": at})
            print(f"{row.result:7} {step.name} in {row.seconds:.0f} s ({row.busy_s:.0f} s of processor)  {row.note}", flush=True)
    return rows


def run_step_apart(step: Step, left_s: float, sender) -> None:
    process.adopt_orphans()
    row = run_step(step, left_s)
    row.busy_s = process.processor_seconds()
    sender.send(row)


@dataclass
class Row:
    """Outcome of a step: `result` is passed, failed or skipped; `busy_s` is processor time,
    `seconds` is elapsed time. `repeated` names what passed only in a second run, `skipped` is the
    number of tests and cases inside the step that could not run."""

    step: Step
    result: str
    note: str
    seconds: float
    busy_s: float = 0.0
    repeated: list[str] = field(default_factory=list)
    skipped: int = 0


def run_step(step: Step, left_s: float) -> Row:
    """Runs a step; the note is the reason of the result, or a remark about what was tested."""
    if left_s <= 0:
        return Row(step, "failed", "not reached in time: the machine is too busy", 0.0)
    log = paths.RESULTS / f"test-{step.name}.log"
    done = run_once(step, min(step.limit_s, left_s), log)
    seconds, note, repeated = done.seconds, "", []
    if step.again and not done.ok and done.code != SKIPPED and left_s > 2 * seconds:
        print(process.tail(done.output, 30))
        kept = log.rename(log.with_suffix(".first.log"))
        note, repeated = f"flaky: failed at first, log {kept.relative_to(paths.ROOT)}; ", [step.name]
        print(f"    {step.name} failed, and is run again", flush=True)
        done = run_once(step, min(step.limit_s, left_s - seconds), log)
        seconds += done.seconds
    if done.ok:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", done.output)
        skipped, repeated = skips(plain), repeated + flaky_tests(plain)
        return Row(step, "passed", note + remark(step, plain), seconds, repeated=repeated, skipped=len(skipped))
    if done.code == SKIPPED:
        return Row(step, "skipped", process.tail(done.output, 1), seconds)
    print(process.tail(done.output, 30))
    reason = done.why or f"exit code {done.code}"
    return Row(step, "failed", f"{reason}, log {log.relative_to(paths.ROOT)}", seconds)


def run_once(step: Step, limit_s: float, log) -> process.Finished:
    command = [*step.command, "--passed", str(step.cases)] if step.cases else step.command
    return process.run(command, limit_s, step.env, cwd=paths.ROOT, log=log)


def skips(output: str) -> list[str]:
    """The reason of each test or case that could not run. A line `skipped: N cases …` stands for N
    of them."""
    reasons = []
    for reason in re.findall(r"^ *skipped: (.*)$", output, re.MULTILINE):
        several = re.match(r"(\d+) cases ", reason)
        reasons += [reason] * (int(several[1]) if several else 1)
    return reasons


def flaky_tests(output: str) -> list[str]:
    """Names of the tests that nextest had to run again: `FLAKY 2/3 [ 0.015s] (7/9) NAME`."""
    names = re.findall(r"^ *FLAKY \S+ \[.*?\] *(?:\( *\d+/\d+\) *)?(.*)$", output, re.MULTILINE)
    return sorted({" ".join(name.split()) for name in names})


def remark(step: Step, output: str) -> str:
    """Remark about a step that passed: how much was tested, what was skipped, what needed two
    runs."""
    reasons = skips(output)
    if step.command[0] == sys.executable:
        said = [process.tail(output, 1).strip()]
    else:
        said = re.findall(r"^ *Summary \[.*?\] *(.*)$", output, re.MULTILINE)
        # A test that cannot run here ends without an error, so its runner counts it as passed.
        said = [re.sub(r"(\d+) passed", lambda it: f"{int(it[1]) - len(reasons)} passed", line) for line in said]
        said += [f"flaky: {name}" for name in flaky_tests(output)]
        said += re.findall(r"^(seeds .*: nothing found)$", output, re.MULTILINE)
    if reasons:
        said.append(f"{len(reasons)} could not run here: {', '.join(sorted(set(reasons)))}")
    return "; ".join(said)


def summarise(prepared: list[Row], rows: list[Row], seconds: float, left_out: list[Step]) -> int:
    print(f"\n{'step':28} {'result':8} {'time':>6} {'work':>6}  note")
    for row in prepared:
        print(f"{row.step.name:28} {row.result:8} {row.seconds:5.0f}s {'':>6}  before the first step{'; ' if row.note else ''}{row.note}")
    for row in rows:
        print(f"{row.step.name:28} {row.result:8} {row.seconds:5.0f}s {row.busy_s:5.0f}s  {row.note}")
    for step in left_out:
        print(f"{step.name:28} {'left out':8} {'':>6} {'':>6}  slow; only in make test-all")
    again = [name for row in rows for name in row.repeated if row.result == "passed"]
    print(f"\npassed only when they were run again: {len(again)}{': ' if again else ''}{', '.join(again)}")
    before = f", after {sum(row.seconds for row in prepared) / 60:.1f} minutes of preparation" if prepared else ""
    load = os.getloadavg()[2]
    print(f"{seconds / 60:.1f} minutes{before}; load of the machine in the last quarter of an hour: {load:.1f} on {os.cpu_count()} cores")
    failed = [row.step for row in rows if row.result == "failed"]
    for step in failed:
        print(end_of_log(step))
    for step in failed:
        print(f"again alone: python3 scripts/test.py {step.name}")
    print(counts(rows))
    return 1 if failed else 0


def counts(rows: list[Row]) -> str:
    """The last line: numbers of steps, and of what was skipped inside those that passed."""
    steps = [f"{sum(row.result == result for row in rows)} {result}" for result in ("passed", "failed", "skipped")]
    inside = [f"{row.skipped} of {row.step.name}" for row in rows if row.skipped]
    total = f"{sum(row.skipped for row in rows)} tests and cases inside steps were skipped"
    return f"{', '.join(steps)}; {total}{': ' if inside else ''}{', '.join(inside)}"


def end_of_log(step: Step) -> str:
    log = paths.RESULTS / f"test-{step.name}.log"
    if not log.exists():
        return f"\n{step.name} has no log"
    end = process.tail(log.read_text(errors="replace"), END_LINES)
    return f"\nthe end of {log.relative_to(paths.ROOT)}:\n{end}\n"


if __name__ == "__main__":
    sys.exit(main())
