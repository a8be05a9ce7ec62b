"""Notes the results of malloc, mmap, open and sbrk after each phase of communication.

Usage: addresses.py SEED FOLDER

The seed determines only how long each rank sleeps before each step: everything else is the same in
every run. What leaves is FOLDER/rank-N with one line `RANK PHASE WHAT VALUE` for each note.
"""

import ctypes
import os
import sys

SEED = int(sys.argv[1])
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.malloc.restype = LIBC.mmap.restype = LIBC.sbrk.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.sbrk.argtypes = [ctypes.c_ssize_t]
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
READ_WRITE, PRIVATE_ANONYMOUS = 3, 0x22
# Sizes of blocks that malloc takes from bins, from the top of the heap, and from a mapping.
BLOCKS = [24, 200, 5_000, 60_000, 400_000]
LONGEST_SLEEP_NS = 40_000_000
RANKS_MAX = 8
MESSAGES = 40
NOTES = []


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def table():
    """A table of pauses, different for every seed, rank and step. The table is made beforehand, so
    that every pause allocates the same memory."""
    mixed = [(SEED * 7919 + i * 40503 + (i // 100) * 9973) % 1009 for i in range(RANKS_MAX * 200)]
    times = (Timespec * len(mixed))()
    for i, number in enumerate(mixed):
        times[i].nanoseconds = LONGEST_SLEEP_NS * number // 1009
    return times


def pause(rank, step):
    LIBC.nanosleep(ctypes.byref(PAUSES[rank * 200 + step]), None)


def note(rank, phase):
    """Notes the addresses after a phase. The memory stays allocated, so that later allocations lie
    after it."""
    for size in BLOCKS:
        NOTES.append((rank, phase, f"malloc {size}", LIBC.malloc(size)))
    mapped = LIBC.mmap(None, 100_000, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
    NOTES.append((rank, phase, "mmap", mapped))
    NOTES.append((rank, phase, "sbrk", LIBC.sbrk(0)))
    NOTES.append((rank, phase, "open", os.open("/dev/null", os.O_RDONLY)))


def main():
    note(-1, "00 start")
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    note(rank, "01 init")
    buffers = {length: bytearray(length) for length in (8, 4_000, 100_000, 2_000_000)}
    pause(rank, 1)
    world.Barrier()
    note(rank, "02 barrier")
    neighbours(world, buffers)
    note(rank, "03 neighbours")
    to_everybody(world, buffers)
    note(rank, "04 to everybody")
    unexpected(world, buffers)
    note(rank, "05 unexpected")
    wildcards(world, buffers)
    note(rank, "06 wildcards")
    remote_memory(MPI, world, buffers)
    note(rank, "07 remote memory")
    pause(rank, 8)
    world.Alltoall(buffers[4_000], bytearray(4_000))
    note(rank, "08 alltoall")
    with open(f"{sys.argv[2]}/rank-{rank}", "w") as out:
        for mine, phase, what, value in NOTES:
            print(rank if mine < 0 else mine, phase, what, hex(value), file=out)


def neighbours(world, buffers):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for step, length in enumerate((8, 4_000, 100_000, 2_000_000)):
        pause(world.rank, 10 + step)
        request = world.Isend(buffers[length], right, step)
        pause(world.rank, 20 + step)
        world.Recv(bytearray(length), left, step)
        request.Wait()


def to_everybody(world, buffers):
    others = [rank for rank in range(world.size) if rank != world.rank]
    for step, length in enumerate((8, 100_000)):
        pause(world.rank, 30 + step)
        into = [bytearray(length) for _ in others]
        requests = [world.Irecv(room, other, 50) for room, other in zip(into, others)]
        for other in others:
            pause(world.rank, 40 + other)
            requests.append(world.Isend(buffers[length], other, 50))
        for request in requests:
            request.Wait()


def unexpected(world, buffers):
    """Sends many messages that arrive before or after their receives are posted, depending on the
    sleeps."""
    peer = world.rank ^ 1
    for length in (8, 4_000, 100_000):
        requests = [world.Isend(buffers[length], peer, tag) for tag in range(MESSAGES)]
        pause(world.rank, 60 + length % 7)
        room = bytearray(length)
        for tag in reversed(range(MESSAGES)):
            world.Recv(room, peer, tag)
        for request in requests:
            request.Wait()


def wildcards(world, buffers):
    """Receives with wildcards: the order of arrival is random, and the program's actions do not
    depend on it."""
    if world.rank == 0:
        room = bytearray(4_000)
        for _ in range(MESSAGES * (world.size - 1)):
            world.Recv(room)
    else:
        for step in range(MESSAGES):
            if step % 10 == 0:
                pause(world.rank, 70 + step)
            world.Send(buffers[4_000], 0, step)


def remote_memory(MPI, world, buffers):
    window = MPI.Win.Create(buffers[100_000], comm=world)
    window.Fence()
    pause(world.rank, 90)
    window.Put(buffers[4_000], (world.rank + 1) % world.size)
    pause(world.rank, 91)
    window.Fence()
    window.Free()


PAUSES = table()
main()
