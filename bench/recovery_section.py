"""The section "Killed ranks" of docs/BENCHMARKS.md, from the results of bench/recovery.py.

What enters: for each part the samples by variant and name, and the stamp of their measurement. What
leaves: text with a verdict for each target, then all medians with their spread; a picture. A part
that was not measured is named as such; results of other binaries are not shown without saying so.
"""

import statistics

import prose
import recovery_ways as ways
import stamp
from recovery_ways import KIB, MIB, RELAY, SAME, SENDERS, SPARES, UNIT
from support import svg

DISK_TIMES = 96
NODE_PARTS = ("new", "again", "beyond")
TITLES = {
    "new": "PingPong on a node, new memory",
    "again": "PingPong on a node, 64 MiB used again",
    "beyond": "PingPong on a node, 512 MiB used in turn",
    "stream-new": "one way on a node, new memory",
    "stream-again": "one way on a node, 64 MiB used again",
    "stream-beyond": "one way on a node, 512 MiB used in turn",
    "pairs": "two pairs on a node, 64 MiB used again",
    "one-sided": "one-sided on a node (IMB-RMA), 64 MiB used again",
    "ranks": "2 to 64 ranks on a node",
    "nodes": "two nodes over TCP",
    "spares": "two nodes over TCP, with a spare node",
    "link": "a link of 1 Gbit/s, 5 ms one way",
    "applications": "applications, 2 ranks on a node",
    "disk": "message log larger than memory",
    "counts": "what is logged of a message",
    "back": "from a kill to the same point",
}
WHERE = {"new": "new memory", "again": "64 MiB used again", "beyond": "512 MiB used in turn"}
DRAWN = (8, KIB, 32 * KIB, MIB)


def section(result: dict) -> str:
    what = (
        "Medians of the rounds, in parentheses the least and the greatest value. The variants took turns within each round and "
        "group of sizes. A ratio is that of medians to the same provider without `--recover`, in parentheses that of the best rounds. "
        f"Messages up to {size_name(ways.SHORT_MAX)} are judged by time, longer ones by bandwidth."
    )
    lines = ["## Killed ranks come back: what it costs", "", prose.wrapped(what), "", *targets_table(result), "", *stamps(result)]
    for part in ways.PARTS:
        if part in result:
            lines += ["", f"**{upper(TITLES[part])}**", "", *WRITERS.get(part, size_tables)(part, result[part])]
            lines += [f"\n{upper(name)} did not run: {' '.join(error.split())}" for name, error in result[part]["errors"].items()]
    return "\n".join(lines) + "\n"


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]


# Measured by hand on 2026-11-30: the same job after 20 s of rest, and right behind another one.
GIVEN_BACK = (
    "A virtual machine that gives free pages back to its host takes each of them again at the first touch, on this one "
    "at 0.35 GB/s: a PingPong of 32 KiB through new memory of logs takes 95 to 110 us after a pause, and 6.4 to 7.8 us while the "
    "machine has the pages (7.2 to 8.1 us without logs). A machine without a host has the pages always."
)


def stamps(result: dict) -> list[str]:
    """When and of which binaries each part was measured, and whether these differ."""
    lines = ["| part | rounds | measured | commit | binaries | load at the end | seconds |", "|---|--:|---|---|---|--:|--:|"]
    for part in ways.PARTS:
        if part in result:
            made = result[part]["stamp"]
            rounds = f"{result[part]['rounds']}{' (a trial)' if result[part]['is_trial'] else ''}"
            lines.append(f"| {part} | {rounds} | {made['at']} | {made['commit']} | {made['binaries']} | {made['load']} | {result[part]['seconds']} |")
    measured = [result[part]["stamp"] for part in ways.PARTS if part in result]
    machines = sorted({made["machine"] for made in measured})
    lines += ["", prose.wrapped(f"Measured on {'; '.join(machines)}.")]
    kept = [part for part in ways.PARTS if part in result and result[part].get("is_kept")]
    if kept:
        lines += ["", prose.wrapped(GIVEN_BACK + f" Measured while it did not: {', '.join(kept)}.")]
    if len({(made["commit"], made["binaries"]) for made in measured}) > 1:
        lines += ["", "**The parts are of different commits or binaries**, so compare numbers only within a part."]
    if any(result[part]["is_trial"] for part in ways.PARTS if part in result):
        lines += ["", "**A trial has too few repetitions**: its numbers and verdicts only show that the part runs."]
    return lines


# --- numbers


def median(part: dict, way, name: str) -> float | None:
    row = part["samples"].get(way.name, {}).get(name)
    return statistics.median(row) if row else None


def is_bandwidth(name: str) -> bool:
    return name.startswith("Uniband")


def ratio(part: dict, way, name: str, base=SAME, best: bool = False) -> float | None:
    """A variant's value to that of another: of bandwidth if the value is one, else of time."""
    ours, others = (part["samples"].get(it.name, {}).get(name) for it in (way, base))
    if not ours or not others:
        return None
    of = (max if is_bandwidth(name) else min) if best else statistics.median
    return of(ours) / of(others)


def names(part: dict) -> list[str]:
    return list(dict.fromkeys(name for row in part["samples"].values() for name in row))


def size_of(name: str) -> int:
    return int(name.partition("/")[2])


def size_name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} KiB" if size >= KIB else f"{size} B"


# --- targets


def targets_table(result: dict) -> list[str]:
    """Each target with its worst value: met, missed and by how much, or not measured."""
    lines = ["| what | target | measured | |", "|---|--:|--:|---|"]
    rows = [row for part in NODE_PARTS for row in node_rows(result, part)]
    rows += pair_rows(result) + one_sided_rows(result) + between_rows(result) + spare_rows(result)
    rows += application_rows(result) + other_rows(result)
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def node_rows(result: dict, part: str) -> list[list[str]]:
    target, where = ways.TARGETS[part], WHERE[part]
    rows = worst_of(result, part, SENDERS, "PingPong", target, f"node, {where}")
    rows += worst_of(result, f"stream-{part}", SENDERS, "Uniband", target, f"node, {where}")
    found = ratios_of(result, part, UNIT, lambda name: True)
    return [*rows, judged(f"node, {where}: `recover_unit=node`, PingPong, every size", found, ways.TARGET_UNIT, False)]


def pair_rows(result: dict) -> list[list[str]]:
    return worst_of(result, "pairs", SENDERS, "Uniband", ways.TARGETS["pairs"], "node, two pairs")


def one_sided_rows(result: dict) -> list[list[str]]:
    target, rows = ways.TARGETS["one-sided"], []
    for benchmark in ways.RMA_BENCHMARKS:
        rows += worst_of(result, "one-sided", SENDERS, benchmark, target, "node")
    return rows + [row for benchmark in ways.ATOMIC for row in worst_of(result, "one-sided", SENDERS, benchmark, target, "node")[:1]]


def between_rows(result: dict) -> list[list[str]]:
    rows = worst_of(result, "nodes", SENDERS, "PingPong", ways.TARGETS["nodes"], "two nodes, TCP")
    rows += worst_of(result, "nodes", SENDERS, "Uniband", ways.TARGETS["nodes"], "two nodes, TCP")
    return rows + worst_of(result, "link", SENDERS, "PingPong", ways.TARGETS["link"], "link of 1 Gbit/s")


def spare_rows(result: dict) -> list[list[str]]:
    """What a message waits for, in round trips between the nodes: two times of a short message
    without `--recover`."""
    what, target = "spare nodes: what a message up to 1 KiB waits, in round trips", ways.TARGET_ROUND_TRIPS
    part = result.get("spares")
    base = median(part, SAME, "PingPong/8") if part else None
    waits = {}
    for name in names(part) if base else []:
        times = [median(part, way, name) for way in (SPARES, SENDERS)]
        if name.startswith("PingPong") and size_of(name) <= KIB and None not in times:
            waits[name] = (times[0] - times[1]) / (2 * base)
    rows = [judged(what, waits, target, False)]
    return rows + worst_of(result, "spares", SPARES, "Uniband", ways.TARGETS["spares"], "spare nodes")


def application_rows(result: dict) -> list[list[str]]:
    return [
        judged(f"{name}: elapsed time", ratios_of(result, "applications", SENDERS, lambda it, name=name: it == name), ways.TARGET_APPLICATION, False)
        for name in ways.APPLICATIONS
    ]


def other_rows(result: dict) -> list[list[str]]:
    rows = []
    for way in (SENDERS, RELAY):
        found, part = {}, result.get("disk", {"samples": {}})
        if values := [median(part, way, name) for name in ("beyond", "within")]:
            found = {} if None in values else {"disk": values[0] / values[1]}
        rows.append(judged(f"{way.name}: bandwidth on disk to that in memory", found, ways.TARGET_DISK, True))
    for way in (SENDERS, UNIT):
        back = result.get("back", {"samples": {}})
        middle = {name: statistics.median(row) for name, row in back["samples"].get(way.name, {}).items()}
        live = {"": middle["noticed"] + middle["restart"]} if middle else {}
        speed = {"": middle["first"] / middle["replay"]} if middle else {}
        bytes_of = {"": middle["determinant"]} if middle else {}
        rows.append(judged(f"{way.name}: seconds from a kill until the replay begins", live, ways.TARGET_LIVE_S, False))
        rows.append(judged(f"{way.name}: speed of the replay", speed, ways.TARGET_REPLAY, True))
        rows.append(judged(f"{way.name}: bytes of determinants for each frame", bytes_of, ways.TARGET_DETERMINANT, False))
    return rows


def ratios_of(result: dict, part: str, way, is_wanted) -> dict[str, float]:
    """Ratios to the same provider without `--recover`, of medians, by name."""
    if part not in result:
        return {}
    found = {name: ratio(result[part], way, name) for name in names(result[part]) if is_wanted(name)}
    return {name: value for name, value in found.items() if value is not None}


def worst_of(result: dict, part: str, way, benchmark: str, target, where: str) -> list[list[str]]:
    """Rows of a benchmark: of its times and its bandwidths; of the bandwidth one way those of 1 MiB,
    for which DESIGN has the target, and of every size."""
    own = ratios_of(result, part, way, lambda name: name.startswith(f"{benchmark}/"))
    if benchmark == "Uniband":
        one = {name: value for name, value in own.items() if size_of(name) == MIB}
        return [
            judged(f"{where}: bandwidth one way, 1 MiB", one, target.bandwidth, True),
            judged(f"{where}: bandwidth one way, every size", own, target.bandwidth, True),
        ]
    short = {name: value for name, value in own.items() if size_of(name) <= ways.SHORT_MAX}
    long = {name: 1 / value for name, value in own.items() if size_of(name) > ways.SHORT_MAX}
    limit = size_name(ways.SHORT_MAX)
    return [
        judged(f"{where}: time of {benchmark}, to {limit}", short, target.latency, False),
        judged(f"{where}: bandwidth of {benchmark}, beyond {limit}", long, target.bandwidth, True),
    ]


def judged(what: str, found: dict[str, float], target: float, is_least: bool) -> list[str]:
    """A row of the table of targets, with the worst of the values."""
    shown = f"{'≥' if is_least else '≤'} {target:g}"
    if not found:
        return [what, shown, "", "not measured"]
    worst = (min if is_least else max)(found, key=found.get)
    value = found[worst]
    misses = [name for name, each in found.items() if (each < target if is_least else each > target)]
    at = f" at {size_name(size_of(worst))}" if "/" in worst and len(found) > 1 else ""
    if not misses:
        return [what, shown, f"{value:.2f}{at}", "met"]
    by = abs(value / target - 1)
    several = f", at {len(misses)} of {len(found)} sizes" if len(found) > 1 else ""
    return [what, shown, f"{value:.2f}{at}", f"**missed** by {by:.0%}{several}"]


# --- tables


def size_tables(part_name: str, part: dict) -> list[str]:
    """A table for each benchmark: a row for each size."""
    lines = []
    for benchmark in dict.fromkeys(name.partition("/")[0] for name in names(part)):
        own = sorted((name for name in names(part) if name.startswith(f"{benchmark}/")), key=size_of)
        used = [name for name, row in part["samples"].items() if any(it in row for it in own)]
        compared = [way for way in (SPARES, SENDERS, UNIT, RELAY) if way.name in used and SAME.name in used]
        unit = "MB/s" if is_bandwidth(benchmark) else "us"
        heads = [f"{benchmark}, {unit}", *used, *(f"ratio, {way.name}" for way in compared)]
        lines += ["", f"| {' | '.join(heads)} |", "|--:|" + "--:|" * (len(heads) - 1)]
        for name in own:
            label = str(size_of(name)) if part_name == "ranks" else size_name(size_of(name))
            cells = [spread(part["samples"][way].get(name)) for way in used]
            cells += [ratio_cell(part_name, part, way, name) for way in compared]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines[1:]


def spread(row: list[float] | None) -> str:
    """The median, and the least and the greatest value."""
    if not row:
        return ""
    return f"{short(statistics.median(row))} ({short(min(row))} to {short(max(row))})" if len(row) > 1 else short(row[0])


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio_cell(part_name: str, part: dict, way, name: str) -> str:
    value, best = ratio(part, way, name), ratio(part, way, name, best=True)
    if value is None:
        return ""
    return f"{value:.2f} ({best:.2f}){missed(part_name, way, name, value)}"


def missed(part_name: str, way, name: str, value: float) -> str:
    """The target that a ratio misses, if it has one."""
    target = ways.TARGETS.get(part_name)
    if part_name == "applications" and way == SENDERS:
        return "" if value <= ways.TARGET_APPLICATION else f" missed: {ways.TARGET_APPLICATION}"
    if way == UNIT and part_name in NODE_PARTS:
        return "" if value <= ways.TARGET_UNIT else f" missed: {ways.TARGET_UNIT}"
    is_judged = way == SPARES if part_name == "spares" else way == SENDERS
    if not target or not is_judged or (part_name == "spares" and not is_bandwidth(name)):
        return ""
    if is_bandwidth(name):
        return "" if value >= target.bandwidth else f" missed: {target.bandwidth}"
    if size_of(name) > ways.SHORT_MAX:
        return "" if 1 / value >= target.bandwidth else f" missed: {1 / target.bandwidth:.3g}"
    return "" if value <= target.latency else f" missed: {target.latency}"


def ranks_lines(part_name: str, part: dict) -> list[str]:
    return ["Rows are numbers of ranks; Uniband sends 64 KiB, Allreduce 8 B. New memory.", "", *size_tables(part_name, part)]


def application_lines(part_name: str, part: dict) -> list[str]:
    what = (
        "Elapsed seconds: `examples/heat.py` (512 × 512 cells), `bench/gradient.c` (conjugate gradients on 96³ cells), "
        "`bench/transpose.c` (Fourier transforms of 512 × 512 numbers, of which a transposition sends half)."
    )
    used = list(part["samples"])
    compared = [way for way in (SENDERS, UNIT, RELAY) if way.name in used]
    heads = ["program", *used, *(f"ratio, {way.name}" for way in compared)]
    lines = [prose.wrapped(what), "", f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for name in names(part):
        cells = [spread(part["samples"][way].get(name)) for way in used]
        cells += [ratio_cell(part_name, part, way, name) for way in compared]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def disk_lines(_: str, part: dict) -> list[str]:
    total = (DISK_TIMES * ways.WINDOW * MIB) / (1 << 30)
    lines = [prose.wrapped(f"Uniband, messages of 1 MiB, {total:.1f} GiB in all: MB/s."), "", "| way | within memory | 256 MiB in memory, the rest on disk |"]
    lines.append("|---|--:|--:|")
    return lines + [f"| {way} | {spread(row.get('within'))} | {spread(row.get('beyond'))} |" for way, row in part["samples"].items()]


def counts_lines(_: str, part: dict) -> list[str]:
    """Rows by size; of each variant the bytes of log, determinants, and their bytes."""
    what = (
        "Two ranks exchange messages in turns. Of each message: bytes that the message logs hold, with the message itself; "
        "determinants; bytes of determinants. Logs of the senders take memory by pages, and beyond 2 MiB by 2 MiB, so their bytes are "
        "rounded up: of messages from 512 B on by up to 2 MiB for 32 MiB. With `recover_unit=node` read messages are not kept: "
        "memory is used again from a segment of 512 KiB on."
    )
    used = [name for name, row in part["samples"].items() if row]
    heads = ["size", *(f"{name}: {what}" for name in used for what in ("bytes of log", "determinants", "their bytes"))]
    lines = [prose.wrapped(what), "", f"| {' | '.join(heads)} |", "|--:|" + "--:|" * (len(heads) - 1)]
    for size in sorted({size_of(name) for name in names(part)}):
        rows = [part["samples"][name] for name in used]
        cells = [short(row[f"{kind}/{size}"][0]) for row in rows for kind in ("log", "determinants", "determinant bytes")]
        lines.append(f"| {size_name(size)} | {' | '.join(cells)} |")
    return lines


def back_lines(_: str, part: dict) -> list[str]:
    what = "IMB Sendrecv of 1 KiB, 4 ranks, one killed after some seconds. Seconds, and bytes of determinants for each frame."
    columns = {"first": "ran before", "noticed": "until detected and restarted", "restart": "until the replay began", "replay": "replay"}
    columns |= {"determinant": "determinants, bytes", "polls": "polls", "frames": "frames"}
    lines = [prose.wrapped(what), "", f"| way | {' | '.join(columns.values())} |", "|---|" + "--:|" * len(columns)]
    return lines + [f"| {way} | {' | '.join(spread(row.get(name)) for name in columns)} |" for way, row in part["samples"].items()]


WRITERS = {"ranks": ranks_lines, "applications": application_lines, "disk": disk_lines, "counts": counts_lines, "back": back_lines}


def picture(result: dict) -> str:
    """Speed with logs of the senders, and with the log of the relay, beside the same provider
    without `--recover`."""
    groups = []
    for part in ("new", "again", "beyond", "nodes"):
        for size in DRAWN if part in result else ():
            found = {way.name: ratio(result[part], way, f"PingPong/{size}") for way in (SENDERS, RELAY)}
            if found := {name: 1 / value for name, value in found.items() if value}:
                groups.append((f"{size_name(size)}, {WHERE.get(part, 'two nodes')}", found))
    return svg.bars("Speed of PingPong with --recover, beside that without", groups, "", [(1.0, "without --recover")])
