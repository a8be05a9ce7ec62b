"""Draws numbers from clocks and random sources, which determine what the program does.

Each rank sends every number to rank 0 when it is drawn. Every rank prints its numbers twice: when
they are drawn and at the end; rank 0 prints the numbers that it receives. `--greedy`: rank 1 draws
more than can be recorded. `--children`: ranks start programs and fork all the time. `--drift`: an
unrecorded value determines how often a rank reads the clock."""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import time
import uuid

from mpi4py import MPI

# Of getauxval(3).
AT_RANDOM = 25
# Seconds: longer than one draw, so that a clock determines the number of draws.
ROUND_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--drift", action="store_true")
    parser.add_argument("--children", action="store_true")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    if options.greedy and comm.rank == 1:
        for _ in range(9):
            os.urandom(1 << 25)
    if options.drift:
        # The number of the incarnation comes from the launcher and is not recorded.
        looks = 100 * int(os.environ["LANDBRIDGE_INCARNATION"])
        [time.time() for _ in range(looks)]
        os.urandom(8)
    # A child is not recorded, and must add nothing to the record.
    child = [sys.executable, "-c", "import time; print(time.time() > 1e9)"]
    assert subprocess.run(child, capture_output=True, text=True, check=True).stdout == "True\n"
    drawn = []
    for turn in range(options.rounds):
        if options.children:
            make_children()
        tell_round(comm, turn, drawn)
        comm.barrier()
        time.sleep(random.random() / 20)
    for text in drawn:
        say(f"drew {comm.rank} {text}")
    say(f"rank {comm.rank} ends")


def make_children() -> None:
    """Starts a child that runs another program, and a child that does not."""
    os.system("true")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def tell_round(comm, turn: int, drawn: list[str]) -> None:
    """Draws as often as the time of a round allows, and sends each draw and the end of the round to
    rank 0."""
    if comm.rank == 0:
        open_ranks = comm.size - 1
        while open_ranks:
            status = MPI.Status()
            text = comm.recv(None, MPI.ANY_SOURCE, turn, status)
            open_ranks -= text is None
            if text:
                say(f"heard {status.source} {text}")
        return
    begun = MPI.Wtime()
    while True:
        text = f"{turn} {draw(begun)}"
        say(f"now {comm.rank} {text}")
        drawn.append(text)
        comm.send(text, 0, turn)
        if MPI.Wtime() - begun > ROUND_S * random.random():
            break
    comm.send(None, 0, turn)


def draw(begun: float) -> str:
    words = "-".join({"hash", "seeds", "decide", "the", "order"})
    times = f"{MPI.Wtime() - begun!r} {time.time_ns()} {time.perf_counter_ns()} {time.process_time_ns()}"
    return f"{times} {random.random()!r} {uuid.uuid4()} {uuid.uuid1().time} {words} {program_random()}"


def program_random() -> str:
    """The bytes of getauxval(AT_RANDOM), of which the C library makes what protects the stack."""
    library = ctypes.CDLL(None)
    library.getauxval.restype = ctypes.c_size_t
    return ctypes.string_at(library.getauxval(AT_RANDOM), 16).hex()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
