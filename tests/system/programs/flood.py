"""Floods rank 0 with unexpected messages, and measures the memory that they take there.

Usage: flood.py MESSAGES BYTES

All other ranks send at once. Rank 0 polls for something else until every rank has started every
send, or for HOLD_S, then receives and checks all messages. Prints on rank 0 `growth: KIB` (increase
of resident memory while the messages wait and until all are received), `flood: KIB` (sent bytes)
and `done: MESSAGES`.
"""

import sys
import time
import traceback

import numpy
from mpi4py import MPI

MESSAGES, BYTES = int(sys.argv[1]), int(sys.argv[2])
WORLD = MPI.COMM_WORLD
HOLD_S = 1.0
ELSEWHERE, FLOOD = 1, 2
PATTERNS = 16


def resident_kib():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status if ":" in line)
    # Shared memory that peers write to belongs to the path and not to the flood: only private
    # memory counts.
    return int(lines["RssAnon"].split()[0])


def content(source, number):
    pattern = numpy.arange(BYTES, dtype=numpy.uint32).astype(numpy.uint8)
    return pattern + numpy.uint8((source * 37 + number % PATTERNS) % 256)


def send():
    contents = [content(WORLD.rank, number) for number in range(PATTERNS)]
    WORLD.Barrier()
    requests = [WORLD.Isend(contents[n % PATTERNS], 0, FLOOD) for n in range(MESSAGES)]
    MPI.Request.Waitall(requests)


def receive():
    others = WORLD.size - 1
    expected = {s: [content(s, n) for n in range(PATTERNS)] for s in range(1, WORLD.size)}
    # Requests and buffers that the library makes on first use do not belong to the flood.
    room = numpy.zeros(BYTES, numpy.uint8)
    WORLD.Barrier()
    before = most = resident_kib()
    end = time.monotonic() + HOLD_S
    while time.monotonic() < end:
        for _ in range(1000):
            WORLD.Iprobe(MPI.ANY_SOURCE, ELSEWHERE)
        most = max(most, resident_kib())
    seen, status = dict.fromkeys(expected, 0), MPI.Status()
    for number in range(MESSAGES * others):
        WORLD.Recv(room, MPI.ANY_SOURCE, FLOOD, status)
        source = status.Get_source()
        wanted = expected[source][seen[source] % PATTERNS]
        assert numpy.array_equal(room, wanted), f"message {seen[source]} of {source} is wrong"
        seen[source] += 1
        if number % 1000 == 0:
            most = max(most, resident_kib())
    print(f"growth: {most - before}")
    print(f"flood: {MESSAGES * BYTES * others // 1024}")
    print(f"done: {MESSAGES * others}", flush=True)


try:
    receive() if WORLD.rank == 0 else send()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    WORLD.Abort(1)
