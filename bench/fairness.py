#!/usr/bin/env python3
"""How Landbridge's UDP path shares a link with a TCP flow.

    bench/fairness.py                       six pairs, two rounds; seven minutes
    bench/fairness.py --quick               UDP and TCP with CUBIC, one round of 8 s; one minute
    bench/fairness.py --rounds 1 --seconds 10 --pairs bbr/cubic,tcp-cubic/cubic

Two hosts joined by an emulated link of 1 Gbit/s with a round trip of 10 ms and a queue of one round
trip. From one to the other, a rank sends 1 MiB messages with `udp=on`, and one TCP connection
(bench/bulk.py) sends at full rate. Both are counted over the same span, after both have run for a
while. The flows take turns in beginning first. As yardsticks, pairs of TCP connections with two
kinds of congestion control are measured, too. Reported are the rate of each flow, and Jain's index
of the two: 1 if both had the same rate, 1/2 if one had all (R. Jain, D. Chiu, W. Hawe: A
Quantitative Measure of Fairness, DEC-TR-301, 1984).
"""

import argparse
import json
import re
import shlex
import statistics
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import labs  # noqa: E402
import prose  # noqa: E402
import stall  # noqa: E402
import stamp  # noqa: E402
from support import paths, svg  # noqa: E402

LINK_MB_S = 125.0
ROUNDS, SECONDS, QUICK_SECONDS = 2, 20.0, 8.0
# Seconds between the begin of the first flow and of the second, and seconds between the begin of
# both and the counted span.
BETWEEN_S, WARM_UP_S = 2.0, 4.0
# Seconds from a job's start to its first message, and largest number of seconds of its end.
START_S, END_S = 5.0, 10.0
SIZE, DEPTH = 1 << 20, 8
# Largest payload of a UDP datagram; the segments of one call count as one.
DATAGRAM_BYTES = 65_507
ENTRY = struct.Struct("qq")
BULK = Path(__file__).resolve().parent / "bulk.py"
# Address of the receiving host.
TARGET, PORTS = "10.1.0.11", (7001, 7002)
LAB = """name = "fairness"
[[site]]
name = "near"
hosts = 2
subnet = "10.1.0.0/24"
lan = { rate = "1 Gbit/s", delay = "5 ms", queue = "1221 KiB" }
"""


@dataclass(frozen=True)
class Pair:
    """Congestion control of both flows. `ours`: the first flow is Landbridge's UDP path; else it is
    TCP too."""

    first: str
    tcp: str
    ours: bool = True

    @property
    def name(self) -> str:
        return f"{'' if self.ours else 'tcp-'}{self.first}/{self.tcp}"

    @property
    def names(self) -> tuple[str, str]:
        return f"{'UDP' if self.ours else 'TCP'}, {self.first.upper()}", f"TCP, {self.tcp.upper()}"


PAIRS = [Pair(first, tcp) for first in ("bbr", "cubic") for tcp in ("cubic", "bbr")]
PAIRS += [Pair("cubic", "cubic", False), Pair("bbr", "cubic", False)]


def measure(rounds: int = ROUNDS, seconds: float = SECONDS, pairs=tuple(PAIRS), settings=None) -> dict:
    """Writes build/results/bench-fairness.json: MB/s of both flows, for each pair and round that
    ran."""
    samples: list[list[list[float]]] = [[] for _ in pairs]
    failed = ["" for _ in pairs]
    for turn in range(rounds):
        for number, pair in enumerate(pairs):
            print(f"fairness: round {turn + 1} of {rounds}: {' beside '.join(pair.names)}: ", end="", flush=True)
            try:
                rates = one_run(pair, seconds, turn % 2 == 1, settings or {})
            except labs.Failed as error:
                failed[number] = str(error)
                print(f"does not run: {error}", flush=True)
                continue
            samples[number].append(rates)
            print(f"{rates[0]:.1f} and {rates[1]:.1f} MB/s, index {jain(rates):.3f}", flush=True)
    if not any(samples):
        raise labs.Failed(f"no pair runs: {failed[0]}")
    result = {
        "pairs": [[*pair.names, pair.ours] for pair in pairs],
        "samples": samples,
        "medians": [[statistics.median(column) for column in zip(*found)] for found in samples],
        "indices": [[jain(rates) for rates in found] for found in samples],
        "failed": failed,
        "rounds": rounds,
        "seconds": seconds,
        "settings": settings or {},
        "stamp": stamp.now(),
    }
    (paths.RESULTS / "bench-fairness.json").write_text(json.dumps(result, indent=1))
    return result


def jain(rates) -> float:
    squares = len(rates) * sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / squares if squares else 0.0


def one_run(pair: Pair, seconds: float, is_tcp_first: bool, settings: dict[str, str]) -> list[float]:
    lasts_s = BETWEEN_S + START_S + WARM_UP_S + seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "lab.toml"
        file.write_text(LAB)
        flows = [first_flow(pair, folder, lasts_s, settings), give(pair.tcp, 0, lasts_s)]
        begins = flows[::-1] if is_tcp_first else flows
        takers = " & ".join(take(folder, number) for number in range(1 if pair.ours else 2))
        # The lab ends the processes that still run.
        script = f"{takers} & sleep 0.5; {begins[0]} & sleep {BETWEEN_S}; {begins[1]} & wait"
        with labs.Background(file, labs.name("fairness"), ["sh", "-c", script]) as job:
            done = lambda: "datagrams" in job.log.read_text(errors="replace")  # noqa: E731
            if not job.until(done, lasts_s + END_S):
                raise labs.Failed(f"the TCP flow does not end: {job.tail()}")
            log = job.log.read_text(errors="replace")
        tcp = bulk_notes(folder / "bulk-0")
        ours = [(at, SIZE) for at in stall.read(folder / "0")] if pair.ours else bulk_notes(folder / "bulk-1")
    rates = counted(ours, tcp, seconds, log)
    if pair.ours and datagrams(log) * DATAGRAM_BYTES < rates[0] * seconds * 1e6:
        raise labs.Failed(f"{' beside '.join(pair.names)}: the messages did not go over UDP")
    return rates


def first_flow(pair: Pair, folder: Path, lasts_s: float, settings: dict[str, str]) -> str:
    if not pair.ours:
        return give(pair.first, 1, lasts_s)
    program = [paths.python("mpich"), stall.FLOW, "--size", SIZE, "--depth", DEPTH, "--notes", folder]
    return shlex.join(labs.job(2, 1, {"udp": "on", "congestion": pair.first} | settings, program))


def take(folder: Path, number: int) -> str:
    words = [paths.LANDBRIDGE, "lab", "on", "near-1", "--", sys.executable, BULK, "take"]
    return shlex.join(map(str, [*words, f"{TARGET}:{PORTS[number]}", folder / f"bulk-{number}"]))


def give(kind: str, number: int, lasts_s: float) -> str:
    words = [paths.LANDBRIDGE, "lab", "on", "near-2", "--", sys.executable, BULK, "give"]
    return shlex.join(map(str, [*words, f"{TARGET}:{PORTS[number]}", kind, lasts_s]))


def bulk_notes(file: Path) -> list[tuple[int, int]]:
    data = file.read_bytes() if file.exists() else b""
    return list(ENTRY.iter_unpack(data[: len(data) // ENTRY.size * ENTRY.size]))


def datagrams(log: str) -> int:
    return max(map(int, re.findall(r"^datagrams (\d+)$", log, re.M)), default=0)


def counted(one, other, seconds: float, log: str) -> list[float]:
    """MB/s of both flows in the span that begins when both have run for a while."""
    if not one or not other:
        raise labs.Failed(f"nothing came of one of the flows: {log[-500:]}")
    begin = max(one[0][0], other[0][0]) + WARM_UP_S * 1e9
    end = begin + seconds * 1e9
    # A starved flow may have received its last bytes long before.
    if max(one[-1][0], other[-1][0]) < end:
        raise labs.Failed(f"both ended too early: {log[-500:]}")
    return [sum(size for at, size in notes if begin < at <= end) / seconds / 1e6 for notes in (one, other)]


def section(result: dict) -> str:
    has_comparison = any(not ours for _, _, ours in result["pairs"])
    lines = [
        "## Beside a TCP flow on the same link",
        "",
        prose.wrapped(
            "Two flows from one host to another share an emulated link of 1 Gbit/s (125 MB/s with all headers) with a round "
            f"trip of 10 ms and a queue of one round trip. Both are counted over the same {result['seconds']:g} s; "
            f"{stamp.rounds(result['rounds'])}, the flows begin in turns; medians. The UDP flow is messages of 1 MiB of a "
            "rank. Jain's index is 1 if both flows have the same share, and 0.5 if one has everything (Jain, Chiu and Hawe "
            f"1984).{' Pairs of two TCP flows are for comparison.' if has_comparison else ''}"
        ),
        *stamp.lines(result),
        "",
        "| first flow | second flow | first, MB/s | second, MB/s | both, share of the link | Jain's index | of each round |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for (first, second, ours), rates, indices in zip(result["pairs"], result["medians"], result["indices"]):
        name = f"**{first}**" if ours else first
        if not rates:
            lines.append(f"| {name} | {second} | does not run | | | | |")
            continue
        each = ", ".join(f"{index:.2f}" for index in indices)
        share = f"{sum(rates) / LINK_MB_S:.0%}"
        middle = statistics.median(indices)
        lines.append(f"| {name} | {second} | {rates[0]:.1f} | {rates[1]:.1f} | {share} | {middle:.2f} | {each} |")
    for (first, second, _), why in zip(result["pairs"], result["failed"]):
        if why:
            lines += ["", f"{first} beside {second}, at least once: {why.splitlines()[0]}."]
    return "\n".join(lines) + "\n"


def picture(result: dict) -> str:
    groups = [
        (f"{first} | {second}", {"first flow": rates[0], "second flow": rates[1]})
        for (first, second, _), rates in zip(result["pairs"], result["medians"])
        if rates
    ]
    return svg.bars("Two flows on one link of 1 Gbit/s, 10 ms", groups, "MB/s", [(LINK_MB_S / 2, "half")])


def quick() -> dict:
    return measure(1, QUICK_SECONDS, [pair for pair in PAIRS if pair.ours and pair.tcp == "cubic"])


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that are counted")
    parser.add_argument("--pairs", default=",".join(pair.name for pair in PAIRS), help="with commas")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the jobs")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    wanted = [pair for pair in PAIRS if pair.name in options.pairs.split(",")]
    chosen = dict(word.split("=", 1) for word in options.set)
    sys.exit(
        labs.main(
            lambda: section(
                quick() if options.quick else measure(max(options.rounds, 1), options.seconds, wanted, chosen)
            )
        )
    )
