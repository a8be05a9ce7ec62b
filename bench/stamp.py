"""When and of what a result was measured: a part of each result file, a line in its section."""

import os
import subprocess
import time

from support import paths


def now() -> dict:
    """At the end of a measurement; LANDBRIDGE_BENCH_COMMIT names the commit if other binaries are measured."""
    commit = os.environ.get("LANDBRIDGE_BENCH_COMMIT")
    if not commit:
        words = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(words, cwd=paths.ROOT, capture_output=True, text=True).stdout.strip()
    load = os.getloadavg()[0]
    return {"at": time.strftime("%Y-%m-%d %H:%M"), "commit": commit, "load": round(load, 1)}


def lines(result: dict) -> list[str]:
    """A line about a result, if it says when it was measured."""
    made = result.get("stamp")
    if not made:
        return []
    return [f"Measured {made['at']}, commit {made['commit']}; load at the end {made['load']}."]
