#!/usr/bin/env python3
"""Ranks read more of clocks and chance than a record of them holds, and images of them are taken (`landbridge run --recover
--checkpoint`): records are cut there, so they stay small, and killed ranks go on from these images, here and on other nodes.

Needs CRIU (scripts/criu.py), and a kernel that lets it work.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import checkpoint
import common
import nodes
import recovery
from support import paths, process

# What a record holds.
ROOM = 256 << 20
ROUNDS, ROUND = 300, 1500 << 10


def main() -> int:
    options, checks = checkpoint.begin(__doc__)
    if checks is None:
        return common.SKIPPED
    reader = [common.python(options), str(common.PROGRAMS / "reads_much.py"), "--rounds", str(ROUNDS)]
    here(checks, options, reader)
    seldom(checks, options, reader)
    elsewhere(checks, options, reader)
    return checks.end()


def here(checks, options, reader) -> None:
    """Two of them are killed after each has read more than its record holds, one of them twice; and one long before."""
    name = "who reads more than a record holds"
    if not checks.wants(name):
        return
    most = watch(lambda: checkpoint.job(options, reader, kills(ROUNDS // 4, ROUNDS * 2 // 3)))
    code, _, output = most.outcome
    starts = checkpoint.from_images(output)
    check(checks, name, code, output, f"{starts} new starts from images", starts == 4, most)


def seldom(checks, options, reader) -> None:
    """No image is due by the clock before the record would be full."""
    name = "who reads more than a record holds, an image every ten minutes"
    if not checks.wants(name):
        return
    interval, _, *words = checkpoint.with_images(options)
    words = [interval, "10min", *words]
    most = watch(lambda: recovery.job(options, reader, kills(ROUNDS // 2, ROUNDS * 2 // 3)[1:3], *words))
    code, _, output = most.outcome
    starts = checkpoint.from_images(output)
    check(checks, name, code, output, f"{starts} new starts from images", starts == 2, most)


def kills(early: int, late: int):
    def has_come(rank: int, turn: int):
        return lambda said: f"now {rank} {turn} " in said

    return [(has_come(2, early), 2), (has_come(1, late), 1), (has_come(2, late + 20), 2), (0.8, 1)]


def elsewhere(checks, options, reader) -> None:
    """Their node is lost after they have read more than a record holds: what the relay and the agent above know is cut as well."""
    name = "a node is lost with who reads more than a record holds"
    if not checks.wants(name):
        return
    if why_not := nodes.network.no_lab(options):
        print(f"skipped: {name}: {why_not}")
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [*nodes.SPARE, *checkpoint.with_images(options), "--set", f"checkpoint_dir={folder}"]
        # The clock begins with that line.
        begun = f"now 1 {ROUNDS * 2 // 3} "
        most = watch(lambda: nodes.lab_job(options, reader, [(0.5, nodes.KILLED), (4.0, 1)], words, begun))
    code, _, output = most.outcome
    moves = output.count("ranks 0, 1 are started anew on north-2")
    found = len(re.findall(r"rank [01] goes on from checkpoint \d+ on north-2", output))
    again = checkpoint.from_images(output)
    is_right = (moves, found, again) == (1, 2, 1) and 0 < most.relayed < ROOM
    measured = f"{moves} moves, {found} and {again} from images, at most {most.relayed >> 20} MiB at the relay"
    check(checks, name, code, output, measured, is_right, most)


def check(checks, name: str, code, output: str, measured: str, is_right: bool, most) -> None:
    words = ("now ", "drew ", "heard ")
    told = {word: sorted(re.findall(rf"^{word}(.*)$", output, re.M)) for word in words}
    is_one = told["now "] == told["drew "] == told["heard "] and len(set(told["now "])) == 3 * ROUNDS
    is_small = 0 < most.held < ROOM * 3 // 4 < ROOM < ROUNDS * ROUND
    is_right &= "is full" not in output
    history = f"exit code {code}, {'one' if is_one else 'no one'} history, at most {most.held >> 20} of {ROUNDS * ROUND >> 20} MiB held"
    checks.check(name, code == 0 and is_one and is_small and is_right, f"{history}, {measured}", output)


class watch:
    """Calls this, and sees meanwhile how much the largest record holds, here and at a relay."""

    def __init__(self, call):
        self.held, self.relayed = 0, 0
        is_over = threading.Event()
        watcher = threading.Thread(target=self.look, args=(is_over,), daemon=True)
        watcher.start()
        try:
            self.outcome = call()
        finally:
            is_over.set()
            watcher.join()

    def look(self, is_over: threading.Event) -> None:
        while not is_over.wait(0.5):
            pids = process.descendants()
            self.held = max([self.held, *(held for pid in pids for held in records(pid))])
            told = subprocess.run([paths.LANDBRIDGE, "log", "--json"], capture_output=True, text=True)
            jobs = json.loads(told.stdout or "[]") if told.returncode == 0 else []
            ours = [one for one in jobs if one["launcher"] in pids]
            kept = [it.get("read_bytes", 0) for one in ours for it in one.get("record", {}).get("processes", [])]
            self.relayed = max([self.relayed, *kept])


def records(pid: int) -> list[int]:
    """The bytes that each record takes which this process has open."""
    found = []
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if "landbridge-clocks" in os.readlink(file):
                found.append(file.stat().st_blocks * 512)
    except OSError:
        # It has ended.
        pass
    return found


if __name__ == "__main__":
    sys.exit(main())
