#!/usr/bin/env python3
"""What paths of datagrams carry on a link that loses packets, against TCP, libfabric's own datagrams and QUIC.

    bench/datagrams.py                              every loss and round trip, one round; half an hour
    bench/datagrams.py --loss 0,1 --rtt 10 --rounds 3 --ways tcp-cubic,bbr

IMB PingPong between two hosts joined by an emulated link of 1 Gbit/s: over TCP (`udp=off`) and over UDP, each with two kinds
of congestion control, and over libfabric's `udp;ofi_rxd`; and the same messages there and back over one stream of quinn, by
a program of ours (bench/quic), which encrypts them. A way that is so slow that its time is over has no number. TCP's kind is that of the
kernel's routes (`congctl`): CUBIC is Linux's own default, but this machine may have another.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import imb  # noqa: E402
import labs  # noqa: E402
import stamp  # noqa: E402
from support import paths  # noqa: E402

WAYS = {
    "tcp-cubic": ("TCP, CUBIC", {"udp": "off"}),
    "tcp-bbr": ("TCP, BBR", {"udp": "off"}),
    "cubic": ("UDP, CUBIC", {"udp": "on", "congestion": "cubic"}),
    "bbr": ("UDP, BBR", {"udp": "on", "congestion": "bbr"}),
    "rxd": ("udp;ofi_rxd", {}),
    "quic-cubic": ("QUIC, CUBIC", {}),
    "quic-bbr": ("QUIC, BBR", {}),
}
RXD = "udp;ofi_rxd"
QUIC = paths.ROOT / "target" / "quic" / "release" / "landbridge-bench-quic"
QUIC_ADDRESS = "10.1.0.12:4433"
# With what ours is compared.
BASE = "tcp-cubic"
LOSSES, ROUND_TRIPS_MS = ("0 %", "0.1 %", "1 %", "5 %"), (1, 10, 50)
SIZES = (1 << 20, 4 << 20)
ROUNDS = 1
# No loss: at least so much of TCP. 1 % and 10 ms: at least so many times one connection.
TARGET_QUIET, TARGET_LOSSY = 0.9, 5.0
# Of one size at most, after as many seconds of warm-up messages as a lossy start takes.
SECONDS, TURNS = 4, 200
LIMIT_S = 75.0
SUBNET = "10.1.0.0/24"
LAB = """name = "datagrams"
[[site]]
name = "near"
hosts = 2
subnet = "10.1.0.0/24"
lan = {{ rate = "1 Gbit/s", delay = "{delay_us} us", loss = "{loss}" }}
"""


def measure(rounds=ROUNDS, losses=LOSSES, round_trips=ROUND_TRIPS_MS, ways=tuple(WAYS), settings=None) -> dict:
    """Writes build/results/bench-datagrams.json: MB/s by case, way and size, for each round; None where time was over."""
    if any(way.startswith("quic") for way in ways):
        build_quic()
    cases = [(loss, rtt) for loss in losses for rtt in round_trips]
    samples = {way: [[] for _ in cases] for way in ways}
    for turn in range(rounds):
        for number, (loss, rtt) in enumerate(cases):
            for way in ways:
                what = f"{loss} loss, {rtt} ms, {WAYS[way][0]}"
                print(f"datagrams: round {turn + 1} of {rounds}: {what}: ", end="", flush=True)
                found = one_run(loss, rtt, way, WAYS[way][1] | (settings or {}))
                samples[way][number].append(found)
                print(", ".join("-" if rate is None else f"{rate:.1f}" for rate in found), "MB/s", flush=True)
    result = {
        "cases": cases,
        "sizes": SIZES,
        "rounds": rounds,
        "samples": samples,
        "medians": {way: [medians(rows) for rows in found] for way, found in samples.items()},
        "settings": settings or {},
        "stamp": stamp.now(),
    }
    (paths.RESULTS / "bench-datagrams.json").write_text(json.dumps(result, indent=1))
    return result


def medians(rows: list[list[float | None]]) -> list[float | None]:
    columns = [[rate for rate in column if rate is not None] for column in zip(*rows)]
    return [statistics.median(column) if column else None for column in columns]


def one_run(loss: str, rtt_ms: float, way: str, settings: dict[str, str]) -> list[float | None]:
    with tempfile.TemporaryDirectory() as folder:
        file, lengths = Path(folder) / "lab.toml", Path(folder) / "lengths"
        file.write_text(LAB.format(delay_us=int(rtt_ms * 500), loss=loss))
        lengths.write_text("\n".join(map(str, SIZES)) + "\n")
        program = [str(imb.IMB), "PingPong", "-npmin", "2", "-msglen", str(lengths)]
        program += ["-iter", str(TURNS), "-time", str(SECONDS)]
        kind = "bbr" if way.endswith("bbr") else "cubic"
        words = labs.in_turn([*with_control(kind), job_of(way, kind, settings, program)])
        log = ""
        with labs.Background(file, labs.name("datagrams"), words) as job:
            try:
                job.wait(LIMIT_S)
            except labs.Failed:
                pass
            log = job.log.read_text(errors="replace")
    if way.startswith("quic"):
        rates = {int(size): float(rate) for size, rate in re.findall(r"^(\d+) \d+ ([\d.]+)$", log, re.M)}
        return [rates.get(size) for size in SIZES]
    rows = imb.parse(log).rows
    return [rows[size]["Mbytes/sec"] if size in rows else None for size in SIZES]


def job_of(way: str, kind: str, settings: dict[str, str], program: list[str]) -> list[str]:
    if way == "rxd":
        return [str(paths.LANDBRIDGE), "run", "-n", "2", "--ranks-per-node", "1", "--provider", RXD, "--", *program]
    if not way.startswith("quic"):
        return labs.job(2, 1, settings, program)
    on = f"{paths.LANDBRIDGE} lab on"
    serve = f"{on} near-2 -- {QUIC} serve {QUIC_ADDRESS} {kind}"
    ping = f"{on} near-1 -- {QUIC} ping {QUIC_ADDRESS} {kind} {SECONDS} {' '.join(map(str, SIZES))}"
    # The server is ended with the lab.
    return ["sh", "-c", f"{serve} & sleep 0.5; {ping}"]


def build_quic() -> None:
    folder = paths.ROOT / "bench" / "quic"
    words = ["cargo", "build", "--release", "--manifest-path", str(folder / "Cargo.toml")]
    subprocess.run([*words, "--target-dir", str(QUIC.parents[1])], check=True)


def with_control(kind: str) -> list[list[str]]:
    """Commands after which TCP between the hosts has this congestion control."""
    on, change = [str(paths.LANDBRIDGE), "lab", "on"], ["ip", "route", "change", SUBNET, "dev", "lan0", "congctl", kind]
    return [[*on, host, "--", *change] for host in ("near-1", "near-2")]


def section(result: dict) -> str:
    lines = [
        "## Datagrams on a lossy link",
        "",
        "IMB-MPI1 PingPong, 2 ranks, an emulated link of 1 Gbit/s (125 MB/s with all headers) that loses a share of packets in",
        f"either direction. MB/s with messages of {' and '.join(f'{size >> 20} MiB' for size in result['sizes'])},",
        f"{result['rounds']} rounds, medians; in parentheses how many times one TCP connection of ours with CUBIC.",
        *stamp.lines(result),
        "",
    ]
    ways = list(result["medians"])
    lines.append(f"| loss | round trip | {' | '.join(WAYS[way][0] for way in ways)} |")
    lines.append("|---|--:|" + "--:|" * len(ways))
    for number, (loss, rtt) in enumerate(result["cases"]):
        tcp = result["medians"].get(BASE, [[None] * len(SIZES)] * len(result["cases"]))[number]
        cells = []
        for way in ways:
            found = result["medians"][way][number]
            cells.append(", ".join(cell(*it, way, loss, rtt) for it in zip(found, tcp)))
        lines.append(f"| {loss} | {rtt:g} ms | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(rate: float | None, tcp: float | None, way: str, loss: str, rtt: float) -> str:
    if rate is None:
        return "–"
    if way.startswith("tcp") or not tcp:
        return f"{rate:.1f}"
    ratio, target = rate / tcp, 0.0
    if loss == "0 %":
        target = TARGET_QUIET
    elif (loss, rtt) == ("1 %", 10):
        target = TARGET_LOSSY
    return f"{rate:.1f} ({ratio:.2f}x{'' if ratio >= target else f', missed: {target}'})"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--loss", default="0,0.1,1,5", help="per cent, with commas")
    parser.add_argument("--rtt", default=",".join(map(str, ROUND_TRIPS_MS)), help="milliseconds, with commas")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the jobs")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    wanted = [f"{share} %" for share in options.loss.split(",")]
    trips = [float(trip) for trip in options.rtt.split(",")]
    chosen = dict(word.split("=", 1) for word in options.set)
    sys.exit(
        labs.main(
            lambda: section(
                measure(max(options.rounds, 1), wanted, trips, options.ways.split(","), chosen)
            )
        )
    )
