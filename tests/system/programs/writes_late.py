"""A rank writes a file slowly and ends; rank 0 ends once it is executed again or a file appears.

Usage: writes_late.py FOLDER [WRITER]

Rank 1 writes LINES lines to FOLDER/result after MPI_Finalize; with WRITER that rank writes them before
MPI_Init instead. The first process of rank 0 ends once there is a file FOLDER/end. Each of the two
prints `rank R: ends`.
"""

import os
import sys
import time
from pathlib import Path

import mpi4py

mpi4py.rc.initialize = mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

# A sleep takes no time in a replay, work does.
LINES, LOOPS = 20, 4_000_000


def main() -> None:
    folder, early = Path(sys.argv[1]), int((sys.argv[2:] or ["-1"])[0])
    if int(os.environ["PMI_RANK"]) == early:
        write(folder)
    MPI.Init()
    world, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
    world.sendrecv(rank, (rank + 1) % world.size, source=(rank - 1) % world.size)
    MPI.Finalize()
    if rank == 1 and early < 0:
        write(folder)
    while rank == 0 and int(os.environ.get("LANDBRIDGE_INCARNATION", "0")) == 0 and not (folder / "end").exists():
        time.sleep(0.02)
    if rank in (0, early if early >= 0 else 1):
        print(f"rank {rank}: ends", flush=True)


def write(folder: Path) -> None:
    with open(folder / "result", "w") as result:
        for number in range(LINES):
            result.write(f"line {number}\n")
            result.flush()
            sum(range(LOOPS))


main()
