"""A rank sends, and then waits for a file, without calling MPI, until the receiver has made that.

Usage: sends_and_waits.py FOLDER [COUNT]

Rank 1 sends COUNT messages of up to 8 KB to the last rank, which begins to receive them after a
pause in which it does not call MPI either. Prints `rank R: has sent` and `rank R: COUNT messages`.
"""

import sys
import time
from pathlib import Path

import numpy
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
PAUSE_S = 4


def message(number: int) -> numpy.ndarray:
    return (numpy.arange(number * 137 % 8000) + number).astype(numpy.uint8)


def main() -> None:
    received, count = Path(sys.argv[1]) / "received", int((sys.argv[2:] or ["300"])[0])
    rank, last = WORLD.rank, WORLD.size - 1
    if rank == 1:
        for number in range(count):
            WORLD.Send(message(number), last)
        print(f"rank {rank}: has sent", flush=True)
        while not received.exists():
            time.sleep(0.01)
    elif rank == last:
        time.sleep(PAUSE_S)
        for number in range(count):
            wanted = message(number)
            found = numpy.zeros_like(wanted)
            WORLD.Recv(found, 1)
            assert (found == wanted).all(), f"message {number}"
        print(f"rank {rank}: {count} messages", flush=True)
        received.touch()
    WORLD.Barrier()


main()
