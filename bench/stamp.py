"""Date, commit and machine of a measurement: a part of each result file, a line in its section."""

import hashlib
import os
import platform
import re
import subprocess
import time
from pathlib import Path

from support import paths


def now() -> dict:
    """The stamp of a measurement that ends now; LANDBRIDGE_BENCH_COMMIT names the commit if other
    binaries are measured."""
    commit = os.environ.get("LANDBRIDGE_BENCH_COMMIT")
    if not commit:
        words = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(words, cwd=paths.ROOT, capture_output=True, text=True).stdout.strip()
    load = os.getloadavg()[0]
    return {"at": time.strftime("%Y-%m-%d %H:%M"), "commit": commit, "load": round(load, 1), "machine": machine()}


def of_binaries() -> dict:
    """The stamp of a measurement whose results may stand beside those of other binaries: with a
    digest of launcher, relay and provider. The commit is that of this folder; if the binaries are
    of another one and LANDBRIDGE_BENCH_COMMIT does not name theirs, the stamp says so."""
    digest = hashlib.sha256()
    for file in (paths.LANDBRIDGE, paths.RELAY, paths.PROVIDER):
        digest.update(file.read_bytes())
    made = now() | {"binaries": digest.hexdigest()[:8]}
    if not paths.RELEASE.is_relative_to(paths.ROOT) and "LANDBRIDGE_BENCH_COMMIT" not in os.environ:
        made["commit"] += " (binaries of another folder)"
    return made


def machine() -> str:
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    gib = int(memory[1]) / (1 << 20)
    name = cpu[1] if cpu else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {gib:.0f} GiB, Linux {platform.release()}"


def lines(result: dict) -> list[str]:
    """A line about a result, if the result has a stamp."""
    made = result.get("stamp")
    if not made:
        return []
    on = f", on {made['machine']}" if "machine" in made else ""
    return [f"Measured {made['at']}, commit {made['commit']}{on}; load at the end {made['load']}."]


def rounds(number: int) -> str:
    return f"{number} round{'s' if number != 1 else ''}"
