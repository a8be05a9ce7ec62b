"""Rank 0 spawns two processes after a while and exchanges numbers with them: `PLACE SECONDS
[MORE]`.

PLACE is the name of a host, or `anywhere`. MORE is the number of seconds before the numbers are
sent. Each spawned process prints a line before it communicates with any process.
"""

import os
import sys
import time


def main() -> None:
    if len(sys.argv) == 1:
        print("rank of a spawned group is there", flush=True)
    from mpi4py import MPI

    parent = MPI.Comm.Get_parent()
    if parent != MPI.COMM_NULL:
        parent.send(parent.recv(None, 0, 1), 0, 1)
        return parent.Disconnect()
    world = MPI.COMM_WORLD
    place, seconds, more = sys.argv[1], *map(float, [*sys.argv[2:], 0][:2])
    print(f"rank {world.rank} begins", flush=True)
    world.barrier()
    if world.rank == 0:
        time.sleep(seconds)
        # Two commands: two requests to the process manager.
        info = MPI.Info.Create({} if place == "anywhere" else {"host": place})
        words = [os.path.abspath(__file__)]
        other = MPI.COMM_SELF.Spawn_multiple([sys.executable] * 2, [words] * 2, [1, 1], [info] * 2)
        time.sleep(more)
        for peer in range(2):
            other.send(peer + 7, peer, 1)
        print(f"rank 0 hears {[other.recv(None, peer, 1) for peer in range(2)]}", flush=True)
        other.Disconnect()
    world.barrier()
    print(f"rank {world.rank} ends", flush=True)


main()
