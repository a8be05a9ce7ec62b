#!/usr/bin/env python3
"""Stores and copy methods of payload logging beside the transport, and the log that is the transport.

    bench/payload_log.py                both parts, half an hour
    bench/payload_log.py --quick        one round
    bench/payload_log.py node           only this part: node, nodes

bench/payload_log.c exchanges messages of 1 B to 8 MiB between two ranks, as NetPIPE does, and logs what
it sends by each copy method (pack, pieces, thread) in each store (dummy, heap, file, shared); `hybrid`
takes for each size the method that was fastest at the start, or that is in a profile, which a run before
the first round writes for each store. The variants take turns with the same program without logging, and
with that under `--recover`, where the log of the sender is the transport.

node: both ranks on one node, by the same provider without and with `--recover` (`local=own`).
nodes: two nodes, over TCP (a lab).
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
import labs  # noqa: E402
import parts as parts_of  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import curves, paths, process  # noqa: E402

ROUNDS, LIMIT_S = 3, 240.0
PARTS = {"node": "two ranks of one node", "nodes": "two nodes over TCP"}
LAB = paths.ROOT / "labs" / "two-sites.toml"
KIB, MIB = 1 << 10, 1 << 20
STORES, COPIES = ("dummy", "heap", "file", "shared"), ("pack", "pieces", "thread")
# Of the table; the result file has all powers of two.
SHOWN = (8, KIB, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 8 * MIB)


@dataclass(frozen=True)
class Variant:
    name: str
    store: str
    copy: str
    options: tuple[str, ...] = ("--set", "local=own")
    # Whether the program gets the name of the store's profile: `hybrid` writes it, `profile` reads it.
    has_profile: bool = False


NONE = Variant("no logging", "none", "pack")
OURS = Variant("--recover: the log is the transport", "none", "pack", ("--recover", "--set", "recover_log=sender", "--set", "recover_memory=64MiB"))
PROFILED = "hybrid, profile"
LOGGED = [
    variant
    for store in STORES
    for variant in (
        *(Variant(f"{store}, {copy}", store, copy) for copy in (*COPIES, "hybrid")),
        Variant(f"{store}, {PROFILED}", store, "profile", has_profile=True),
    )
]
VARIANTS = [NONE, *LOGGED, OURS]
# The simplest first.
KEPT = [it for store in ("shared", "heap", "file") for it in LOGGED if it.store == store and it.copy in COPIES]
NEARLY = 1.05


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = tuple(PARTS), quick: bool = False) -> dict:
    """Writes build/results/bench-payload-log.json; parts that are not measured now keep their
    results."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-payload-log.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    most = 64 * KIB if quick else 8 * MIB
    with tempfile.TemporaryDirectory(dir=os.environ.get("LANDBRIDGE_BENCH_DIR", "/var/tmp")) as folder:
        program = build(Path(folder))
        for part in parts:
            samples: dict[str, dict[str, list[float]]] = {}
            chosen: dict[str, dict[str, str]] = {}
            for store in STORES:
                print(f"payload-log: {part}: the profile of {store}", flush=True)
                one_run(part, Variant(f"{store}, its profile", store, "hybrid", has_profile=True), program, most, folder)
            for number in range(rounds):
                for way in VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]:
                    print(f"payload-log: {part}: round {number + 1} of {rounds}: {way.name}", flush=True)
                    for size, micros, copy in one_run(part, way, program, most, folder):
                        samples.setdefault(way.name, {}).setdefault(size, []).append(float(micros))
                        chosen.setdefault(way.name, {})[size] = copy
            medians = {name: {size: statistics.median(row) for size, row in rows.items()} for name, rows in samples.items()}
            result[part] = {"samples": samples, "medians": medians, "chosen": {it.name: chosen[it.name] for it in LOGGED if it.copy not in COPIES}}
    result |= {"rounds": rounds, "stamp": stamp.now()}
    file.write_text(json.dumps(result, indent=1))
    return result


def build(folder: Path) -> Path:
    """Compiles the program with the MPI library of the wheels."""
    root, program = paths.venv("mpich"), folder / "payload_log"
    source = Path(__file__).with_name("payload_log.c")
    words = ["gcc", "-O2", f"-I{root}/include", source, "-o", program, f"-L{root}/lib", "-lmpi", "-lpthread", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(words, check=True)
    return program


def one_run(part: str, way: Variant, program: Path, most: int, folder: str) -> list[tuple[str, str, str]]:
    """Size, microseconds one way, and copy method."""
    job = [str(paths.LANDBRIDGE), "run", "-n", "2"]
    job += ["--ranks-per-node", "1"] if part == "nodes" else []
    job += way.options
    job += ["--", str(program), way.store, way.copy, str(most), folder]
    job += [f"{folder}/profile-{part}-{way.store}"] if way.has_profile else []
    words = labs.command(LAB, labs.name("payload-log"), job) if part == "nodes" else job
    finished = process.run(words, LIMIT_S, labs.environment() if part == "nodes" else {})
    rows = re.findall(r"^(\d+) ([\d.]+) (\w+)$", finished.output, re.M)
    if not finished.ok or not rows:
        raise labs.Failed(f"{way.name}: {finished.why or finished.code}: {process.tail(finished.output, 4)}")
    return rows


# --- the document


def section(result: dict) -> str:
    lines = ["## Payload logging: stores and copy methods", "", f"{stamp.rounds(result['rounds'])}, medians.", *stamp.lines(result)]
    what = (
        "Ping-pong of two ranks that log what they send by a copy beside the transport, as the paper on sender-based logging "
        "measures it (its figures 2 and 3), and by Landbridge's log, which is the transport. *dummy* copies each message over the "
        "one before: the cost of the copy alone. *heap* is anonymous memory, *file* a file on a disk behind a window of 256 MiB, "
        "*shared* 64 MiB of shared memory that are used again. *pack* copies the whole message before it is sent, *pieces* each 64 KiB "
        "before they are sent, *thread* lets another thread copy while the message is sent; *hybrid* takes the fastest of these for "
        "each size, measured at the start, and *hybrid, profile* what was fastest in a run before. Times are relative to the same program without logging."
    )
    why = (
        "What decides is memory. *heap* and *file* take new pages all the time, which this machine's host gives at about 1 GB/s, "
        "and *shared* takes none: its 64 MiB were used before. A thread copies for nothing where a core is free, as in a ping-pong on "
        "two cores, and costs a wake-up of some 10 us, so it wins on a node from 64 KiB on. Ratios below 1 show how much runs of the "
        "same program differ here: most of all over TCP from 256 KiB on, where only large differences count. Landbridge's log needs no second copy on "
        "the sender's side; between nodes the receiver keeps what arrives as well, which costs two more."
    )
    lines += ["", prose.wrapped(what), "", prose.wrapped(why)]
    for part, title in PARTS.items():
        if part in result:
            lines += ["", f"**{title[0].upper()}{title[1:]}.**", "", *table(result[part]), "", *conclusion(result[part], title)]
    return "\n".join(lines) + "\n"


def table(part: dict) -> list[str]:
    medians, sizes = part["medians"], [size for size in SHOWN if str(size) in part["medians"][NONE.name]]
    lines = [f"| store, copy | {' | '.join(map(curves.size_name, sizes))} |", "|---|" + "--:|" * len(sizes)]
    lines.append(f"| no logging, us one way | {' | '.join(f'{medians[NONE.name][str(size)]:.1f}' for size in sizes)} |")
    for way in (way for way in VARIANTS[1:] if way.name in medians):
        ratios = [f"{ratio(part, way.name, size):.2f}" for size in sizes]
        lines.append(f"| {way.name} | {' | '.join(ratios)} |")
    return lines


def ratio(part: dict, name: str, size: int) -> float:
    return part["medians"][name][str(size)] / part["medians"][NONE.name][str(size)]


def conclusion(part: dict, place: str) -> list[str]:
    """What is best here, by size."""
    sizes = [int(size) for size in part["medians"][NONE.name]]
    best = {size: best_kept(part, size) for size in sizes}
    spans: list[list] = []
    for size in sizes:
        if spans and spans[-1][2] == best[size].name:
            spans[-1][1] = size
        else:
            spans.append([size, size, best[size].name])
    said = "; ".join(f"{span(first, last)} *{name}*" for first, last, name in spans)
    wins = [size for size in sizes if ratio(part, OURS.name, size) <= NEARLY * ratio(part, best[size].name, size)]
    ours = f"Landbridge's own log takes no longer than the best of these at {len(wins)} of {len(sizes)} sizes"
    lost = [size for size in sizes if size not in wins]
    more = f"; it loses most at {curves.size_name(worst(part, best, lost))}" if lost else ""
    return [prose.wrapped(f"Of the stores that keep messages, best on {place} (within {NEARLY - 1:.0%}, the simplest first): {said}. {ours}{more}.")]


def best_kept(part: dict, size: int) -> Variant:
    """Of the variants that keep messages, the simplest one that takes no longer than NEARLY times
    the fastest."""
    least = min(ratio(part, way.name, size) for way in KEPT)
    return next(way for way in KEPT if ratio(part, way.name, size) <= NEARLY * least)


def worst(part: dict, best: dict, sizes: list[int]) -> int:
    return max(sizes, key=lambda size: ratio(part, OURS.name, size) / ratio(part, best[size].name, size))


def span(first: int, last: int) -> str:
    return f"at {curves.size_name(first)}" if first == last else f"from {curves.size_name(first)} to {curves.size_name(last)}"


def picture(result: dict) -> str:
    """Latency and bandwidth by size, as the paper's figures 2 and 3: of each store the fastest copy
    method at each size."""
    panels = []
    for part, title in PARTS.items():
        if part in result:
            medians = result[part]["medians"]
            sizes = [int(size) for size in medians[NONE.name]]
            ways = {NONE.name: [NONE.name], OURS.name: [OURS.name]}
            ways |= {f"{store}, its fastest copy method": [f"{store}, {copy}" for copy in COPIES] for store in STORES}
            micros = {name: {size: min(medians[way][str(size)] for way in of) for size in sizes} for name, of in ways.items()}
            panels += latency_and_bandwidth(title, micros)
    return curves.chart("Payload logging: latency and bandwidth by message size", panels)


def more_pictures(result: dict) -> dict[str, tuple[str, str]]:
    """By file: title and picture with every copy method, a row for each store. One picture for each
    part."""
    pictures = {}
    for part, where in PARTS.items():
        if part in result:
            medians, title = result[part]["medians"], f"Payload logging, every copy method: {where}"
            panels = []
            for store in STORES:
                names = {NONE.name: NONE.name} | {copy: f"{store}, {copy}" for copy in (*COPIES, "hybrid", PROFILED)}
                known = {label: medians[name] for label, name in names.items() if name in medians}
                panels += latency_and_bandwidth(store, {label: {int(size): time for size, time in curve.items()} for label, curve in known.items()})
            pictures[f"payload-log-{part}"] = (title, curves.chart(title, panels))
    return pictures


def latency_and_bandwidth(title: str, micros: dict[str, curves.Curve]) -> list[curves.Panel]:
    # Bytes in a microsecond are MB in a second.
    speeds = {name: {size: size / time for size, time in curve.items()} for name, curve in micros.items()}
    return [curves.Panel(f"{title}: latency", "us one way", micros), curves.Panel(f"{title}: bandwidth", "MB/s", speeds)]


if __name__ == "__main__":
    sys.exit(parts_of.main(__doc__, ROUNDS, tuple(PARTS), measure, section))
