"""Each rank works in a folder of its own, which it renames again and again.

Ranks with an even number make another folder at once under the old name, in which they do not work.
In each round a rank writes to a file of its working directory, by a relative name. At the end each
prints where it is and what its file holds.
"""

import argparse
import os
import time
from pathlib import Path

from mpi4py import MPI

ROUNDS_PER_NAME = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    name = options.folder / f"rank-{comm.rank}"
    name.mkdir()
    os.chdir(name)
    total = 0
    for turn in range(options.rounds):
        total += comm.allreduce(turn * comm.rank)
        with open("turns", "a") as file:
            file.write(f"{turn} {total}\n")
        if turn % ROUNDS_PER_NAME == ROUNDS_PER_NAME - 1:
            # Not the next name at once: for a while there is none, or another folder's.
            last, name = name, options.folder / f"rank-{comm.rank}-{turn}"
            last.rename(name)
            if comm.rank % 2 == 0:
                last.mkdir()
            print(f"{comm.rank} {turn} {total}", flush=True)
        time.sleep(0.01)
    turns = Path("turns").read_text().splitlines()
    is_here = Path.cwd() == name.resolve() and Path("turns").samefile(name / "turns")
    print(f"{comm.rank} is {'here' if is_here else 'elsewhere'}, {len(turns)} turns, {turns[-1]}", flush=True)


main()
