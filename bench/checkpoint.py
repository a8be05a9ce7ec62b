#!/usr/bin/env python3
"""The cost of checkpoints: how long a rank stands still, and how much a program slows down.

    bench/checkpoint.py                 all parts, 20 minutes
    bench/checkpoint.py --quick         one round, fewer sizes
    bench/checkpoint.py pause cost      only these parts

pause: a rank that holds a given amount of random memory polls for messages all the time, and prints
each time that it stood still: once for each of its checkpoints, which are taken every three
seconds.
cost: the elapsed time of a heat equation on four ranks with `--recover --checkpoint 30s` and with
`--recover` alone; the two variants take turns.

Needs CRIU (scripts/criu.py).
"""

import json
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import labs  # noqa: E402
import parts as parts_of  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths, process  # noqa: E402

ROUNDS = 5
# Sizes of the random memory in 10^6 bytes.
SIZES = (0, 100, 400)
EVERY_S, IMAGES = 3, 6
STEPS = 72_000
LIMIT_S = 400.0
PARTS = ("pause", "cost")
WITH, WITHOUT = "a checkpoint every 30 s", "no checkpoints"
SEALED = re.compile(r"^landbridge: checkpoint \d+ of rank 0: it stood still for (\d+) ms$", re.M)


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS, quick: bool = False) -> dict:
    """Writes build/results/bench-checkpoint.json; parts that are not measured now keep their
    results."""
    if not paths.CRIU.exists():
        raise labs.Failed(f"{paths.CRIU} is not there (make criu)")
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-checkpoint.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    if "pause" in parts:
        result["pause"] = {str(size): pauses(size) for size in (SIZES[::2] if quick else SIZES)}
    if "cost" in parts:
        result["cost"] = in_turns(rounds, STEPS // 3 if quick else STEPS)
    result |= {"rounds": rounds, "stamp": stamp.now()}
    file.write_text(json.dumps(result, indent=1))
    return result


def run(ranks: int, words: list, program: list) -> tuple[str, float]:
    """Runs a job: its output, and its elapsed time in seconds."""
    words = ["--recover", "--verbose", "--set", f"criu={paths.CRIU}", *words]
    python = str(paths.venv("mpich") / "bin" / "python")
    command = [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *words, "--", python, *map(str, program)]
    began = time.monotonic()
    finished = process.run(command, LIMIT_S, {})
    if not finished.ok:
        raise labs.Failed(f"{finished.why or finished.code}: {process.tail(finished.output, 4)}")
    return finished.output, time.monotonic() - began


def pauses(megabytes: int) -> dict:
    """Milliseconds for which the rank stood still, by its own clock, and for which CRIU worked;
    bytes of a checkpoint image."""
    program = [paths.ROOT / "tests" / "system" / "programs" / "steady.py", "--megabytes", megabytes]
    # The first checkpoint is taken after one interval.
    program += ["--seconds", EVERY_S * (IMAGES + 2)]
    said, _ = run(2, ["--checkpoint", f"{EVERY_S}s"], program)
    criu = [float(text) for text in SEALED.findall(said)]
    # The longest pauses are checkpoints, as many as there were.
    stood = sorted((float(text) for text in re.findall(r"^stood: (\S+)$", said, re.M)), reverse=True)[: len(criu)]
    if len(stood) < IMAGES - 1:
        raise labs.Failed(f"{len(criu)} images of {megabytes} MB were taken, and the rank stood still {len(stood)} times")
    print(f"pause: {megabytes} MB: {', '.join(f'{value:.0f}' for value in stood)} ms; CRIU {statistics.median(criu):.0f} ms", flush=True)
    return {"stood": stood, "criu": criu}


def in_turns(rounds: int, steps: int) -> dict:
    """Seconds, by variant and round."""
    ways = {WITH: ["--checkpoint", "30s"], WITHOUT: []}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    taken = 0
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            said, seconds = run(4, ways[name], [paths.ROOT / "examples" / "heat.py", "--steps", steps])
            taken += len(re.findall(r"^landbridge: checkpoint \d+ of rank", said, re.M))
            samples[name].append(seconds)
            print(f"cost: round {number + 1} of {rounds}: {name}: {seconds:.1f} s", flush=True)
    return {"samples": samples, "images": taken / rounds}


# --- the document


def section(result: dict) -> str:
    lines = ["## Checkpoint images: what they cost", "", *stamp.lines(result)]
    if "pause" in result:
        lines += ["", *pause_lines(result["pause"])]
    if "cost" in result:
        lines += ["", *cost_lines(result["cost"], result["rounds"])]
    return "\n".join(lines) + "\n"


def pause_lines(part: dict) -> list[str]:
    what = (
        "**How long a rank stands still** for a checkpoint, by its own clock: medians (longest), of at least "
        f"{IMAGES - 1} checkpoints."
    )
    lines = [prose.wrapped(what), ""]
    lines += ["| random memory | rank stood still, ms | of that CRIU, ms |", "|--:|--:|--:|"]
    middle = {int(size): statistics.median(row["stood"]) for size, row in part.items()}
    for size, row in part.items():
        lines.append(f"| {size} MB | {middle[int(size)]:.0f} ({max(row['stood']):.0f}) | {statistics.median(row['criu']):.0f} |")
    small, large = min(middle), max(middle)
    if small < large:
        each = (middle[large] - middle[small]) / (large - small) * 100
        lines += ["", f"A checkpoint takes {middle[small]:.0f} ms, and {each:.0f} ms more for each 100 MB."]
    return lines


def cost_lines(part: dict, rounds: int) -> list[str]:
    middle = {name: statistics.median(row) for name, row in part["samples"].items()}
    best = {name: min(row) for name, row in part["samples"].items()}
    what = (
        f"**Cost of a checkpoint every 30 s**: heat equation, 4 ranks, {stamp.rounds(rounds)} in turns, {part['images']:.1f} "
        f"checkpoints of ranks in each run (of 4 ranks, in {middle[WITH]:.0f} s): {middle[WITH]:.1f} s with, "
        f"{middle[WITHOUT]:.1f} s without: "
        f"{middle[WITH] / middle[WITHOUT]:.3f} times as long (best rounds {best[WITH] / best[WITHOUT]:.3f})."
    )
    return [prose.wrapped(what)]


if __name__ == "__main__":
    sys.exit(parts_of.main(__doc__, ROUNDS, PARTS, measure, section))
