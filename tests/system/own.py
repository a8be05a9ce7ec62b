#!/usr/bin/env python3
"""Messages of a process to itself arrive in order with those of others, and never cause a sleep.

A message to the own process is there before messages that other processes send later. Tested over
every kind of path, and under `--recover`. MPICH delivers messages of a process to itself on its
own: its `MPI_Dist_graph_create` counts wrong where a probe finds a peer's message first, and
mpi4py's mutex hangs where an accumulate of a peer overtakes the own accumulate that caused it. The
mutex hangs only where ranks wait for processors, so two other processes keep these busy. Small
operations on the own window are also timed, by a program in C (programs/own_window.c). Each job
takes some seconds at most.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import common

# Name, options of `landbridge run`, LANDBRIDGE_PATHS.
PATHS = [
    ("shared memory", [], "shm"),
    ("tcp", [], "tcp"),
    ("two clusters", ["--clusters", "2"], ""),
    ("recorded", ["--recover"], ""),
    ("recorded, two clusters", ["--recover", "--clusters", "2"], ""),
]
GRAPHS = 100
OPERATIONS = 2_000
# A loop that slept after 2 ms of polls without a message would sleep several hundred times. Other
# reasons to wait are few.
SLEEPS_MAX = 40
TIMED = ("Put 8", "Accumulate 32", "Accumulate 64", "Accumulate 128")
# Longest mean time of a small operation on the own window. It is 0.1 to 8 us with a load of 6 on two
# processors. If polls of a program that computes put it to sleep, the slowest kind takes 500 to
# 1,800 us.
OPERATION_US_MAX = 100.0
# Each mutex is taken once by each rank. Where the order is lost, one of the first thirty hangs.
MUTEXES, RANKS_OF_MUTEX = 60, 4


def main() -> int:
    options = common.arguments(__doc__)
    common.quiet_environment()
    checks = common.Checks(options)
    with tempfile.TemporaryDirectory() as folder:
        for name, words, paths in PATHS:
            times(checks, f"small operations on the own window, {name}", words, paths, Path(folder))
    for name, words, paths in PATHS:
        for mpi, ranks in (("mpich", 2), ("mpich", 4), ("impi", 2)):
            if mpi == "mpich" or "--recover" not in words:
                graphs(checks, f"graphs, {mpi}, {ranks} ranks, {name}", mpi, ranks, words, paths)
        windows(checks, f"own window, {name}", words, paths)
        mutexes(checks, f"mutex, four ranks, busy processors, {name}", words, paths)
    return checks.end()


def graphs(checks, name, mpi, ranks, words, paths):
    if checks.wants(name):
        finished = job(checks, mpi, ranks, words, paths, "graph", GRAPHS)
        is_right = finished.ok and common.values(finished.output, "wrong") == ["0"]
        checks.check(name, is_right, common.how(finished), finished.output)


def windows(checks, name, words, paths):
    if checks.wants(name):
        finished = job(checks, "mpich", 2, words, paths, "window", OPERATIONS)
        sleeps = common.values(finished.output, "sleeps")
        is_right = finished.ok and common.values(finished.output, "value") == ["{2}"]
        is_awake = bool(sleeps) and int(sleeps[0]) <= SLEEPS_MAX
        checks.check(name, is_right and is_awake, f"slept {' '.join(sleeps)} times", finished.output)


def times(checks, name, words, paths, folder):
    if not checks.wants(name):
        return
    if not shutil.which("gcc"):
        print(f"skipped: {name}: there is no gcc")
        return
    program, root = folder / "own_window", checks.options.venvs / "mpich"
    if not program.exists():
        source = common.PROGRAMS / "own_window.c"
        libraries = [f"-L{root}/lib", "-lmpi", f"-Wl,-rpath,{root}/lib"]
        subprocess.run(["gcc", "-O2", f"-I{root}/include", source, "-o", program, *libraries], check=True)
    command = [*common.landbridge_run(checks.options, 2, *words), program, OPERATIONS]
    finished = common.run(checks.options, command, {"LANDBRIDGE_PATHS": paths})
    sleeps = common.values(finished.output, "sleeps")
    found = {kind: float((common.values(finished.output, f"{kind} B, us") or ["inf"])[0]) for kind in TIMED}
    is_right = finished.ok and common.values(finished.output, "wrong numbers") == ["0"]
    is_awake = bool(sleeps) and int(sleeps[0]) <= SLEEPS_MAX
    is_quick = max(found.values()) <= OPERATION_US_MAX
    listed = ", ".join(f"{kind} B {took:.1f} us" for kind, took in found.items())
    measured = f"{listed}, slept {' '.join(sleeps)} times"
    checks.check(name, is_right and is_awake and is_quick, measured, finished.output)


def mutexes(checks, name, words, paths):
    if checks.wants(name):
        with busy_processors():
            finished = job(checks, "mpich", RANKS_OF_MUTEX, words, paths, "mutex", MUTEXES)
        taken = common.values(finished.output, "taken")
        is_right = finished.ok and taken == [str(MUTEXES * RANKS_OF_MUTEX)]
        checks.check(name, is_right, f"taken {' '.join(taken)} times, {common.how(finished)}", finished.output)


@contextlib.contextmanager
def busy_processors():
    """Two processes that do nothing but count, for a minute at most."""
    loop = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def job(checks, mpi, ranks, words, paths, mode, times):
    command = common.landbridge_run(checks.options, ranks, *words)
    program = [common.python(checks.options, mpi), common.PROGRAMS / "own.py", mode, times]
    return common.run(checks.options, [*command, *program], {"LANDBRIDGE_PATHS": paths})


if __name__ == "__main__":
    sys.exit(main())
