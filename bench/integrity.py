#!/usr/bin/env python3
"""What the end-to-end check and reliability cost, on one node over TCP and shared memory.

    bench/integrity.py                      five rounds, three minutes
    bench/integrity.py --rounds 2 --paths tcp
    bench/integrity.py --before DIR         also the provider in DIR, of a build without reliability

IMB PingPong and Uniband with MPICH: over TCP with integrity=crc32c, sum and off, over shared memory with
integrity_shm on and off. Ways take turns within each round. Reported are ratios to "off" and to "before", of the
medians and of the best rounds. A build from before reliability is that of commit 6bb5831.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import imb  # noqa: E402
import labs  # noqa: E402
import stamp  # noqa: E402
from support import paths, process  # noqa: E402

ROUNDS = 5
# Latency at most, bandwidth at least, in times of that without.
TARGET = {"us": 1.05, "MB/s": 0.97}
KIB, MIB = 1 << 10, 1 << 20
PINGPONG = ((8, "us"), (KIB, "us"), (64 * KIB, "MB/s"), (MIB, "MB/s"), (4 * MIB, "MB/s"))
UNIBAND = ((64 * KIB, "MB/s"), (MIB, "MB/s"), (4 * MIB, "MB/s"))
# Each size for so long, and no matter how many bytes: IMB alone would do 10 turns of 4 MiB.
PINGPONG_BOUNDS = ("-iter", "100000,2000000000", "-time", "0.4")
# Repetitions for each size, of 8 windows of 64 messages.
REPETITIONS = {64 * KIB: 40, MIB: 3, 4 * MIB: 1}
LIMIT_S = 60.0
BEFORE, OFF = "before", "off"
COLUMNS = [("PingPong", *column) for column in PINGPONG] + [("Uniband", *column) for column in UNIBAND]


@dataclass(frozen=True)
class Way:
    """`check` is what the tables call it; `launcher` brings the provider beside it."""

    path: str
    check: str
    settings: tuple[tuple[str, str], ...]
    launcher: Path = paths.LANDBRIDGE

    @property
    def name(self) -> str:
        return f"{self.path}, {self.check}"


WAYS = [
    Way("tcp", "crc32c", (("integrity", "crc32c"),)),
    Way("tcp", "sum", (("integrity", "sum"),)),
    Way("tcp", OFF, (("integrity", "off"),)),
    Way("shm", "crc32c", (("integrity_shm", "on"),)),
    Way("shm", OFF, (("integrity_shm", "off"),)),
]


def measure(rounds: int = ROUNDS, only: tuple[str, ...] = ("tcp", "shm"), before: Path | None = None) -> dict:
    """Writes build/results/bench-integrity.json: a row of COLUMNS for each way and round."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    with earlier_build(before) as launcher:
        ways = [way for way in WAYS if way.path in only]
        if launcher:
            ways += [replace(w, check=BEFORE, settings=(), launcher=launcher) for w in ways if w.check == OFF]
        samples: dict[str, list[list[float]]] = {way.name: [] for way in ways}
        for number in range(rounds):
            # The order turns: who comes after whom must not matter.
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                print(f"integrity: round {number + 1} of {rounds}: {way.name}", flush=True)
                samples[way.name].append(one_run(way))
    result = {
        "columns": COLUMNS,
        "rounds": rounds,
        "samples": samples,
        "medians": {way: [statistics.median(c) for c in zip(*rows)] for way, rows in samples.items()},
        "best": {way: best(rows) for way, rows in samples.items()},
        "before": str(before.name) if before else "",
        "stamp": stamp.now(),
    }
    (paths.RESULTS / "bench-integrity.json").write_text(json.dumps(result, indent=1))
    return result


@contextlib.contextmanager
def earlier_build(folder: Path | None):
    """A launcher beside the provider of `folder`; None without one."""
    if folder is None:
        yield None
        return
    provider = folder / paths.PROVIDER.name
    if not provider.exists():
        raise labs.Failed(f"{provider} is not there")
    with tempfile.TemporaryDirectory() as beside:
        # The launcher looks for the provider where it lies itself.
        shutil.copy2(paths.LANDBRIDGE, beside)
        shutil.copy2(provider, beside)
        yield Path(beside) / paths.LANDBRIDGE.name


def one_run(way: Way) -> list[float]:
    row = table(way, "PingPong", [size for size, _ in PINGPONG], PINGPONG_BOUNDS)
    values = [row.latency_us(size) if unit == "us" else row.bandwidth(size) for size, unit in PINGPONG]
    for size, _ in UNIBAND:
        bounds = ("-iter", str(REPETITIONS[size]), "-iter_policy", "off")
        values.append(table(way, "Uniband", [size], bounds).bandwidth(size))
    return values


def table(way: Way, benchmark: str, sizes: list[int], bounds: tuple[str, ...]) -> imb.Table:
    lengths = paths.RESULTS / "integrity-lengths"
    lengths.write_text("\n".join(map(str, sizes)) + "\n")
    program = [str(imb.IMB), benchmark, "-npmin", "2", "-msglen", str(lengths), *bounds]
    command = [str(way.launcher), *labs.job(2, 2, dict(way.settings), program)[1:]]
    finished = process.run(command, LIMIT_S, labs.environment() | {"LANDBRIDGE_PATHS": way.path})
    found = imb.parse(finished.output)
    if not finished.ok or not set(sizes) <= set(found.rows):
        why = finished.why or finished.code
        raise labs.Failed(f"{way.name}: {benchmark}: {why}: {process.tail(finished.output, 4)}")
    return found


def best(rows: list[list[float]]) -> list[float]:
    return [(min if unit == "us" else max)(c) for c, (_, _, unit) in zip(zip(*rows), COLUMNS)]


def section(result: dict) -> str:
    columns = [f"{kind} {size_name(size)}, {unit}" for kind, size, unit in result["columns"]]
    lines = [
        "## What reliability and the end-to-end check cost",
        "",
        f"IMB-MPI1 with 2 ranks on one node, {result['rounds']} rounds, medians. Ratios are of the way over that",
        '"off" or "before": below 1 is better for times, above 1 for bandwidth.',
    ]
    if result["before"]:
        lines.append('"Before" is commit 6bb5831, which had neither the check nor retransmission.')
    lines += [*stamp.lines(result), "", f"| way | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    medians = result["medians"]
    lines += [f"| {way} | {' | '.join(f'{value:.2f}' for value in row)} |" for way, row in medians.items()]
    for way in medians:
        path, check = way.split(", ")
        for base in (OFF, BEFORE):
            other = f"{path}, {base}"
            if check in (base, BEFORE) or other not in medians:
                continue
            for title, kind in (("", "medians"), (", best rounds", "best")):
                cells = ratios(result, result[kind][way], result[kind][other])
                lines.append(f"| **{way} / {base}{title}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratios(result: dict, ours: list[float], base: list[float]) -> list[str]:
    cells = []
    for value, other, (_, _, unit) in zip(ours, base, result["columns"]):
        ratio = value / other
        met = ratio <= TARGET[unit] if unit == "us" else ratio >= TARGET[unit]
        cells.append(f"{ratio:.2f}" + ("" if met else f" (missed: {TARGET[unit]})"))
    return cells


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--paths", default="tcp,shm", help="tcp, shm or both with a comma")
    parser.add_argument("--before", type=Path, metavar="DIR", help=f"holds {paths.PROVIDER.name} of an earlier build")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    chosen = tuple(options.paths.split(","))
    sys.exit(labs.main(lambda: section(measure(max(options.rounds, 1), chosen, options.before))))
