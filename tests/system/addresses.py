#!/usr/bin/env python3
"""A program gets the same memory addresses whatever the network does.

The same program runs several times without address randomisation. Its ranks sleep for different
times, so messages come early or late, expected or unexpected, and connections are made in another
order; the paths differ, too. After every phase each rank notes the results of malloc, mmap, open
and sbrk. All runs must note the same. With `--provider NAME` another libfabric provider (tcp, say)
runs, which shows what this test detects.
"""

import platform
import shutil
import sys
import tempfile
from pathlib import Path

import common

RANKS = 4
SEEDS = [1, 2, 3]
# Names of one length: the environment lies on the program's stack and moves what lies below.
PATHS = ["tcp", "shm"]
# Python itself must not allocate at random: its small objects, which may, lie in pools of its own.
STEADY = {"PYTHONHASHSEED": "0", "PYTHONMALLOC": "pymalloc"}


def main() -> int:
    options = common.arguments(__doc__, add_options)
    common.quiet_environment()
    checks = common.Checks(options)
    if not shutil.which("setarch"):
        return common.skipped("setarch (util-linux) is not installed")
    if options.provider:
        runs = [(f"seed {seed}", other_provider(options, seed)) for seed in SEEDS]
        compare(checks, options, options.provider, runs)
        return checks.end()
    runs = [(f"{path} seed {seed}", ours(options, seed, path)) for path in PATHS for seed in SEEDS]
    compare(checks, options, "shared memory and tcp", runs)
    every, two = "shm,tcp,relay", ("--clusters", "2")
    runs = [(f"seed {seed}", ours(options, seed, every, *two)) for seed in SEEDS]
    compare(checks, options, "two clusters", runs)
    return checks.end()


def add_options(parser):
    parser.add_argument("--provider", help="look at another libfabric provider instead of ours")


def program(options, seed: int, notes: str) -> list[str]:
    still = ["setarch", platform.machine(), "-R"]
    name = str(common.PROGRAMS / "addresses.py")
    return [*still, common.python(options), name, str(seed), notes]


def ours(options, seed, path, *words):
    before = common.landbridge_run(options, RANKS, *words)
    return noted(options, seed, before, {"LANDBRIDGE_PATHS": path})


def other_provider(options, seed):
    before = [options.venvs / "mpich" / "bin" / "mpiexec", "-n", RANKS]
    environment = {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_NOLOCAL": "1"}
    return noted(options, seed, before, {"FI_PROVIDER": options.provider} | environment)


def noted(options, seed, before, environment):
    """Runs the program: the outcome, and the notes of its ranks."""
    with tempfile.TemporaryDirectory(prefix="notes-") as folder:
        command = [*before, *program(options, seed, folder)]
        finished = common.run(options, command, environment | STEADY)
        files = sorted(Path(folder).glob("rank-*"))
        return finished, [file.read_text().splitlines() for file in files]


def compare(checks, options, name, runs):
    """Checks that all runs have noted the same."""
    if not checks.wants(name):
        return
    notes = {}
    for label, (finished, ranks) in runs:
        if not finished.ok or len(ranks) != RANKS:
            checks.check(name, False, f"{label}: {common.how(finished)}", finished.output)
            return
        notes[label] = sum(ranks, [])
    first, *others = notes
    unlike = {label: differences(notes[first], notes[label]) for label in others}
    unlike = {label: lines for label, lines in unlike.items() if lines}
    if not unlike:
        seen = len(notes[first])
        checks.check(name, True, f"{len(runs)} runs, {RANKS} ranks, {seen} notes each, all the same")
        return
    text = "\n".join(f"{first} / {label}: {line}" for label, lines in unlike.items() for line in lines[:3])
    which = ", ".join(f"{label} ({len(lines)} notes)" for label, lines in unlike.items())
    checks.check(name, False, f"unlike {first}: {which}", text)


def differences(some: list[str], other: list[str]) -> list[str]:
    if len(some) != len(other):
        return [f"{len(some)} notes, {len(other)} notes"]
    return [f"{a}  {b}" for a, b in zip(some, other) if a != b]


if __name__ == "__main__":
    sys.exit(main())
