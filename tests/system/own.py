#!/usr/bin/env python3
"""Messages of a process to itself arrive in order with those of others, and never cause a sleep.

A message to the own process is there before messages that other processes send later. Tested over
every kind of path, and under `--recover`. MPICH delivers messages of a process to itself on its
own: its `MPI_Dist_graph_create` counts wrong where a probe finds a peer's message first, and
mpi4py's mutex hangs where an accumulate of a peer overtakes the own accumulate that caused it. The
mutex hangs only where ranks wait for processors, so two other processes keep these busy. Each job
takes some seconds at most.
"""

import contextlib
import subprocess
import sys

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
# Longest mean time of a small operation on the own window. It is 3 to 26 us with a load of 6 on two
# processors; a sleep in each operation takes more than 1,000 us.
OPERATION_US_MAX = 300.0
TIMED = ("Put 8", "Accumulate 32", "Accumulate 64", "Accumulate 128")
# Each mutex is taken once by each rank. Where the order is lost, one of the first thirty hangs.
MUTEXES, RANKS_OF_MUTEX = 60, 4


def main() -> int:
    options = common.arguments(__doc__)
    common.quiet_environment()
    checks = common.Checks(options)
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
        is_right &= common.values(finished.output, "wrong numbers") == ["0"]
        is_awake = bool(sleeps) and int(sleeps[0]) <= SLEEPS_MAX
        times = [common.values(finished.output, f"{operation} B, us") for operation in TIMED]
        is_quick = all(took and float(took[0]) <= OPERATION_US_MAX for took in times)
        listed = ", ".join(f"{operation} B {' '.join(took)} us" for operation, took in zip(TIMED, times))
        measured = f"slept {' '.join(sleeps)} times; {listed}"
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
