"""Ranks call MPI again and again until a file is there, so that images can be taken of them, and then
run a program; with `--behind` they run it before.

Usage: meets.py [--behind] FILE PROGRAM WORD…
"""

import runpy
import sys
import time
from pathlib import Path

from mpi4py import MPI

PAUSE_S = 0.01


def meet_until(file: Path) -> None:
    world = MPI.COMM_WORLD
    # Every rank waits for the others: one that only sends would not look for messages.
    while not world.allreduce(world.rank == 0 and file.exists(), MPI.LOR):
        time.sleep(PAUSE_S)


def main() -> None:
    is_behind = sys.argv[1] == "--behind"
    file, *program = sys.argv[1 + is_behind :]
    if not is_behind:
        meet_until(Path(file))
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")
    if is_behind:
        meet_until(Path(file))


main()
