"""Each rank sends lines through a program that runs beside it for the first half of the job.

`FOLDER`: the program also writes the lines into a file of the rank in this folder. Every rank
prints how the program has ended, and a sum over all lines that came back."""

import subprocess
import sys
import zlib

from mpi4py import MPI
from rounds import end_round

ROUNDS, ROUND_S = 90, 0.1


def main() -> None:
    comm = MPI.COMM_WORLD
    words = ["tee", f"{sys.argv[1]}/beside.{comm.rank}"] if len(sys.argv) > 1 else ["cat"]
    beside = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    total = 0
    for turn in range(ROUNDS):
        line = b"rank %d round %d\n" % (comm.rank, turn)
        if turn < ROUNDS // 2:
            beside.stdin.write(line)
            beside.stdin.flush()
            line = beside.stdout.readline()
        if turn == ROUNDS // 2:
            beside.stdin.close()
            say(f"rank {comm.rank}: it has ended with {beside.wait()}")
        total = comm.allreduce(zlib.crc32(line, total)) & 0xFFFFFFFF
        end_round(comm, turn, ROUND_S)
    say(f"rank {comm.rank}: sum {total}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


main()
