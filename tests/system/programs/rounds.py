"""The end of a round of programs whose ranks get images: rank 0 says the number of the round on
standard error, and all ranks let the MPI library poll for a while, so that an image can be taken."""

import sys
import time


def end_round(comm, turn: int, seconds: float) -> None:
    if comm.rank == 0:
        print(f"round {turn}", file=sys.stderr, flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        comm.Iprobe()
        time.sleep(0.002)
