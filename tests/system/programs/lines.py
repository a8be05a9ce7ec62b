"""Rank 0 reads lines of standard input and broadcasts them; every rank prints a checksum of
each. Rank 0 writes the checksums into a file too, whose name is the argument.

Python reads a clock for each piece that the pipe delivers, so a write into a file comes after other
recorded calls if the pieces differ.
"""

import sys
import time
import zlib

from mpi4py import MPI

PAUSE_S = 0.004


def main() -> None:
    comm = MPI.COMM_WORLD
    so_far, number = 0, 0
    written = open(sys.argv[1], "w") if comm.rank == 0 else None  # noqa: SIM115
    while line := comm.bcast(sys.stdin.readline() if comm.rank == 0 else None):
        so_far = zlib.crc32(f"{comm.allreduce(so_far)} {line}".encode())
        print(f"rank {comm.rank} line {number}: {so_far:08x}", flush=True)
        if written:
            print(f"{so_far:08x}", file=written, flush=True)
        number += 1
        time.sleep(PAUSE_S)


main()
