"""All ranks pass numbers around a ring and write them into files of a folder: `HOW FOLDER`.

HOW is one of these words. `together`: all ranks write one file, by MPI_File_write_at_all. `append`:
each rank appends one line to a file of its own each time. `restart`: each rank writes a file of its
own from the beginning each time, under a temporary name that is then renamed, and a rank that finds
its file continues from it. With any other word a rank writes its file likewise, and never continues
from an earlier one.
"""

import os
import sys
import time
from pathlib import Path

import numpy
from mpi4py import MPI

ROUNDS, EVERY, WIDTH = 1000, 10, 1000


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    world = MPI.COMM_WORLD
    own, first = folder / f"rank-{world.rank}", 0
    if how == "restart" and own.exists():
        first = int(own.read_text().split()[0]) + 1
    if how == "together":
        shared = MPI.File.Open(world, str(folder / "all"), MPI.MODE_CREATE | MPI.MODE_WRONLY)
    number = world.rank
    for turn in range(first, ROUNDS):
        time.sleep(0.005)
        number = (world.sendrecv(number, (world.rank + 1) % world.size, turn, None, (world.rank - 1) % world.size, turn) * 31 + turn) % 65521
        if turn % EVERY:
            continue
        if how == "together":
            block = numpy.full(WIDTH, number, numpy.int32)
            shared.Write_at_all(((turn // EVERY) * world.size + world.rank) * block.nbytes, block)
        elif how == "append":
            with open(own, "a") as file:
                file.write(f"{turn} {number}\n")
        else:
            fresh = own.with_suffix(".new")
            fresh.write_text(f"{turn} {number}\n")
            os.replace(fresh, own)
    if how == "together":
        shared.Close()
    print(f"rank {world.rank} has {number}", flush=True)


main()
