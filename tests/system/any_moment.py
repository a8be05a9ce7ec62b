#!/usr/bin/env python3
"""Nodes are lost and ranks are killed at any moment of a job, from its start to its end.

Four ranks are on the first two of four hosts of a cluster in a lab. The first host is lost at a
random moment, often with the second host, a rank before or a rank after. The program, who logs
messages, whether ranks have images, and all moments are functions of the run's number. The result
must be that of an undisturbed run, or the job was not there yet, or over, and nobody was lost.
`--runs N`: number of runs; `--first`: the first of them.
"""

import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import common
import network
import nodes
from support import paths, process

RUNS = 6
# Seconds: a quiet machine needs ten for the longest run.
LIMIT_S = 90.0
# Seconds from the start of the launcher to the end of a program, at most; the start and the end
# itself take half of the losses.
WHOLE_S, START_S = 5.0, 1.5
# The rounds of a ring that lasts four seconds.
ROUNDS = "300"


@dataclass
class Program:
    """A program. `is_right`: whether the lines of a job, and its whole output, are right."""

    name: str
    words: list[str]
    is_right: object


def main() -> int:
    def add(parser):
        parser.add_argument("--runs", type=int, default=RUNS, help="number of runs [%(default)s]")
        parser.add_argument("--first", type=int, default=0, help="the first of them [0]")
        parser.add_argument("--criu", type=Path, default=paths.CRIU, metavar="FILE")

    options = common.arguments(__doc__, add)
    common.quiet_environment()
    process.adopt_orphans()
    if why_not := network.no_lab(options):
        return common.skipped(f"no lab can be built here: {why_not}")
    if why_not := checkpoint.no_criu(options.criu):
        print(f"skipped: with images: {why_not}")
    checks = common.Checks(options)
    with tempfile.TemporaryDirectory() as folder:
        lab = nodes.wide_lab(Path(folder))
        programs = every_program(options, lab)
        for number in range(options.first, options.first + options.runs):
            check(checks, options, lab, programs, number, has_criu=not why_not)
    return checks.end()


def every_program(options, lab: Path) -> list[Program]:
    """A ring, one with wildcards, one that draws clocks and random numbers, and one whose ranks end
    apart from each other."""
    python, ring = common.python(options), str(common.PROGRAMS / "ring.py")
    rows = [
        ("ring", [ring, "--rounds", ROUNDS], None),
        ("wildcards", [ring, "--any", "--rounds", "150"], lambda _, output: nodes.took_once(output)),
        ("clocks and chance", [str(common.PROGRAMS / "chance.py"), "--rounds", "200"], lambda _, output: nodes.drew_once(output)),
        ("ranks that end apart", [str(common.PROGRAMS / "closes.py")], None),
    ]
    found = []
    for name, words, is_right in rows:
        words = [python, *words]
        if is_right is None:
            wanted = sorted(nodes.lab_job(options, words, [], nodes.WIDE, lab_file=lab)[1])
            is_right = lambda lines, _, wanted=wanted: len(wanted) > nodes.RANKS and sorted(lines) == wanted  # noqa: E731
        found.append(Program(name, words, is_right))
    return found


def check(checks, options, lab: Path, programs: list[Program], number: int, has_criu: bool) -> None:
    chance = random.Random(number)
    program, logs = chance.choice(programs), chance.choice([[], [], nodes.SENDER, nodes.RELAY])
    has_images, events = has_criu and chance.random() < 0.5, losses(chance)
    place = ", from images" if has_images else ", from the start"
    relays = ", logs of relays" if logs == nodes.RELAY else ""
    name = f"run {number}, {program.name}{place}{relays}"
    if not checks.wants(name):
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [*nodes.WIDE, *logs]
        if has_images:
            every = chance.choice(["500ms", "1s"])
            words += ["--checkpoint", every, "--set", f"criu={options.criu.resolve()}", "--set", f"checkpoint_dir={folder}"]
        # Events count from the start of the launcher.
        code, lines, output = nodes.lab_job(options, program.words, events, words, "", lab_file=lab, limit_s=LIMIT_S)
    is_right = program.is_right(lines, output)
    said = ", ".join(f"{who if isinstance(who, int) else who[0]} at {at:.2f} s" for at, who in events)
    lost, starts = output.count(" is lost ("), output.count(": restarted")
    measured = f"exit code {code}, {'right' if is_right else 'WRONG' if code == 0 else 'no result'}; {said}; lost {lost}, {starts} restarts in place"
    checks.check(name, code == 0 and is_right, measured, output)


def losses(chance: random.Random) -> list:
    """The first host is lost: at the start or at any moment. Seconds, and a host or a rank."""
    moment = chance.uniform(0.0, chance.choice([START_S, WHOLE_S]))
    events = [(moment, ("north-1", nodes.KILLED))]
    if chance.random() < 0.3:
        events.insert(0, (chance.uniform(0.0, moment), chance.randrange(nodes.RANKS)))
    if chance.random() < 0.4:
        then = chance.choice([("north-2", nodes.KILLED), *range(nodes.RANKS)])
        events.append((moment + chance.uniform(0.0, START_S), then))
    return events


if __name__ == "__main__":
    sys.exit(main())
