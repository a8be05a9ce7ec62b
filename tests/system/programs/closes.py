"""The ranks of the first half leave MPI at once, those of the second half 1.5 s later.

A rank of the second half thus sends its last message, has all that it waits for, and closes its
transport while the rank that is to receive that message may be away. Each rank prints `rank R:
begins`, then leaves MPI and prints `rank R: closed`, and prints `rank R: ends` 2 s later.
"""

import time

import mpi4py

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

LATER_S, AFTER_S = 1.5, 2.0


def main() -> None:
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    world.barrier()
    print(f"rank {rank}: begins", flush=True)
    if rank >= size // 2:
        time.sleep(LATER_S)
    MPI.Finalize()
    print(f"rank {rank}: closed", flush=True)
    time.sleep(AFTER_S)
    print(f"rank {rank}: ends", flush=True)


main()
