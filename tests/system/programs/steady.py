"""Polls for messages for a while, and prints how long it stood still: `stood: MS`.

A line is printed for each pause longer than 20 ms; the other rank causes no pauses. Rank 0 holds
`--megabytes` of random memory; rank 1 waits for the last message of rank 0."""

import argparse
import os
import time

from mpi4py import MPI

LONG_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    if comm.rank != 0:
        comm.recv(None, 0)
        return
    # Random bytes cannot be compressed.
    memory = bytearray(os.urandom(options.megabytes * 1_000_000))
    print(f"ready: {len(memory)}", flush=True)
    last = time.monotonic()
    end = last + options.seconds
    while last < end:
        # Checkpoints are taken at this poll.
        comm.Iprobe(1)
        now = time.monotonic()
        if now - last > LONG_S:
            print(f"stood: {(now - last) * 1e3:.1f}", flush=True)
        last = now
    comm.send(None, 1)


main()
