#!/usr/bin/env python3
"""The gain of a network path in addition to shared memory between two ranks of one node.

    bench/second_path.py                     five rounds, five minutes
    bench/second_path.py --quick             one round

IMB Uniband on one host of labs/two-rails.toml, which has a second interface, so that a TCP
connection to itself is possible in addition to the ring in shared memory. One pair: over shared
memory alone, over TCP alone, and with both paths up, where each message takes the path that
delivers it first. Two pairs at the same time, which is the most that two paths can give together:
both over shared memory, one over each, both over TCP; the sum of both pairs counts. Variants take
turns within each round.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import imb  # noqa: E402
import labs  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths, svg  # noqa: E402

ROUNDS = 5
KIB, MIB = 1 << 10, 1 << 20
# Repetitions for each size, of 8 windows of 64 messages.
REPETITIONS = {64 * KIB: 40, MIB: 3, 4 * MIB: 1}
SIZES = list(REPETITIONS)
LIMIT_S = 120.0
# Smallest gain that justifies a second path in addition to the ring.
WORTH = 1.1
NO_RAILS = {"rails_exclude": "0.0.0.0/0"}
# Uniband pairs rank N with N + 2. A rank with a node name of its own shares no memory with the
# others.
APART = 'case $LANDBRIDGE_INDEX in {ranks}) export LANDBRIDGE_NODE="apart-$LANDBRIDGE_INDEX";; esac; exec "$@"'


@dataclass(frozen=True)
class Variant:
    """A variant. `apart`: a shell pattern of the ranks that share no memory with others."""

    name: str
    ranks: int
    settings: tuple[tuple[str, str], ...] = tuple(NO_RAILS.items())
    apart: str = "none"


ALONE, TCP, BOTH = "one pair, shared memory", "one pair, TCP", "one pair, both paths"
TWO_SHM, TWO_BOTH, TWO_TCP = "two pairs, shared memory", "two pairs, one on each", "two pairs, TCP"
VARIANTS = [
    Variant(ALONE, 2),
    Variant(TCP, 2, apart="*"),
    Variant(BOTH, 2, settings=()),
    Variant(TWO_SHM, 4),
    Variant(TWO_BOTH, 4, apart="1|3"),
    Variant(TWO_TCP, 4, apart="*"),
]


def measure(rounds: int = ROUNDS) -> dict:
    """Writes build/results/bench-second-path.json: MB/s by variant and size, for each round."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    samples: dict[str, list[list[float]]] = {way.name: [] for way in VARIANTS}
    for number in range(rounds):
        # The order rotates, so that the predecessor of a variant has no influence.
        for way in VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]:
            print(f"second path: round {number + 1} of {rounds}: {way.name}: ", end="", flush=True)
            samples[way.name].append(row := one_run(way))
            print(", ".join(f"{rate:.0f}" for rate in row), "MB/s", flush=True)
    result = {
        "sizes": SIZES,
        "rounds": rounds,
        "samples": samples,
        "medians": {way: [statistics.median(c) for c in zip(*rows)] for way, rows in samples.items()},
        "cores": os.cpu_count(),
        "stamp": stamp.now(),
    }
    (paths.RESULTS / "bench-second-path.json").write_text(json.dumps(result, indent=1))
    return result


def one_run(way: Variant) -> list[float]:
    row = []
    for size, times in REPETITIONS.items():
        lengths = paths.RESULTS / "second-path-lengths"
        lengths.write_text(f"{size}\n")
        bounds = ["-npmin", str(way.ranks), "-msglen", str(lengths), "-iter", str(times), "-iter_policy", "off"]
        program = ["sh", "-c", APART.format(ranks=way.apart), "sh", str(imb.IMB), "Uniband", *bounds]
        job = labs.job(way.ranks, way.ranks, dict(way.settings), program)
        output = labs.run(labs.TWO_RAILS, labs.name("second-path"), job, LIMIT_S)
        table = imb.parse(output)
        if size not in table.rows:
            raise labs.Failed(f"{way.name}: no table: {output[-400:]}")
        row.append(table.bandwidth(size))
    return row


def section(result: dict) -> str:
    titles = [f"{size_name(size)}, MB/s" for size in result["sizes"]]
    lines = [
        "## A network path beside shared memory",
        "",
        prose.wrapped(
            f"IMB-MPI1 Uniband on one host with {result['cores']} processors, {stamp.rounds(result['rounds'])}, medians; for "
            'two pairs the sum of both. "Both paths" of one pair: a connection to another address of the same host, together '
            "with the ring."
        ),
        *stamp.lines(result),
        "",
        f"| way | {' | '.join(titles)} |",
        "|---|" + "--:|" * len(titles),
    ]
    medians = result["medians"]
    lines += [f"| {way} | {' | '.join(f'{rate:.0f}' for rate in row)} |" for way, row in medians.items()]
    gains = []
    for over, base in ((BOTH, ALONE), (TWO_BOTH, TWO_SHM)):
        ratios = [rate / other for rate, other in zip(medians[over], medians[base])]
        gains += ratios
        lines.append(f"| **{over} / {base}** | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    verdict = "pays" if max(gains) >= WORTH else "does not pay"
    summary = (
        f"A second path would be worth its cost with {WORTH} times the bandwidth. The best of these ratios is "
        f"{max(gains):.2f}, so a second path {verdict}."
    )
    lines += ["", prose.wrapped(summary)]
    return "\n".join(lines) + "\n"


def picture(result: dict) -> str:
    groups = []
    for number, size in enumerate(result["sizes"]):
        groups.append((size_name(size), {way: row[number] for way, row in result["medians"].items()}))
    return svg.bars("One node: shared memory, TCP beside it", groups, "MB/s", [])


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one round")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    sys.exit(labs.main(lambda: section(measure(1 if options.quick else max(options.rounds, 1)))))
