"""Rank 0 reads lines of standard input and broadcasts them; every rank prints a checksum of
each. Rank 0 writes the checksums into a file too, whose name is the argument. With a second argument
it asks by select(2) whether input has come, each time that it reads a piece.

Python reads a clock for each piece that the pipe delivers, so a write into a file comes after other
recorded calls if the pieces differ.
"""

import os
import select
import sys
import time
import zlib

from mpi4py import MPI

PAUSE_S = 0.004


def asked_lines():
    """The lines of standard input, and an empty one at its end."""
    rest, piece = b"", b"?"
    while piece:
        while not select.select([0], [], [], 0.02)[0]:
            pass
        piece = os.read(0, 4096)
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode() + "\n" for line in whole)
    yield ""


def main() -> None:
    asked = asked_lines()
    read = (lambda: next(asked)) if len(sys.argv) > 2 else sys.stdin.readline
    comm = MPI.COMM_WORLD
    so_far, number = 0, 0
    written = open(sys.argv[1], "w") if comm.rank == 0 else None  # noqa: SIM115
    while line := comm.bcast(read() if comm.rank == 0 else None):
        so_far = zlib.crc32(f"{comm.allreduce(so_far)} {line}".encode())
        print(f"rank {comm.rank} line {number}: {so_far:08x}", flush=True)
        if written:
            print(f"{so_far:08x}", file=written, flush=True)
        number += 1
        time.sleep(PAUSE_S)


main()
