#!/usr/bin/env python3
"""Everything `make test` does, as a list of named steps with a summary at the end.

    scripts/test.py                 all steps but the slow ones
    scripts/test.py --slow          those too
    scripts/test.py --list          the steps, and the command that runs each alone
    scripts/test.py NAME ...        only these

Each step is a command with a time limit; its whole output is in build/results/test-NAME.log, and the
end of it is shown when it fails. A step that cannot run here is skipped, which is said with its
reason. The exit code is 0 only if nothing failed.
"""

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths, process  # noqa: E402

# An exit code with which a step says that it cannot run here; its last line is the reason.
SKIPPED = 77


@dataclass
class Step:
    name: str
    what: str
    command: list[str]
    limit_s: float = 300
    slow: bool = False
    tool: str = ""  # a program without which the step is skipped


def main() -> int:
    options = arguments()
    steps = every_step()
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
    return run_all(chosen, left_out=len(wanted) - len(chosen))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the steps and their commands")
    parser.add_argument("--slow", action="store_true", help="run the slow steps too")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these steps")
    return parser.parse_args()


def every_step() -> list[Step]:
    return [*rust_steps(), *mpi4py_steps(), *imb_steps(), *other_steps()]


def rust_steps() -> list[Step]:
    nextest = ["cargo", "nextest", "run", "--release", "--workspace", "--no-fail-fast"]
    plain = ["cargo", "test", "--release", "--workspace", "--no-fail-fast"]
    clippy = ["cargo", "clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]
    return [
        Step("fmt", "rustfmt", ["cargo", "fmt", "--all", "--check"]),
        Step("clippy", "clippy, warnings denied", clippy, 900),
        Step("deny", "licences and bans", ["cargo", "deny", "check"], tool="cargo-deny"),
        # Unit, property and simulation tests, corpus replay, layering, launcher, lab, ssh.
        Step("rust", "tests of the crates", nextest if shutil.which("cargo-nextest") else plain, 1800),
    ]


def mpi4py_steps() -> list[Step]:
    """The suite where `make test` wants it: both libraries directly, MPICH also across clusters."""
    ways = [("mpich", "own", n) for n in (1, 2, 4)]
    ways += [("mpich", "clusters", n) for n in (2, 4)]
    ways += [("ompi", "own", n) for n in (1, 2, 4)]
    return [
        python_step(
            f"mpi4py-{mpi}-{via}-np{n}",
            f"mpi4py suite, {mpi}, {n} ranks, {PLACES[via]}",
            "tests/mpi4py_suite.py",
            *("--mpi", mpi, "--via", via, "--np", str(n)),
            limit_s=1300,
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


def other_steps() -> list[Step]:
    heat = [
        *(str(paths.LANDBRIDGE), "run", "--clusters", "2", "-n", "4", "--"),
        *(paths.python("mpich"), "examples/heat.py", "--check", "--size", "128", "--steps", "200"),
    ]
    return [Step("heat", "heat equation, two clusters, against a serial run", heat, 120)]


def python_step(name, what, script, *arguments, limit_s) -> Step:
    return Step(name, what, [sys.executable, script, *arguments], limit_s)


def run_all(steps: list[Step], left_out: int) -> int:
    process.adopt_orphans()
    started, rows = time.monotonic(), []
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {step.name}: {step.what}", flush=True)
        rows.append((step, *run_step(step)))
    seconds = time.monotonic() - started
    for pid in process.end_descendants():
        print(f"test: ended process {pid}, which a step had left behind")
    return summarise(rows, seconds, left_out)


def run_step(step: Step) -> tuple[str, str, float]:
    """(passed, failed or skipped; the reason or last line; seconds)."""
    if step.tool and not shutil.which(step.tool):
        return "skipped", f"{step.tool} is not installed", 0.0
    log = paths.RESULTS / f"test-{step.name}.log"
    done = process.run(step.command, step.limit_s, cwd=paths.ROOT, log=log)
    last = process.tail(done.output, 1)
    if done.ok:
        return "passed", last if step.command[0] == sys.executable else "", done.seconds
    if done.code == SKIPPED:
        return "skipped", last, done.seconds
    print(process.tail(done.output, 30))
    reason = done.why or f"exit code {done.code}"
    return "failed", f"{reason}, log {log.relative_to(paths.ROOT)}", done.seconds


def summarise(rows, seconds: float, left_out: int) -> int:
    print(f"\n{'step':28} {'result':8} {'time':>6}  note")
    for step, result, note, took in rows:
        print(f"{step.name:28} {result:8} {took:5.0f}s  {note}")
    count = {key: sum(r[1] == key for r in rows) for key in ("passed", "failed", "skipped")}
    print(f"\n{', '.join(f'{n} {key}' for key, n in count.items())} in {seconds / 60:.1f} minutes")
    if left_out:
        print(f"{left_out} slow steps were left out; make test-all runs them")
    for step, result, *_ in rows:
        if result == "failed":
            print(f"again alone: python3 scripts/test.py {step.name}")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
