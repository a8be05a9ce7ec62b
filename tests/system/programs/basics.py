"""Hello, ping-pong, allreduce and one-sided operations, each checked. Prints `done: N` on rank 0.

Usage: basics.py [--no-rma]
"""

import sys

import numpy
from mpi4py import MPI

SIZES = [0, 8, 1024, 16384, 65536, 1 << 20]
INCREMENTS = 50


def main():
    world = MPI.COMM_WORLD
    hello(world)
    ping_pong(world)
    allreduce(world)
    if "--no-rma" not in sys.argv:
        one_sided(world)
    world.Barrier()
    if world.rank == 0:
        print(f"done: {world.size}", flush=True)


def hello(world):
    ranks = world.gather((world.rank, is_mapped()), root=0)
    if world.rank == 0:
        assert [rank for rank, _ in ranks] == list(range(world.size))
        print(f"library: {MPI.Get_library_version().split(chr(10))[0].strip(chr(0))[:60]}")
        print(f"mapped: {sum(mapped for _, mapped in ranks)}", flush=True)


def is_mapped():
    with open("/proc/self/maps") as maps:
        return "liblandbridge-fi.so" in maps.read()


def ping_pong(world):
    peer = world.rank ^ 1
    if peer >= world.size:
        return
    for size in SIZES:
        out = numpy.arange(size, dtype=numpy.int64).astype(numpy.uint8) + world.rank
        back = numpy.zeros(size, numpy.uint8)
        if world.rank < peer:
            world.Send(out, peer, 5)
            world.Recv(back, peer, 6)
        else:
            world.Recv(back, peer, 5)
            world.Send(out, peer, 6)
        expected = numpy.arange(size, dtype=numpy.int64).astype(numpy.uint8) + peer
        assert numpy.array_equal(back, expected), f"ping-pong of {size} bytes"


def allreduce(world):
    for count in (1, 1000, 100_000):
        total = numpy.zeros(count)
        world.Allreduce(numpy.full(count, world.rank + 1.0), total)
        assert (total == world.size * (world.size + 1) / 2).all(), f"allreduce of {count}"


def one_sided(world):
    memory = numpy.zeros(1000 + world.size, numpy.int64)
    window = MPI.Win.Create(memory, disp_unit=8, comm=world)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    window.Fence()
    window.Put(numpy.arange(1000, dtype=numpy.int64) * (world.rank + 1), right, target=0)
    window.Fence()
    assert (memory[:1000] == numpy.arange(1000) * (left + 1)).all(), "put"
    seen, one = numpy.zeros(1, numpy.int64), numpy.ones(1, numpy.int64)
    window.Lock_all()
    for _ in range(INCREMENTS):
        window.Fetch_and_op(one, seen, 0, 1000, MPI.SUM)
    window.Flush_all()
    window.Unlock_all()
    world.Barrier()
    window.Lock(0, MPI.LOCK_SHARED)
    window.Get(seen, 0, 1000)
    window.Unlock(0)
    assert seen[0] == INCREMENTS * world.size, f"fetch_and_op: {seen[0]}"
    world.Barrier()
    window.Free()


main()
