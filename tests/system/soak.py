#!/usr/bin/env python3
"""Unmodified programs run over and over in a lab whose network fails at random: a short `landbridge lab soak`.

The schedule of faults is that of a seed, `--seed`; what the programs do when they come is not.
"""

import sys

import common
from network import endure

# Beyond the time asked for: undisturbed runs first, and the last program.
SLACK_S = 150


def main() -> int:
    return endure("soak", common.arguments(__doc__, add_options), [], SLACK_S)


def add_options(parser):
    parser.add_argument("--minutes", type=float, default=3, help="how long faults come [3]")
    parser.add_argument("--seed", type=int, default=1, help="which faults [1]")


if __name__ == "__main__":
    sys.exit(main())
