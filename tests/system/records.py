#!/usr/bin/env python3
"""Ranks record more nondeterminism than a record holds, and checkpoints truncate the records.

Ranks read clocks, random numbers and files under `landbridge run --recover --checkpoint`. A
checkpoint truncates the record, so records stay small, and killed ranks are restored from these
checkpoints, on the same node and on other nodes. Without checkpoints small files are compared by
digest beyond a bound of recorded content, and a rank whose record is full is not restarted. Needs
CRIU (scripts/criu.py), and a kernel that supports it.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import checkpoint
import common
import nodes
import recovery
from support import paths, process

# Bytes that a record holds.
ROOM = 256 << 20
ROUNDS, ROUND = 300, 1500 << 10
# Bytes of a record for the content of small files; and the largest number of bytes that the
# interpreter's own reads take.
CONTENT, BESIDE = 64 << 20, 24 << 20
# Bytes of the file that reads_files.py reads in each round.
READ = 1 << 20
# Seconds: a file that is older than this before a job begins does not count as changed since.
OLD_S = 2.5
# With an image each second and a lost node a job takes a minute on a busy machine.
LIMIT_S = 180.0


def main() -> int:
    options, checks = checkpoint.begin(__doc__)
    if checks is None:
        return common.SKIPPED
    reader = [common.python(options), str(common.PROGRAMS / "reads_much.py"), "--rounds", str(ROUNDS)]
    local_restart(checks, options, reader)
    rare_checkpoints(checks, options, reader)
    spare_node(checks, options, reader)
    small_files(checks, options)
    scratch_files(checks, options)
    return checks.end()


def local_restart(checks, options, reader) -> None:
    """Two ranks are killed after each has read more than its record holds, one of them twice, and
    one rank long before."""
    name = "who reads more than a record holds"
    if not checks.wants(name):
        return
    most = watch(lambda: checkpoint.job(options, reader, kills(ROUNDS // 4, ROUNDS * 2 // 3)))
    code, _, output = most.outcome
    starts = checkpoint.restores(output)
    check(checks, name, code, output, f"{starts} restarts from images", starts == 4, most)


def rare_checkpoints(checks, options, reader) -> None:
    """The interval between checkpoints is longer than the record takes to fill."""
    name = "who reads more than a record holds, an image every ten minutes"
    if not checks.wants(name):
        return
    interval, _, *words = checkpoint.checkpoint_options(options)
    words = [interval, "10min", *words]
    most = watch(lambda: recovery.job(options, reader, kills(ROUNDS // 2, ROUNDS * 2 // 3)[1:3], *words))
    code, _, output = most.outcome
    starts = checkpoint.restores(output)
    check(checks, name, code, output, f"{starts} restarts from images", starts == 2, most)


def kills(early: int, late: int):
    def has_come(rank: int, turn: int):
        return lambda said: f"now {rank} {turn} " in said

    return [(has_come(2, early), 2), (has_come(1, late), 1), (has_come(2, late + 20), 2), (0.8, 1)]


def spare_node(checks, options, reader) -> None:
    """The node is lost after its ranks have read more than a record holds: the copies at the parent
    agent and, with logs of relays, at the relay are truncated as well."""
    for logs, words in (("", []), (nodes.RELAYS, recovery.RELAY)):
        name = f"{logs}a node is lost with who reads more than a record holds"
        if not checks.wants(name):
            continue
        if why_not := nodes.network.no_lab(options):
            print(f"skipped: {name}: {why_not}")
            continue
        lose_node(checks, options, reader, name, words)


def lose_node(checks, options, reader, name: str, logs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [*nodes.SPARE, *logs, *checkpoint.checkpoint_options(options), "--set", f"checkpoint_dir={folder}"]
        # The time of the kills is relative to that line.
        begun = f"now 1 {ROUNDS * 2 // 3} "
        most = watch(lambda: nodes.lab_job(options, reader, [(0.5, nodes.KILLED), (4.0, 1)], words, begun, limit_s=LIMIT_S))
    code, _, output = most.outcome
    moves = output.count("ranks 0, 1 are restarted on north-2")
    found = len(re.findall(r"rank [01] is restored from checkpoint \d+ on north-2", output))
    again = checkpoint.restores(output)
    is_right = (moves, found, again) == (1, 2, 1) and (0 < most.relayed < ROOM if logs else most.relayed == 0)
    measured = f"{moves} moves, {found} and {again} from images, at most {most.relayed >> 20} MiB at the relay"
    check(checks, name, code, output, measured, is_right, most)


def small_files(checks, options) -> None:
    """Ranks read more of a file than the bound of recorded content: digests serve beyond it, and a
    file that changes afterwards ends the job."""
    name = "who reads more of small files than is recorded"
    if checks.wants(name):
        kills = [(has_read(1, 80), 1), (has_read(2, 92), 2)]
        with old_files() as folder:
            program = reads_files(options, folder, 100)
            most = watch(lambda: recovery.job(options, program, kills))
        code, lines, output = most.outcome
        is_one, starts = is_one_reading(lines, 100), output.count(": restarted")
        is_bound = CONTENT - BESIDE < most.held < CONTENT + BESIDE
        measured = f"{how(code, is_one)}, {starts} restarts, at most {most.held >> 20} MiB held"
        checks.check(name, code == 0 and is_one and is_bound and starts == 2, measured, output)
    name = "who reads more of small files than is recorded, and they change"
    if checks.wants(name):
        with old_files() as folder:
            # Digests begin after 64 rounds.
            program = reads_files(options, folder, 100, "--rewritten", "85")
            code, _, output = recovery.job(options, program, [(has_read(1, 92), 1)])
            file = re.escape(f"{folder}/own.1")
        # Python reads the whole file with one call, which asks for one byte more than the file has.
        about = rf"its read of {READ + 1} bytes at 0 of {file} gave {READ} bytes of digest ([0-9a-f]{{16}})"
        found = re.search(rf"cannot go on: {about}, and before {READ} of ([0-9a-f]{{16}}): the file has changed", output)
        is_named = found is not None and found[1] != found[2]
        measured = f"exit code {code}, {'refused, with file, place and two digests' if is_named else 'not named'}"
        checks.check(name, code == 1 and is_named, measured, output)


def scratch_files(checks, options) -> None:
    """Reads of a rank's own file are recorded until the record is full; checkpoints truncate the
    record."""
    rounds, is_full = 275, "its nondeterminism record is full"
    at_last = has_read(1, rounds - 5)
    name = "who reads more of its own scratch file than a record holds"
    if checks.wants(name):
        kills = [(lambda said: is_full in said and at_last(said), 1)]
        with old_files() as folder:
            program = reads_files(options, folder, rounds, "--scratch")
            code, _, output = recovery.job(options, program, kills)
        refusal = f"rank 1 was killed by SIGKILL and cannot be restarted: {is_full}"
        said, is_named = output.count(f"Warn: {is_full}"), refusal in output
        measured = f"exit code {code}, {'named' if is_named else 'not named'}, said {said} times"
        is_right = code == 128 + signal.SIGKILL and is_named and said == recovery.RANKS - 1
        checks.check(name, is_right, measured, output)
    name = "who reads more of its own scratch file than a record holds, from images"
    if checks.wants(name):
        interval, _, *words = checkpoint.checkpoint_options(options)
        words = [interval, "10min", *words]
        with old_files() as folder:
            program = reads_files(options, folder, rounds, "--scratch")
            most = watch(lambda: recovery.job(options, program, [(at_last, 1)], *words))
        code, lines, output = most.outcome
        is_one, starts = is_one_reading(lines, rounds), checkpoint.restores(output)
        is_small = most.held < ROOM * 3 // 4 and "is full" not in output
        held = f"at most {most.held >> 20} of {rounds} MiB held"
        measured = f"{how(code, is_one)}, {held}, {starts} restarts from images"
        checks.check(name, code == 0 and is_one and is_small and starts == 1, measured, output)


def reads_files(options, folder: str, rounds: int, *words) -> list[str]:
    program = [common.python(options), str(common.PROGRAMS / "reads_files.py")]
    return [*program, folder, "--rounds", str(rounds), *words]


@contextlib.contextmanager
def old_files():
    """A folder with a file of 1 MiB for each rank; the files have not changed for OLD_S."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(recovery.RANKS):
            Path(folder, f"own.{rank}").write_bytes(random.Random(rank).randbytes(READ))
        time.sleep(OLD_S)
        yield folder


def has_read(rank: int, turn: int):
    return lambda said: f"now {rank} {turn} " in said


def is_one_reading(lines: list[str], rounds: int) -> bool:
    """Whether rank 0 and the other ranks print the same line twice for each of `rounds` rounds."""
    words = ("now ", "end ")
    printed = [sorted(line[4:] for line in lines if line.startswith(word)) for word in words]
    wanted = (recovery.RANKS - 1) * rounds
    return printed[0] == printed[1] and len(printed[0]) == 2 * len(set(printed[0])) == 2 * wanted


def how(code, is_one: bool) -> str:
    return f"exit code {code}, {'one' if is_one else 'no one'} history"


def check(checks, name: str, code, output: str, measured: str, is_right: bool, most) -> None:
    words = ("now ", "drew ", "heard ")
    printed = {word: sorted(re.findall(rf"^{word}(.*)$", output, re.M)) for word in words}
    is_one = printed["now "] == printed["drew "] == printed["heard "] and len(set(printed["now "])) == 3 * ROUNDS
    is_small = 0 < most.held < ROOM * 3 // 4 < ROOM < ROUNDS * ROUND
    is_right &= "is full" not in output
    history = f"exit code {code}, {'one' if is_one else 'no one'} history, at most {most.held >> 20} of {ROUNDS * ROUND >> 20} MiB held"
    checks.check(name, code == 0 and is_one and is_small and is_right, f"{history}, {measured}", output)


class watch:
    """Calls a function, and meanwhile tracks the size of the largest record, on this machine and at
    a relay."""

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
            printed = subprocess.run([paths.LANDBRIDGE, "log", "--json"], capture_output=True, text=True)
            jobs = json.loads(printed.stdout or "[]") if printed.returncode == 0 else []
            ours = [one for one in jobs if one["launcher"] in pids]
            kept = [it.get("nondeterminism_bytes", 0) for one in ours for it in one.get("log_status", {}).get("processes", [])]
            self.relayed = max([self.relayed, *kept])


def records(pid: int) -> list[int]:
    """Sizes in bytes of the records that a process has open."""
    found = []
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if "landbridge-recording" in os.readlink(file):
                found.append(file.stat().st_blocks * 512)
    except OSError:
        # The process has ended.
        pass
    return found


if __name__ == "__main__":
    sys.exit(main())
