"""Rank 1 writes a file slowly after MPI_Finalize and ends; rank 0 ends if it runs again.

Usage: writes_late.py FOLDER

Rank 1 writes LINES lines to FOLDER/result. The first process of rank 0 does not end. Each prints
`rank R: ends`.
"""

import os
import sys
import time
from pathlib import Path

import mpi4py

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

# A sleep takes no time in a replay, work does.
LINES, LOOPS = 20, 4_000_000


def main() -> None:
    world, folder = MPI.COMM_WORLD, Path(sys.argv[1])
    rank = world.rank
    world.sendrecv(rank, (rank + 1) % world.size, source=(rank - 1) % world.size)
    MPI.Finalize()
    if rank == 1:
        with open(folder / "result", "w") as result:
            for number in range(LINES):
                result.write(f"line {number}\n")
                result.flush()
                sum(range(LOOPS))
        print(f"rank {rank}: ends", flush=True)
    elif rank == 0:
        while int(os.environ.get("LANDBRIDGE_INCARNATION", "0")) == 0:
            time.sleep(0.02)
        print(f"rank {rank}: ends", flush=True)


main()
