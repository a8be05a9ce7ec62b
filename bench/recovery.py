#!/usr/bin/env python3
"""The cost of recovery of killed ranks, and the time that a recovery takes.

    bench/recovery.py                   all parts, an hour
    bench/recovery.py --quick           one round, fewer sizes
    bench/recovery.py new nodes         only these parts: new, again, stream, ranks, nodes, link, disk, back

Variants take turns within each round: logs of the senders (the default of `--recover`), the same
where the ranks of a node begin again together (`recover_unit=node`), the log of the relay, without
`--recover` by the same provider (`local=own`), and without `--recover` and other settings (inside a
node MPICH's own shared memory).

new: IMB PingPong of 2 ranks on a node; all memory of the logs is new.
again: the same with long messages; the logs use their memory again (`recover_memory=64MiB`, and no
checkpoints: what does not fit is given up, and the memory that was read last is used first. With
checkpoints the memory of all logs is used in turn, which is slower beyond the processor's caches).
stream: IMB Uniband of 2 ranks on a node, one-way bandwidth, in new memory and in memory used again.
ranks: 2 to 64 ranks on a node: Uniband (half of the ranks send to the other half) and Allreduce.
nodes: PingPong between two nodes over TCP (a lab), memory used again.
link: PingPong over the link of labs/two-sites.toml (1 Gbit/s, 5 ms one way).
disk: IMB Uniband beyond the memory bound of the logs, with `recover_dir`, against Uniband within the
bound; logs of the senders, and the log of the relay.
back: a rank of a program that only communicates is killed, alone or with the ranks of its node.
Measured are the time until the launcher notices, until the next incarnation runs, and until the
replay is complete; the speed of the replay relative to the first run; and the bytes of determinants
for each delivered frame.

A virtual machine's host provides memory at the first touch, at a tenth of the speed of the
machine's own pages; so before each variant as much memory is touched and released as the variant
can use.
"""

import json
import mmap
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import imb  # noqa: E402
import labs  # noqa: E402
import parts as parts_of  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths, process, svg  # noqa: E402

ROUNDS = 5
KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 8, 64, 512, 4 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
LONG = tuple(size for size in SIZES if size >= 32 * KIB)
# Bytes of messages of one direction at most: the logs of all repetitions fit `recover_memory`.
BYTES_MAX, TIMES_MAX = 640 * MIB, 50_000
# In memory that is used again, each size begins with as many bytes as fill it.
AGAIN = ("--set", "recover_memory=64MiB")
# Repetitions over the link: enough for congestion control to find the rate.
FEW = {8: 200, 512: 200, 4 * KIB: 200, 32 * KIB: 200, 256 * KIB: 100, 4 * MIB: 20}
LAB = paths.ROOT / "labs" / "two-sites.toml"
LIMIT_S = 240.0
TARGET_DISK, TARGET_UNIT = 0.9, 1.1
TARGET_LIVE_S, TARGET_REPLAY = 0.5, 5.0
# Seconds that a rank has run before it is killed.
FIRST_S = 3.0
WARM_BYTES = 5 << 30
PARTS = ("new", "again", "stream", "ranks", "nodes", "link", "disk", "back")
TARGET_DETERMINANT = 8.0
# Numbers of ranks, and the amount that each pair of them sends, 64 messages at a time: 1.3 GB in
# all.
CROWDS = (2, 4, 8, 16, 32, 64)
CROWD_BYTES, CROWD_TIMES = 64 * KIB, 640
ALLREDUCE_TIMES = 200


@dataclass(frozen=True)
class Variant:
    name: str
    options: tuple[str, ...]


SENDERS = Variant("logs of the senders", ("--recover", "--set", "recover_log=sender"))
UNIT = Variant("logs of the senders, recover_unit=node", (*SENDERS.options, "--set", "recover_unit=node"))
RELAY = Variant("log of the relay", ("--recover", "--set", "recover_log=relay"))
SAME = Variant("without --recover, same provider", ("--set", "local=own"))
PLAIN = Variant("without --recover", ())
ON_A_NODE, BETWEEN_NODES = [SENDERS, UNIT, RELAY, SAME, PLAIN], [SENDERS, RELAY, SAME]
ON_DISK = [(way, memory) for way in (SENDERS, RELAY) for memory in ("within memory", "beyond it")]


@dataclass(frozen=True)
class Target:
    """What logs of the senders may cost, beside the same provider without `--recover`."""

    latency: float
    bandwidth: float


# Of DESIGN: latency up to 32 KiB; bandwidth of 1 MiB in new memory, in memory used again, between
# nodes.
TARGETS = {"new": Target(1.2, 0.08), "again": Target(1.2, 0.5), "nodes": Target(1.05, 0.95), "link": Target(1.05, 0.95)}


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS, quick: bool = False) -> dict:
    """Writes build/results/bench-recovery.json; parts that are not measured now keep their
    results."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-recovery.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    sizes = (8, 4 * KIB, MIB) if quick else SIZES
    long = (MIB,) if quick else LONG
    few = (8, 4 * MIB) if quick else tuple(FEW)
    measures = {
        "new": lambda: in_turns("new", ON_A_NODE, rounds, lambda way: ping_pong(way, sizes)) | {"sizes": sizes},
        "again": lambda: in_turns("again", ON_A_NODE, rounds, lambda way: ping_pong(again(way), long)) | {"sizes": long},
        "stream": lambda: in_turns("stream", ON_A_NODE, rounds, lambda way: streams(way, long)) | {"sizes": long},
        "ranks": lambda: in_turns("ranks", [SENDERS, UNIT, RELAY, SAME], min(rounds, 3), lambda way: crowded(way, crowds)) | {"crowds": crowds},
        "nodes": lambda: in_turns("nodes", BETWEEN_NODES, rounds, lambda way: between_nodes(again(way), sizes)) | {"sizes": sizes},
        "link": lambda: in_turns("link", BETWEEN_NODES, min(rounds, 3), lambda way: over_link(way, few)) | {"sizes": few},
        "disk": lambda: in_turns("disk", [Variant(f"{way.name}, {memory}", way.options) for way, memory in ON_DISK], rounds, spilling),
        "back": lambda: recovery_times(rounds),
    }
    crowds = (2, 16) if quick else CROWDS
    for part in parts:
        result[part] = measures[part]()
        result |= {"rounds": rounds, "stamp": stamp.now()}
        file.write_text(json.dumps(result, indent=1))
    return result


def in_turns(part: str, ways: list, rounds: int, one) -> dict:
    """Rows of numbers by variant and round."""
    samples: dict[str, list[list[float]]] = {}
    for number in range(rounds):
        # The order rotates, so that the predecessor of a variant has no influence.
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            print(f"{part}: round {number + 1} of {rounds}: {way.name}: ", end="", flush=True)
            warm()
            samples.setdefault(way.name, []).append(row := one(way))
            print(", ".join(f"{value:.1f}" for value in row), flush=True)
    return {"samples": samples, "medians": {name: list(map(statistics.median, zip(*rows))) for name, rows in samples.items()}}


def warm() -> None:
    """Makes the host of the virtual machine provide memory for the next measurement."""
    with mmap.mmap(-1, WARM_BYTES) as memory:
        for at in range(0, WARM_BYTES, mmap.PAGESIZE):
            memory[at] = 1


def again(way: Variant) -> Variant:
    """The variant whose logs use little memory, again and again."""
    return Variant(way.name, (*way.options, *AGAIN)) if "--recover" in way.options else way


def times_of(size: int) -> int:
    return min(TIMES_MAX, BYTES_MAX // size)


def ping_pong(way: Variant, sizes) -> list[float]:
    """Microseconds one way, by size."""
    return [run_imb(way.options, "PingPong", 2, size, times_of(size)) for size in sizes]


def streams(way: Variant, sizes) -> list[float]:
    """MB/s one way, by size: in new memory, and in memory that is used again."""
    return [run_imb(one.options, "Uniband", 2, size, max(times_of(size) // 64, 4)) for one in (way, again(way)) for size in sizes]


def crowded(way: Variant, crowds) -> list[float]:
    """MB/s of all pairs together, by number of ranks, and then microseconds of an Allreduce."""
    bands = [run_imb(way.options, "Uniband", ranks, CROWD_BYTES, CROWD_TIMES // ranks) for ranks in crowds]
    return bands + [run_imb(way.options, "Allreduce", ranks, 8, ALLREDUCE_TIMES) for ranks in crowds]


def benchmark_words(benchmark: str, ranks: int, size: int, times: int) -> list[str]:
    lengths = paths.RESULTS / "recovery-lengths"
    # The first size is not counted: 64 MiB in all, so that memory that is used again is full.
    lengths.write_text(f"{min(64 * MIB // times + 8, 4 * MIB)}\n{size}\n")
    bounds = ["-npmin", str(ranks), "-msglen", str(lengths), "-iter", str(times), "-iter_policy", "off"]
    return [str(imb.IMB), benchmark, *bounds]


def run_imb(options, benchmark: str, ranks: int, size: int, times: int) -> float:
    """MB/s of Uniband; microseconds of other benchmarks."""
    program = benchmark_words(benchmark, ranks, size, times)
    command = [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *options, "--", *program]
    environment = {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
    return parsed(process.run(command, LIMIT_S, environment), benchmark, size)


def parsed(finished, benchmark: str, size: int) -> float:
    table = imb.parse(finished.output)
    if not finished.ok or size not in table.rows:
        raise labs.Failed(f"{finished.why or finished.code}: {process.tail(finished.output, 4)}")
    return table.bandwidth(size) if benchmark == "Uniband" else table.latency_us(size)


def between_nodes(way: Variant, sizes) -> list[float]:
    """Microseconds one way, by size, between two nodes of a cluster."""
    return [lab_imb(way.options, size, min(times_of(size), 5000), []) for size in sizes]


def over_link(way: Variant, sizes) -> list[float]:
    """Microseconds one way, by size, between two sites."""
    gateways = paths.ROOT / "tests" / "system" / "programs" / "on_gateways.py"
    return [lab_imb(way.options, size, FEW[size], [sys.executable, str(gateways)]) for size in sizes]


def lab_imb(options, size: int, times: int, placed: list[str]) -> float:
    program = benchmark_words("PingPong", 2, size, times)
    job = [str(paths.LANDBRIDGE), "run", "-n", "2", "--ranks-per-node", "1", *options, "--", *program]
    words = labs.command(LAB, labs.name("recovery"), [*placed, *job])
    return parsed(process.run(words, LIMIT_S, labs.environment()), "PingPong", size)


def spilling(way: Variant) -> list[float]:
    """MB/s of long messages: with a log of 4 GiB in memory, or of 256 MiB in memory and the rest on
    a disk."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("LANDBRIDGE_BENCH_DIR", "/var/tmp")) as directory:
        memory = "12GiB" if way.name.endswith("within memory") else "256MiB"
        bounds = (*way.options, "--set", f"recover_memory={memory}", "--set", f"recover_dir={directory}")
        return [run_imb(bounds, "Uniband", 2, MIB, 24)]


# --- from a kill to the end of the replay

STARTED = re.compile(r"restarted: (\d+) polls")
LIVE = re.compile(r"the replay is over after (\d+) frames")


def recovery_times(rounds: int) -> dict:
    """Rows by variant."""
    rows = {way.name: [] for way in (SENDERS, UNIT)}
    for _ in range(rounds):
        for way in (SENDERS, UNIT):
            rows[way.name].append(recovery_time(way))
    return rows


def recovery_time(way: Variant) -> dict:
    """Seconds: from the kill until the launcher notices, from then until the replay begins, and
    from then until the rank is live; and the duration of the first run."""
    lengths = paths.RESULTS / "recovery-lengths"
    lengths.write_text("1024\n")
    program = [str(imb.IMB), "Sendrecv", "-npmin", "4", "-msglen", str(lengths), "-iter", "10000000", "-iter_policy", "off", "-time", "600"]
    command = [str(paths.LANDBRIDGE), "run", "-n", "4", *way.options, "--set", "log=info", "--", *program]
    environment = os.environ | {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
    print(f"back: {way.name}: ", end="", flush=True)
    with tempfile.TemporaryFile("w+") as said:
        job = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            wait_for(said, lambda _: pid_of(1, job.pid), job)
            began = time.monotonic()
            time.sleep(FIRST_S)
            each = determinant_bytes(job.pid)
            killed = time.monotonic()
            os.kill(pid_of(1, job.pid), signal.SIGKILL)
            noticed = wait_for(said, lambda text: ": restarted" in text, job)
            replay_begun = wait_for(said, lambda text: STARTED.search(text), job)
            live = wait_for(said, lambda text: LIVE.search(text), job)
            said.seek(0)
            text = said.read()
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(30)
            process.end_descendants()
    row = {"first": killed - began, "noticed": noticed - killed, "restart": replay_begun - noticed, "replay": live - replay_begun}
    row |= {"determinant": each, "polls": int(STARTED.search(text)[1]), "frames": int(LIVE.search(text)[1])}
    print(", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    return row


def determinant_bytes(launcher: int) -> float:
    """Bytes of determinants for each delivered frame."""
    answer = subprocess.run([str(paths.LANDBRIDGE), "log", "--json"], capture_output=True, text=True, timeout=10)
    (kept,) = [job["log_status"]["processes"] for job in json.loads(answer.stdout) if job["launcher"] == launcher]
    return sum(it["determinant_bytes"] for it in kept) / max(sum(it["delivered_frames"] for it in kept), 1)


def wait_for(file, is_there, job) -> float:
    """The time of a message in the output, with a resolution of 2 ms."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.poll() is None:
        file.seek(0)
        if is_there(file.read()):
            return time.monotonic()
        time.sleep(0.002)
    file.seek(0)
    raise labs.Failed(f"ended, or said nothing for {LIMIT_S:.0f} s: {process.tail(file.read(), 4)}")


def pid_of(rank: int, launcher: int) -> int | None:
    answer = subprocess.run([str(paths.LANDBRIDGE), "ps", "--json"], capture_output=True, text=True, timeout=10)
    jobs = json.loads(answer.stdout) if answer.returncode == 0 else []
    ranks = [row for job in jobs if job["launcher"] == launcher for row in job["ranks"]]
    return next((row["pid"] for row in ranks if row["rank"] == str(rank)), None)


# --- the document


def section(result: dict) -> str:
    lines = ["## Killed ranks come back: what it costs", "", f"{stamp.rounds(result['rounds'])}, medians.", *stamp.lines(result)]
    what = {
        "new": "**PingPong on a node**, IMB-MPI1, 2 ranks and all other processes on two cores. All memory of the logs is new: the "
        "first access to a page costs more than all copies into it.",
        "again": f"**PingPong on a node, memory used again** (`{AGAIN[1]}`, without checkpoints: messages that were read are given up, and "
        "their memory is used first. With checkpoints all memory is used in turn.)",
        "nodes": f"**PingPong between two nodes over TCP** (a lab on this machine, `{AGAIN[1]}`).",
        "link": f"**PingPong over a link** of 1 Gbit/s, 5 ms one way (`{LAB.relative_to(paths.ROOT)}`).",
    }
    for part, title in what.items():
        if part in result:
            lines += ["", prose.wrapped(title), "", *table(result[part], TARGETS[part])]
    if "stream" in result:
        lines += ["", "**One way on a node**, Uniband, 64 messages at a time.", "", *stream_table(result["stream"])]
    if "ranks" in result:
        lines += ["", "**Many ranks** of a node on the same two cores, new memory.", "", *crowd_table(result["ranks"])]
    if "disk" in result:
        lines += ["", *disk_lines(result["disk"])]
    if "back" in result:
        for name, rows in result["back"].items():
            lines += ["", *recovery_time_lines(name, rows)]
    return "\n".join(lines) + "\n"


def table(part: dict, target: Target) -> list[str]:
    """One-way times; ratios of the variants with a log to the same provider without."""
    names = [size_name(size) for size in part["sizes"]]
    lines = [f"| way, us one way | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for name, row in part["medians"].items():
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in row)} |")
    best = {name: [min(column) for column in zip(*rows)] for name, rows in part["samples"].items()}
    for title, rows in (("**ratio to the same provider**", part["medians"]), ("the same, best rounds", best)):
        pairs = list(zip(rows[SENDERS.name], rows[SAME.name], part["sizes"]))
        lines.append(f"| {title} | {' | '.join(verdict(with_log, none, size, target) for with_log, none, size in pairs)} |")
    if unit := part["medians"].get(UNIT.name):
        ratios = [judged(with_log / none, TARGET_UNIT, False) for with_log, none in zip(unit, part["medians"][SAME.name])]
        lines.append(f"| ratio, `recover_unit=node` | {' | '.join(ratios)} |")
    pairs = zip(part["medians"][RELAY.name], part["medians"][SAME.name])
    lines.append(f"| ratio, log of the relay | {' | '.join(f'{with_log / none:.2f}' for with_log, none in pairs)} |")
    return lines


def stream_table(part: dict) -> list[str]:
    """Bandwidth in new memory, and in memory used again."""
    count, names = len(part["sizes"]), [size_name(size) for size in part["sizes"]]
    lines = [f"| MB/s | {' | '.join(names)} |", "|---|" + "--:|" * count]
    for title, first, share in (("new memory", 0, TARGETS["new"].bandwidth), ("used again", count, TARGETS["again"].bandwidth)):
        rows = {name: row[first : first + count] for name, row in part["medians"].items()}
        for name, row in rows.items():
            lines.append(f"| {title}: {name} | {' | '.join(f'{value:.0f}' for value in row)} |")
        ratios = [judged(with_log / none, share, True) for with_log, none in zip(rows[SENDERS.name], rows[SAME.name])]
        lines.append(f"| **ratio to the same provider** | {' | '.join(ratios)} |")
    return lines


def size_name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} KiB" if size >= KIB else f"{size} B"


def crowd_table(part: dict) -> list[str]:
    """Rows of bandwidth and of times, with their ratios."""
    crowds = part["crowds"]
    lines = [f"| ranks | {' | '.join(map(str, crowds))} |", "|---|" + "--:|" * len(crowds)]
    for title, first, is_long in (("Uniband, 64 KiB, MB/s", 0, True), ("Allreduce, 8 B, us", len(crowds), False)):
        rows = {name: row[first : first + len(crowds)] for name, row in part["medians"].items()}
        for name, row in rows.items():
            lines.append(f"| {title}: {name} | {' | '.join(f'{value:.0f}' for value in row)} |")
        pairs = zip(rows[SENDERS.name], rows[SAME.name])
        ratios = [f"{with_log / none:.2f}{' of bandwidth' if is_long else ''}" for with_log, none in pairs]
        lines.append(f"| **ratio to the same provider** | {' | '.join(ratios)} |")
    return lines


def verdict(with_log: float, none: float, size: int, target: Target) -> str:
    """The ratio and its target: of latency up to 32 KiB, of bandwidth for longer messages."""
    is_long = size > 32 * KIB
    return judged(none / with_log, target.bandwidth, True) if is_long else judged(with_log / none, target.latency, False)


def judged(ratio: float, target: float, is_bandwidth: bool) -> str:
    met = ratio >= target if is_bandwidth else ratio <= target
    return f"{ratio:.2f}{' of bandwidth' if is_bandwidth else ''}{'' if met else f' (missed: {target})'}"


def disk_lines(part: dict) -> list[str]:
    what = f"**Message log larger than memory**, IMB Uniband, messages of 1 MiB, {2 * 24 * 64 >> 10} GiB in all:"
    for way in (SENDERS, RELAY):
        within, beyond = (part["medians"][f"{way.name}, {memory}"][0] for memory in ("within memory", "beyond it"))
        share = beyond / within
        missed = "" if share >= TARGET_DISK else f" (missed: {TARGET_DISK:.0%})"
        what += (
            f" {way.name}: {within:.0f} MB/s within memory, {beyond:.0f} MB/s with 256 MiB of memory and the rest on disk: "
            f"{share:.0%}{missed};"
        )
    return [prose.wrapped(what.rstrip(";") + ".")]


def recovery_time_lines(name: str, rows: list[dict]) -> list[str]:
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    speed = middle["first"] / middle["replay"]
    waiting = middle["noticed"] + middle["restart"]
    late = "" if waiting <= TARGET_LIVE_S else f" (missed: {TARGET_LIVE_S} s)"
    slow = "" if speed >= TARGET_REPLAY else f" (missed: {TARGET_REPLAY} times)"
    large = "" if middle["determinant"] <= TARGET_DETERMINANT else f" (missed: {TARGET_DETERMINANT})"
    what = (
        f"**From a kill to the same point, {name}**, IMB Sendrecv of 1 KiB, 4 ranks, one killed after {FIRST_S:.0f} s: detected and "
        f"restarted within {middle['noticed'] * 1e3:.0f} ms, the replay began {middle['restart'] * 1e3:.0f} ms "
        f"later{late}, and {middle['first']:.1f} s were replayed in {middle['replay']:.2f} s: {speed:.1f} times as fast as the "
        f"first time{slow}. Each delivered frame took {middle['determinant']:.1f} bytes of determinants{large}."
    )
    return [prose.wrapped(what)]


def picture(result: dict) -> str:
    """Speed with logs of the senders, and with the log of the relay, beside the same provider
    without `--recover`."""
    groups = []
    for part, where in (("new", "a node, new memory"), ("again", "a node, used memory"), ("nodes", "two nodes"), ("link", "two sites")):
        if rows := result.get(part):
            names = (SENDERS.name, RELAY.name)
            times = zip(rows["sizes"], rows["medians"][SAME.name], *(rows["medians"][name] for name in names))
            groups += [(f"{size_name(size)}, {where}", dict(zip(names, (none / one for one in each)))) for size, none, *each in times]
    return svg.bars("Speed of PingPong with --recover, beside that without", groups, "", [(1.0, "without --recover")])


if __name__ == "__main__":
    sys.exit(parts_of.main(__doc__, ROUNDS, PARTS, measure, section))
