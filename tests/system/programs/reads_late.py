"""Rank 0 sends messages of 1 MiB, more than connections hold (`reads_late.py SECONDS`). Rank 1 calls MPI
for the first time after some seconds, receives them, and prints `done: N` if that took no longer than
two seconds.
"""

import sys
import time

import numpy
from mpi4py import MPI

MESSAGES, BYTES, LATE_S = 32, 1 << 20, 2.0

comm = MPI.COMM_WORLD
content = numpy.arange(BYTES, dtype="u1")
comm.barrier()
if comm.rank == 0:
    print("started", flush=True)
    MPI.Request.Waitall([comm.Isend(content, 1, number) for number in range(MESSAGES)])
else:
    time.sleep(float(sys.argv[1]))
    began = time.monotonic()
    for number in range(MESSAGES):
        received = numpy.zeros(BYTES, "u1")
        comm.Recv(received, 0, number)
        assert (received == content).all(), f"message {number}"
    took = time.monotonic() - began
    print(f"{'done' if took < LATE_S else 'late'}: {MESSAGES} messages in {took:.2f} s", flush=True)
comm.barrier()
