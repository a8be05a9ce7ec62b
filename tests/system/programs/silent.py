"""Ranks send messages, and then wait for a file, without calling MPI, until these have arrived.

Usage: silent.py FOLDER [COUNT]

Rank 2 sends to rank 0, and rank 3 to rank 1, COUNT messages of up to 8 KB. Each receiver waits for
a moment before it receives them. Prints `rank R: waits` and `rank R: COUNT messages`.
"""

import sys
import time
from pathlib import Path

import numpy
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
PAUSE_S = 1.5


def message(number: int) -> numpy.ndarray:
    return (numpy.arange(number * 137 % 8000) + number).astype(numpy.uint8)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def main() -> None:
    folder, count = Path(sys.argv[1]), int((sys.argv[2:] or ["300"])[0])
    rank = WORLD.rank
    sent, received = (folder / f"{what}.{rank % 2}" for what in ("sent", "received"))
    if rank >= 2:
        for number in range(count):
            WORLD.Send(message(number), rank - 2)
        sent.touch()
        wait_for(received)
    else:
        wait_for(sent)
        print(f"rank {rank}: waits", flush=True)
        time.sleep(PAUSE_S)
        for number in range(count):
            wanted = message(number)
            found = numpy.zeros_like(wanted)
            WORLD.Recv(found, rank + 2)
            assert (found == wanted).all(), f"message {number}"
        print(f"rank {rank}: {count} messages", flush=True)
        received.touch()
    WORLD.Barrier()


main()
