#!/usr/bin/env python3
"""Ranks are killed with SIGKILL under `landbridge run --recover`: the job ends as if nothing had been."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import common
from support import process

RANKS = 4
# How long a job may take, kills and all.
LIMIT_S = 60.0
# A rank needs about this long to come to its first message: kills before that are kills at the start.
START_S = 1.2


def main() -> int:
    def add(parser):
        parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")

    options = common.arguments(__doc__, add)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    chance = random.Random(options.seed)
    moment = lambda: chance.uniform(0.2, 1.5)  # noqa: E731
    program = [common.python(options), str(common.PROGRAMS / "ring.py")]
    ring = [*program, "--rounds", "300"]
    undisturbed = sorted(job(options, ring, [])[1])
    cases = {
        "as a job begins": [(0.3, 1)],
        "rank 0": [(START_S + moment(), 0)],
        "another rank": [(START_S + moment(), 2)],
        "two at once": [(START_S + moment(), 1), (0.0, 3)],
        "one after another": [(START_S + moment(), 1), (moment(), 2), (moment(), 0)],
        "the same again while it comes back": [(START_S + moment(), 2), (0.4, 2), (0.3, 2)],
        "all": [(START_S + moment(), 0), (0.0, 1), (0.0, 2), (0.0, 3)],
    }
    for name, kills in cases.items():
        if checks.wants(name):
            code, lines, output = job(options, ring, kills)
            is_same = sorted(lines) == undisturbed
            measured = f"exit code {code}, {'the same' if is_same else 'other'} output"
            checks.check(name, code == 0 and is_same and len(undisturbed) > RANKS, measured, output)
    name = "who takes whatever comes"
    if checks.wants(name):
        kills = [(START_S + moment(), 0), (moment(), 2), (moment(), 0)]
        code, lines, output = job(options, [*program, "--any", "--rounds", "150"], kills)
        heard = sorted(re.findall(r"^heard (\d+: rank \d message \d+)$", "\n".join(lines), re.M))
        told = sorted(re.findall(r"^place (\d+: rank \d message \d+)$", "\n".join(lines), re.M))
        is_one = heard == told and len(set(heard)) == 150 * (RANKS - 1) == len(heard)
        measured = f"exit code {code}, {'one' if is_one else 'no one'} history"
        checks.check(name, code == 0 and is_one, measured, output)
    return checks.end()


def job(options, program, kills):
    """Exit code, lines of standard output, and all output of a job of which ranks are killed: after so many seconds
    more, this one."""
    command = [*common.landbridge_run(options, RANKS, "--recover", "--timeout", "60"), *program]
    running = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for seconds, rank in kills:
            time.sleep(seconds)
            for pid in pids_of(rank):
                os.kill(pid, signal.SIGKILL)
        out, err = running.communicate(timeout=LIMIT_S)
        return running.returncode, out.splitlines(), out + err
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
        out, err = running.communicate()
        return f"none within {LIMIT_S:.0f} s", out.splitlines(), out + err
    finally:
        process.end_descendants()


def pids_of(rank: int) -> list[int]:
    """The process of a rank, among our descendants."""
    wanted = f"LANDBRIDGE_INDEX={rank}".encode()
    found = []
    for pid in process.descendants():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(pid)
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
