"""Consecutive messages between pairs of ranks; each receiver records their arrival times.

    flow.py --size BYTES --depth N --notes FOLDER [--stop FILE]

Ranks of the first half receive from the rank that is half the world further on. FOLDER/RANK gets
eight bytes for each message: CLOCK_MONOTONIC in nanoseconds, native order. The program ends when
FILE exists, else when it is killed. Every message carries its number at both ends; a wrong number
ends the job with exit code 3.
"""

import argparse
import os
import struct
import sys
import time

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
NUMBER = struct.Struct("q")
LAST = -1


def main() -> int:
    options = arguments()
    half = WORLD.size // 2
    buffers = [bytearray(options.size) for _ in range(options.depth)]
    WORLD.Barrier()
    if WORLD.rank < half:
        receive(options, buffers, WORLD.rank + half)
    elif WORLD.rank < 2 * half:
        send(options, buffers, WORLD.rank - half)
    WORLD.Barrier()
    return 0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True, help="messages under way")
    parser.add_argument("--notes", required=True)
    parser.add_argument("--stop", default="")
    return parser.parse_args()


def receive(options, buffers, source: int) -> None:
    notes = os.open(os.path.join(options.notes, str(WORLD.rank)), os.O_WRONLY | os.O_CREAT)
    requests = [WORLD.Irecv(buffer, source) for buffer in buffers]
    number = 0
    while True:
        turn = number % len(buffers)
        requests[turn].Wait()
        os.write(notes, NUMBER.pack(time.monotonic_ns()))
        if NUMBER.unpack_from(buffers[turn])[0] == LAST:
            break
        compare(buffers[turn], number)
        requests[turn] = WORLD.Irecv(buffers[turn], source)
        number += 1
    MPI.Request.Waitall(requests)


def send(options, buffers, target: int) -> None:
    requests = [MPI.REQUEST_NULL] * len(buffers)
    number, last = 0, 0
    while last < len(buffers):
        turn = number % len(buffers)
        requests[turn].Wait()
        last += bool(last or options.stop and os.path.exists(options.stop))
        mark(buffers[turn], LAST if last else number)
        requests[turn] = WORLD.Isend(buffers[turn], target)
        number += 1
    MPI.Request.Waitall(requests)


def mark(buffer, number: int) -> None:
    NUMBER.pack_into(buffer, 0, number)
    NUMBER.pack_into(buffer, len(buffer) - NUMBER.size, number)


def compare(buffer, number: int) -> None:
    head, tail = NUMBER.unpack_from(buffer), NUMBER.unpack_from(buffer, len(buffer) - NUMBER.size)
    if head != (number,) or tail != (number,):
        print(f"wrong: message {number} has {head[0]} and {tail[0]}", flush=True)
        WORLD.Abort(3)


if __name__ == "__main__":
    sys.exit(main())
