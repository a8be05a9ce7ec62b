"""Two independent pairs of ranks take turns; the last rank has computed for a long time before.

Usage: pairs.py --turns N --compute N. The first rank of each pair prints the longest time that it
has waited for a turn; the first turn does not count.
"""

import argparse
import time

from mpi4py import MPI

PAUSE_S = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=800)
    parser.add_argument("--compute", type=int, default=60_000_000)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    world.Barrier()
    spent = sum(range(options.compute)) if world.rank == 3 else 0
    other = world.rank ^ 1
    longest, before = 0.0, None
    for turn in range(options.turns):
        heard = world.sendrecv((turn, spent), other, source=other)
        assert heard[0] == turn
        now = time.monotonic()
        longest, before = max(longest, now - (before or now)), now
        if turn == 0:
            print("first:", world.rank, flush=True)
        time.sleep(PAUSE_S)
    if world.rank % 2 == 0:
        print(f"pair {world.rank // 2}: longest {longest:.3f} s", flush=True)


if __name__ == "__main__":
    main()
