"""Two ranks exchange a known number of messages, and stand still before and after.

    counted.py SIZE TIMES

Rank 0 prints `counted N` once both ranks have sent N messages to each other, 0 at first and then
TIMES, and goes on when a line comes on its standard input. So what the message logs hold can be
read meanwhile.
"""

import sys

from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def main() -> None:
    size, times = map(int, sys.argv[1:])
    buffer = bytearray(size)
    # The first message opens the logs.
    exchange(buffer)
    stand_still(0)
    for _ in range(times):
        exchange(buffer)
    stand_still(times)


def exchange(buffer: bytearray) -> None:
    if WORLD.rank == 0:
        WORLD.Send(buffer, 1)
        WORLD.Recv(buffer, 1)
    else:
        WORLD.Recv(buffer, 0)
        WORLD.Send(buffer, 0)


def stand_still(number: int) -> None:
    if WORLD.rank == 0:
        print(f"counted {number}", flush=True)
        sys.stdin.readline()


main()
