#!/usr/bin/env python3
"""Random messages and one-sided operations, every one of them checked, over every kind of path.

Each job takes seconds. A seed repeats it: `--seed N`, and `--only` with the name of a check. The
flood also bounds the receiver's memory for unexpected messages.
"""

import sys

import common

# Name, options of `landbridge run`, LANDBRIDGE_PATHS.
PATHS = [
    ("default", [], "shm,tcp,relay"),
    ("tcp", [], "tcp"),
    ("two clusters", ["--clusters", "2"], "shm,tcp,relay"),
    ("two clusters, tcp to the relay", ["--clusters", "2"], "tcp,relay"),
]
SIZES = [2, 4, 8]
ROUNDS = 4
# Eager credit between two ranks of a small job, as in the protocol's limits.
WINDOW_KIB = 2048
# A generous bound of the memory for each waiting message, in the library and in the provider.
RECORD_BYTES = 400
SLACK_KIB = 4096
FLOOD_MESSAGES = 20_000


def main() -> int:
    options = common.arguments(__doc__, add_options)
    common.quiet_environment()
    checks = common.Checks(options)
    interpreter = common.python(options)
    for ranks in options.np:
        for name, words, paths in PATHS:
            if ranks < 2 and words:
                continue
            for what, make in (("messages", stress), ("one-sided", rma), ("flood", flood)):
                title = f"{what}, {ranks} ranks, {name}"
                if checks.wants(title):
                    command = [*common.landbridge_run(options, ranks, *words), interpreter]
                    make(checks, title, command, {"LANDBRIDGE_PATHS": paths}, ranks)
    return checks.end()


def add_options(parser):
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--np", type=int, nargs="*", default=SIZES, metavar="RANKS")


def stress(checks, title, command, environment, ranks):
    program(checks, title, command, environment, "stress.py")


def rma(checks, title, command, environment, ranks):
    program(checks, title, command, environment, "rma.py")


def program(checks, title, command, environment, name):
    """Runs a program that checks itself and prints the number of its operations."""
    numbers = [str(checks.options.seed), str(checks.options.rounds)]
    words = [*command, str(common.PROGRAMS / name), *numbers]
    finished = common.run(checks.options, words, environment)
    done = common.values(finished.output, "done")
    measured = f"{done[0]} operations in {finished.seconds:.1f} s" if done else common.how(finished)
    checks.check(title, finished.ok and bool(done), f"{measured}, seed {numbers[0]}", finished.output)


def flood(checks, title, command, environment, ranks):
    """Sends far more than the credit: lengths that are sent at once, lengths that are not, and
    empty messages."""
    for size in (0, 16_384, 40_000):
        messages = FLOOD_MESSAGES // (ranks - 1)
        words = [*command, str(common.PROGRAMS / "flood.py"), str(messages), str(size)]
        finished = common.run(checks.options, words, environment)
        grown = common.values(finished.output, "growth")
        if not (finished.ok and grown):
            checks.check(f"{title}, {size} bytes", False, common.how(finished), finished.output)
            continue
        bound = (ranks - 1) * WINDOW_KIB + FLOOD_MESSAGES * RECORD_BYTES // 1024 + SLACK_KIB
        sent = common.values(finished.output, "flood")[0]
        measured = f"{sent} KiB sent, receiver grew by {grown[0]} KiB (at most {bound})"
        checks.check(
            f"{title}, {size} bytes",
            int(grown[0]) <= bound,
            f"{measured}, {finished.seconds:.1f} s",
            finished.output,
        )


if __name__ == "__main__":
    sys.exit(main())
