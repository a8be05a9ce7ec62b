#!/usr/bin/env python3
"""The cost of checkpoints: how long a rank stands still, and how much a program slows down.

    bench/checkpoint.py                 all parts, 20 minutes
    bench/checkpoint.py --quick         one round, fewer sizes
    bench/checkpoint.py pause cost      only these parts: pause, cost, release

pause: a rank that holds a given amount of random memory polls for messages all the time, and prints
each time that it stood still: once for each of its checkpoints, which are taken every three
seconds. With logs of the senders, and with the log of the relay.
cost: the elapsed time of a heat equation on four ranks with `--recover --checkpoint 5s` and with
`--recover` alone, with either log; the variants take turns.
release: bench/transpose.c, of which nearly all data are messages, with logs of the senders of at
most 256 MiB, which checkpoints release; beside the same without checkpoints in as much memory as the
logs take, and without `--recover`; the variants take turns.

Needs CRIU (scripts/criu.py).
"""

import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import compiled  # noqa: E402
import labs  # noqa: E402
import parts as parts_of  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
import warm  # noqa: E402
from support import paths, process  # noqa: E402

ROUNDS = 5
# Sizes of the random memory in 10^6 bytes.
SIZES = (0, 100, 400)
EVERY_S, IMAGES = 3, 6
STEPS = 72_000
LIMIT_S = 400.0
PARTS = ("pause", "cost", "release")
LOGS = {"logs of the senders": "sender", "log of the relay": "relay"}
INTERVAL = "5s"
KINDS = {"checkpoints": ["--checkpoint", INTERVAL], "no checkpoints": []}
# Of the part `release`: each rank sends 1 MiB four times in a step.
RELEASE_STEPS, RELEASE_MEMORY = 400, "256MiB"
RELEASED, ALL_KEPT, NONE = f"--recover, {RELEASE_MEMORY} for logs, a checkpoint every 2 s", "--recover, all kept", "without --recover"
# What the logs of `ALL_KEPT` take.
WARM_BYTES = 4 << 30
FULL = "memory for message logs is full"
SEALED = re.compile(r"^landbridge: checkpoint \d+ of rank 0: it stood still for (\d+) ms$", re.M)


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS, quick: bool = False) -> dict:
    """Writes build/results/bench-checkpoint.json; parts that are not measured now keep their
    results."""
    if not paths.CRIU.exists():
        raise labs.Failed(f"{paths.CRIU} is not there (make criu)")
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-checkpoint.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    # Results of earlier versions of this program have no stamp for each part.
    result = {part: kept[part] for part in PARTS if "stamp" in kept.get(part, {})}
    measures = {
        "pause": lambda: {"logs": {name: {str(size): pauses(size, log) for size in (SIZES[::2] if quick else SIZES)} for name, log in LOGS.items()}},
        "cost": lambda: costs(rounds, STEPS // 12 if quick else STEPS),
        "release": lambda: releases(rounds, RELEASE_STEPS // 4 if quick else RELEASE_STEPS),
    }
    for part in parts:
        result[part] = measures[part]() | {"rounds": 1 if part == "pause" else rounds, "is_trial": quick, "stamp": stamp.of_binaries()}
        file.write_text(json.dumps(result, indent=1))
    return result


def run(ranks: int, words: list, program: list) -> str:
    """Runs a job, and returns its output."""
    words = ["--verbose", "--set", f"criu={paths.CRIU}", *words]
    command = [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *words, "--", *map(str, program)]
    finished = process.run(command, LIMIT_S, {})
    if not finished.ok:
        raise labs.Failed(f"{finished.why or finished.code}: {process.tail(finished.output, 4)}")
    return finished.output


def recovering(log: str) -> list[str]:
    return ["--recover", "--set", f"recover_log={log}"]


def pauses(megabytes: int, log: str) -> dict:
    """Milliseconds for which the rank stood still, by its own clock, and for which CRIU worked;
    bytes of a checkpoint image."""
    steady = paths.ROOT / "tests" / "system" / "programs" / "steady.py"
    program = [paths.python("mpich"), steady, "--megabytes", megabytes]
    # The first checkpoint is taken after one interval.
    program += ["--seconds", EVERY_S * (IMAGES + 2)]
    said = run(2, [*recovering(log), "--checkpoint", f"{EVERY_S}s"], program)
    criu = [float(text) for text in SEALED.findall(said)]
    # The longest pauses are checkpoints, as many as there were.
    stood = sorted((float(text) for text in re.findall(r"^stood: (\S+)$", said, re.M)), reverse=True)[: len(criu)]
    if len(stood) < IMAGES - 1:
        raise labs.Failed(f"{len(criu)} images of {megabytes} MB were taken, and the rank stood still {len(stood)} times")
    print(f"pause: {log}: {megabytes} MB: {', '.join(f'{value:.0f}' for value in stood)} ms; CRIU {statistics.median(criu):.0f} ms", flush=True)
    return {"stood": stood, "criu": criu}


def costs(rounds: int, steps: int) -> dict:
    """Seconds and checkpoints of a heat equation, by variant and round."""
    heat = [paths.python("mpich"), paths.ROOT / "examples" / "heat.py", "--steps", steps]
    ways = {f"{name}, {kind}": [*recovering(log), *words] for name, log in LOGS.items() for kind, words in KINDS.items()}
    return in_turns("cost", rounds, ways, lambda words: run(4, words, heat))


def releases(rounds: int, steps: int) -> dict:
    """Seconds, checkpoints and full memories of a program that sends much, by variant and round."""
    ways = {
        RELEASED: [*recovering("sender"), "--set", f"recover_memory={RELEASE_MEMORY}", "--checkpoint", "2s"],
        ALL_KEPT: [*recovering("sender"), "--set", "recover_memory=12GiB"],
        NONE: ["--set", "local=own"],
    }
    with tempfile.TemporaryDirectory() as folder:
        program = [compiled.program("transpose", Path(folder)), 512, steps]
        return in_turns("release", rounds, ways, lambda words: run(2, words, program))


def in_turns(part: str, rounds: int, ways: dict[str, list], one) -> dict:
    """Seconds as the program measures them, checkpoints of ranks, and warnings of full memory, by
    variant and round."""
    samples: dict[str, list[dict]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            warm.memory(WARM_BYTES if part == "release" else WARM_BYTES // 8)
            said = one(ways[name])
            seconds = compiled.elapsed_s(said)
            taken = [float(text) for text in re.findall(r"^landbridge: checkpoint \d+ of rank \d+: it stood still for (\d+) ms$", said, re.M)]
            samples[name].append({"seconds": seconds, "paused": taken, "full": said.count(FULL)})
            print(f"{part}: round {number + 1} of {rounds}: {name}: {seconds:.1f} s, {len(taken)} checkpoints, {said.count(FULL)} times full", flush=True)
    return {"samples": samples}


# --- the document


def section(result: dict) -> str:
    lines = ["## Checkpoint images: what they cost"]
    writers = {"pause": pause_lines, "cost": cost_lines, "release": release_lines}
    for part, write in writers.items():
        if part in result:
            made = result[part]
            trial = ", a trial" if made["is_trial"] else ""
            lines += ["", *write(made), "", prose.wrapped(f"{stamp.rounds(made['rounds'])}{trial}, binaries {made['stamp']['binaries']}. {' '.join(stamp.lines(made))}")]
    return "\n".join(lines) + "\n"


def pause_lines(part: dict) -> list[str]:
    what = (
        "**How long a rank stands still** for a checkpoint, by its own clock: medians (longest), of at least "
        f"{IMAGES - 1} checkpoints."
    )
    lines = [prose.wrapped(what), ""]
    lines += ["| message log | random memory | rank stood still, ms | of that CRIU, ms |", "|---|--:|--:|--:|"]
    found = []
    for name, rows in part["logs"].items():
        middle = {int(size): statistics.median(row["stood"]) for size, row in rows.items()}
        for size, row in rows.items():
            lines.append(f"| {name} | {size} MB | {middle[int(size)]:.0f} ({max(row['stood']):.0f}) | {statistics.median(row['criu']):.0f} |")
        small, large = min(middle), max(middle)
        if small < large:
            each = (middle[large] - middle[small]) / (large - small) * 100
            found.append(f"With {name} a checkpoint takes {middle[small]:.0f} ms, and {each:.0f} ms more for each 100 MB.")
    return [*lines, "", prose.wrapped(" ".join(found))]


def cost_lines(part: dict) -> list[str]:
    what = f"**Cost of a checkpoint every {INTERVAL}**: heat equation on 4 ranks."
    rows = table_of(part)
    for name in LOGS:
        with_images, without = (part["samples"][f"{name}, {kind}"] for kind in KINDS)
        rows.append(f"| **ratio**, {name} | {ratio_of(with_images, without)} | | | |")
    return [what, "", *rows]


def release_lines(part: dict) -> list[str]:
    what = (
        "**Logs that checkpoints release**: `bench/transpose.c` on 2 ranks, each of which sends 4 MiB in a step. *Full* counts "
        "warnings that a log was given up before a checkpoint released it: 0 says that the ranks could always be restarted."
    )
    rows = table_of(part)
    for name, base in ((RELEASED, ALL_KEPT), (RELEASED, NONE), (ALL_KEPT, NONE)):
        rows.append(f"| **ratio**, {name}, to {base} | {ratio_of(part['samples'][name], part['samples'][base])} | | | |")
    return [prose.wrapped(what), "", *rows]


def table_of(part: dict) -> list[str]:
    """Medians, in parentheses the least and the greatest."""
    lines = ["| way | seconds | checkpoints | longest pause, ms | full |", "|---|--:|--:|--:|--:|"]
    for name, rows in part["samples"].items():
        seconds, taken = [row["seconds"] for row in rows], [len(row["paused"]) for row in rows]
        pauses_of = [pause for row in rows for pause in row["paused"]]
        longest = f"{max(pauses_of):.0f}" if pauses_of else ""
        spread = f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        lines.append(f"| {name} | {spread} | {statistics.median(taken):g} | {longest} | {sum(row['full'] for row in rows)} |")
    return lines


def ratio_of(rows: list[dict], base: list[dict]) -> str:
    """Of medians, in parentheses of the best rounds."""
    ours, others = ([row["seconds"] for row in each] for each in (rows, base))
    return f"{statistics.median(ours) / statistics.median(others):.3f} ({min(ours) / min(others):.3f})"


if __name__ == "__main__":
    sys.exit(parts_of.main(__doc__, ROUNDS, PARTS, measure, section))
