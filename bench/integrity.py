#!/usr/bin/env python3
"""The cost of end-to-end checksums and reliability, over TCP, shared memory and an emulated link.

    bench/integrity.py                      five rounds, six minutes
    bench/integrity.py --rounds 2 --paths tcp
    bench/integrity.py --quick              one round, a minute and a half
    bench/integrity.py --before DIR         also a build without reliability (its target/release)

IMB PingPong and Uniband with MPICH: on one node over TCP with integrity=crc32c, sum and off, over
shared memory with integrity_shm on and off, and over TCP between two hosts on an emulated link of 1
Gbit/s (the first rail of labs/two-rails.toml). Over loopback, memory to memory at a multiple of any
such link's rate, every instruction counts, and no real network behaves so. Variants take turns
within each round. Reported are ratios to "off" and to "before", of the medians and of the best
rounds. A build from before reliability is that of commit 6bb5831.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import imb  # noqa: E402
import labs  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths, process, svg  # noqa: E402

ROUNDS = 5
# Latency at most, bandwidth at least, as a multiple of the variant without checksums.
TARGET = {"us": 1.05, "MB/s": 0.97}
KIB, MIB = 1 << 10, 1 << 20
PINGPONG = ((8, "us"), (KIB, "us"), (64 * KIB, "MB/s"), (MIB, "MB/s"), (4 * MIB, "MB/s"))
UNIBAND = ((64 * KIB, "MB/s"), (MIB, "MB/s"), (4 * MIB, "MB/s"))
# Each size runs for this time, whatever the number of bytes: IMB alone would do 10 turns of 4 MiB.
PINGPONG_BOUNDS = ("-iter", "100000,2000000000", "-time", "0.4")
# Repetitions for each size, of 8 windows of 64 messages. With 4 MiB messages that is 18 s on the
# emulated link.
REPETITIONS = {64 * KIB: 40, MIB: 3, 4 * MIB: 1}
LINK_REPETITIONS = {64 * KIB: 8, MIB: 1}
LIMIT_S = 60.0
BEFORE, OFF = "before", "off"
TCP, SHM, LINK = "tcp", "shm", "link"
PLACES = {
    TCP: "TCP over loopback",
    SHM: "Shared memory",
    LINK: "TCP over an emulated link of 1 Gbit/s, 50 us one way",
}
# One of the two rails of the lab.
LINK_SETTINGS = (("paths", "tcp"), ("rails", "10.1.0.0/24"))
COLUMNS = [("PingPong", *column) for column in PINGPONG] + [("Uniband", *column) for column in UNIBAND]


@dataclass(frozen=True)
class Variant:
    """A variant. `check` is its name in the tables; `launcher` loads the provider in its own
    folder."""

    path: str
    check: str
    settings: tuple[tuple[str, str], ...]
    launcher: Path | None = None  # `paths.LANDBRIDGE`

    @property
    def name(self) -> str:
        return f"{self.path}, {self.check}"


VARIANTS = [
    Variant(TCP, "crc32c", (("integrity", "crc32c"),)),
    Variant(TCP, "sum", (("integrity", "sum"),)),
    Variant(TCP, OFF, (("integrity", "off"),)),
    Variant(SHM, "crc32c", (("integrity_shm", "on"),)),
    Variant(SHM, OFF, (("integrity_shm", "off"),)),
    Variant(LINK, "crc32c", (("integrity", "crc32c"),)),
    Variant(LINK, "sum", (("integrity", "sum"),)),
    Variant(LINK, OFF, (("integrity", "off"),)),
]


def columns_of(path: str) -> list[tuple[str, int, str]]:
    return [it for it in COLUMNS if path != LINK or it[0] == "PingPong" or it[1] in LINK_REPETITIONS]


def measure(rounds: int = ROUNDS, only: tuple[str, ...] = tuple(PLACES), before: Path | None = None) -> dict:
    """Writes build/results/bench-integrity.json: a row of its path's columns for each variant and
    round."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    ways = [way for way in VARIANTS if way.path in only]
    if before:
        launcher = earlier_launcher(before)
        ways += [replace(w, check=BEFORE, settings=(), launcher=launcher) for w in ways if w.check == OFF]
    samples: dict[str, list[list[float]]] = {way.name: [] for way in ways}
    for number in range(rounds):
        # The order rotates, so that the predecessor of a variant has no influence.
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            print(f"integrity: round {number + 1} of {rounds}: {way.name}", flush=True)
            samples[way.name].append(tried(way))
    result = {
        "columns": {path: columns_of(path) for path in only},
        "rounds": rounds,
        "samples": samples,
        "medians": {way: [statistics.median(c) for c in zip(*rows)] for way, rows in samples.items()},
        "best": {way.name: best(samples[way.name], columns_of(way.path)) for way in ways},
        "before": str(before.name) if before else "",
        "stamp": stamp.now(),
    }
    (paths.RESULTS / "bench-integrity.json").write_text(json.dumps(result, indent=1))
    return result


def earlier_launcher(folder: Path) -> Path:
    """The launcher of the build in `folder`, which uses the relay and the provider of its own
    folder."""
    needed = [folder / name for name in (paths.LANDBRIDGE.name, "landbridge-relay", paths.PROVIDER.name)]
    for file in needed:
        if not file.exists():
            raise labs.Failed(f"{file} is not there")
    return needed[0].resolve()


def tried(way: Variant) -> list[float]:
    """Runs a variant, and repeats the run once if IMB omits a table because its processes had no
    processor for a while."""
    try:
        return one_run(way)
    except labs.Failed as failed:
        print(f"  once more: {failed}", flush=True)
        return one_run(way)


def one_run(way: Variant) -> list[float]:
    row = table(way, "PingPong", [size for size, _ in PINGPONG], PINGPONG_BOUNDS)
    values = [row.latency_us(size) if unit == "us" else row.bandwidth(size) for size, unit in PINGPONG]
    repetitions = LINK_REPETITIONS if way.path == LINK else REPETITIONS
    for size, times in repetitions.items():
        bounds = ("-iter", str(times), "-iter_policy", "off")
        values.append(table(way, "Uniband", [size], bounds).bandwidth(size))
    return values


def table(way: Variant, benchmark: str, sizes: list[int], bounds: tuple[str, ...]) -> imb.Table:
    lengths = paths.RESULTS / "integrity-lengths"
    lengths.write_text("\n".join(map(str, sizes)) + "\n")
    program = [str(imb.IMB), benchmark, "-npmin", "2", "-msglen", str(lengths), *bounds]
    if way.path == LINK:
        # An earlier build takes no settings, but has only one rail.
        settings = {} if way.check == BEFORE else dict(LINK_SETTINGS + way.settings)
        job = [str(way.launcher or paths.LANDBRIDGE), *labs.job(2, 1, settings, program)[1:]]
        output = labs.run(labs.TWO_RAILS, labs.name("integrity"), job, LIMIT_S)
    else:
        job = [str(way.launcher or paths.LANDBRIDGE), *labs.job(2, 2, dict(way.settings), program)[1:]]
        finished = process.run(job, LIMIT_S, labs.environment() | {"LANDBRIDGE_PATHS": way.path})
        output = finished.output
        if not finished.ok:
            why = finished.why or finished.code
            raise labs.Failed(f"{way.name}: {benchmark}: {why}: {process.tail(output, 4)}")
    found = imb.parse(output)
    if not set(sizes) <= set(found.rows):
        raise labs.Failed(f"{way.name}: {benchmark}: no table: {process.tail(output, 4)}")
    return found


def best(rows: list[list[float]], columns) -> list[float]:
    return [(min if unit == "us" else max)(c) for c, (_, _, unit) in zip(zip(*rows), columns)]


def section(result: dict) -> str:
    what = (
        f"IMB-MPI1 with 2 ranks, {stamp.rounds(result['rounds'])}, medians. Ratios compare a configuration with \"off\" or "
        '"before": below 1 is better for times, above 1 for bandwidth. '
        f"Targets: {TARGET['us']} and {TARGET['MB/s']}."
    )
    if result["before"]:
        what += ' "Before" is commit 6bb5831, which had neither checksums nor retransmission.'
    lines = ["## What reliability and the end-to-end check cost", "", prose.wrapped(what), *stamp.lines(result)]
    for path in result["columns"]:
        lines += ["", f"{PLACES[path]}:", "", *path_table(result, path)]
    return "\n".join(lines) + "\n"


def path_table(result: dict, path: str) -> list[str]:
    """The variants of a path, then the ratios of each that has a checksum to the one without, and
    of "off" to "before"."""
    columns = result["columns"][path]
    titles = [f"{kind} {size_name(size)}, {unit}" for kind, size, unit in columns]
    lines = [f"| way | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    medians = {way: row for way, row in result["medians"].items() if way.split(", ")[0] == path}
    lines += [f"| {way} | {' | '.join(f'{value:.2f}' for value in row)} |" for way, row in medians.items()]
    for way in medians:
        check = way.split(", ")[1]
        for base in (OFF, BEFORE):
            other = f"{path}, {base}"
            if check in (base, BEFORE) or other not in medians:
                continue
            for title, kind in (("", "medians"), (", best rounds", "best")):
                cells = ratios(columns, result[kind][way], result[kind][other])
                lines.append(f"| **{way} / {base}{title}** | {' | '.join(cells)} |")
    return lines


def ratios(columns, ours: list[float], base: list[float]) -> list[str]:
    cells = []
    for value, other, (_, _, unit) in zip(ours, base, columns):
        ratio = value / other
        met = ratio <= TARGET[unit] if unit == "us" else ratio >= TARGET[unit]
        cells.append(f"{ratio:.2f}" + ("" if met else f" (missed: {TARGET[unit]})"))
    return cells


def picture(result: dict) -> str:
    """Speed relative to the variant without a checksum: bars below the line show the cost."""
    groups = []
    for number, (kind, size, unit) in enumerate(COLUMNS):
        values = {}
        for way, row in result["medians"].items():
            path, check = way.split(", ")
            columns = [tuple(it) for it in result["columns"][path]]
            if check in (OFF, BEFORE) or (kind, size, unit) not in columns or f"{path}, {OFF}" not in result["medians"]:
                continue
            place = columns.index((kind, size, unit))
            base = result["medians"][f"{path}, {OFF}"][place]
            values[way] = base / row[place] if unit == "us" else row[place] / base
        groups.append((f"{kind} {size_name(size)} {'1/latency' if unit == 'us' else 'bandwidth'}", values))
    return svg.bars("Speed with the check, beside that without (higher is better)", groups, "", [(1.0, "off")])


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--paths", default=",".join(PLACES), help="tcp, shm, link, with commas")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--before", type=Path, metavar="DIR", help="an earlier build's target/release")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    chosen = tuple(options.paths.split(","))
    rounds = 1 if options.quick else max(options.rounds, 1)
    sys.exit(labs.main(lambda: section(measure(rounds, chosen, options.before))))
