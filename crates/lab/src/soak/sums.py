"""Messages of many sizes between all ranks, one-sided writes and reductions; every byte that comes is compared.

    sums.py [--seconds S] [--seed N]
    sums.py --turns N [--largest BYTES]           the same messages whatever the time is

Rank 0 prints `started` once all ranks have met, and `done: N` with the number of messages that were compared.
A wrong byte ends the job with the line `wrong: …` and exit code 3.
"""

import argparse
import sys
import time

import numpy
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
SIZES = [0, 1, 100, 5_000, 70_000, 1 << 20, 4 << 20]
# Of these bytes every message is a part: making new random ones would take longer than sending them.
POOL_BYTES = 16 << 20
WINDOW_BYTES = 64 << 10


def main() -> int:
    options = arguments()
    pool = numpy.random.default_rng(options.seed).integers(0, 256, POOL_BYTES, dtype=numpy.uint8)
    window = MPI.Win.Allocate(WINDOW_BYTES * WORLD.size, comm=WORLD)
    WORLD.Barrier()
    if WORLD.rank == 0:
        print("started", flush=True)
    end, turn, compared = time.monotonic() + options.seconds, 0, 0
    while turn != options.turns:
        for size in (size for size in SIZES if size <= options.largest):
            compared += exchange(pool, turn, size)
        reduce_all(turn)
        compared += put(pool, window, turn)
        turn += 1
        if options.turns is None and WORLD.bcast(time.monotonic() > end, root=0):
            break
    window.Free()
    total = WORLD.reduce(compared, root=0)
    if WORLD.rank == 0:
        print(f"done: {total}", flush=True)
    return 0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, help="so many instead")
    parser.add_argument("--largest", type=int, default=max(SIZES), help="bytes of a message")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def message(pool, turn: int, size: int, source: int, target: int):
    """What `source` sends to `target` in this turn."""
    start = (turn * 7919 + source * 104_729 + target * 1_299_709 + size) % (POOL_BYTES - size)
    return pool[start : start + size]


def exchange(pool, turn: int, size: int) -> int:
    """A message from every rank to every other one, all at once."""
    others = [rank for rank in range(WORLD.size) if rank != WORLD.rank]
    places = {rank: numpy.zeros(size, numpy.uint8) for rank in others}
    requests = [WORLD.Irecv(places[rank], rank, tag=size) for rank in others]
    for rank in others:
        requests.append(WORLD.Isend(message(pool, turn, size, WORLD.rank, rank), rank, tag=size))
    MPI.Request.Waitall(requests)
    for rank in others:
        compare(places[rank], message(pool, turn, size, rank, WORLD.rank), f"from {rank} in turn {turn}")
    return len(others)


def reduce_all(turn: int) -> None:
    for count in (1, 3_000, 200_000):
        total = numpy.zeros(count, numpy.int64)
        WORLD.Allreduce(numpy.arange(count, dtype=numpy.int64) * (WORLD.rank + turn), total)
        factor = sum(rank + turn for rank in range(WORLD.size))
        compare(total, numpy.arange(count, dtype=numpy.int64) * factor, f"reduced in turn {turn}")


def put(pool, window, turn: int) -> int:
    """Every rank writes into the memory of every other one."""
    window.Fence()
    for rank in range(WORLD.size):
        piece = message(pool, turn, WINDOW_BYTES, WORLD.rank, rank)
        window.Put(piece, rank, target=(WORLD.rank * WINDOW_BYTES, WINDOW_BYTES, MPI.BYTE))
    window.Fence()
    memory = numpy.frombuffer(window.tomemory(), numpy.uint8)
    for rank in range(WORLD.size):
        found = memory[rank * WINDOW_BYTES : (rank + 1) * WINDOW_BYTES]
        compare(found, message(pool, turn, WINDOW_BYTES, rank, WORLD.rank), f"put by {rank} in turn {turn}")
    return WORLD.size


def compare(found, expected, where: str) -> None:
    if numpy.array_equal(found, expected):
        return
    wrong = numpy.flatnonzero(found != expected)
    print(f"wrong: rank {WORLD.rank}: {len(wrong)} of {len(found)} {where}, first at {wrong[0]}", flush=True)
    WORLD.Abort(3)


if __name__ == "__main__":
    sys.exit(main())
