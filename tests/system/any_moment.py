#!/usr/bin/env python3
"""Nodes are lost and ranks are killed at any moment of a job, from its start to its end.

Four ranks are on the first two of four hosts of a cluster in a lab, or on the first hosts of two
clusters. The first host is lost at a random moment, often with another host, a rank before or a rank
after. The place, the program, who logs messages, whether ranks have images or write logs to disk,
and all moments are functions of the run's number. The result must be that of an undisturbed run.
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
# Seconds: a quiet machine needs thirty for the longest run. Beside other steps a run from images was
# at its turn 125 of 200 after 90 s.
LIMIT_S = 180.0
# Seconds from the start of the launcher to the end of a program, at most; the start and the end
# itself take half of the losses.
WHOLE_S, START_S = 5.0, 1.5
# The rounds of a ring that lasts four seconds.
ROUNDS = "300"
# Of a process, in bytes: with a disk, logs of the last seconds do not fit.
LITTLE = "1MiB"


@dataclass
class Place:
    """Where the ranks are: options of the launcher, the lab, and the hosts that have ranks."""

    name: str
    words: list[str]
    lab: Path
    hosts: list[str]


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
        places = [
            Place("one cluster", nodes.WIDE, nodes.wide_lab(Path(folder)), ["north-1", "north-2"]),
            Place("two clusters", nodes.SPARE, nodes.LAB, ["north-1", "south-1"]),
        ]
        programs = every_program(options, places[0])
        for number in range(options.first, options.first + options.runs):
            check(checks, options, places, programs, number, has_criu=not why_not)
    return checks.end()


def every_program(options, place: Place) -> list[Program]:
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
            wanted = sorted(nodes.lab_job(options, words, [], place.words, lab_file=place.lab)[1])
            is_right = lambda lines, _, wanted=wanted: len(wanted) > nodes.RANKS and sorted(lines) == wanted  # noqa: E731
        found.append(Program(name, words, is_right))
    return found


def check(checks, options, places: list[Place], programs: list[Program], number: int, has_criu: bool) -> None:
    chance = random.Random(number)
    place, program = chance.choice(places), chance.choice(programs)
    logs = chance.choice([[], [], nodes.SENDER, nodes.RELAY])
    has_images, has_disk = has_criu and chance.random() < 0.5, chance.random() < 0.3
    events = losses(chance, place.hosts)
    how = [place.name, "from images" if has_images else "from the start"]
    how += ["logs of relays"] * (logs == nodes.RELAY) + ["logs on disk"] * has_disk
    name = f"run {number}, {program.name}, {', '.join(how)}"
    if not checks.wants(name):
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as disk:
        words = [*place.words, *logs]
        if has_images:
            every = chance.choice(["500ms", "1s"])
            words += ["--checkpoint", every, "--set", f"criu={options.criu.resolve()}", "--set", f"checkpoint_dir={folder}"]
        if has_disk:
            words += ["--set", f"recover_dir={disk}", "--set", f"recover_memory={LITTLE}"]
        # Events count from the start of the launcher.
        code, lines, output = nodes.lab_job(options, program.words, events, words, "", lab_file=place.lab, limit_s=LIMIT_S)
    is_right = program.is_right(lines, output)
    said = ", ".join(f"{who if isinstance(who, int) else who[0]} at {at:.2f} s" for at, who in events)
    lost, starts = output.count(" is lost ("), output.count(": restarted")
    outcome = "right" if is_right else "WRONG" if code == 0 else "no result"
    checks.check(name, code == 0 and is_right, f"exit code {code}, {outcome}; {said}; lost {lost}, {starts} restarts in place", output)


def losses(chance: random.Random, hosts: list[str]) -> list:
    """The first host is lost: at the start or at any moment. Seconds, and a host or a rank."""
    moment = chance.uniform(0.0, chance.choice([START_S, WHOLE_S]))
    events = [(moment, (hosts[0], nodes.KILLED))]
    if chance.random() < 0.3:
        events.insert(0, (chance.uniform(0.0, moment), chance.randrange(nodes.RANKS)))
    if chance.random() < 0.4:
        then = chance.choice([(hosts[1], nodes.KILLED), *range(nodes.RANKS)])
        events.append((moment + chance.uniform(0.0, START_S), then))
    return events


if __name__ == "__main__":
    sys.exit(main())
