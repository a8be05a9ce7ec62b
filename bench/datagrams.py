#!/usr/bin/env python3
"""The rate of UDP paths on a lossy link, against TCP, libfabric's own datagrams and QUIC.

    bench/datagrams.py                  every loss and round trip, one round; at most twelve minutes
    bench/datagrams.py --quick          no loss and 1 %, 10 ms; two minutes
    bench/datagrams.py --loss 0,1 --rtt 10 --rounds 3 --ways tcp-cubic,bbr

Messages back and forth (bench/ping_pong.py) between two hosts joined by an emulated link of 1
Gbit/s: over TCP (`udp=off`) and over UDP, each with two kinds of congestion control, and over
libfabric's `udp;ofi_rxd`. The same messages go over one stream of quinn, and as datagrams of quinn
(RFC 9221) that the program repairs, by a program of this project (bench/quic), which encrypts them. The kernel's routes set TCP's congestion control
(`congctl`): CUBIC is Linux's own default, but this machine may have another.

Each cell has a time limit, and all cells together have one. A variant that cannot complete one
message back and forth within the time of its cell has a bound instead of a number ("< 0.4"); a
variant that transfers nothing has a dash.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import labs  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import dots, paths  # noqa: E402

VARIANTS = {
    "tcp-cubic": ("TCP, CUBIC", {"udp": "off"}),
    "tcp-bbr": ("TCP, BBR", {"udp": "off"}),
    "cubic": ("UDP, CUBIC", {"udp": "on", "congestion": "cubic"}),
    "bbr": ("UDP, BBR", {"udp": "on", "congestion": "bbr"}),
    "rxd": ("udp;ofi_rxd", {}),
    "quic-cubic": ("QUIC, CUBIC", {}),
    "quic-bbr": ("QUIC, BBR", {}),
    "quic-datagrams-bbr": ("QUIC datagrams, BBR", {}),
}
RXD = "udp;ofi_rxd"
QUIC = paths.ROOT / "target" / "quic" / "release" / "landbridge-bench-quic"
QUIC_HOST, QUIC_PORT = "10.1.0.12", 4433
# The variant to which UDP paths are compared.
BASE = "tcp-cubic"
LOSSES, ROUND_TRIPS_MS = ("0 %", "0.1 %", "1 %", "5 %"), (1, 10, 50)
SIZES = (1 << 20, 4 << 20)
ROUNDS = 1
# Targets: without loss at least this share of TCP; at 1 % and 10 ms at least this multiple of one
# connection.
TARGET_QUIET, TARGET_LOSSY = 0.9, 5.0
# The quick cells, for which there are targets.
QUICK_LOSSES, QUICK_ROUND_TRIPS_MS = ("0 %", "1 %"), (10,)
PING_PONG = Path(__file__).resolve().parent / "ping_pong.py"
# Seconds for each size after its first rounds, unless the link is so slow that one round takes
# longer.
SECONDS = 2.0
# Seconds for a cell with all sizes: a job takes a second to start. `quic` has half of them for each
# size.
LIMIT_S, LIMIT_MIN_S = 11.0, 6.0
# Minutes for all cells of a round: if cells take longer, the last ones have less time.
MINUTES = 12.0
# Rounds of the QUIC program before it prints a line.
QUIC_ROUNDS = 3
SUBNET = "10.1.0.0/24"
LAB = """name = "datagrams"
[[site]]
name = "near"
hosts = 2
subnet = "10.1.0.0/24"
lan = {{ rate = "1 Gbit/s", delay = "{delay_us} us", loss = "{loss}" }}
"""


@dataclass
class Cell:
    """The result of one run of one variant for one size. Both None: no data arrived."""

    rate: float | None = None  # MB/s
    bound: float | None = None  # less than this number of MB/s
    by: str = ""  # "tcp" or "udp", if the program knows

    @property
    def row(self) -> list:
        return [self.rate, self.bound, self.by]


def measure(
    rounds=ROUNDS, losses=LOSSES, round_trips=ROUND_TRIPS_MS, ways=tuple(VARIANTS), settings=None, minutes=MINUTES
) -> dict:
    """Writes build/results/bench-datagrams.json: for each variant, case and round a Cell's row for
    each size."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    if any(way.startswith("quic") for way in ways):
        build_quic()
    cases = [(loss, rtt) for loss in losses for rtt in round_trips]
    samples = {way: [[] for _ in cases] for way in ways}
    for turn in range(rounds):
        ends, left = time.monotonic() + 60 * minutes, len(cases) * len(ways)
        for number, (loss, rtt) in enumerate(cases):
            for way in ways:
                what = f"{loss} loss, {rtt:g} ms, {VARIANTS[way][0]}"
                print(f"datagrams: round {turn + 1} of {rounds}: {what}: ", end="", flush=True)
                limit_s = min(LIMIT_S, max(LIMIT_MIN_S, (ends - time.monotonic()) / left))
                found = one_run(loss, rtt, way, VARIANTS[way][1] | (settings or {}), limit_s)
                left -= 1
                samples[way][number].append([cell.row for cell in found])
                print(", ".join(shown(cell) for cell in found), "MB/s", flush=True)
    result = {
        "cases": cases,
        "sizes": SIZES,
        "rounds": rounds,
        "samples": samples,
        "cells": {way: [merged(found) for found in rows] for way, rows in samples.items()},
        "settings": settings or {},
        "stamp": stamp.now(),
    }
    (paths.RESULTS / "bench-datagrams.json").write_text(json.dumps(result, indent=1))
    return result


def merged(rounds: list[list[list]]) -> list[list]:
    """The median for each size; if no round has a number, the highest bound. `by` is tcp if any
    round used TCP."""
    cells = []
    for column in zip(*rounds):
        rates = [rate for rate, _, _ in column if rate is not None]
        bounds = [bound for _, bound, _ in column if bound is not None]
        by = "tcp" if any(by == "tcp" for _, _, by in column) else column[0][2]
        rate = statistics.median(rates) if rates else None
        cells.append(Cell(rate, max(bounds, default=None) if rate is None else None, by).row)
    return cells


def one_run(loss: str, rtt_ms: float, way: str, settings: dict[str, str], limit_s: float) -> list[Cell]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lab.toml"
        file.write_text(LAB.format(delay_us=int(rtt_ms * 500), loss=loss))
        kind = "bbr" if way.endswith("bbr") else "cubic"
        words = labs.in_turn([*with_control(kind), job_of(way, kind, settings, limit_s)])
        with labs.Background(file, labs.name("datagrams"), words) as job:
            try:
                job.wait(limit_s)
            except labs.Failed:
                pass
            ended, log = time.monotonic(), job.log.read_text(errors="replace")
    return [read(log, size, ended, QUIC_ROUNDS if way.startswith("quic") else 1) for size in SIZES]


def read(log: str, size: int, ended: float, rounds_min: int) -> Cell:
    """The last line about a size. Without a line, fewer than `rounds_min` rounds were completed
    within the time."""
    if lines := re.findall(rf"^{size} \d+ ([\d.]+) ?(tcp|udp|)$", log, re.M):
        return Cell(float(lines[-1][0]), by=lines[-1][1])
    if begun := re.search(rf"^begun {size} ([\d.]+)$", log, re.M):
        over = re.search(rf"^over {size} ([\d.]+)$", log, re.M)
        seconds = (float(over[1]) if over else ended) - float(begun[1])
        return Cell(bound=2 * rounds_min * size / max(seconds, 0.1) / 1e6)
    return Cell()


def shown(cell: Cell) -> str:
    if cell.rate is not None:
        return f"{figure(cell.rate)}{' by TCP' if cell.by == 'tcp' else ''}"
    return "–" if cell.bound is None else f"< {figure(cell.bound)}"


def figure(rate: float) -> str:
    return f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


def job_of(way: str, kind: str, settings: dict[str, str], limit_s: float) -> list[str]:
    program = [paths.python("mpich"), str(PING_PONG), str(SECONDS), *map(str, SIZES)]
    if way == "rxd":
        return [str(paths.LANDBRIDGE), "run", "-n", "2", "--ranks-per-node", "1", "--provider", RXD, "--", *program]
    if not way.startswith("quic"):
        return labs.job(2, 1, settings, program)
    on = f"{paths.LANDBRIDGE} lab on"
    carrier = "datagrams" if "datagrams" in way else "stream"
    script, limit = "", f"timeout {limit_s / len(SIZES) - 0.4:.1f}"
    # CLOCK_MONOTONIC, except for time in which the machine slept
    clock = "cut -d' ' -f1 /proc/uptime"
    for number, size in enumerate(SIZES):
        # A server waits long for a lost client, so each size has a server of its own. All end with
        # the lab.
        address = f"{QUIC_HOST}:{QUIC_PORT + number}"
        script += f"{on} near-2 -- {QUIC} serve {address} {kind} {carrier} & sleep 0.3; echo begun {size} $({clock})\n"
        script += f"{on} near-1 -- {limit} {QUIC} ping {address} {kind} {carrier} {SECONDS} {size}; echo over {size} $({clock})\n"
    return ["sh", "-c", script]


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
        prose.wrapped(
            "Two ranks send messages there and back (`bench/ping_pong.py`; QUIC: one stream, or datagrams that are repaired above QUIC; encrypted) over an emulated "
            "link of 1 Gbit/s (125 MB/s with all headers) that loses a share of packets in either direction. MB/s as IMB "
            f"PingPong counts them, with messages of {' and '.join(f'{size >> 20} MiB' for size in result['sizes'])}, "
            f"{stamp.rounds(result['rounds'])}, medians. The factor in parentheses compares with one TCP connection of "
            'Landbridge with CUBIC. "< N": no round ended in the time of the cell; "–": no result.'
        ),
        *stamp.lines(result),
        "",
    ]
    ways = list(result["cells"])
    lines.append(f"| loss | round trip | {' | '.join(VARIANTS[way][0] for way in ways)} |")
    lines.append("|---|--:|" + "--:|" * len(ways))
    nothing = [[Cell().row] * len(result["sizes"])] * len(result["cases"])
    for number, (loss, rtt) in enumerate(result["cases"]):
        base = [Cell(*row) for row in result["cells"].get(BASE, nothing)[number]]
        cells = []
        for way in ways:
            found = [Cell(*row) for row in result["cells"][way][number]]
            cells.append("; ".join(in_table(*pair, way, loss, rtt) for pair in zip(found, base)))
        lines.append(f"| {loss} | {rtt:g} ms | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def in_table(cell: Cell, base: Cell, way: str, loss: str, rtt: float) -> str:
    """A number, and for variants other than TCP its ratio to one TCP connection; targets apply to
    Landbridge's variants."""
    if way.startswith("tcp"):
        return shown(Cell(cell.rate, cell.bound))
    target = target_of(way, loss, rtt)
    ours, tcp = (it.rate if it.rate is not None else it.bound for it in (cell, base))
    if not ours or not tcp:
        return shown(cell)
    ratio, notes = ours / tcp, []
    # The ratio of two bounds has no meaning.
    if cell.rate is not None:
        notes.append(f"{'' if base.rate is not None else '> '}{ratio:.2f}x")
    if ratio < target:
        # If TCP has only a bound, the true ratio may be larger.
        notes.append(f"{'missed' if base.rate is not None else 'not shown'}: {target}")
    return shown(cell) + (f" ({', '.join(notes)})" if notes else "")


def target_of(way: str, loss: str, rtt: float) -> float:
    if "congestion" not in VARIANTS[way][1]:
        return 0.0
    return TARGET_QUIET if loss == "0 %" else TARGET_LOSSY if (loss, rtt) == ("1 %", 10) else 0.0


def picture(result: dict) -> str:
    """The picture for the first size: a panel for each round trip, a group for each loss."""
    cases = [tuple(case) for case in result["cases"]]
    trips = list(dict.fromkeys(rtt for _, rtt in cases))
    panels = [dots.Panel(f"round trip {rtt:g} ms", "MB/s") for rtt in trips]
    groups = []
    for loss in dict.fromkeys(loss for loss, _ in cases):
        at = [cases.index((loss, rtt)) for rtt in trips]
        # A rate of zero has no position on a logarithmic axis.
        rows = [
            dots.Row(VARIANTS[way][0], [found[i][0][0] or None for i in at], "congestion" in VARIANTS[way][1])
            for way, found in result["cells"].items()
        ]
        groups.append(dots.Group(f"{loss} loss", rows))
    size = result["sizes"][0] >> 20
    notes = ["An emulated link of 1 Gbit/s; higher is better.", "Filled: ours over UDP. –: not one round in its time."]
    return dots.chart(f"Messages of {size} MiB there and back on a lossy link", notes, panels, groups)


def quick() -> dict:
    return measure(1, QUICK_LOSSES, QUICK_ROUND_TRIPS_MS)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="no loss and 1 %%, round trips of 10 ms")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all cells of a round")
    parser.add_argument("--loss", default="0,0.1,1,5", help="per cent, with commas")
    parser.add_argument("--rtt", default=",".join(map(str, ROUND_TRIPS_MS)), help="milliseconds, with commas")
    parser.add_argument("--ways", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the jobs")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    wanted = [f"{share} %" for share in options.loss.split(",")]
    trips = [float(trip) for trip in options.rtt.split(",")]
    if options.quick:
        wanted, trips = QUICK_LOSSES, QUICK_ROUND_TRIPS_MS
    chosen = dict(word.split("=", 1) for word in options.set)
    asked = options.ways.split(",")
    sys.exit(
        labs.main(
            lambda: section(measure(max(options.rounds, 1), wanted, trips, asked, chosen, options.minutes))
        )
    )
