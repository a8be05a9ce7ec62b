#!/usr/bin/env python3
"""The pause of an application when one of its two rails fails in the middle of a message.

    bench/stall.py                      50 cuts, rails in turn; three minutes
    bench/stall.py --quick              6 cuts, half a minute
    bench/stall.py --cuts 12            12 cuts
    bench/stall.py --set suspect_after=50ms

In labs/two-rails.toml one rank sends 1 MiB messages to another, two in flight, and the receiver
records the arrival times. A rail is cut silently (no packet passes, the carrier stays up) for 1.5 s
at a random time, then restored. The pause is the longest time without a message that overlaps the
cut; without a cut, messages arrive every few milliseconds. After each cut the time is measured
until the restored rail carries payload.
"""

import argparse
import array
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import labs  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths, svg  # noqa: E402

TARGET_MS = 200.0
CUTS, QUICK_CUTS = 50, 6
# Milliseconds of the picture: width of a group of pauses, and the begin of the last group, which
# holds all longer pauses.
STEP_MS, LAST_MS = 20, 240
CUT_S, REST_S = 1.5, 0.8
SIZE, DEPTH = 1 << 20, 2
FLOW = Path(__file__).resolve().parent / "flow.py"
# The sender's host.
SENDER = "near-2"
# Probes are much smaller, half of a message on two rails is larger: from this number of bytes on,
# the rail carries payload.
USED_BYTES = 128 << 10
# Seconds: a rail that carries nothing for this time after it is restored is not waited for.
USED_LIMIT_S = 5.0
START_LIMIT_S, END_LIMIT_S = 30.0, 30.0


@dataclass
class Cut:
    """A cut. Times in nanoseconds of CLOCK_MONOTONIC. `used_ms`: None if the rail was not used
    again in time."""

    rail: int
    begun: int
    restored: int = 0
    used_ms: float | None = None
    # Whether the other rail carried payload when this one was cut.
    had_other: bool = True
    pause_ms: float = 0.0


def measure(cuts: int = CUTS, settings: dict[str, str] | None = None, seed: int = 1) -> dict:
    """Writes build/results/bench-stall.json."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        notes, stop = Path(folder) / "0", Path(folder) / "stop"
        program = [paths.python("mpich"), FLOW, "--size", SIZE, "--depth", DEPTH]
        program += ["--notes", folder, "--stop", stop]
        lab = labs.name("stall")
        words = labs.job(2, 1, settings or {}, program)
        with labs.Background(labs.TWO_RAILS, lab, words) as job:
            is_on = lambda: notes.exists() and notes.stat().st_size > 0  # noqa: E731
            if not job.until(is_on, START_LIMIT_S):
                raise labs.Failed(f"no message came: {job.tail()}")
            made = []
            for rail in (0, 1):
                if used_after(job, lab, rail) is None:
                    raise labs.Failed(f"rail {rail} carries nothing before any cut")
            for number in range(cuts):
                made.append(one_cut(job, lab, number % 2, chance, made))
                report(notes, made[-1], number, cuts)
            stop.touch()
            code = job.wait(END_LIMIT_S)
            if code:
                raise labs.Failed(f"the job ended with {code}: {job.tail()}")
        came = read(notes)
    for cut in made:
        cut.pause_ms = pause_ms(came, cut)
    result = summary(came, made) | {"settings": settings or {}, "stamp": stamp.now()}
    (paths.RESULTS / "bench-stall.json").write_text(json.dumps(result, indent=1))
    return result


def one_cut(job, lab: str, rail: int, chance, before: list[Cut]) -> Cut:
    job.sleep(REST_S + chance.uniform(0, 0.1))
    cut = Cut(rail, time.monotonic_ns(), had_other=not before or before[-1].used_ms is not None)
    labs.link(lab, f"near-LAN{rail}", "--down")
    job.sleep(CUT_S)
    cut.restored = time.monotonic_ns()
    labs.link(lab, f"near-LAN{rail}", "--restore")
    cut.used_ms = used_after(job, lab, rail)
    return cut


def used_after(job, lab: str, rail: int) -> float | None:
    """Milliseconds until a rail has carried payload from now on."""
    started, lan = time.monotonic(), f"LAN{rail}"
    first = labs.bytes_on(lab, SENDER, lan)
    is_used = lambda: labs.bytes_on(lab, SENDER, lan) - first >= USED_BYTES  # noqa: E731
    if not job.until(is_used, USED_LIMIT_S):
        return None
    return 1e3 * (time.monotonic() - started)


def report(notes: Path, cut: Cut, number: int, cuts: int) -> None:
    again = "not used again" if cut.used_ms is None else f"used again after {cut.used_ms:.0f} ms"
    pause = pause_ms(read(notes), cut)
    print(f"stall: cut {number + 1} of {cuts}, rail {cut.rail}: {pause:.0f} ms, {again}", flush=True)


def read(notes: Path) -> array.array:
    came = array.array("q")
    data = notes.read_bytes()
    came.frombytes(data[: len(data) // came.itemsize * came.itemsize])
    return came


def pause_ms(came, cut: Cut) -> float:
    """The longest time between two messages that overlaps the cut."""
    gaps = [b - a for a, b in zip(came, came[1:]) if b > cut.begun and a < cut.restored]
    if came and came[-1] < cut.restored:
        gaps.append(time.monotonic_ns() - came[-1])
    return max(gaps, default=0) / 1e6


def summary(came, made: list[Cut]) -> dict:
    pauses = sorted(cut.pause_ms for cut in made)
    used = sorted(cut.used_ms for cut in made if cut.used_ms is not None)
    quiet = [
        (b - a) / 1e6
        for a, b in zip(came, came[1:])
        if not any(b > cut.begun and a < cut.restored + 1e9 for cut in made)
    ]
    return {
        "cuts": [asdict(cut) for cut in made],
        "median_ms": statistics.median(pauses),
        "worst_ms": pauses[-1],
        "over": sum(pause > TARGET_MS for pause in pauses),
        "per_rail": {rail: of_rail(made, rail) for rail in (0, 1)},
        "used_median_ms": statistics.median(used) if used else None,
        "used_worst_ms": used[-1] if used else None,
        "never_used": sum(cut.used_ms is None for cut in made),
        "lone": sum(not cut.had_other for cut in made),
        "usual_ms": statistics.median(quiet) if quiet else None,
        "usual_worst_ms": max(quiet, default=None),
        "messages": len(came),
    }


def of_rail(made: list[Cut], rail: int) -> list[float] | None:
    """Median and worst pause when this rail was cut."""
    pauses = [cut.pause_ms for cut in made if cut.rail == rail]
    return [statistics.median(pauses), max(pauses)] if pauses else None


def section(result: dict) -> str:
    worst = result["worst_ms"]
    verdict = "" if worst <= TARGET_MS else f"missed: {TARGET_MS:.0f}"
    lines = [
        "## A rail dies in the middle of a message",
        "",
        prose.wrapped(
            f"{len(result['cuts'])} interruptions of {CUT_S} s without a notice in `labs/two-rails.toml` (two rails of "
            f"1 Gbit/s), on each rail in turn, while one rank sends messages of 1 MiB to another, {DEPTH} of them under way. "
            "The pause is the longest time between two messages at the receiver that overlaps the interruption."
        ),
        *stamp.lines(result),
        "",
        "| what | median, ms | worst, ms | |",
        "|---|--:|--:|---|",
        f"| pause | {result['median_ms']:.0f} | {worst:.0f} | {verdict} |",
    ]
    for rail, pauses in result["per_rail"].items():
        if pauses:
            lines.append(f"| pause, rail {rail} interrupted | {pauses[0]:.0f} | {pauses[1]:.0f} | |")
    if result["usual_ms"] is not None:
        usual = f"{result['usual_ms']:.1f} | {result['usual_worst_ms']:.0f}"
        lines.append(f"| between messages, no interruption within 1 s | {usual} | |")
    if result["used_median_ms"] is not None:
        used = f"{result['used_median_ms']:.0f} | {result['used_worst_ms']:.0f}"
        lines.append(f"| until a restored rail carries payload again | {used} | |")
    lines += ["", f"{result['over']} of {len(result['cuts'])} pauses were longer than {TARGET_MS:.0f} ms."]
    if result["never_used"]:
        never = (
            f"{result['never_used']} times a restored rail carried nothing for {USED_LIMIT_S:.0f} s; the table leaves these "
            f"times out. In {result['lone']} interruptions, therefore, the other rail carried nothing."
        )
        lines += ["", prose.wrapped(never)]
    return "\n".join(lines) + "\n"


def picture(result: dict) -> str:
    """The number of pauses by length."""
    groups = []
    for low in range(0, LAST_MS + 1, STEP_MS):
        high = low + STEP_MS if low < LAST_MS else float("inf")
        lengths = [(cut["rail"], cut["pause_ms"]) for cut in result["cuts"]]
        numbers = {rail: sum(rail == other and low <= length < high for other, length in lengths) for rail in (0, 1)}
        found = {f"rail {rail} interrupted": number for rail, number in numbers.items() if number}
        groups.append((f"{low}–{high:g}" if low < LAST_MS else f"{low}–", found))
    title = f"Pauses of {len(result['cuts'])} interruptions by their length in ms (target: at most {TARGET_MS:g})"
    return svg.bars(title, groups, "interruptions")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=CUTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the cuts")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the job")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    chosen = dict(word.split("=", 1) for word in options.set)
    wanted = QUICK_CUTS if options.quick else max(options.cuts, 1)
    sys.exit(labs.main(lambda: section(measure(wanted, chosen, options.seed))))
