"""Reduces in a loop until it is killed. Every rank prints `pid: RANK PROCESS` once all have met.

With `--alone` a rank that gets an error prints it and ends at once, without notifying the launcher.
"""

import os
import sys
import time

import numpy
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
# The program ends itself after this many seconds: no process may be left behind.
LIMIT_S = 60.0

mine, total = numpy.ones(20_000), numpy.zeros(20_000)
WORLD.Alltoall(numpy.zeros(WORLD.size), numpy.zeros(WORLD.size))
# One write, however Python buffers: some launchers mix lines that arrive in parts.
os.write(1, f"pid: {WORLD.rank} {os.getpid()}\n".encode())
end = time.monotonic() + LIMIT_S
while time.monotonic() < end:
    try:
        WORLD.Allreduce(mine, total)
    except MPI.Exception as error:
        if "--alone" not in sys.argv:
            raise
        os.write(1, f"error: {error}\n".encode())
        os._exit(1)
sys.exit("nobody ended the job")
