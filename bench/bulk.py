"""One TCP connection at full rate, and the bytes received in each tenth of a second.

    bulk.py take ADDRESS:PORT NOTES
    bulk.py give ADDRESS:PORT KIND SECONDS

KIND is the congestion control of the sender: cubic or bbr. `take` writes to NOTES, for each tenth
of a second in which data arrived, CLOCK_MONOTONIC in nanoseconds and the number of bytes, as two
numbers of 8 bytes in native order; it creates a file NOTES.ready when it listens. `give` prints
`datagrams N` at its end: the number of UDP datagrams that left its host meanwhile.
"""

import socket
import struct
import sys
import time
from pathlib import Path

ENTRY = struct.Struct("qq")
CHUNK = 256 << 10
EACH_NS = 100_000_000


def main() -> int:
    what, place, *rest = sys.argv[1:]
    host, port = place.split(":")
    if what == "take":
        take((host, int(port)), Path(rest[0]))
    else:
        give((host, int(port)), rest[0].encode(), float(rest[1]))
    return 0


def take(address: tuple[str, int], notes: Path) -> None:
    with socket.create_server(address) as server:
        notes.with_suffix(".ready").touch()
        connection, _ = server.accept()
    buffer = bytearray(CHUNK)
    came, since = 0, time.monotonic_ns()
    with connection, notes.open("wb", buffering=0) as out:
        while got := connection.recv_into(buffer):
            came += got
            if (now := time.monotonic_ns()) - since >= EACH_NS:
                out.write(ENTRY.pack(now, came))
                came, since = 0, now


def give(address: tuple[str, int], kind: bytes, seconds: float) -> None:
    before = datagrams_sent()
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, kind)
        connection.connect(address)
        data, ends = bytes(CHUNK), time.monotonic() + seconds
        while time.monotonic() < ends:
            connection.sendall(data)
    print(f"datagrams {datagrams_sent() - before}", flush=True)


def datagrams_sent() -> int:
    """Number of UDP datagrams sent by this host, or network namespace."""
    names, numbers = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Udp:")
    )
    return int(numbers[names.index("OutDatagrams")])


if __name__ == "__main__":
    sys.exit(main())
