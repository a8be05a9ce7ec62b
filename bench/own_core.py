#!/usr/bin/env python3
"""What it gains that a waiting thread moves to a core of its own (the setting `own_core`).

    bench/own_core.py                     20 rounds, three minutes
    bench/own_core.py --quick             5 rounds

IMB PingPong and Allreduce between two ranks of one node, with `own_core` on and off in turns, in
many short jobs: where the kernel places the ranks at first differs from job to job, and stays for
seconds. So the quartiles and the slowest job count, not the median alone.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import imb  # noqa: E402
import labs  # noqa: E402
import peers  # noqa: E402
import prose  # noqa: E402
import stamp  # noqa: E402
from support import paths  # noqa: E402

ROUNDS, QUICK_ROUNDS = 20, 5
# Benchmark, size in bytes, and repetitions of a job.
CASES = (("PingPong", 8, 20_000), ("PingPong", 65_536, 4_000), ("Allreduce", 8, 20_000))
VARIANTS = {value: peers.landbridge(f"own_core={value}", "shm", "--set", f"own_core={value}") for value in ("on", "off")}
# `on` becomes the default if its slowest quarter is at least this much faster, in one case.
WORTH = 1.1


def measure(rounds: int = ROUNDS) -> dict:
    """Writes build/results/bench-own-core.json: microseconds of each job, by case and variant."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    samples = {f"{benchmark}, {size} B": {name: [] for name in VARIANTS} for benchmark, size, _ in CASES}
    for number in range(rounds):
        for (benchmark, size, times), row in zip(CASES, samples.values()):
            print(f"own core: round {number + 1} of {rounds}: {benchmark}, {size} B: ", end="", flush=True)
            for name in sorted(VARIANTS, reverse=number % 2 == 0):
                bounds = ("-iter", str(times), "-iter_policy", "off")
                table = imb.run(VARIANTS[name], 2, benchmark, [size], *bounds)
                row[name].append(table.latency_us(size))
                print(f"{name} {row[name][-1]:.2f} ", end="", flush=True)
            print("us", flush=True)
    result = {"rounds": rounds, "samples": samples, "stamp": stamp.now()}
    (paths.RESULTS / "bench-own-core.json").write_text(json.dumps(result, indent=1))
    return result


def quarters(times: list[float]) -> list[float]:
    """Minimum, lower quartile, median, upper quartile, maximum."""
    inner = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return [min(times), *inner, max(times)]


def section(result: dict) -> str:
    what = (
        "IMB between two ranks of one node, in short jobs with `own_core` on and off in turns, "
        f"{stamp.rounds(result['rounds'])}. Microseconds."
    )
    lines = ["## A core of its own for a waiting thread", "", prose.wrapped(what), *stamp.lines(result), ""]
    lines += ["| case | `own_core` | fastest job | lower quartile | median | upper quartile | slowest job |"]
    lines += ["|---|---|" + "--:|" * 5]
    gains = []
    for case, row in result["samples"].items():
        for name, times in row.items():
            lines.append(f"| {case} | {name} | {' | '.join(f'{time:.2f}' for time in quarters(times))} |")
        gains.append(quarters(row["off"])[3] / quarters(row["on"])[3])
    verdict = "pays" if max(gains) >= WORTH else "does not pay"
    summary = (
        "The upper quartile without the setting, divided by that with it: "
        f"{', '.join(f'{gain:.2f}' for gain in gains)}. The setting is off by default as long as each of these is below "
        f"{WORTH}: here it {verdict}."
    )
    return "\n".join([*lines, "", prose.wrapped(summary)]) + "\n"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    sys.exit(labs.main(lambda: section(measure(QUICK_ROUNDS if options.quick else options.rounds))))
