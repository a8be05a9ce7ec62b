#!/usr/bin/env python3
"""The cost of recording file calls, for programs that use files much and for others.

    bench/files.py                  both parts, 10 minutes
    bench/files.py --quick          one round
    bench/files.py calls            only this part: calls, free

calls: bench/file_calls.c on two ranks: microseconds of one call, by kind and size, each rank with a
file of its own in memory (tmpfs), so that no disk has an influence.
free: programs that use no files while they are measured: a heat equation, and IMB-MPI1 PingPong and
Allreduce.

The variants take turns: without `--recover`, with `--recover` but without recording files, with
`--recover`, and with `--recover` by the binaries in the folder LANDBRIDGE_BENCH_BEFORE (a
`target/release` of an earlier commit), if that variable is set.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import imb  # noqa: E402
import labs  # noqa: E402
import parts as parts_of  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths, process  # noqa: E402

ROUNDS, LIMIT_S = 5, 240.0
PARTS = ("calls", "free")
STEPS = 12_000
INPUT_BYTES = 16 << 20
# Largest ratio for a program that uses no files.
TARGET = 1.03


@dataclass(frozen=True)
class Variant:
    name: str
    launcher: Path
    options: tuple[str, ...] = ()


def variants() -> list[Variant]:
    off = ("--recover", "--set", "recover_files=off")
    found = [Variant("without --recover", paths.LANDBRIDGE), Variant("recover_files=off", paths.LANDBRIDGE, off)]
    found.append(Variant("--recover", paths.LANDBRIDGE, ("--recover",)))
    if before := os.environ.get("LANDBRIDGE_BENCH_BEFORE"):
        found.append(Variant("--recover, before", Path(before) / "landbridge", ("--recover",)))
    return found


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS, quick: bool = False) -> dict:
    """Writes build/results/bench-files.json; parts that are not measured now keep their results."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-files.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if "calls" in parts:
            program = build(Path(folder))
            result["calls"] = in_turns("calls", rounds, variants(), lambda way: calls(way, program))
        if "free" in parts:
            steps = STEPS // 4 if quick else STEPS
            result["free"] = in_turns("free", rounds, variants(), lambda way: free(way, steps))
    result |= {"rounds": rounds, "stamp": stamp.now()}
    file.write_text(json.dumps(result, indent=1))
    return result


def in_turns(part: str, rounds: int, ways: list, one) -> dict:
    """Medians and samples, by the name of a variant and measured quantity."""
    samples: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        # The order rotates, so that the predecessor of a variant has no influence.
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            print(f"{part}: round {number + 1} of {rounds}: {way.name}", flush=True)
            for what, value in one(way).items():
                samples.setdefault(way.name, {}).setdefault(what, []).append(value)
    medians = {name: {what: statistics.median(row) for what, row in rows.items()} for name, rows in samples.items()}
    return {"samples": samples, "medians": medians}


def build(folder: Path) -> Path:
    """Compiles the program with the MPI library of the wheels."""
    root, program = paths.venv("mpich"), folder / "file_calls"
    source = Path(__file__).with_name("file_calls.c")
    words = ["gcc", "-O2", f"-I{root}/include", source, "-o", program, f"-L{root}/lib", "-lmpi", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(words, check=True)
    return program


def run(way: Variant, ranks: int, program: list, environment=None) -> str:
    command = [str(way.launcher), "run", "-n", str(ranks), *way.options, "--", *map(str, program)]
    finished = process.run(command, LIMIT_S, environment or {})
    if not finished.ok:
        raise labs.Failed(f"{way.name}: {finished.why or finished.code}: {process.tail(finished.output, 4)}")
    return finished.output


def calls(way: Variant, program: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        given = Path(folder, "input")
        given.write_bytes(bytes(INPUT_BYTES))
        said = run(way, 2, [program, folder, given])
    return {what: float(value) for what, value in re.findall(r"^([a-z ]+ \d+): ([\d.]+)$", said, re.M)}


def free(way: Variant, steps: int) -> dict[str, float]:
    python = paths.venv("mpich") / "bin" / "python"
    said = run(way, 4, [python, paths.ROOT / "examples" / "heat.py", "--steps", steps], {"OPENBLAS_NUM_THREADS": "1"})
    seconds = re.search(r"([\d.]+) s, \d+ steps/s", said)
    if not seconds:
        raise labs.Failed(f"heat says no time: {process.tail(said, 4)}")
    found = {"heat equation, s": float(seconds[1])}
    library = {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
    for benchmark, ranks in (("PingPong", 2), ("Allreduce", 4)):
        lengths = paths.RESULTS / "files-lengths"
        lengths.write_text("8\n65536\n")
        bounds = ["-npmin", ranks, "-msglen", lengths, "-iter", 4000, "-iter_policy", "off"]
        table = imb.parse(run(way, ranks, [imb.IMB, benchmark, *bounds], library))
        found |= {f"{benchmark} {size} B, us": table.latency_us(size) for size in (8, 65536)}
    return found


# --- the document


def section(result: dict) -> str:
    lines = ["## Files under `--recover`: what recording costs", "", f"{stamp.rounds(result['rounds'])}, medians.", *stamp.lines(result)]
    if "calls" in result:
        what = (
            "**Calls on files**, microseconds for one call, two ranks with one file each in memory (`bench/file_calls.c`); the "
            "number after a call is its size in bytes."
        )
        lines += ["", prose.wrapped(what), ""]
        lines += table(result["calls"])
    if "free" in result:
        lines += ["", f"**Programs without files.** The target is at most {TARGET} times as long as with `recover_files=off`.", ""]
        lines += table(result["free"], TARGET)
    return "\n".join(lines) + "\n"


def table(part: dict, target: float = float("inf")) -> list[str]:
    """A row for each measured quantity; the ratios of `--recover` to the other variants. The target
    is for the ratio to `recover_files=off`."""
    names = list(part["medians"])
    recorded = part["medians"]["--recover"]
    heads = [*names, *(f"--recover / {name}" for name in names if name != "--recover")]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for what, value in recorded.items():
        row = [f"{part['medians'][name][what]:.3g}" for name in names]
        ratios = {name: value / part["medians"][name][what] for name in names if name != "--recover"}
        targets = {"recover_files=off": target}
        row += [verdict(ratio, targets.get(name, float("inf"))) for name, ratio in ratios.items()]
        lines.append(f"| {what} | {' | '.join(row)} |")
    return lines


def verdict(ratio: float, target: float) -> str:
    return f"{ratio:.2f}" + ("" if ratio <= target else f" (missed: {target})")


if __name__ == "__main__":
    sys.exit(parts_of.main(__doc__, ROUNDS, PARTS, measure, section))
