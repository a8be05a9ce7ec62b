#!/usr/bin/env python3
"""Unmodified programs in a lab whose network fails at random: a short `landbridge lab soak`.

The schedule of faults is a function of the seed, `--seed`; the progress of the programs at these
times is not.
"""

import sys

import common
from network import endure

# Seconds beyond the requested time: undisturbed runs first, and the last program.
SLACK_S = 150


def main() -> int:
    return endure("soak", common.arguments(__doc__, add_options), [], SLACK_S)


def add_options(parser):
    parser.add_argument("--minutes", type=float, default=3, help="how long faults come [3]")
    parser.add_argument("--seed", type=int, default=1, help="which faults [1]")


if __name__ == "__main__":
    sys.exit(main())
