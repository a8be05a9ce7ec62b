"""Rank 0 sends a short message every 0.1 s for some seconds (`polls_seldom.py SECONDS`), and calls MPI
at no other time. Rank 1 waits for them, and prints `done: N` if none was late by more than a second.
"""

import sys
import time

from mpi4py import MPI

GAP_S, LATE_S = 0.1, 1.0

comm = MPI.COMM_WORLD
messages = int(float(sys.argv[1]) / GAP_S)
comm.barrier()
if comm.rank == 0:
    print("started", flush=True)
    requests = []
    for number in range(messages):
        requests.append(comm.isend(number, 1))
        # The library looks at its connections once.
        comm.iprobe()
        time.sleep(GAP_S)
    for request in requests:
        request.wait()
else:
    longest, before = 0.0, time.monotonic()
    for number in range(messages):
        assert comm.recv(None, 0) == number
        now = time.monotonic()
        longest, before = max(longest, now - before), now
    word = "done" if longest < LATE_S else "late"
    print(f"{word}: {messages} messages, {longest:.2f} s between two of them at most", flush=True)
comm.barrier()
