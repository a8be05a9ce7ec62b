"""Reads many random numbers and clocks in every round, and sends a digest of them to rank 0.

Every rank but 0 prints the digest twice: when it is made and at the end; rank 0 prints the digests
that it receives. The reads of all rounds exceed the capacity of one record."""

import argparse
import hashlib
import os
import sys
import time

from mpi4py import MPI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--kilobytes", type=int, default=1500, help="in a round")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    read = []
    for turn in range(options.rounds):
        if comm.rank == 0:
            for source in range(1, comm.size):
                say(f"heard {source} {comm.recv(None, source, turn)}")
        else:
            read.append(f"{turn} {digest(options.kilobytes << 10)}")
            say(f"now {comm.rank} {read[-1]}")
            comm.send(read[-1], 0, turn)
        comm.barrier()
        time.sleep(0.01)
    for text in read:
        say(f"drew {comm.rank} {text}")
    say(f"rank {comm.rank} ends")


def digest(count: int) -> str:
    """A digest of `count` random bytes, read in pieces of all lengths, and of thousands of clock
    reads."""
    seen = hashlib.sha256()
    while count > 0:
        piece = os.urandom(min(count, 1 + count // 3))
        seen.update(piece)
        count -= len(piece)
    times = [time.time_ns() for _ in range(1000)] + [time.monotonic_ns() for _ in range(1000)]
    seen.update(repr(times).encode())
    return seen.hexdigest()[:16]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
