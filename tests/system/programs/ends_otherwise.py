"""Rank 2 ends with code 3 after MPI_Finalize, and with 0 when it is executed again; the others wait.

Usage: ends_otherwise.py

Ranks 0 and 1 end SECONDS after MPI_Finalize. Rank 2 prints `rank 2: ends`.
"""

import os
import sys
import time

import mpi4py

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

SECONDS = 8.0


def main() -> None:
    world = MPI.COMM_WORLD
    rank = world.rank
    world.sendrecv(rank, (rank + 1) % world.size, source=(rank - 1) % world.size)
    MPI.Finalize()
    if rank == 2:
        print(f"rank {rank}: ends", flush=True)
        sys.exit(3 if int(os.environ.get("LANDBRIDGE_INCARNATION", "0")) == 0 else 0)
    if rank < 2:
        time.sleep(SECONDS)


main()
