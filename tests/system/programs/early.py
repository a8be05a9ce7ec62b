"""Rank 1 leaves MPI, and works on for some seconds; a restarted rank 1 ends before it has begun, with
exit code 0."""

import os
import sys
import time

if os.environ.get("LANDBRIDGE_INDEX") == "1" and int(os.environ["LANDBRIDGE_INCARNATION"]) > 0:
    sys.exit(0)

import mpi4py  # noqa: E402

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

CLOSED_S, WORK_S = 0.5, 4


def main() -> None:
    rank = MPI.COMM_WORLD.rank
    MPI.COMM_WORLD.barrier()
    MPI.Finalize()
    if rank == 0:
        # By then the others have left MPI, too.
        time.sleep(CLOSED_S)
        print("rank 0: closed", flush=True)
    if rank == 1:
        time.sleep(WORK_S)
        print("rank 1: has worked", flush=True)


main()
