"""Ranks draw numbers from one counter by fetching one-sided operations: each number occurs once.

This holds also when ranks are killed. Usage: tickets.py --rounds N. Rank 0 prints the number of
numbers, and whether each occurred once.
"""

import argparse
import time

import numpy as np
from mpi4py import MPI

PAUSE_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    world = MPI.COMM_WORLD
    window = MPI.Win.Allocate(16 if world.rank == 0 else 0, 8, comm=world)
    if world.rank == 0:
        np.frombuffer(window.tomemory(), dtype="i8")[:] = 0
    world.Barrier()
    print("first:", world.rank, flush=True)
    one, drawn, sums = np.ones(1, "i8"), np.zeros(rounds, "i8"), np.zeros(1, "i8")
    window.Lock_all()
    for turn in range(rounds):
        window.Fetch_and_op(one, drawn[turn : turn + 1], 0, 0, MPI.SUM)
        window.Flush(0)
        window.Get_accumulate(drawn[turn : turn + 1], sums, 0, (1, 1, MPI.INT64_T), MPI.SUM)
        window.Flush(0)
        time.sleep(PAUSE_S)
    window.Unlock_all()
    world.Barrier()
    everybody = world.gather(drawn)
    if world.rank == 0:
        numbers = np.sort(np.concatenate(everybody))
        is_right = bool((numbers == np.arange(rounds * world.size)).all())
        total = int(np.frombuffer(window.tomemory(), dtype="i8")[1])
        is_right &= total == numbers.sum()
        print(f"tickets: {len(numbers)}, {'each once' if is_right else 'WRONG'}", flush=True)
    window.Free()


if __name__ == "__main__":
    main()
