#!/usr/bin/env python3
"""The cost of recovery of killed ranks, and the time that a recovery takes.

    bench/recovery.py                   all parts, 40 minutes
    bench/recovery.py --quick           one round, fewer sizes
    bench/recovery.py kept disk         only these parts: kept, again, ranks, link, disk, back

kept: IMB PingPong, both ranks and their relay on one machine: with a complete message log, over the
same path without a log (`recover_memory=1MiB`, which the first message fills, so that the relay
gives up the log of the ranks), through a relay without `--recover`, and without a relay. Variants
take turns within each round.
again: long messages back and forth, with a message log in reused memory, as it is from the third
checkpoint of a rank on: then the log before the first checkpoint is released. (In `kept` all memory
of the log is new.)
ranks: 2 to 64 ranks with a complete log and without one: Uniband (half of the ranks send to the
other half) and Allreduce.
link: the variants of kept over the link of labs/two-sites.toml (1 Gbit/s, 5 ms one way), the usual
environment of such jobs.
disk: IMB Uniband beyond the memory bound, with `recover_dir`, against Uniband within the bound.
back: a rank of a program that only communicates is killed. Measured are the time until the launcher
notices, until the next incarnation runs, and until the replay is complete; the speed of the replay
relative to the first run; and the bytes of determinants for each delivered frame.

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
SIZES = (8, 512, 4 * KIB, 32 * KIB, 256 * KIB, 4 * MIB)
# Repetitions for each size: the log of all of them is smaller than `recover_memory`.
REPETITIONS = {8: 20_000, 512: 20_000, 4 * KIB: 10_000, 32 * KIB: 4_000, 256 * KIB: 800, 4 * MIB: 60}
# Repetitions over the link: enough for congestion control to find the rate.
FEW = {8: 200, 512: 200, 4 * KIB: 200, 32 * KIB: 200, 256 * KIB: 100, 4 * MIB: 20}
LAB = paths.ROOT / "labs" / "two-sites.toml"
LIMIT_S = 240.0
TARGET_LATENCY, TARGET_BANDWIDTH = 1.05, 0.98
TARGET_DISK = 0.9
TARGET_LIVE_S, TARGET_REPLAY = 2.0, 5.0
# Seconds that a rank has run before it is killed.
FIRST_S = 3.0
WARM_BYTES = 5 << 30
RECOVERY_WITHOUT_LOG = ("--recover", "--set", "recover_memory=1MiB")
PARTS = ("kept", "again", "ranks", "link", "disk", "back")
TARGET_DETERMINANT = 8.0
# MiB that each rank receives before a checkpoint; the measured messages are too few to trigger
# another one.
REUSED_MIB, REUSED_CHECKPOINTS = 300, 3
REUSED_REPETITIONS = {32 * KIB: 2_000, 256 * KIB: 250, 4 * MIB: 16}
# Numbers of ranks, and the amount that each pair of them sends, 64 messages at a time: 1.3 GB in
# all.
CROWDS = (2, 4, 8, 16, 32, 64)
CROWD_BYTES, CROWD_TIMES = 64 * KIB, 640
ALLREDUCE_TIMES = 200


@dataclass(frozen=True)
class Variant:
    name: str
    options: tuple[str, ...]
    paths: str = ""


RECORDED = Variant("message log", ("--recover",))
UNRECORDED = Variant("the same path, no message log", RECOVERY_WITHOUT_LOG)
VARIANTS = [RECORDED, UNRECORDED, Variant("a relay, without --recover", ("--clusters", "1"), "relay"), Variant("direct", ())]


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS, quick: bool = False) -> dict:
    """Writes build/results/bench-recovery.json; parts that are not measured now keep their
    results."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-recovery.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    sizes = (8, 4 * MIB) if quick else SIZES
    if "kept" in parts:
        result["kept"] = in_turns("kept", VARIANTS, rounds, lambda way: ping_pong(way, sizes)) | {"sizes": sizes}
    if "again" in parts:
        result["again"] = in_turns("again", [RECORDED, UNRECORDED], rounds, reused_memory) | {"sizes": tuple(REUSED_REPETITIONS)}
    if "ranks" in parts:
        crowds = (2, 16) if quick else CROWDS
        result["ranks"] = in_turns("ranks", [RECORDED, UNRECORDED], min(rounds, 3), lambda way: crowded(way, crowds)) | {"crowds": crowds}
    if "link" in parts:
        result["link"] = in_turns("link", [RECORDED, UNRECORDED], min(rounds, 3), lambda way: over_link(way, sizes)) | {"sizes": sizes}
    if "disk" in parts:
        result["disk"] = in_turns("disk", ["within memory", "beyond it"], rounds, spilling)
    if "back" in parts:
        result["back"] = [recovery_time() for _ in range(rounds)]
    result |= {"rounds": rounds, "stamp": stamp.now()}
    file.write_text(json.dumps(result, indent=1))
    return result


def in_turns(part: str, ways: list, rounds: int, one) -> dict:
    """Rows of numbers by variant and round."""
    samples: dict[str, list[list[float]]] = {}
    for number in range(rounds):
        # The order rotates, so that the predecessor of a variant has no influence.
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            name = getattr(way, "name", way)
            print(f"{part}: round {number + 1} of {rounds}: {name}: ", end="", flush=True)
            warm()
            samples.setdefault(name, []).append(row := one(way))
            print(", ".join(f"{value:.1f}" for value in row), flush=True)
    return {"samples": samples, "medians": {name: list(map(statistics.median, zip(*rows))) for name, rows in samples.items()}}


def warm() -> None:
    """Makes the host of the virtual machine provide memory for the next measurement."""
    with mmap.mmap(-1, WARM_BYTES) as memory:
        for at in range(0, WARM_BYTES, mmap.PAGESIZE):
            memory[at] = 1


def ping_pong(way: Variant, sizes) -> list[float]:
    """Microseconds one way, by size."""
    return [run_imb(way.options, "PingPong", 2, size, REPETITIONS[size], way.paths) for size in sizes]


def reused_memory(way: Variant) -> list[float]:
    """Microseconds one way, by size, in memory that checkpoints have released."""
    program = paths.ROOT / "tests" / "system" / "programs" / "there_and_back.py"
    images = ("--checkpoint", "1h", "--set", f"checkpoint_log={REUSED_MIB}MiB", "--set", f"criu={paths.CRIU}", "--verbose")
    options = (*way.options, *(images if way is RECORDED else ()))
    bounds = [f"{size}:{times}" for size, times in REUSED_REPETITIONS.items()]
    python = str(paths.venv("mpich") / "bin" / "python")
    # The disk writes of a checkpoint last for seconds after it.
    words = ["--first", str(REUSED_MIB + REUSED_MIB // 50), "--times", str(REUSED_CHECKPOINTS), "--wait", "5", *bounds]
    finished = process.run([str(paths.LANDBRIDGE), "run", "-n", "2", *options, "--", python, str(program), *words], LIMIT_S, {})
    rows = re.findall(r"^one way: (\d+) B: (\S+) us$", finished.output, re.M)
    images_taken = len(re.findall(r"^landbridge: checkpoint \d+ of rank", finished.output, re.M))
    if not finished.ok or len(rows) != len(REUSED_REPETITIONS) or images_taken != (2 * REUSED_CHECKPOINTS if way is RECORDED else 0):
        why = finished.why or f"exit code {finished.code}, {images_taken} images"
        raise labs.Failed(f"{why}: {process.tail(finished.output, 4)}")
    return [float(micros) for _, micros in rows]


def crowded(way: Variant, crowds) -> list[float]:
    """MB/s of all pairs together, by number of ranks, and then microseconds of an Allreduce."""
    streams = [run_imb(way.options, "Uniband", ranks, CROWD_BYTES, CROWD_TIMES // ranks) for ranks in crowds]
    return streams + [run_imb(way.options, "Allreduce", ranks, 8, ALLREDUCE_TIMES) for ranks in crowds]


def run_imb(options, benchmark: str, ranks: int, size: int, times: int, allowed: str = "") -> float:
    """MB/s of Uniband; microseconds of other benchmarks."""
    lengths = paths.RESULTS / "recovery-lengths"
    # The first size is not counted: 4 MiB in all, so that a bound of 1 MiB is full.
    lengths.write_text(f"{4 * MIB // times + 8}\n{size}\n")
    bounds = ["-npmin", str(ranks), "-msglen", str(lengths), "-iter", str(times), "-iter_policy", "off"]
    command = [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *options, "--", str(imb.IMB), benchmark, *bounds]
    environment = {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
    environment |= {"LANDBRIDGE_PATHS": allowed} if allowed else {}
    return parsed(process.run(command, LIMIT_S, environment), benchmark, size)


def parsed(finished, benchmark: str, size: int) -> float:
    table = imb.parse(finished.output)
    if not finished.ok or size not in table.rows:
        raise labs.Failed(f"{finished.why or finished.code}: {process.tail(finished.output, 4)}")
    return table.bandwidth(size) if benchmark == "Uniband" else table.latency_us(size)


def over_link(way: Variant, sizes) -> list[float]:
    """Microseconds one way, by size, between two sites."""
    return [lab_imb(way.options, size) for size in sizes]


def lab_imb(options, size: int) -> float:
    lengths = paths.RESULTS / "recovery-lengths"
    lengths.write_text(f"{4 * MIB // FEW[size] + 8}\n{size}\n")
    gateways = paths.ROOT / "tests" / "system" / "programs" / "on_gateways.py"
    bounds = ["-npmin", "2", "-msglen", str(lengths), "-iter", str(FEW[size]), "-iter_policy", "off"]
    job = [str(paths.LANDBRIDGE), "run", "-n", "2", "--ranks-per-node", "1", *options, "--", str(imb.IMB), "PingPong", *bounds]
    words = labs.command(LAB, labs.name("recovery"), [sys.executable, str(gateways), *job])
    return parsed(process.run(words, LIMIT_S, labs.environment()), "PingPong", size)


def spilling(way: str) -> list[float]:
    """MB/s of long messages: with a log of 4 GiB in memory, or of 256 MiB in memory and the rest on
    a disk."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("LANDBRIDGE_BENCH_DIR", "/var/tmp")) as directory:
        memory = "12GiB" if way == "within memory" else "256MiB"
        bounds = ("--recover", "--set", f"recover_memory={memory}", "--set", f"recover_dir={directory}")
        return [run_imb(bounds, "Uniband", 2, MIB, 24)]


# --- from a kill to the end of the replay

STARTED = re.compile(r"restarted: (\d+) polls")
LIVE = re.compile(r"live again, after (\d+) frames")


def recovery_time() -> dict:
    """Seconds: from the kill until the launcher notices, from then until the replay begins, and
    from then until the rank is live; and the duration of the first run."""
    lengths = paths.RESULTS / "recovery-lengths"
    lengths.write_text("1024\n")
    program = [str(imb.IMB), "Sendrecv", "-npmin", "4", "-msglen", str(lengths), "-iter", "10000000", "-iter_policy", "off", "-time", "600"]
    command = [str(paths.LANDBRIDGE), "run", "-n", "4", "--recover", "--set", "log=info", "--", *program]
    environment = os.environ | {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
    print("back: ", end="", flush=True)
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
    if "kept" in result:
        what = (
            "**One machine**, IMB-MPI1 PingPong, 2 ranks and their relay on the same two cores. All memory is new: the first "
            "access to a page costs more than all copies into it."
        )
        lines += ["", prose.wrapped(what), ""]
        lines += table(result["kept"])
    if "again" in result:
        what = (
            f"**In memory that was in use before**, as in a job with checkpoints: {REUSED_CHECKPOINTS} checkpoints of each rank "
            f"were taken before, one after each {REUSED_MIB} MiB of messages."
        )
        lines += ["", prose.wrapped(what), ""]
        lines += table(result["again"])
    if "ranks" in result:
        lines += ["", "**Many ranks** on the same two cores, which they share with their relay.", "", *crowd_table(result["ranks"])]
    if "link" in result:
        lines += ["", f"**A link** of 1 Gbit/s, 5 ms one way (`{LAB.relative_to(paths.ROOT)}`), the same program.", ""]
        lines += table(result["link"])
    if "disk" in result:
        lines += ["", *disk_lines(result["disk"])]
    if "back" in result:
        lines += ["", *recovery_time_lines(result["back"])]
    return "\n".join(lines) + "\n"


def table(part: dict) -> list[str]:
    """One-way times; ratios of the variant with a log to the same path without."""
    names = [size_name(size) for size in part["sizes"]]
    lines = [f"| way, us one way | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for name, row in part["medians"].items():
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in row)} |")
    best = {name: [min(column) for column in zip(*rows)] for name, rows in part["samples"].items()}
    for title, rows in (("**ratio, message log to no message log**", part["medians"]), ("ratio, best rounds only", best)):
        pairs = zip(rows[RECORDED.name], rows[UNRECORDED.name], part["sizes"])
        lines.append(f"| {title} | {' | '.join(verdict(kept, none, size) for kept, none, size in pairs)} |")
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
        pairs = zip(rows[RECORDED.name], rows[UNRECORDED.name])
        ratios = [judged(kept / none, is_long) for kept, none in pairs]
        lines.append(f"| **ratio** | {' | '.join(ratios)} |")
    return lines


def verdict(kept: float, none: float, size: int) -> str:
    """The ratio and its target: of bandwidth for long messages, of latency for short ones."""
    is_long = size >= 32 * KIB
    return judged(none / kept if is_long else kept / none, is_long)


def judged(ratio: float, is_bandwidth: bool) -> str:
    target = TARGET_BANDWIDTH if is_bandwidth else TARGET_LATENCY
    met = ratio >= target if is_bandwidth else ratio <= target
    return f"{ratio:.2f}{' of bandwidth' if is_bandwidth else ''}{'' if met else f' (missed: {target})'}"


def disk_lines(part: dict) -> list[str]:
    within, beyond = part["medians"]["within memory"][0], part["medians"]["beyond it"][0]
    share = beyond / within
    missed = "" if share >= TARGET_DISK else f" (missed: {TARGET_DISK:.0%})"
    what = (
        f"**Message log larger than memory**, IMB Uniband, messages of 1 MiB, {2 * 24 * 64 >> 10} GiB in all: {within:.0f} MB/s "
        f"within memory, {beyond:.0f} MB/s with 256 MiB of memory and the rest on disk: {share:.0%}{missed}."
    )
    return [prose.wrapped(what)]


def recovery_time_lines(rows: list[dict]) -> list[str]:
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    speed = middle["first"] / middle["replay"]
    waiting = middle["noticed"] + middle["restart"]
    late = "" if waiting <= TARGET_LIVE_S else f" (missed: {TARGET_LIVE_S} s)"
    slow = "" if speed >= TARGET_REPLAY else f" (missed: {TARGET_REPLAY} times)"
    large = "" if middle["determinant"] <= TARGET_DETERMINANT else f" (missed: {TARGET_DETERMINANT})"
    what = (
        f"**From a kill to the same point**, IMB Sendrecv of 1 KiB, 4 ranks, one killed after {FIRST_S:.0f} s: detected and "
        f"restarted within {middle['noticed'] * 1e3:.0f} ms, the replay from the relay began {middle['restart'] * 1e3:.0f} ms "
        f"later{late}, and {middle['first']:.1f} s were replayed in {middle['replay']:.2f} s: {speed:.1f} times as fast as the "
        f"first time{slow}. Each delivered frame took {middle['determinant']:.1f} bytes of determinants{large}."
    )
    return [prose.wrapped(what)]


def picture(result: dict) -> str:
    """Speed with a complete log, relative to that without a log."""
    groups = []
    if kept := result.get("kept"):
        pairs = zip(kept["sizes"], kept["medians"][RECORDED.name], kept["medians"][UNRECORDED.name])
        groups += [(size_name(size), {"one machine, PingPong": none / with_all}) for size, with_all, none in pairs]
    if again := result.get("again"):
        pairs = zip(again["sizes"], again["medians"][RECORDED.name], again["medians"][UNRECORDED.name])
        groups += [(f"{size_name(size)}, used memory", {"one machine, PingPong": none / with_all}) for size, with_all, none in pairs]
    if link := result.get("link"):
        pairs = zip(link["sizes"], link["medians"][RECORDED.name], link["medians"][UNRECORDED.name])
        groups += [(size_name(size), {"1 Gbit/s, PingPong": none / with_all}) for size, with_all, none in pairs]
    if crowd := result.get("ranks"):
        count = len(crowd["crowds"])
        rows = list(zip(crowd["medians"][RECORDED.name], crowd["medians"][UNRECORDED.name]))
        for number, (ranks, fast, slow) in enumerate(zip(crowd["crowds"], rows[:count], rows[count:])):
            shares = {"one machine, Uniband of 64 KiB": fast[0] / fast[1], "one machine, Allreduce of 8 B": slow[1] / slow[0]}
            groups.append((f"{ranks} ranks", shares))
    return svg.bars("Speed with a message log, beside that of the same path without", groups, "", [(1.0, "no message log")])


if __name__ == "__main__":
    sys.exit(parts_of.main(__doc__, ROUNDS, PARTS, measure, section))
