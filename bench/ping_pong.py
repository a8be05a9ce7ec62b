"""Messages back and forth between two ranks, for a given time whatever the rate of the link.

    ping_pong.py SECONDS SIZE...

Rank 0 prints, for each size, `begun SIZE AT` (CLOCK_MONOTONIC in seconds), and after rounds, at
most ten times a second, `SIZE ROUNDS MB/s BY`: the number of rounds after the first, the size
divided by half the time of a round, and `tcp` or `udp`, whichever carried the messages of this
rank. If the program is killed, the lines until then remain. The first round is not counted; only a
line with 0 rounds is about the first round alone.
"""

import sys
import time
from pathlib import Path

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
GO_ON, LAST = 0, 1
PRINT_S = 0.1
# Largest payload of a TCP segment in packets of 1500 bytes.
SEGMENT_BYTES = 1460


def main() -> int:
    seconds, sizes = float(sys.argv[1]), list(map(int, sys.argv[2:]))
    WORLD.Barrier()
    for size in sizes:
        buffer = bytearray(size)
        if WORLD.rank == 0:
            Rounds(buffer, seconds).lead()
        else:
            follow(buffer)
    return 0


class Rounds:
    def __init__(self, buffer: bytearray, seconds: float):
        self.buffer, self.seconds = buffer, seconds
        self.segments = segments_sent()
        self.printed = 0.0

    def lead(self) -> None:
        started = time.monotonic()
        print(f"begun {len(self.buffer)} {started:.3f}", flush=True)
        self.exchange(GO_ON)
        first = time.monotonic()
        self.report(0, first - started)
        rounds, is_last = 0, False
        while not is_last:
            is_last = time.monotonic() - first >= self.seconds
            self.exchange(LAST if is_last else GO_ON)
            rounds += 1
            if is_last or time.monotonic() - self.printed >= PRINT_S:
                self.report(rounds, (time.monotonic() - first) / rounds)

    def exchange(self, word: int) -> None:
        self.buffer[0] = word
        WORLD.Send(self.buffer, 1)
        WORLD.Recv(self.buffer, 1)

    def report(self, rounds: int, round_s: float) -> None:
        self.printed = time.monotonic()
        size = len(self.buffer)
        by_tcp = (segments_sent() - self.segments) * SEGMENT_BYTES
        by = "tcp" if by_tcp > size * (rounds + 1) / 2 else "udp"
        print(f"{size} {rounds} {size / (round_s / 2) / 1e6:.3f} {by}", flush=True)


def follow(buffer: bytearray) -> None:
    while True:
        WORLD.Recv(buffer, 0)
        WORLD.Send(buffer, 0)
        if buffer[0] == LAST:
            return


def segments_sent() -> int:
    """Number of TCP segments with new data that left this host, or network namespace."""
    names, numbers = (
        line.split() for line in Path("/proc/net/netstat").read_text().splitlines() if line.startswith("TcpExt:")
    )
    return int(numbers[names.index("TCPOrigDataSent")])


if __name__ == "__main__":
    sys.exit(main())
