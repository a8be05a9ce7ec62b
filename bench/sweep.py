#!/usr/bin/env python3
"""Every operation at every power of two of bytes, against all peers in turns: the program sweep.c.

    bench/sweep.py                      all families, 5 rounds: about an hour
    bench/sweep.py --quick              one round: a trial
    bench/sweep.py node-one-sided       only this family; the results of the others stay
    bench/sweep.py --bin DIR tcp        the binaries in DIR

A family is a job of sweep.c: what it measures, the number of its ranks, and the peers. Each round
begins with another peer than the round before. The ratio is the median of Landbridge's rounds over
that of the best peer: all are times, so below 1 Landbridge is faster.

What leaves: build/results/bench-sweep.json, in which each family has the time, the commit and a
digest of the binaries of its measurement. A peer that does not run here, or ends with an error, is
named with it, and has no part in the ratios of that family.
"""

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import compiled  # noqa: E402
import parts  # noqa: E402
import peers  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import curves, paths, process  # noqa: E402

ROUNDS = 5
KIB, MIB = 1 << 10, 1 << 20
# Seconds: the slowest family takes two minutes over the slowest peer, 16 ranks that spin on two cores.
LIMIT_S = 300.0
# Sizes whose ratios have a column; the others are in the picture and in the result.
COLUMNS = (8, 256, KIB, 8 * KIB, 64 * KIB, MIB, 4 * MIB)
# Every operation is at least as fast as the best peer.
TARGET = 1.0


@dataclass(frozen=True)
class Family:
    title: str
    of: str  # FAMILY of sweep.c
    ranks: int
    peers: tuple
    bytes_max: int = 4 * MIB


NODE, TCP, CROWD = tuple(peers.NODE), tuple(peers.TCP), tuple(peers.CROWD)
FAMILIES = {
    "node": Family("node, 2 ranks", "two-sided", 2, NODE),
    "node-self": Family("node, 1 rank", "self", 1, NODE),
    "node-one-sided": Family("node, one-sided", "one-sided", 2, NODE),
    "node-pairs-2": Family("node, 2 pairs", "pairs", 4, NODE),
    "node-pairs-3": Family("node, 3 pairs", "pairs", 6, NODE),
    "node-pairs-4": Family("node, 4 pairs", "pairs", 8, NODE),
    "node-collectives-2": Family("node, 2 ranks together", "collectives", 2, NODE),
    "node-collectives-4": Family("node, 4 ranks together", "collectives", 4, NODE),
    "node-collectives-16": Family("node, 16 ranks together", "collectives", 16, CROWD, 64 * KIB),
    "tcp": Family("TCP, 2 ranks", "two-sided", 2, TCP),
    "tcp-one-sided": Family("TCP, one-sided", "one-sided", 2, TCP),
    "tcp-pairs-2": Family("TCP, 2 pairs", "pairs", 4, TCP),
    "tcp-pairs-4": Family("TCP, 4 pairs", "pairs", 8, TCP),
    "tcp-collectives-2": Family("TCP, 2 ranks together", "collectives", 2, TCP),
    "tcp-collectives-4": Family("TCP, 4 ranks together", "collectives", 4, TCP),
    "tcp-collectives-16": Family("TCP, 16 ranks together", "collectives", 16, TCP, 64 * KIB),
}

# Microseconds by case and bytes, written `put, flush/8`.
Times = dict[str, float]


class Failed(Exception):
    """A job did not end well; the text is the end of what it said."""


def measure(rounds: int = ROUNDS, families: tuple[str, ...] = tuple(FAMILIES), quick: bool = False) -> dict:
    """Writes build/results/bench-sweep.json; families that are not measured now keep their
    results."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-sweep.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        program = compiled.program("sweep", Path(folder))
        for name in families:
            result[name] = measured(name, program, rounds) | {"is_trial": quick, "stamp": stamp.of_binaries()}
            file.write_text(json.dumps(result, indent=1))
    return result


def measured(name: str, program: str, rounds: int) -> dict:
    family = FAMILIES[name]
    samples: dict[str, dict[str, list[float]]] = {peer.name: {} for peer in family.peers}
    errors: dict[str, str] = {}
    for number in range(rounds):
        first = number % len(family.peers)
        for peer in (*family.peers[first:], *family.peers[:first]):
            if peer.name in errors:
                continue
            print(f"sweep: {family.title}: round {number + 1} of {rounds}: {peer.name}", flush=True)
            try:
                for row, time in one_run(family, peer, program).items():
                    samples[peer.name].setdefault(row, []).append(time)
            except Failed as failed:
                errors[peer.name] = str(failed)
                print(f"  does not run: {failed}", flush=True)
    ours = [peer.name for peer in family.peers if peer.ours]
    known = {peer: rows for peer, rows in samples.items() if rows and peer not in errors}
    return {"samples": known, "errors": errors, "ours": ours, "rounds": rounds}


def one_run(family: Family, peer, program: str) -> Times:
    words = peer.command(family.ranks, [program, family.of, str(family.bytes_max)])
    done = process.run(words, LIMIT_S, peer.environment())
    rows = [line.split("\t") for line in done.output.splitlines() if line.count("\t") == 2]
    if not done.ok or not rows:
        raise Failed(f"{done.why or done.code}: {process.tail(done.output, 4)}")
    return {f"{case}/{size}": float(time) for case, size, time in rows}


# --- the section


@dataclass
class Case:
    """One operation of a family: ratios to the best peer by size."""

    name: str
    ratios: dict[int, float]
    best: dict[int, float]  # of the fastest rounds

    def worst(self) -> int:
        return max(self.ratios, key=self.ratios.get)


def cases(result: dict) -> list[Case]:
    """All cases of all families, the worst ratio first."""
    found = []
    for name, family in FAMILIES.items():
        part = result.get(name, {})
        for case in dict.fromkeys(row.rpartition("/")[0] for rows in part.get("samples", {}).values() for row in rows):
            ratios, best = (ratios_of(part, case, of) for of in (statistics.median, min))
            if ratios:
                found.append(Case(f"{family.title}: {case}", ratios, best))
    return sorted(found, key=lambda case: -case.ratios[case.worst()])


def ratios_of(part: dict, case: str, of) -> dict[int, float]:
    """Ours over the best peer's, by size; `of`: which of the rounds counts."""
    ratios = {}
    (ours,) = part["ours"]
    for row, times in part["samples"].get(ours, {}).items():
        others = [of(rows[row]) for way, rows in part["samples"].items() if way != ours and row in rows]
        name, _, size = row.rpartition("/")
        if name == case and others:
            ratios[int(size)] = of(times) / min(others)
    return ratios


def section(result: dict) -> str:
    found = cases(result)
    slower = sum(ratio > TARGET for case in found for ratio in case.ratios.values())
    count = sum(len(case.ratios) for case in found)
    text = (
        "The program bench/sweep.c between processes of one machine: the time of an operation, divided by that of the best peer, "
        f"so that below {TARGET:g} Landbridge is faster. A row is a case, the worst first; `worst` is the greatest ratio of all powers of two "
        "of bytes, with its size, then that of the fastest rounds; `slower` is how many of the sizes are above "
        f"{TARGET:g}. Of all {count} sizes, {slower} are."
    )
    lines = ["## Every operation at every size", "", prose.wrapped(text), *stamps(result), ""]
    lines += [f"| case | worst | fastest rounds | slower | {' | '.join(map(curves.size_name, COLUMNS))} |"]
    lines += ["|---|--:|--:|--:|" + "--:|" * len(COLUMNS)]
    for case in found:
        size = case.worst()
        cells = [f"{case.ratios[column]:.2f}" if column in case.ratios else "" for column in COLUMNS]
        above = sum(ratio > TARGET for ratio in case.ratios.values())
        worst = f"{case.ratios[size]:.2f} at {curves.size_name(size)}"
        lines.append(f"| {case.name} | {worst} | {case.best[size]:.2f} | {above} of {len(case.ratios)} | {' | '.join(cells)} |")
    for name, family in FAMILIES.items():
        lines += [f"\nDoes not run here, {family.title}: {peer}." for peer in result.get(name, {}).get("errors", {})]
    return "\n".join(lines) + "\n"


def stamps(result: dict) -> list[str]:
    """A line for each measurement, with the families that it is of."""
    by_line: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        if name in result:
            part = result[name]
            line = " ".join(stamp.lines(part))
            by_line.setdefault(f"{stamp.rounds(part['rounds'])}. {line}", []).append(family.title)
    return [prose.wrapped(f"{'; '.join(titles)}: {line}") + "\n" for line, titles in by_line.items()]


def picture(result: dict) -> str:
    """The worst ratio of each family's cases by size: a panel for each place, a curve for each
    family."""
    panels: dict[str, curves.Panel] = {}
    for name, family in FAMILIES.items():
        worst: curves.Curve = {}
        for case in cases({name: result.get(name, {})}):
            worst |= {size: max(ratio, worst.get(size, 0.0)) for size, ratio in case.ratios.items()}
        place, _, what = family.title.partition(", ")
        if worst:
            panels.setdefault(place, curves.Panel(place, "ratio to the best peer", {})).curves[what] = worst
    return curves.chart("Every operation at every size: the slowest case of each family", list(panels.values()))


def more_pictures(result: dict) -> dict[str, tuple[str, str]]:
    """By file: title and picture of a family, a panel for each case with the times of all peers."""
    pictures = {}
    for name, family in FAMILIES.items():
        samples = result.get(name, {}).get("samples", {})
        names = dict.fromkeys(row.rpartition("/")[0] for rows in samples.values() for row in rows)
        panels = [curves.Panel(case, "us", times_of(samples, case)) for case in names]
        if panels:
            title = f"Every size: {family.title}"
            pictures[f"sweep-{name}"] = (title, curves.chart(title, panels))
    return pictures


def times_of(samples: dict, case: str) -> dict[str, curves.Curve]:
    return {
        way: {int(size): statistics.median(rows[f"{case}/{size}"]) for name, _, size in (row.rpartition("/") for row in rows) if name == case}
        for way, rows in samples.items()
    }


if __name__ == "__main__":
    sys.exit(parts.main(__doc__, ROUNDS, tuple(FAMILIES), measure, section))
