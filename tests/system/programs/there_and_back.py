#!/usr/bin/env python3
"""Two ranks send messages back and forth; rank 0 prints the one-way time for each length.

Before the measurement the ranks send `--first` MiB and wait, `--times` times: enough that
checkpoints of both are taken (`checkpoint_log`). From the third checkpoint on, the message log uses
memory that was in use before.
"""

import argparse
import time

import numpy as np
from mpi4py import MPI

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="MiB that each gets before")
    parser.add_argument("--times", type=int, default=2, help="how often [2]")
    parser.add_argument("--wait", type=float, default=3, help="seconds to wait each time [3]")
    parser.add_argument("bounds", nargs="+", help="LENGTH:REPETITIONS")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    if options.first:
        for _ in range(options.times):
            back_and_forth(world, MIB, options.first)
            time.sleep(options.wait)
    for bound in options.bounds:
        length, repetitions = map(int, bound.split(":"))
        back_and_forth(world, length, max(1, repetitions // 10))
        micros = back_and_forth(world, length, repetitions)
        if world.rank == 0:
            print(f"one way: {length} B: {micros:.3f} us", flush=True)


def back_and_forth(world, length: int, repetitions: int) -> float:
    """Microseconds one way."""
    message = np.zeros(length, dtype=np.uint8)
    world.Barrier()
    began = MPI.Wtime()
    for _ in range(repetitions):
        if world.rank == 0:
            world.Send(message, 1)
            world.Recv(message, 1)
        else:
            world.Recv(message, 0)
            world.Send(message, 0)
    return (MPI.Wtime() - began) / repetitions / 2 * 1e6


main()
