"""Rank 0 takes whatever comes, in every way in which a program can, and tells each sender in which place it came.

    wildcards.py [--rounds N]

The others print `place P: rank R message M`, rank 0 `heard P: rank R message M`. The order is chance, but it must be the
same for all who saw it: each place once, and the same by both.
"""

import argparse
import sys
import time

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
# How rank 0 takes a message, by its number: a receive of its own that is posted, one for any sender, a look first.
OWN, ANY, LOOK = range(3)
ANSWER = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150, help="messages of each rank")
    parser.add_argument("--pause", type=float, default=0.004, help="seconds between two of them")
    options = parser.parse_args()
    if WORLD.rank == 0:
        take(options.rounds, options.pause)
    else:
        tell(options.rounds, options.pause)
    # No rank ends before the others: one of the near cluster would be done long before its kill.
    WORLD.Barrier()
    say(f"rank {WORLD.rank} ends")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell(rounds: int, pause: float) -> None:
    for number in range(rounds):
        time.sleep(pause)
        WORLD.send(number, 0, number % 3)
        say(f"place {WORLD.recv(None, 0, ANSWER)}: rank {WORLD.rank} message {number}")


def take(rounds: int, pause: float) -> None:
    """One receive is posted for each other rank, and one for all of them; the rest is looked for."""
    others = range(1, WORLD.size)
    posted = [WORLD.irecv(source=MPI.ANY_SOURCE, tag=ANY)]
    posted += [WORLD.irecv(source=other, tag=OWN) for other in others]
    due = dict.fromkeys(others, 0)  # the number that comes next from each
    status = MPI.Status()
    for place in range(rounds * len(others)):
        if place % 2 and any(number < rounds and number % 3 != LOOK for number in due.values()):
            index, number = MPI.Request.waitany(posted, status)
        else:
            index, number = look(posted, status, pause)
        source, tag = status.source, status.tag
        if index is not None:
            posted[index] = WORLD.irecv(source=source if tag == OWN else MPI.ANY_SOURCE, tag=tag)
        due[source] = number + 1
        say(f"heard {place}: rank {source} message {number}")
        WORLD.send(place, source, ANSWER)
    for request in posted:
        request.cancel()
        request.wait()


def look(posted, status, pause: float):
    """Which of the posted receives has something, or None for what was not posted; and what it is."""
    while True:
        index, is_there, number = MPI.Request.testany(posted, status)
        if is_there and index != MPI.UNDEFINED:
            return index, number
        if WORLD.iprobe(MPI.ANY_SOURCE, LOOK, status):
            return None, WORLD.recv(None, status.source, LOOK, status)
        time.sleep(pause / 8)


main()
