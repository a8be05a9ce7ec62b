"""How much of an emulated wide-area link of 1 Gbit/s a job over two clusters fills.

IMB Uniband, four ranks: two pairs, each with one rank on either side of labs/two-sites.toml (5 ms
one way, packets of 1500 bytes), many messages in flight. The link's rate counts whole IP packets;
TCP's and IP's own headers leave 96.5 % of it to a single stream.
"""

import json

import imb
import prose
import stamp
from support import paths, process

LINK_MB_S = 125.0
TARGET = 0.95
RANKS = 4
SIZES = (64 << 10, 1 << 20, 4 << 20)
LAB = "labs/two-sites.toml"
# Seconds for each size: enough for TCP to find the rate.
TIME_S = 8
LIMIT_S = 180.0


def measure(rounds: int) -> None:
    """Writes build/results/bench-wan.json: MB/s by size, for each round."""
    lengths = paths.RESULTS / "wan-lengths"
    lengths.write_text("\n".join(map(str, SIZES)) + "\n")
    ours = str(paths.LANDBRIDGE)
    job = [ours, "run", "-n", str(RANKS), "--ppn", "1", "--", str(imb.IMB), "Uniband"]
    job += ["-npmin", str(RANKS), "-msglen", str(lengths), "-iter", "40", "-time", str(TIME_S)]
    environment = {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")}
    samples = []
    for number in range(rounds):
        print(f"wan: round {number + 1} of {rounds}", flush=True)
        finished = process.run([ours, "lab", "run", LAB, "--", *job], LIMIT_S, environment)
        table = imb.parse(finished.output)
        if not finished.ok or not set(SIZES) <= set(table.rows):
            print(f"  does not run: {finished.why or finished.code}: {process.tail(finished.output, 4)}")
            return
        samples.append([table.bandwidth(size) for size in SIZES])
    medians = [sorted(column)[len(column) // 2] for column in zip(*samples)]
    document = {"sizes": SIZES, "medians": medians, "samples": samples, "stamp": stamp.now()}
    (paths.RESULTS / "bench-wan.json").write_text(json.dumps(document))


def section(result: dict) -> str:
    lines = [
        "## A wide-area link of 1 Gbit/s",
        "",
        prose.wrapped(
            f"IMB-MPI1 Uniband, {RANKS} ranks, two pairs across the link of `{LAB}` (5 ms one way, packets of 1500 bytes, "
            "whose headers count). Relays run on both sides. The lab emulates the link on the same two cores."
        ),
        *stamp.lines(result),
        "",
        "| message | MB/s | share of the link | |",
        "|---|--:|--:|---|",
    ]
    for size, rate in zip(result["sizes"], result["medians"]):
        share = rate / LINK_MB_S
        missed = "" if share >= TARGET else f"missed: {TARGET:.0%}"
        lines.append(f"| {size >> 10} KiB | {rate:.1f} | {share:.1%} | {missed} |")
    return "\n".join(lines) + "\n"
