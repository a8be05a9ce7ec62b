"""Rank 0 sends the number of its incarnation to the last rank, which prints it and ends; ranks 0 and 1
work on after MPI_Finalize.

A restarted rank 0 thus sends something else to a rank that is not there any more. With the argument
`nothing` it sends nothing, and the last rank computes meanwhile before it calls MPI_Finalize.
"""

import os
import sys
import time

import mpi4py

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

WORK_S = 6


def main() -> None:
    world = MPI.COMM_WORLD
    rank, last = world.rank, world.size - 1
    incarnation, sends_nothing = int(os.environ["LANDBRIDGE_INCARNATION"]), "nothing" in sys.argv
    if rank == 0 and not (incarnation and sends_nothing):
        world.send(incarnation, last)
    if rank == last:
        print(f"rank {rank}: heard {world.recv(source=0)}", flush=True)
        time.sleep(2 * WORK_S * sends_nothing)
    MPI.Finalize()
    if rank < 2:
        time.sleep(WORK_S)
        print(f"rank {rank}: ends", flush=True)


main()
