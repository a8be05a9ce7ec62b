"""Ranks 0 and 1 end at once after MPI_Finalize, the others SECONDS later. Before, all exchange messages.

Usage: ends_apart.py SECONDS
"""

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
    total = (total * 31 + total_there) % 1000003
print(f"rank {rank} has {total}", flush=True)
MPI.Finalize()
if rank > 1:
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        time.sleep(0.05)
print(f"rank {rank} has ended", flush=True)
