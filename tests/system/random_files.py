#!/usr/bin/env python3
"""Random file programs (programs/random_files.py) whose ranks are killed at random.

Every answer of every call must be that of the model, and all answers of each rank must be those of
an undisturbed run. One job runs many programs, because a kill costs more than a program does.
Programs, victims and moments are functions of `--seed`. `--runs N`: number of programs under kills,
half of them from checkpoints over two clusters (default: as many as fit into a minute).
"""

import random
import re
import sys
import tempfile
from pathlib import Path

import checkpoint
import common
import files
import recovery
from support import paths, process

RANKS = recovery.RANKS
PROGRAM = common.PROGRAMS / "random_files.py"
# One job: some ten seconds, in which ranks are killed one after the other.
PLANS, KILLS, MEAN_S, LIMIT_S = 1000, 12, 0.7, 480.0
# A refusal must be rare: of so many jobs with the same programs, one must not be refused.
ATTEMPTS = 3


def main() -> int:
    def add(parser):
        parser.add_argument("--seed", type=int, default=1, help="of the programs and of the moments of the kills")
        parser.add_argument("--runs", type=int, default=2 * PLANS, help="programs under kills [%(default)s]")
        parser.add_argument("--first", type=int, default=0, help="the first of them [0]")
        parser.add_argument("--criu", type=Path, default=paths.CRIU, metavar="FILE")

    options = common.arguments(__doc__, add)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    why_not = checkpoint.no_criu(options.criu)
    if why_not:
        print(f"skipped: with images: {why_not}")
    for number, first in enumerate(range(options.first, options.first + options.runs, PLANS)):
        plans = min(PLANS, options.first + options.runs - first)
        check(checks, options, first, plans, has_images=number % 2 == 1 and not why_not, is_divided=number % 2 == 1)
    return checks.end()


def check(checks, options, first: int, plans: int, has_images: bool, is_divided: bool) -> None:
    """Checks `plans` programs, undisturbed and with kills."""
    places = ", two clusters" * is_divided + (", from images" if has_images else ", from the start")
    name = f"programs {first} to {first + plans - 1}{places}"
    if not checks.wants(name):
        return
    code, results, output = play(options, first, plans, [])
    if not checks.check(f"{name}: undisturbed", code == 0 and is_right(results), f"exit code {code}", output):
        return
    words = recovery.TWO_CLUSTERS if is_divided else []
    words = [*words, *(["--checkpoint", "1s", "--set", f"criu={options.criu}"] if has_images else [])]
    # After a kill within a change of names nothing may show whether the change has happened: the
    # job refuses, and never gives other answers. The programs then run again under other kills.
    for attempt in range(ATTEMPTS):
        kills = chosen_kills(f"{options.seed} {first} {attempt}", checkpoint.FIRST_S if has_images else recovery.START_S)
        code, found, output = play(options, first, plans, kills, *words)
        if code == 0 or not re.search(files.CANNOT_TELL, output):
            break
        print(f"again   {name}: refused, by name", flush=True)
    starts, images = output.count(": restarted"), checkpoint.restores(output)
    is_same = found == results
    measured = f"exit code {code}, {'the same answers' if is_same else 'OTHER answers'}, {starts} restarts, {images} from images"
    # A job may end before the last kills; a restore that is killed is one restart of two kills.
    is_met = starts + checkpoint.kills_within_restores(output) > KILLS * 2 // 3
    checks.check(name, is_met and code == 0 and is_same, measured, output)


def chosen_kills(seed: str, start: float) -> list[tuple[float, int]]:
    """Seconds before each kill, and its victim."""
    chance = random.Random(seed)
    kills = [(chance.expovariate(1 / MEAN_S), chance.randrange(RANKS)) for _ in range(KILLS)]
    return [(start + kills[0][0], kills[0][1]), *kills[1:]]


def play(options, first: int, plans: int, kills, *words):
    """Exit code, the final lines of the ranks, and all output."""
    with tempfile.TemporaryDirectory() as folder:
        program = [common.python(options), str(PROGRAM), folder, "--seed", str(options.seed), "--first", str(first), "--plans", str(plans)]
        code, lines, output = recovery.job(options, program, kills, *words, limit_s=LIMIT_S, recover=bool(kills))
    return code, sorted(line for line in lines if not line.startswith("landbridge")), output


def is_right(results: list[str]) -> bool:
    return len(results) == RANKS and all(re.search(r", wrong 0, ", line) for line in results)


if __name__ == "__main__":
    sys.exit(main())
