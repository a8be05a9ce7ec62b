"""Rank 1 looks up a name or id of its process or node, prints it, and sends it to the last rank.

    tells.py WHAT HOW

WHAT is hostname, uname, pid or parent. With HOW `prints` rank 1 prints the value at once and sends
it after all rounds, with `sends` it sends the value before all rounds and prints it after them. The
last rank prints what it receives.
"""

import os
import socket
import sys
import time

from mpi4py import MPI

ROUNDS = 150
VALUES = {"hostname": socket.gethostname, "uname": lambda: os.uname().nodename, "pid": os.getpid, "parent": os.getppid}


def main() -> None:
    what, how = sys.argv[1:]
    comm = MPI.COMM_WORLD
    value = VALUES[what]() if comm.rank == 1 else None
    if how == "sends":
        pass_on(comm, value)
    elif comm.rank == 1:
        say(f"drew {value}")
    for _ in range(ROUNDS):
        comm.barrier()
        time.sleep(0.005)
    if how == "prints":
        pass_on(comm, value)
    elif comm.rank == 1:
        say(f"drew {value}")
    say(f"rank {comm.rank} ends")


def pass_on(comm, value) -> None:
    last = comm.size - 1
    if comm.rank == 1:
        comm.send(value, last)
    if comm.rank == last:
        say(f"heard {comm.recv(None, 1)}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
