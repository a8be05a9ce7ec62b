"""Ranks exchange numbers in a ring and leave MPI; the first ones work on for seconds after that.

Usage: works_on.py COUNT

The last rank prints `rank R: exchanged` before it leaves MPI. COUNT ranks work on, and print
`rank R: SUM` when they end.
"""

import sys
import time

import mpi4py

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

ROUNDS, WORK_S = 100, 8


def main() -> None:
    world = MPI.COMM_WORLD
    rank, size, total = world.rank, world.size, 0
    for number in range(ROUNDS):
        total += world.sendrecv(rank * number, (rank + 1) % size, source=(rank - 1) % size)
    if rank == size - 1:
        print(f"rank {rank}: exchanged", flush=True)
    MPI.Finalize()
    if rank < int(sys.argv[1]):
        time.sleep(WORK_S)
        print(f"rank {rank}: {total}", flush=True)


main()
