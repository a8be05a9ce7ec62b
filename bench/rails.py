#!/usr/bin/env python3
"""The bandwidth of two rails together, against one of them alone.

    bench/rails.py                      three rounds, four minutes
    bench/rails.py --quick              one round, 64 KiB and 1 MiB; a minute
    bench/rails.py --rounds 1 --sizes 65536,1048576

IMB Uniband between two hosts of labs/two-rails.toml (1 Gbit/s each rail): over rail 0 alone, over
both, and over both with the second at a tenth. For comparison, plain TCP connections run in the
same lab, one on rail 0 and one on each rail at once: the emulator runs on the same processors as
the ranks. The variants take turns.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import imb  # noqa: E402
import labs  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths, svg  # noqa: E402

TARGET_BOTH, TARGET_SLOW = 1.95, 1.0
# The message size of the first target.
TARGET_SIZE = 1 << 20
SIZES = (64 << 10, 1 << 20, 4 << 20)
QUICK_SIZES = SIZES[:2]
ROUNDS = 3
LINK_MB_S = 125.0
# Uniband sends 8 windows of 64 messages for each requested repetition (the lab counts them). Bytes
# for each size, with one repetition at least: 2 s on one rail, with 4 MiB messages 18 s.
MESSAGES, VOLUME = 8 * 64, 256 << 20
TCP_S = 2
ALONE, BOTH, SLOW = "rail 0 alone", "both rails", "both, the second at a tenth"
TCP_ONE, TCP_BOTH = "TCP, rail 0", "TCP, both at once"
FIRST_RAIL = {"rails": "10.1.0.0/24"}
SLOWER = ["link", ".", "near-LAN1", "--rate", "100Mbit/s"]
# Seconds: a run of one variant takes 25 s on an idle machine.
LIMIT_S = 90.0


def measure(rounds: int = ROUNDS, sizes=SIZES, settings: dict[str, str] | None = None) -> dict:
    """Writes build/results/bench-rails.json: MB/s by variant and size, for each round."""
    settings, sizes = settings or {}, list(sizes)
    ours = str(paths.LANDBRIDGE)
    ways = {
        ALONE: jobs(sizes, FIRST_RAIL | settings),
        BOTH: jobs(sizes, settings),
        SLOW: [[ours, "lab", *SLOWER], *jobs(sizes, settings)],
    }
    samples: dict[str, list[list[float]]] = {way: [] for way in ways}
    tcp: dict[str, list[float]] = {TCP_ONE: [], TCP_BOTH: []}
    for number in range(rounds):
        for way, commands in ways.items():
            print(f"rails: round {number + 1} of {rounds}: {way}: ", end="", flush=True)
            output = labs.run(labs.TWO_RAILS, labs.name("rails"), labs.in_turn(commands), LIMIT_S)
            samples[way].append(row := bandwidths(output, sizes))
            print(", ".join(f"{rate:.0f}" for rate in row), "MB/s", flush=True)
        for way, hosts in ((TCP_ONE, ["near-2"]), (TCP_BOTH, ["near-2", "near-2-lan1"])):
            tcp[way].append(plain_tcp(hosts))
            print(f"rails: round {number + 1} of {rounds}: {way}: {tcp[way][-1]:.0f} MB/s", flush=True)
    result = {
        "sizes": sizes,
        "rounds": rounds,
        "samples": samples,
        "medians": {way: [statistics.median(c) for c in zip(*rows)] for way, rows in samples.items()},
        "best": {way: [max(c) for c in zip(*rows)] for way, rows in samples.items()},
        "tcp": {way: statistics.median(rates) for way, rates in tcp.items()},
        "settings": settings,
        "stamp": stamp.now(),
    }
    (paths.RESULTS / "bench-rails.json").write_text(json.dumps(result, indent=1))
    return result


def jobs(sizes: list[int], settings: dict[str, str]) -> list[list[str]]:
    """One job for each size: IMB has one number of repetitions for all sizes."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    words = []
    for size in sizes:
        lengths = paths.RESULTS / f"rails-lengths-{size}"
        lengths.write_text(f"{size}\n")
        turns = max(1, VOLUME // (MESSAGES * size))
        program = [str(imb.IMB), "Uniband", "-npmin", "2", "-msglen", str(lengths), "-warm_up", "off"]
        program += ["-iter", str(turns), "-iter_policy", "off"]
        words.append(labs.job(2, 1, settings, program))
    return words


def bandwidths(output: str, sizes: list[int]) -> list[float]:
    rows: dict[int, dict[str, float]] = {}
    for table in output.split("#bytes")[1:]:
        rows |= imb.parse("#bytes" + table).rows
    if not set(sizes) <= set(rows):
        raise labs.Failed(f"IMB printed no {set(sizes) - set(rows)}")
    return [rows[size]["Mbytes/sec"] for size in sizes]


def plain_tcp(hosts: list[str]) -> float:
    """MB/s of one TCP connection to each of `hosts` at once, together."""
    lab = f"{paths.LANDBRIDGE} lab"
    probes = " ".join(f"{lab} probe rate {host} --seconds {TCP_S} &" for host in hosts)
    # The lab ends the server.
    script = f"{lab} on near-2 -- {lab} probe serve & sleep 0.5; ({probes} wait)"
    output = labs.run(labs.TWO_RAILS, labs.name("rails"), ["sh", "-c", script], 30)
    rates = [float(rate) for rate in re.findall(r"mbit_per_s=([\d.]+)", output)]
    if len(rates) != len(hosts):
        raise labs.Failed(f"the TCP probes said: {output}")
    return sum(rates) / 8


def section(result: dict) -> str:
    sizes = result["sizes"]
    medians, best = result["medians"], result["best"]
    lines = [
        "## Two rails",
        "",
        prose.wrapped(
            f"IMB-MPI1 Uniband, 2 ranks, {stamp.rounds(result['rounds'])}, in `labs/two-rails.toml`: two rails of 1 Gbit/s "
            "(125 MB/s with all headers), emulated on the processors that run the ranks. MB/s, medians."
        ),
        *stamp.lines(result),
        "",
        f"| way | {' | '.join(f'{size >> 10} KiB' for size in sizes)} |",
        "|---|" + "--:|" * len(sizes),
    ]
    lines += [f"| {way} | {' | '.join(f'{rate:.1f}' for rate in row)} |" for way, row in medians.items()]
    for way, target in ((BOTH, TARGET_BOTH), (SLOW, TARGET_SLOW)):
        for title, values in (("", medians), (", best rounds", best)):
            cells = [
                verdict(ours / alone, target if way == SLOW or size == TARGET_SIZE else 0)
                for ours, alone, size in zip(values[way], values[ALONE], sizes)
            ]
            lines.append(f"| **{way} / alone{title}** | {' | '.join(cells)} |")
    one, both = result["tcp"][TCP_ONE], result["tcp"][TCP_BOTH]
    plain = (
        f"Plain TCP in the same lab carries {one:.1f} MB/s on rail 0, and {both:.1f} MB/s with a connection on each rail at "
        f"once, {both / one:.2f} times as much."
    )
    return "\n".join([*lines, "", prose.wrapped(plain)]) + "\n"


def picture(result: dict) -> str:
    groups = [
        (f"{size >> 10} KiB", {way: row[number] for way, row in result["medians"].items()})
        for number, size in enumerate(result["sizes"])
    ]
    groups.append(("plain TCP", dict(zip((ALONE, BOTH), result["tcp"].values()))))
    marks = [(LINK_MB_S, "one rail"), (2 * LINK_MB_S, "two")]
    return svg.bars("Two rails of 1 Gbit/s", groups, "MB/s", marks)


def verdict(ratio: float, target: float) -> str:
    return f"{ratio:.2f}x" + ("" if ratio >= target else f" (missed: {target})")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, with commas")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the jobs")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    chosen = dict(word.split("=", 1) for word in options.set)
    asked = [int(size) for size in options.sizes.split(",")]
    if options.quick:
        options.rounds, asked = 1, QUICK_SIZES
    sys.exit(labs.main(lambda: section(measure(max(options.rounds, 1), asked, chosen))))
