"""Each rank counts with an eventfd that is a semaphore, for the first half of the job.

Every rank prints a sum over what it has read: a semaphore gives 1 at each read."""

import os
import sys

from mpi4py import MPI
from rounds import end_round

ROUNDS, ROUND_S = 90, 0.1
COUNT = 2 * ROUNDS


def main() -> None:
    comm = MPI.COMM_WORLD
    semaphore = os.eventfd(COUNT, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
    total = 0
    for turn in range(ROUNDS):
        if turn < ROUNDS // 2:
            total += os.eventfd_read(semaphore)
        if turn == ROUNDS // 2:
            os.close(semaphore)
        total = comm.allreduce(total) % 1000003
        end_round(comm, turn, ROUND_S)
    sys.stdout.write(f"rank {comm.rank}: sum {total}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
