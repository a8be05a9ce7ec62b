"""Numbers go round a ring and into sums for a while, and every rank prints its numbers.

`--any`: rank 0 receives with wildcards and prints the order, and sends it to the others."""

import argparse
import ctypes
import math
import mmap
import os
import signal
import sys
import time

from mpi4py import MPI

ROUNDS_PER_SUM = 20
HEAVY_ROUNDS = 60
NUMBERS = 500
# Of a message that nobody takes.
STRAY_TAG = 30000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--numbers", type=int, default=NUMBERS, help="in each message")
    parser.add_argument("--heavy", type=int, default=0, help="so many more in each of the first 60 rounds")
    parser.add_argument("--pause", type=float, default=0.005, help="seconds of each round")
    parser.add_argument("--any", action="store_true")
    parser.add_argument("--crash", action="store_true", help="rank 1 does, in the end")
    parser.add_argument("--leave", type=int, metavar="CODE", help="rank 1 does, in the end, without MPI_Finalize")
    parser.add_argument("--aloud", action="store_true", help="everything is said on standard error, too")
    parser.add_argument("--drift", action="store_true", help="send what is another number each time")
    parser.add_argument("--stray", action="store_true", help="rank 1 sends one message to another rank each time")
    parser.add_argument("--addresses", action="store_true", help="send where things lie in memory, at first and every 100 rounds")
    options = parser.parse_args()
    global is_aloud
    is_aloud = options.aloud
    comm = MPI.COMM_WORLD
    take = whatever_comes if options.any else round_about
    take(comm, options)
    if options.crash and comm.rank == 1:
        signal.raise_signal(signal.SIGSEGV)
    if options.leave is not None:
        if comm.rank == 1:
            os._exit(options.leave)
        comm.recv(None, 1, options.rounds)
    say(f"rank {comm.rank} ends")


is_aloud = False


def say(line: str) -> None:
    for stream in (sys.stdout, sys.stderr)[: 1 + is_aloud]:
        stream.write(line + "\n")
        stream.flush()


kept = []


def addresses() -> list[int]:
    """Addresses of the stack (the environment, and below it), the heap, a mapping of the allocator
    and a mapping of this function."""
    environment = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value
    with open("/proc/self/stat") as stat:
        start_of_stack = int(stat.read().rpartition(")")[2].split()[25])
    ours = ctypes.c_char.from_buffer(mmap.mmap(-1, 100_000))
    buffers = [ctypes.create_string_buffer(size) for size in (5_000, 400_000)]
    # The next ones lie elsewhere.
    kept.extend([ours, *buffers])
    return [environment, start_of_stack, *map(ctypes.addressof, (*buffers, ours))]


def round_about(comm, options) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    numbers = [float(comm.rank + n) for n in range(options.numbers)]
    for turn in range(options.rounds):
        if options.addresses and turn % 100 == 0:
            numbers[:5] = map(float, addresses())
        if options.drift:
            # The number of the incarnation comes from the launcher and is not recorded.
            numbers[0] = float(os.environ["LANDBRIDGE_INCARNATION"])
        if options.stray and turn == 5 and comm.rank == 1:
            comm.isend("stray", (2 + int(os.environ["LANDBRIDGE_INCARNATION"])) % comm.size, STRAY_TAG)
        more = [0.5] * (options.heavy if turn < HEAVY_ROUNDS else 0)
        numbers = comm.sendrecv(numbers + more, right, turn, None, left, turn)[: options.numbers]
        numbers = [math.sin(number) + comm.rank for number in numbers]
        if turn % ROUNDS_PER_SUM == 0:
            say(f"rank {comm.rank} turn {turn}: {comm.allreduce(sum(numbers))!r}")
        time.sleep(options.pause)
    say(f"rank {comm.rank} has {sum(numbers)!r}")


def whatever_comes(comm, options) -> None:
    """The other ranks send numbered messages; rank 0 answers each with the position at which its
    message arrived."""
    status = MPI.Status()
    if comm.rank:
        for turn in range(options.rounds):
            time.sleep(4 * options.pause)
            comm.send(turn, 0, turn)
            say(f"place {comm.recv(None, 0, turn)}: rank {comm.rank} message {turn}")
        return
    for place in range(options.rounds * (comm.size - 1)):
        while not comm.iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            time.sleep(options.pause / 10)
        turn = comm.recv(None, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        say(f"heard {place}: rank {status.source} message {turn}")
        comm.send(place, status.source, turn)


main()
