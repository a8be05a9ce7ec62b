"""Does the same small thing for a while, and tells how long it stood still: `stood: MS` for each time that was longer than 20 ms, as
its other rank sees nothing of it. Rank 0 holds so many bytes of random memory; rank 1 waits for its last word."""

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
    # Nothing that can be made small.
    memory = bytearray(os.urandom(options.megabytes * 1_000_000))
    print(f"ready: {len(memory)}", flush=True)
    last = time.monotonic()
    end = last + options.seconds
    while last < end:
        # A look for messages: here images are taken.
        comm.Iprobe(1)
        now = time.monotonic()
        if now - last > LONG_S:
            print(f"stood: {(now - last) * 1e3:.1f}", flush=True)
        last = now
    comm.send(None, 1)


main()
