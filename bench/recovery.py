#!/usr/bin/env python3
"""What it costs that killed ranks come back, and how soon they do.

    bench/recovery.py                   all of it, 20 minutes
    bench/recovery.py --quick           one round, fewer sizes
    bench/recovery.py kept disk         only these parts: kept, link, disk, back

kept: IMB PingPong, both ranks and their relay on one machine: with everything kept, with the same path and nothing kept
(`recover_memory=1MiB`, which the first message fills, so that the relay gives the ranks up), through a relay without
`--recover`, and without one. Ways take turns within each round.
link: the same over the link of labs/two-sites.toml (1 Gbit/s, 5 ms one way), which is where such jobs run.
disk: IMB Uniband beyond the memory bound, with `recover_dir`, against the same within it.
back: a rank of a program that does nothing but communicate is killed; how long until it is noticed, is there again, and is
where it was, and how fast that goes beside the first time.

A virtual machine's host gives it memory when it is touched first, at a tenth of the speed of the machine's own pages; so
before each way as much memory is touched and given back as it can take.
"""

import argparse
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
import stamp  # noqa: E402
from support import paths, process  # noqa: E402

ROUNDS = 5
KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 512, 4 * KIB, 32 * KIB, 256 * KIB, 4 * MIB)
# Repetitions for each size: what is kept of all of them is less than `recover_memory`.
REPETITIONS = {8: 20_000, 512: 20_000, 4 * KIB: 10_000, 32 * KIB: 4_000, 256 * KIB: 800, 4 * MIB: 60}
# Of the link: enough for congestion control to find the rate.
FEW = {8: 200, 512: 200, 4 * KIB: 200, 32 * KIB: 200, 256 * KIB: 100, 4 * MIB: 20}
LAB = paths.ROOT / "labs" / "two-sites.toml"
LIMIT_S = 240.0
TARGET_LATENCY, TARGET_BANDWIDTH = 1.05, 0.98
TARGET_DISK = 0.9
TARGET_LIVE_S, TARGET_REPLAY = 2.0, 5.0
# A killed rank has run for so long.
FIRST_S = 3.0
WARM_BYTES = 5 << 30
NOTHING = ("--recover", "--set", "recover_memory=1MiB")
PARTS = ("kept", "link", "disk", "back")


@dataclass(frozen=True)
class Way:
    name: str
    options: tuple[str, ...]
    paths: str = ""


KEPT, NONE = Way("kept", ("--recover",)), Way("the same path, nothing kept", NOTHING)
WAYS = [KEPT, NONE, Way("a relay, without --recover", ("--clusters", "1"), "relay"), Way("direct", ())]


def measure(rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS, quick: bool = False) -> dict:
    """Writes build/results/bench-recovery.json; parts that are not measured now stay as they were."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    file = paths.RESULTS / "bench-recovery.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    sizes = (8, 4 * MIB) if quick else SIZES
    if "kept" in parts:
        result["kept"] = in_turns("kept", WAYS, rounds, lambda way: ping_pong(way, sizes)) | {"sizes": sizes}
    if "link" in parts:
        result["link"] = in_turns("link", [KEPT, NONE], min(rounds, 3), lambda way: over_link(way, sizes)) | {"sizes": sizes}
    if "disk" in parts:
        result["disk"] = in_turns("disk", ["within memory", "beyond it"], rounds, spilling)
    if "back" in parts:
        result["back"] = [coming_back() for _ in range(rounds)]
    result |= {"rounds": rounds, "stamp": stamp.now()}
    file.write_text(json.dumps(result, indent=1))
    return result


def in_turns(part: str, ways: list, rounds: int, one) -> dict:
    """Rows of numbers by way and round."""
    samples: dict[str, list[list[float]]] = {}
    for number in range(rounds):
        # The order turns: who comes after whom must not matter.
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            name = getattr(way, "name", way)
            print(f"{part}: round {number + 1} of {rounds}: {name}: ", end="", flush=True)
            warm()
            samples.setdefault(name, []).append(row := one(way))
            print(", ".join(f"{value:.1f}" for value in row), flush=True)
    return {"samples": samples, "medians": {name: list(map(statistics.median, zip(*rows))) for name, rows in samples.items()}}


def warm() -> None:
    """Has the machine's host find memory for what is measured next."""
    with mmap.mmap(-1, WARM_BYTES) as memory:
        for at in range(0, WARM_BYTES, mmap.PAGESIZE):
            memory[at] = 1


def ping_pong(way: Way, sizes) -> list[float]:
    """Microseconds one way, by size."""
    return [run_imb(way.options, "PingPong", 2, size, REPETITIONS[size], way.paths) for size in sizes]


def run_imb(options, benchmark: str, ranks: int, size: int, times: int, allowed: str = "") -> float:
    """Microseconds (of PingPong) or MB/s."""
    lengths = paths.RESULTS / "recovery-lengths"
    # First, and not counted: 4 MiB in all, so that a bound of 1 MiB is full.
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
    return table.latency_us(size) if benchmark == "PingPong" else table.bandwidth(size)


def over_link(way: Way, sizes) -> list[float]:
    """As `ping_pong`, between two sites."""
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
    """MB/s of long messages: 4 GiB are kept, or 256 MiB, and the rest is written to a disk."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("LANDBRIDGE_BENCH_DIR", "/var/tmp")) as directory:
        memory = "12GiB" if way == "within memory" else "256MiB"
        bounds = ("--recover", "--set", f"recover_memory={memory}", "--set", f"recover_dir={directory}")
        return [run_imb(bounds, "Uniband", 2, MIB, 24)]


# --- from a kill to where it was

STARTED = re.compile(r"started anew: (\d+) polls")
LIVE = re.compile(r"live again, after (\d+) frames")


def coming_back() -> dict:
    """Seconds: until it is noticed, from then until it is told what was, and from then until it is where it was; and how long
    the first time took."""
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
            killed = time.monotonic()
            os.kill(pid_of(1, job.pid), signal.SIGKILL)
            noticed = wait_for(said, lambda text: "started anew" in text, job)
            told = wait_for(said, lambda text: STARTED.search(text), job)
            live = wait_for(said, lambda text: LIVE.search(text), job)
            said.seek(0)
            text = said.read()
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(30)
            process.end_descendants()
    row = {"first": killed - began, "noticed": noticed - killed, "restart": told - noticed, "replay": live - told}
    row |= {"polls": int(STARTED.search(text)[1]), "frames": int(LIVE.search(text)[1])}
    print(", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    return row


def wait_for(file, is_there, job) -> float:
    """When it was said; seen within 2 ms."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.poll() is None:
        file.seek(0)
        if is_there(file.read()):
            return time.monotonic()
        time.sleep(0.002)
    file.seek(0)
    raise labs.Failed(f"ended, or said nothing for {LIMIT_S:.0f} s: {process.tail(file.read(), 4)}")


def pid_of(rank: int, launcher: int) -> int | None:
    told = subprocess.run([str(paths.LANDBRIDGE), "ps", "--json"], capture_output=True, text=True, timeout=10)
    jobs = json.loads(told.stdout) if told.returncode == 0 else []
    ranks = [row for job in jobs if job["launcher"] == launcher for row in job["ranks"]]
    return next((row["pid"] for row in ranks if row["rank"] == str(rank)), None)


# --- the document


def section(result: dict) -> str:
    lines = ["## Killed ranks come back: what it costs", "", f"{stamp.rounds(result['rounds'])}, medians.", *stamp.lines(result)]
    if "kept" in result:
        lines += ["", "**One machine**, IMB-MPI1 PingPong, 2 ranks and their relay on the same two cores.", ""]
        lines += table(result["kept"])
    if "link" in result:
        lines += ["", f"**A link** of 1 Gbit/s, 5 ms one way (`{LAB.relative_to(paths.ROOT)}`), the same program.", ""]
        lines += table(result["link"])
    if "disk" in result:
        lines += ["", *disk_lines(result["disk"])]
    if "back" in result:
        lines += ["", *back_lines(result["back"])]
    return "\n".join(lines) + "\n"


def table(part: dict) -> list[str]:
    """Times one way; ratios of what is kept to the same path without."""
    names = [f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} KiB" if size >= KIB else f"{size} B" for size in part["sizes"]]
    lines = [f"| way, us one way | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for name, row in part["medians"].items():
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in row)} |")
    best = {name: [min(column) for column in zip(*rows)] for name, rows in part["samples"].items()}
    for title, rows in (("**ratio, kept to nothing kept**", part["medians"]), ("ratio, best rounds only", best)):
        pairs = zip(rows[KEPT.name], rows[NONE.name], part["sizes"])
        lines.append(f"| {title} | {' | '.join(verdict(kept, none, size) for kept, none, size in pairs)} |")
    return lines


def verdict(kept: float, none: float, size: int) -> str:
    """Long messages: of bandwidth; short ones: of latency."""
    is_long = size >= 32 * KIB
    ratio = none / kept if is_long else kept / none
    met = ratio >= TARGET_BANDWIDTH if is_long else ratio <= TARGET_LATENCY
    return f"{ratio:.2f}{' of bandwidth' if is_long else ''}{'' if met else f' (missed: {TARGET_BANDWIDTH if is_long else TARGET_LATENCY})'}"


def disk_lines(part: dict) -> list[str]:
    within, beyond = part["medians"]["within memory"][0], part["medians"]["beyond it"][0]
    share = beyond / within
    missed = "" if share >= TARGET_DISK else f" (missed: {TARGET_DISK:.0%})"
    return [
        f"**Beyond the bound of memory**, IMB Uniband, messages of 1 MiB, {2 * 24 * 64 >> 10} GiB in all: {within:.0f} MB/s within memory, "
        f"{beyond:.0f} MB/s with 256 MiB of memory and the rest on the disk: {share:.0%}{missed}."
    ]


def back_lines(rows: list[dict]) -> list[str]:
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    speed = middle["first"] / middle["replay"]
    waiting = middle["noticed"] + middle["restart"]
    late = "" if waiting <= TARGET_LIVE_S else f" (missed: {TARGET_LIVE_S} s)"
    slow = "" if speed >= TARGET_REPLAY else f" (missed: {TARGET_REPLAY} times)"
    return [
        f"**From a kill to where it was**, IMB Sendrecv of 1 KiB, 4 ranks, one killed after {FIRST_S:.0f} s: noticed and started anew within "
        f"{middle['noticed'] * 1e3:.0f} ms, told what was {middle['restart'] * 1e3:.0f} ms later{late}, replay of {middle['first']:.1f} s in "
        f"{middle['replay']:.2f} s: {speed:.1f} times as fast as the first time{slow}."
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("parts", nargs="*", metavar="PART", default=PARTS)
    options = parser.parse_args()
    process.adopt_orphans()
    if set(options.parts) - set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
    result = measure(1 if options.quick else options.rounds, tuple(options.parts), options.quick)
    print(section(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
