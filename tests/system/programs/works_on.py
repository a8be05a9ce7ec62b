"""Ranks exchange numbers in a ring and leave MPI; the first two work on for seconds after that.

Rank 0 prints `rank 0: exchanged` before it leaves MPI, and ranks 0 and 1 `rank R: SUM` when they
end.
"""

import time

import mpi4py

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

ROUNDS, WORK_S = 100, 5


def main() -> None:
    world = MPI.COMM_WORLD
    rank, size, total = world.rank, world.size, 0
    for number in range(ROUNDS):
        total += world.sendrecv(rank * number, (rank + 1) % size, source=(rank - 1) % size)
    if rank == 0:
        print("rank 0: exchanged", flush=True)
    MPI.Finalize()
    if rank < 2:
        time.sleep(WORK_S)
        print(f"rank {rank}: {total}", flush=True)


main()
