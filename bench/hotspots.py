"""Profile of Landbridge's variant in the comparisons: samples of perf(1), by library and function.

Ranks that wait poll, so in a ping-pong at least half of the samples are waiting and not work: the
order of the remaining samples counts, and the kernel's share. Without perf nothing is measured.
"""

import json
import re
import shutil

import imb
import prose
import stamp
from support import paths, process

# Samples per second and processor.
FREQUENCY = 1999
# Seconds of IMB for each case; the samples include a second of starting.
TIME_S = 4
LIMIT_S = 60.0
TOP = 6
# Name of the kernel in perf's tables.
KERNEL = "[kernel.kallsyms]"


def measure(cases) -> None:
    """Writes build/results/bench-profile.json. A case: (title, peer, benchmark, ranks, size)."""
    if not shutil.which("perf"):
        print("profile: perf is not installed; not measured")
        return
    rows = []
    for title, peer, benchmark, ranks, size in cases:
        print(f"profile: {title}", flush=True)
        lengths, samples = paths.RESULTS / "profile-lengths", paths.RESULTS / "profile.data"
        lengths.write_text(f"{size}\n")
        program = [str(imb.IMB), benchmark, "-npmin", str(ranks), "-msglen", str(lengths)]
        program += ["-iter", "2000000", "-time", str(TIME_S)]
        record = ["perf", "record", "-q", "-F", str(FREQUENCY), "-o", str(samples), "--"]
        done = process.run(record + peer.command(ranks, program), LIMIT_S, peer.environment())
        if not done.ok and not samples.exists():
            print(f"  does not run: {done.why or done.code}: {process.tail(done.output, 3)}")
            continue
        libraries = shares(samples, "dso")
        functions = shares(samples, "dso,symbol")
        samples.unlink(missing_ok=True)
        rows.append({"title": title, "libraries": libraries[:TOP], "functions": functions[:TOP]})
    result = {"rows": rows, "stamp": stamp.now()} if rows else {}
    (paths.RESULTS / "bench-profile.json").write_text(json.dumps(result))


def shares(samples, key: str) -> list[tuple[float, str]]:
    """(percent, name), the largest first."""
    command = ["perf", "report", "-i", str(samples), "--no-children", "--stdio", "-q", "--sort", key]
    report = process.run(command, LIMIT_S)
    found = re.findall(r"^ +([\d.]+)% +(.+?) *$", report.output, re.MULTILINE)
    # perf pads names, and adds empty columns.
    names = [(percent, re.sub(r"[ -]+$", "", name)) for percent, name in found]
    return [(float(percent), short(name)) for percent, name in names]


def short(name: str) -> str:
    """A name without module paths, hashes and addresses."""
    name = re.sub(r"^(\S+) +\[[.k]\] +", lambda match: f"{match[1]}: ", name)
    name = name.replace(KERNEL, "kernel").replace("|", "")
    name = re.sub(r"<impl [^>]*(?:<[^>]*>)?[^>]*>::", "", name)
    return re.sub(r"\blandbridge_\w+::(?:\w+::)*", "", name)


def section(result) -> str:
    # Older results are a list of rows, without a stamp.
    result = {"rows": result} if isinstance(result, list) else result
    what = (
        "Samples of perf(1) over all ranks of Landbridge, and over their relay where there is one. Polling while a rank "
        "waits is included."
    )
    lines = ["## Where the time goes", "", prose.wrapped(what), *stamp.lines(result), ""]
    lines += ["| case | by library | by function |", "|---|---|---|"]
    for row in result["rows"]:
        cells = ["; ".join(f"{name} {share:.0f} %" for share, name in row[key] if share >= 1)
                 for key in ("libraries", "functions")]
        lines.append(f"| {row['title']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"
