"""Rank 0 sends the number of its incarnation to the last rank, which prints it and ends; ranks 0 and 1
work on after MPI_Finalize.

A restarted rank 0 thus sends something else to a rank that is not there any more.
"""

import os
import time

import mpi4py

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

WORK_S = 6


def main() -> None:
    world = MPI.COMM_WORLD
    rank, last = world.rank, world.size - 1
    if rank == 0:
        world.send(int(os.environ["LANDBRIDGE_INCARNATION"]), last)
    if rank == last:
        print(f"rank {rank}: heard {world.recv(source=0)}", flush=True)
    MPI.Finalize()
    if rank < 2:
        time.sleep(WORK_S)
        print(f"rank {rank}: ends", flush=True)


main()
