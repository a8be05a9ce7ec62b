"""Ranks spawn processes and communicate with them; rank 0 of the first world prints `key: value`.

    spawn.py              all cases
    spawn.py crash        spawns three processes, of which one dies of a signal

The same file is the spawned program, with its task as first argument.
"""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
ROUNDS = 3
# Lengths: short, longer than the first frame, and longer than what may be in flight through relays.
LENGTHS = (1, 40_000, 3_000_000)


def main():
    parent = MPI.Comm.Get_parent()
    task = sys.argv[1] if len(sys.argv) > 1 else "all"
    if parent == MPI.COMM_NULL:
        {"all": everything, "crash": crash}[task]()
    else:
        {"talk": talk, "nest": nest, "die": die}[task](parent)


def everything():
    for number in range(ROUNDS):
        talk(spawn(["talk", str(number)], 1 + 2 * number))
    say("rounds", ROUNDS)
    several_commands()
    info()
    talk_below = spawn(["nest"], 2)
    say("nested", talk_below.bcast(None, root=0))
    talk_below.Disconnect()
    say("refused", refusals())
    # A refused spawn must not block later ones.
    talk(spawn(["talk", "again"], 2))
    say("end", "well")


def spawn(arguments, count, **info):
    words = [os.path.abspath(__file__), *arguments]
    return WORLD.Spawn(sys.executable, words, count, MPI.Info.Create(info))


def talk(other):
    """Sends between all pairs of the two sides, and by collective operations over both sides."""
    for length in LENGTHS:
        mine = np.full(length, WORLD.rank, dtype=np.uint8)
        theirs = [np.empty(length, dtype=np.uint8) for _ in range(other.remote_size)]
        requests = [other.Isend(mine, peer) for peer in range(other.remote_size)]
        requests += [other.Irecv(theirs[peer], peer) for peer in range(other.remote_size)]
        MPI.Request.Waitall(requests)
        assert all((theirs[peer] == peer).all() for peer in range(other.remote_size))
    merged = other.Merge(high=MPI.Comm.Get_parent() != MPI.COMM_NULL)
    total = merged.allreduce(merged.rank)
    assert total == merged.size * (merged.size - 1) // 2
    clusters = merged.gather(os.environ.get("LANDBRIDGE_CLUSTER"))
    if merged.rank == 0:
        print("clusters:", *sorted(set(clusters)), flush=True)
    merged.Free()
    other.Disconnect()


def nest(parent):
    """A spawned world spawns a third one, and sends its size to the first."""
    below = spawn(["talk", "below"], 2)
    size = below.remote_size
    talk(below)
    parent.bcast(size, root=MPI.ROOT if WORLD.rank == 0 else MPI.PROC_NULL)
    parent.Disconnect()


def several_commands():
    """Processes of each command have their own application number."""
    code = (
        "from mpi4py import MPI; p = MPI.Comm.Get_parent(); w = MPI.COMM_WORLD;"
        "p.gather((w.rank, w.size, w.Get_attr(MPI.APPNUM)), root=0); p.Disconnect()"
    )
    commands = [sys.executable] * 2
    child = WORLD.Spawn_multiple(commands, [["-c", code]] * 2, [1, 2], [MPI.INFO_NULL] * 2)
    seen = child.gather(None, root=MPI.ROOT if WORLD.rank == 0 else MPI.PROC_NULL)
    child.Disconnect()
    say("commands", seen)


def info():
    """The directory, and with several clusters the cluster, are those of the info keys."""
    code = (
        "from mpi4py import MPI; import os; p = MPI.Comm.Get_parent();"
        "p.gather((os.getcwd(), os.environ['LANDBRIDGE_CLUSTER']), root=0); p.Disconnect()"
    )
    last = os.environ["LANDBRIDGE_TEST_LAST_CLUSTER"]
    info = MPI.Info.Create({"wdir": "/", "cluster": last})
    child = WORLD.Spawn(sys.executable, ["-c", code], 3, info)
    seen = child.gather(None, root=MPI.ROOT if WORLD.rank == 0 else MPI.PROC_NULL)
    child.Disconnect()
    say("info", sorted(set(seen or [])))


def refusals():
    """Number of these requests that end in an MPI error."""
    good, bad = [sys.executable, "-c", "import time; time.sleep(600)"], ["/no/such/program"]
    tries = [
        ([bad[0]], [[]], [1], {}),
        # Only one of the two programs can be started: its process must not stay.
        ([good[0], bad[0]], [good[1:], []], [1, 1], {}),
        ([good[0]], [good[1:]], [70_000], {}),
        ([good[0]], [good[1:]], [1], {"host": "nowhere"}),
        ([good[0]], [["two\nlines"]], [1], {}),
    ]
    refused = 0
    for commands, arguments, counts, info in tries:
        try:
            info = [MPI.Info.Create(info)] * len(commands)
            WORLD.Spawn_multiple(commands, arguments, counts, info)
        except MPI.Exception:
            refused += 1
    return f"{refused} of {len(tries)}"


def crash():
    spawn(["die"], 3).Barrier()


def die(_parent):
    WORLD.Barrier()
    if WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    while True:
        WORLD.Barrier()


def say(key, value):
    if WORLD.rank == 0:
        print(f"{key}:", value, flush=True)


if __name__ == "__main__":
    main()
