"""Messages of three lengths go round a ring, and what each rank sends depends on all it has received.

Usage: long_ring.py --turns N [--longest BYTES] [--pause S]. Every rank prints a digest of all that it
has received, after each fifth turn.
"""

import argparse
import time
import zlib

import numpy
from mpi4py import MPI

SHORT, MIDDLE = 100, 70_000
TURNS_PER_LINE = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--longest", type=int, default=1 << 20, help="bytes of the third message")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of each turn")
    options = parser.parse_args()
    world, digest = MPI.COMM_WORLD, 0
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    messages = [numpy.arange(length).astype(numpy.uint8) for length in (SHORT, MIDDLE, options.longest)]
    for turn in range(options.turns):
        for place, message in enumerate(messages):
            arrived = numpy.empty_like(message)
            world.Sendrecv(message, right, place, arrived, left, place)
            digest = zlib.crc32(arrived, digest)
            messages[place] = arrived + numpy.uint8((digest + world.rank) & 0xFF)
        if turn % TURNS_PER_LINE == 0:
            print(f"rank {world.rank} turn {turn}: {digest:08x}", flush=True)
        time.sleep(options.pause)
    print(f"rank {world.rank} ends: {digest:08x}", flush=True)


main()
