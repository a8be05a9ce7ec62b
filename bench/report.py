"""Writes docs/BENCHMARKS.md from the result files of bench/run.py.

A measured section replaces the old section including text that people have written below it; the
other sections of the document stay. Pictures: docs/pictures/NAME.svg.
"""

import json
import re

import second_path
import checkpoint
import datagrams
import fairness
import files
import hop_cost
import hotspots
import integrity
import intercept
import own_core
import payload_log
import prose
import rails
import recovery
import stall
import stamp
import streams
import sweep
import wan
from support import paths, svg

DOCUMENT = paths.ROOT / "docs" / "BENCHMARKS.md"
ORDER = ["node", "tcp", "node-pairs", "tcp-pairs", "relays", "allreduce", "alltoall"]
PICTURES = paths.ROOT / "docs" / "pictures"
# Modules with a `section`, some with a `picture`, or `more_pictures`, too.
OTHERS = {"wan": wan, "hop-cost": hop_cost, "profile": hotspots, "integrity": integrity, "rails": rails}
OTHERS |= {"datagrams": datagrams, "fairness": fairness, "stall": stall, "streams": streams, "second-path": second_path}
OTHERS |= {"own-core": own_core, "recovery": recovery, "checkpoint": checkpoint, "files": files, "intercept": intercept}
OTHERS |= {"payload-log": payload_log, "sweep": sweep}


def write(names: list[str] | None = None) -> None:
    """Writes the sections of all results, or of `names` alone."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    sections = [text for name in [*ORDER, *OTHERS, "idle"] if names is None or name in names for text in made(name)]
    old = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    DOCUMENT.write_text("\n".join([head(old), *merged(old, sections)]))
    print(f"bench: wrote {DOCUMENT.relative_to(paths.ROOT)}")


def made(name: str) -> list[str]:
    """The section about the last result, if there is one; writes its picture."""
    result = load(name)
    if not result:
        return []
    if name == "idle":
        return [idle_section(result)]
    if name in ORDER:
        picture(name, result)
        return [section(name, result)]
    source = OTHERS[name]
    text = source.section(result)
    if not hasattr(source, "picture"):
        return [text]
    (PICTURES / f"{name}.svg").write_text(source.picture(result))
    title = text.partition("\n")[0].removeprefix("## ")
    shown = [f"![{title}](pictures/{name}.svg)"]
    if hasattr(source, "more_pictures"):
        for file, (caption, drawn) in source.more_pictures(result).items():
            (PICTURES / f"{file}.svg").write_text(drawn)
            shown.append(f"![{caption}](pictures/{file}.svg)")
    return ["\n\n".join([text.rstrip(), *shown]) + "\n"]


def merged(old: str, measured: list[str]) -> list[str]:
    """The sections of a document in which measured sections replace those with the same titles; new
    ones come last."""
    sections = {text.partition("\n")[0]: text for text in re.split(r"^(?=## )", old, flags=re.M)[1:]}
    sections |= {text.partition("\n")[0]: text for text in measured}
    return [text.rstrip("\n") + "\n" for text in sections.values()]


def load(name: str):
    file = paths.RESULTS / f"bench-{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def head(old: str) -> str:
    """The head of the document, which names the machine of those sections that name none."""
    known = re.search(r"^Machine: (.+?)\. Sections", old, re.M | re.S)
    machine = " ".join(known[1].split()) if known else stamp.machine()
    what = (
        "`make bench` writes this document. Comparisons of MPI transports use the same MPICH 5.0.2 and the same IMB binary. "
        "The variants take turns in one run, and each number is the median of its rounds. The ratio is Landbridge's number "
        "over that of the best peer: below 1 is better for times, above 1 for bandwidth. MB is 10^6 bytes. A cell names the "
        "target that it missed; targets are for medians. The two cores of the virtual machine are sometimes two cores of the "
        "host and sometimes one, and a median shows only which case was more frequent. So a second line has the ratio of the "
        "best rounds: that of Landbridge over that of the best peer."
    )
    where = (
        f"Machine: {machine}. Sections name the date and the commit of their measurement; those that name no machine were "
        "measured on this one. A section that is not measured again stays as it was."
    )
    return f"# Benchmarks\n\n{prose.wrapped(what)}\n\n{prose.wrapped(where)}\n"


def section(name: str, result: dict) -> str:
    columns = [f"{size_name(size)}, {unit}" for size, unit in result["columns"]]
    lines = [f"## {result['title']}", "", f"{result['benchmark']}, {stamp.rounds(result['rounds'])}."]
    lines += [*stamp.lines(result), ""]
    lines += [f"| way | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for way, values in result["medians"].items():
        lines.append(f"| {way} | {' | '.join(f'{value:.2f}' for value in values)} |")
    for way in result["ours"]:
        if way in result["medians"]:
            lines.append(f"| **ratio to the best peer** | {' | '.join(ratios(result, way))} |")
            lines.append(f"| ratio, best rounds only | {' | '.join(best_ratios(result, way))} |")
    references = [way for way in result.get("yardsticks", []) if way in result["medians"]]
    lines += [f'\n"{way}" is a reference, and not a peer of the ratio.' for way in references]
    lines += [f"\nDoes not run here: {way}." for way in result["errors"]]
    return "\n".join([*lines, "", f"![{result['title']}](pictures/{name}.svg)", ""])


def ratios(result: dict, way: str) -> list[str]:
    others = {*result["ours"], *result.get("yardsticks", [])}
    peers = [values for name, values in result["medians"].items() if name not in others]
    return [
        verdict(ours, [values[i] for values in peers], unit, result["targets"][unit])
        for i, (ours, (_, unit)) in enumerate(zip(result["medians"][way], result["columns"]))
    ]


def best_ratios(result: dict, way: str) -> list[str]:
    """Ratios of the best rounds of each variant, without the variation between rounds."""
    best = {
        name: [(min if unit == "us" else max)(column) for column, (_, unit) in zip(zip(*rows), result["columns"])]
        for name, rows in result["samples"].items()
        if rows
    }
    return ratios(result | {"medians": best}, way)


def verdict(ours: float, peers: list[float], unit: str, target: float) -> str:
    if not peers:
        return "no peer"
    best = min(peers) if unit == "us" else max(peers)
    ratio = ours / best
    met = ratio <= target if unit == "us" else ratio >= target
    return f"{ratio:.2f} {'' if met else f'(missed: {target})'}".strip()


def size_name(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def picture(name: str, result: dict) -> None:
    """One group of bars for each column, relative to the best value in it (the best has full
    height)."""
    groups = []
    for i, (size, unit) in enumerate(result["columns"]):
        values = {way: values[i] for way, values in result["medians"].items()}
        best = min(values.values()) if unit == "us" else max(values.values())
        bars = {w: best / v if unit == "us" else v / best for w, v in values.items()}
        kind = "1/latency" if unit == "us" else "bandwidth"
        groups.append((f"{size_name(size)} {kind}", bars))
    file = PICTURES / f"{name}.svg"
    file.write_text(svg.bars(f"{result['title']} (best = 1, higher is better)", groups))


def idle_section(result: dict) -> str:
    rows = [("relay, per attached rank", "relay_bytes_per_rank", 16)]
    rows += [("provider, per silent peer", "rank_bytes_per_peer", 4)]
    lines = ["## Idle memory", "", *stamp.lines(result), "", "| what | KiB | target | |", "|---|--:|--:|---|"]
    for what, key, target in rows:
        kib = result[key] / 1024
        lines.append(f"| {what} | {kib:.1f} | {target} | {'' if kib <= target else 'missed'} |")
    lines += recover_rows(result.get("recover", {}))
    note = (
        "The memory of a rank is that of the whole process, so the data of its MPI library are included. A number below "
        "zero means that some part of the process shrinks with the size of the job, by more than the peers cost."
    )
    if "recover" in result:
        note += (
            " Under --recover, and in the rows that it is compared with, all ranks are on one node: a row is what an "
            "ordered pair of ranks takes in the process of one of both, in its page tables, and in the node's file with "
            "the logs of the senders."
        )
    lines += ["", prose.wrapped(note)]
    return "\n".join(lines) + "\n"


def recover_rows(ways: dict) -> list[str]:
    """Rows about silent pairs of ranks of one node."""
    rows = []
    for name, found in ways.items():
        if found:
            kib = sum(found.values()) / 1024
            parts = ", ".join(f"{key} {value / 1024:.1f}" for key, value in found.items())
            rows.append(f"| one node, {name}, per pair: {parts} | {kib:.1f} | 4 | {'' if kib <= 4 else 'missed'} |")
    return rows
