"""Rank 0 reads lines of standard input and broadcasts them; every rank prints a checksum of
each."""

import sys
import time
import zlib

from mpi4py import MPI

PAUSE_S = 0.004


def main() -> None:
    comm = MPI.COMM_WORLD
    so_far, number = 0, 0
    while line := comm.bcast(sys.stdin.readline() if comm.rank == 0 else None):
        so_far = zlib.crc32(f"{comm.allreduce(so_far)} {line}".encode())
        print(f"rank {comm.rank} line {number}: {so_far:08x}", flush=True)
        number += 1
        time.sleep(PAUSE_S)


main()
