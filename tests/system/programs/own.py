"""Operations of a process on itself: neighbours that include the process, and its own window part.

`own.py graph TIMES` creates a graph in which each rank names itself and its neighbours, and counts
wrong graphs. `own.py mutex TIMES` makes mutexes of mpi4py one after the other, and each rank takes
each mutex once: a rank empties its place in the queue of waiting ranks by an accumulate to itself,
and a peer then enters itself there. `own.py window TIMES` makes rank 0 put to, get from and
accumulate in its own part of a window, and counts its sleeps.
"""

import resource
import sys

import numpy
from mpi4py import MPI
from mpi4py.util import sync

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
mode, times = sys.argv[1], int(sys.argv[2])


def graph() -> None:
    wrong = 0
    for _ in range(times):
        neighbours = [(rank - 1) % size, rank, (rank + 1) % size]
        made = comm.Create_dist_graph([rank], [3], neighbours, MPI.UNWEIGHTED)
        wrong += made.Get_dist_neighbors_count() != (3, 3, False)
        made.Free()
    wrong = comm.allreduce(wrong)
    if rank == 0:
        print(f"wrong: {wrong}", flush=True)


def mutex() -> None:
    taken = 0
    for _ in range(times):
        made = sync.Mutex(comm=comm)
        with made:
            taken += 1
        made.free()
    taken = comm.allreduce(taken)
    if rank == 0:
        print(f"taken: {taken}", flush=True)


def window() -> None:
    made = MPI.Win.Allocate(1024, 8, comm=comm)
    ones, got = numpy.ones(4, "q"), numpy.zeros(4, "q")
    numpy.frombuffer(made.tomemory(), "q")[:] = 0
    comm.barrier()
    made.Lock_all()
    if rank == 0:
        before = sleeps()
        for _ in range(times):
            made.Put(ones, 0)
            made.Flush(0)
            made.Accumulate(ones, 0)
            made.Flush(0)
            made.Get(got, 0)
            made.Flush(0)
        print(f"sleeps: {sleeps() - before}", flush=True)
        print(f"value: {set(got.tolist())}", flush=True)
    made.Unlock_all()
    comm.barrier()
    made.Free()


def sleeps() -> int:
    """Number of times that this process has given up its processor to wait."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


{"graph": graph, "mutex": mutex, "window": window}[mode]()
