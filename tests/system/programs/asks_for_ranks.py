#!/usr/bin/env python3
"""The last rank asks again and again whether the processes of the other ranks exist, as a program
does that takes over a lock whose owner is gone. Prints how often one did not exist. Arguments: for
how many seconds; `files`: only by files of /proc."""

import os
import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
pids = world.allgather(os.getpid())
seconds = float(sys.argv[1])


def asks(ask, pid: int) -> bool:
    try:
        return ask(pid)
    except OSError:
        return False


def is_signalled(pid: int) -> bool:
    os.kill(pid, 0)
    return True


def is_opened(pid: int) -> bool:
    with open(f"/proc/{pid}/comm", "rb"):
        return True


ways = {
    "kill": is_signalled,
    "access": lambda pid: os.access(f"/proc/{pid}", os.F_OK),
    "stat": lambda pid: os.path.exists(f"/proc/{pid}/status"),
    "open": is_opened,
    "getpgid": lambda pid: os.getpgid(pid) > 0,
}
# What the kernel says of a process in its files is recorded; answers of the other calls are not.
if sys.argv[2:] == ["files"]:
    del ways["kill"], ways["getpgid"]
if world.rank == world.size - 1:
    missing = dict.fromkeys(ways, 0)
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for pid in pids[:-1]:
            for way, ask in ways.items():
                missing[way] += not asks(ask, pid)
                count += 1
        time.sleep(0.002)
    print(f"asked: {'often' if count > 500 else count}, missing: {missing}", flush=True)
world.Barrier()
