"""One-sided operations of every kind, all of them checked. Prints `done: OPERATIONS` on rank 0.

Usage: rma.py SEED ROUNDS

Every rank keeps a model of the memory of all ranks, because the seed gives all ranks the same plan.
"""

import random
import sys
import traceback

import numpy
from mpi4py import MPI

SEED, ROUNDS = int(sys.argv[1]), int(sys.argv[2])
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
# Number of elements of eight bytes in each rank's memory, and the largest number that one operation
# touches.
ELEMENTS, LONGEST = 40_000, 20_000
OPERATIONS = 12


def count(chance):
    return chance.choice([1, 2, 7, 128, 1024, 5000, LONGEST, chance.randint(1, LONGEST)])


def noise(number, length):
    return (numpy.arange(length, dtype=numpy.int64) * 2654435761 + number * 97) % 1_000_003


class Plan:
    """Operations whose ranges do not overlap, so that their order does not matter; and the
    outcome."""

    def __init__(self, chance, model):
        self.operations = []
        free = [0] * SIZE
        for number in range(OPERATIONS * SIZE):
            origin, target = chance.randrange(SIZE), chance.randrange(SIZE)
            length = count(chance)
            kind = chance.choice(["put", "get", "add", "max", "fetch"])
            if free[target] + length <= ELEMENTS:
                self.operations.append((number, kind, origin, target, free[target], length))
                free[target] += length
        self.before = model.copy()
        for number, kind, _, target, at, length in self.operations:
            part, value = model[target, at : at + length], noise(number, length)
            if kind == "put":
                part[:] = value
            elif kind in ("add", "fetch"):
                part += value
            elif kind == "max":
                numpy.maximum(part, value, out=part)

    def start(self, window):
        """Starts the operations of this rank; returns what must hold when they are complete."""
        expected = []
        for number, kind, origin, target, at, length in self.operations:
            if origin != RANK:
                continue
            value = noise(number, length)
            before = self.before[target, at : at + length]
            if kind == "put":
                window.Put(value, target, at)
            elif kind in ("add", "max"):
                window.Accumulate(value, target, at, MPI.SUM if kind == "add" else MPI.MAX)
            else:
                seen = numpy.full(length, -1, numpy.int64)
                if kind == "get":
                    window.Get(seen, target, at)
                else:
                    window.Get_accumulate(value, seen, target, at, MPI.SUM)
                expected.append((seen, before, f"{kind} of {length} from {target} at {at}"))
            # The memory of a put must stay unchanged until the operation is complete.
            expected.append((value, noise(number, length), f"{kind} changed what it sent"))
        return expected


def check(expected):
    for seen, wanted, what in expected:
        wrong = numpy.flatnonzero(seen != wanted)
        assert not wrong.size, f"{what}: {wrong.size} elements wrong, first {wrong[0]}"


def fence(window, plan):
    window.Fence()
    expected = plan.start(window)
    window.Fence()
    check(expected)


def lock_all(window, plan):
    window.Lock_all()
    expected = plan.start(window)
    window.Flush_all()
    check(expected)
    window.Unlock_all()
    WORLD.Barrier()


def lock(window, plan):
    """Runs a plan with one lock for each target, exclusive or shared."""
    for target in range(SIZE):
        part = Plan.__new__(Plan)
        part.before = plan.before
        part.operations = [o for o in plan.operations if o[3] == target]
        window.Lock(target, MPI.LOCK_EXCLUSIVE if target % 2 else MPI.LOCK_SHARED)
        expected = part.start(window)
        window.Unlock(target)
        check(expected)
    WORLD.Barrier()


def post_start(window, plan):
    group = WORLD.Get_group()
    window.Post(group)
    window.Start(group)
    expected = plan.start(window)
    window.Complete()
    window.Wait()
    group.Free()
    check(expected)


def compare(memory, model, how):
    WORLD.Barrier()
    wrong = numpy.flatnonzero(memory != model[RANK])
    assert not wrong.size, f"{how}: {wrong.size} elements of the memory wrong, first {wrong[0]}"
    WORLD.Barrier()


def random_rounds(chance):
    memory = numpy.zeros(ELEMENTS, numpy.int64)
    model = numpy.zeros((SIZE, ELEMENTS), numpy.int64)
    window = MPI.Win.Create(memory, 8, comm=WORLD)
    done = 0
    for _ in range(ROUNDS):
        how = chance.choice([fence, lock_all, lock, post_start])
        plan = Plan(chance, model)
        done += len(plan.operations)
        WORLD.Barrier()
        how(window, plan)
        # Writes of other ranks become visible after a synchronisation of the own window.
        window.Lock(RANK)
        window.Unlock(RANK)
        compare(memory, model, how.__name__)
    window.Free()
    return done


def counters():
    """All ranks add to one counter, and then count by compare and swap: every value occurs once."""
    memory = numpy.zeros(2, numpy.int64)
    window = MPI.Win.Create(memory, 8, comm=WORLD)
    one, seen = numpy.ones(1, numpy.int64), numpy.zeros(1, numpy.int64)
    values = []
    window.Lock_all()
    for _ in range(40):
        window.Fetch_and_op(one, seen, 0, 0, MPI.SUM)
        window.Flush(0)
        values.append(int(seen[0]))
    old, new = numpy.zeros(1, numpy.int64), numpy.zeros(1, numpy.int64)
    for _ in range(10):
        while True:
            new[0] = old[0] + 1
            window.Compare_and_swap(new, old.copy(), seen, 0, 1)
            window.Flush(0)
            if seen[0] == old[0]:
                break
            old[0] = seen[0]
    window.Unlock_all()
    everybody = sorted(sum(WORLD.allgather(values), []))
    assert everybody == list(range(40 * SIZE)), "fetch_and_op: a value was seen twice or never"
    window.Lock(0, MPI.LOCK_SHARED)
    window.Get(seen, 0, 1)
    window.Unlock(0)
    assert seen[0] == 10 * SIZE, f"compare_and_swap: {seen[0]} instead of {10 * SIZE}"
    WORLD.Barrier()
    window.Free()


def dynamic():
    """Memory that is attached to a window later and addressed directly."""
    window = MPI.Win.Create_dynamic(comm=WORLD)
    memory = numpy.full(LONGEST, RANK, numpy.int64)
    window.Attach(memory)
    places = WORLD.allgather(MPI.Get_address(memory))
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    value = noise(RANK, LONGEST // 2)
    seen = numpy.zeros(LONGEST // 2, numpy.int64)
    window.Lock_all()
    window.Put(value, right, (places[right], LONGEST // 2, MPI.INT64_T))
    window.Get(seen, right, (places[right] + 8 * (LONGEST // 2), LONGEST // 2, MPI.INT64_T))
    window.Flush_all()
    window.Unlock_all()
    WORLD.Barrier()
    assert (memory[: LONGEST // 2] == noise(left, LONGEST // 2)).all(), "put to attached memory"
    assert (memory[LONGEST // 2 :] == RANK).all(), "a put wrote beside its place"
    assert (seen == right).all(), "get from attached memory"
    window.Detach(memory)
    window.Free()


def main():
    done = random_rounds(random.Random(SEED))
    counters()
    dynamic()
    WORLD.Barrier()
    if RANK == 0:
        print(f"done: {done}", flush=True)


try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    WORLD.Abort(1)
