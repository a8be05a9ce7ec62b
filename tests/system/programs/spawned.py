"""Rank 0 spawns two processes by two commands; they sum what ranks send and print each round."""

import os
import sys
import time

from mpi4py import MPI

ROUNDS = 20


def main() -> None:
    parent = MPI.Comm.Get_parent()
    if parent != MPI.COMM_NULL:
        return serve(parent)
    world = MPI.COMM_WORLD
    words = [os.path.abspath(__file__)]
    other = world.Spawn_multiple([sys.executable] * 2, [words] * 2, [1, 1])
    for turn in range(ROUNDS):
        time.sleep(0.1)
        sums = []
        for peer in range(other.remote_size):
            other.send(turn, peer, turn)
        for peer in range(other.remote_size):
            sums.append(other.recv(None, peer, turn))
        if world.rank == 0:
            print(f"round {turn}", flush=True)
            print(f"sum {turn}: {' '.join(str(number // 2) for number in sums)}", flush=True)
    other.Disconnect()


def serve(parent) -> None:
    """Receives the number of the round from every rank, and sends all ranks the sum."""
    for turn in range(ROUNDS):
        total = sum(parent.recv(None, rank, turn) for rank in range(parent.remote_size))
        for rank in range(parent.remote_size):
            parent.send(total, rank, turn)
    parent.Disconnect()


main()
