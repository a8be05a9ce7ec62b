"""Reduces in a loop until something ends it. Every rank prints `pid: RANK PROCESS` once it has met all others."""

import os
import sys
import time

import numpy
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
# If nobody ends it, it ends itself: nothing may be left behind.
LIMIT_S = 60.0

mine, total = numpy.ones(20_000), numpy.zeros(20_000)
WORLD.Alltoall(numpy.zeros(WORLD.size), numpy.zeros(WORLD.size))
# In one piece, however Python buffers: some launchers mix what they get in parts.
os.write(1, f"pid: {WORLD.rank} {os.getpid()}\n".encode())
end = time.monotonic() + LIMIT_S
while time.monotonic() < end:
    WORLD.Allreduce(mine, total)
sys.exit("nobody ended the job")
