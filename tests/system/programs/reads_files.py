"""Ranks 1 and up read a file of 1 MiB in each round and send a digest of the content to rank 0.

All ranks print the digests when they know them, and a second time at the end. With `--scratch` each
rank writes its file before each read, other bytes each time; otherwise the files `own.RANK` exist
in the folder before the job begins. With `--rewritten TURN` rank 0 gives all files another content
before that round.
"""

import argparse
import hashlib
import random
import sys
from pathlib import Path

from mpi4py import MPI

BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--scratch", action="store_true")
    parser.add_argument("--rewritten", type=int, metavar="TURN")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    own, lines = options.folder / f"own.{comm.rank}", []
    for turn in range(options.rounds):
        if turn == options.rewritten:
            if comm.rank == 0:
                [file.write_bytes(file.read_bytes()[::-1]) for file in options.folder.iterdir()]
            comm.barrier()
        if comm.rank == 0:
            lines += [f"{source} {comm.recv(None, source, turn)}" for source in range(1, comm.size)]
        else:
            if options.scratch:
                own.write_bytes(random.Random(f"{comm.rank} {turn}").randbytes(BYTES))
            content = hashlib.sha256(own.read_bytes()).hexdigest()[:16]
            lines.append(f"{comm.rank} {turn} {content}")
            comm.send(f"{turn} {content}", 0, turn)
        for line in lines[-comm.size :]:
            say(f"now {line}") if line.split()[1] == str(turn) else None
        comm.barrier()
    for line in lines:
        say(f"end {line}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
