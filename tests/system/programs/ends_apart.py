"""Ranks of even numbers end at once after MPI_Finalize, the others SECONDS later. Before, all exchange
messages.

Usage: ends_apart.py SECONDS [drift]

With `drift` a later incarnation of rank 0 fails in the middle.
"""

import os
import sys
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
total = rank
for turn in range(200):
    comm.send((turn, total), dest=(rank + 1) % size)
    turn_there, total_there = comm.recv(source=(rank - 1) % size)
    assert turn_there == turn
    if rank == 0 and turn == 100 and sys.argv[2:] == ["drift"] and int(os.environ.get("LANDBRIDGE_INCARNATION", "0")) > 0:
        os._exit(3)
    total = (total * 31 + total_there) % 1000003
print(f"rank {rank} has {total}", flush=True)
MPI.Finalize()
if rank % 2 == 1:
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        time.sleep(0.05)
print(f"rank {rank} has ended", flush=True)
