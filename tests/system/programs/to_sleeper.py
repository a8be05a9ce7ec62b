"""Rank 0 sends long messages to rank 1, which sleeps for 3 s before it receives them, three times."""

import time

from mpi4py import MPI

TURNS, MESSAGES, BYTES, SLEEP_S = 3, 16, 8 << 20, 3.0

comm = MPI.COMM_WORLD
memory = bytearray(BYTES)
for turn in range(TURNS):
    if comm.rank == 0:
        MPI.Request.Waitall([comm.Isend(memory, 1, tag) for tag in range(MESSAGES)])
        comm.recv(None, 1, MESSAGES)
    else:
        time.sleep(SLEEP_S)
        for tag in range(MESSAGES):
            comm.Recv(memory, 0, tag)
        comm.send(turn, 0, MESSAGES)
print(f"rank {comm.rank} is done", flush=True)
