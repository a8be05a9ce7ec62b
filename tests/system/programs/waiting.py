"""Measures the cost of waiting. Prints `name: number` lines on rank 0 or 1.

Usage: waiting.py collectives | blocked | pressed | computing | turns
"""

import sys
import time

import numpy
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
ROUNDS = 30
QUIET_S = 2.0
WAKES = 7
WAKE_GAP_S = 0.15
# Computing: number of pieces of work, of LOOPS loops each, between two polls, and number of
# repetitions of each measurement.
PIECES, REPEATS = 150, 7
LOOPS = 20_000
TURNS = 2000


def collectives():
    """Many ranks wait for each other repeatedly."""
    mine, total = numpy.full(1000, WORLD.rank + 1.0), numpy.zeros(1000)
    blocks = numpy.full(WORLD.size * 1024, WORLD.rank, numpy.uint8)
    got = numpy.zeros(WORLD.size * 1024, numpy.uint8)
    WORLD.Barrier()
    for name, work in (
        ("allreduce", lambda: WORLD.Allreduce(mine, total)),
        ("alltoall", lambda: WORLD.Alltoall(blocks, got)),
    ):
        start = time.monotonic()
        for _ in range(ROUNDS):
            work()
        WORLD.Barrier()
        if WORLD.rank == 0:
            print(f"{name}: {1e3 * (time.monotonic() - start) / ROUNDS:.3f}", flush=True)
    assert (total == WORLD.size * (WORLD.size + 1) / 2).all()
    assert (got.reshape(WORLD.size, 1024) == numpy.arange(WORLD.size)[:, None]).all()


def blocked():
    """Rank 1 waits for a message that is sent after a while, then for several more."""
    stamp = numpy.zeros(1)
    WORLD.Barrier()
    if WORLD.rank == 0:
        for gap in [QUIET_S] + [WAKE_GAP_S] * WAKES:
            time.sleep(gap)
            stamp[0] = time.clock_gettime(time.CLOCK_MONOTONIC)
            WORLD.Send(stamp, 1)
    elif WORLD.rank == 1:
        used, late = time.process_time(), []
        for number in range(1 + WAKES):
            WORLD.Recv(stamp, 0)
            late.append(time.clock_gettime(time.CLOCK_MONOTONIC) - stamp[0])
            if number == 0:
                print(f"share: {100 * (time.process_time() - used) / QUIET_S:.1f}")
        print(f"wake: {1e3 * sorted(late)[len(late) // 2]:.2f}")
        print(f"worst: {1e3 * max(late):.2f}", flush=True)
    WORLD.Barrier()


def pressed():
    """Rank 0 sends more than path and credit take to rank 1, which computes and receives nothing
    for a while."""
    block, parts = 16_000, 64
    mine, got = numpy.ones((parts, block), numpy.uint8), numpy.zeros((parts, block), numpy.uint8)
    # A first exchange establishes the path.
    if WORLD.rank == 0:
        WORLD.Send(mine[0], 1)
    elif WORLD.rank == 1:
        WORLD.Recv(got[0], 0)
    WORLD.Barrier()
    if WORLD.rank == 0:
        used = time.process_time()
        MPI.Request.Waitall([WORLD.Isend(part, 1) for part in mine])
        # A completed send may have been copied only: after the answer all data has left.
        WORLD.Recv(bytearray(1), 1)
        print(f"share: {100 * (time.process_time() - used) / QUIET_S:.1f}", flush=True)
    elif WORLD.rank == 1:
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            work()
        for part in got:
            WORLD.Recv(part, 0)
        assert (got == 1).all()
        WORLD.Send(bytearray(1), 0)
    WORLD.Barrier()


def work():
    x = 0
    for i in range(LOOPS):
        x += i
    return x


def pieces(request):
    """Seconds for all pieces, with a test of the request after each piece if there is a request."""
    start = time.monotonic()
    for _ in range(PIECES):
        work()
        if request is not None:
            request.Test()
    return time.monotonic() - start


def computing():
    """Rank 0 computes and polls now and then for a message that does not come; the other ranks
    sleep."""
    if WORLD.rank == 0:
        request = WORLD.Irecv(bytearray(8), 1, 1)
        alone, looking = [], []
        for _ in range(REPEATS):
            alone.append(pieces(None))
            looking.append(pieces(request))
        for other in range(1, WORLD.size):
            WORLD.Send(bytearray(8), other, 2)
        request.Wait()
        print(f"piece: {1e6 * min(alone) / PIECES:.0f}")
        print(f"slowdown: {100 * (min(looking) / min(alone) - 1):.2f}", flush=True)
    else:
        # Outside the library, in which waiting would take processor time from rank 0.
        time.sleep(0.5)
        while not WORLD.Iprobe(0, 2):
            time.sleep(0.05)
        WORLD.Recv(bytearray(8), 0, 2)
        if WORLD.rank == 1:
            WORLD.Send(bytearray(8), 0, 1)
    WORLD.Barrier()


def turns():
    """Ranks 0 and 1 send 8 bytes in turns; the median time of one message."""
    block, took = numpy.zeros(8, numpy.uint8), []
    WORLD.Barrier()
    for _ in range(TURNS if WORLD.rank < 2 else 0):
        start = time.perf_counter()
        if WORLD.rank == 0:
            WORLD.Send(block, 1)
            WORLD.Recv(block, 1)
        else:
            WORLD.Recv(block, 0)
            WORLD.Send(block, 0)
        took.append(time.perf_counter() - start)
    WORLD.Barrier()
    if WORLD.rank == 0:
        print(f"turn: {1e6 * sorted(took)[TURNS // 2] / 2:.2f}", flush=True)


globals()[sys.argv[1]]()
