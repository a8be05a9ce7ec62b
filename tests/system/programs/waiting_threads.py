"""Each rank has two threads that wait in the kernel: one reads numbers from a pipe, one waits for a
semaphore. The C library's functions are called directly, so that an interrupted wait (EINTR) is
seen; Python would wait again. What the threads have got is printed at the end."""

import ctypes
import os
import sys
import threading
import time

from mpi4py import MPI

ROUNDS = 140
c_library = ctypes.CDLL(None, use_errno=True)
results = {"reads": 0, "sum": 0, "posts": 0, "interrupted": 0}


def read_numbers(pipe: int) -> None:
    room = ctypes.create_string_buffer(8)
    while length := c_library.read(pipe, room, 8):
        if length == 8:
            results["reads"] += 1
            results["sum"] += int.from_bytes(room.raw, "little")
        else:
            results["interrupted"] += 1


def wait_for_posts(semaphore) -> None:
    while results["posts"] < ROUNDS:
        if c_library.sem_wait(semaphore) == 0:
            results["posts"] += 1
        else:
            results["interrupted"] += 1


def main() -> None:
    world = MPI.COMM_WORLD
    ends = os.pipe()
    semaphore = ctypes.create_string_buffer(32)
    c_library.sem_init(semaphore, 0, 0)
    threads = [threading.Thread(target=read_numbers, args=(ends[0],)), threading.Thread(target=wait_for_posts, args=(semaphore,))]
    for thread in threads:
        thread.start()
    for step in range(ROUNDS):
        os.write(ends[1], (step * 7 + world.rank).to_bytes(8, "little"))
        c_library.sem_post(semaphore)
        world.barrier()
        if world.rank == 0:
            print(f"round {step}", file=sys.stderr, flush=True)
        # The MPI library polls, so that an image can be taken.
        for _ in range(15):
            world.Iprobe()
            time.sleep(0.003)
    os.close(ends[1])
    for thread in threads:
        thread.join()
    sys.stdout.write(f"rank {world.rank}: {results}\n" + "".join(f"rank {world.rank} step {step}\n" for step in range(4)))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
