#!/usr/bin/env python3
"""Unmodified programs under `--recover` whose ranks are killed at random: a short `landbridge lab punish`, in one cluster and
over two.

Who is killed and when is a function of the seed, `--seed`; what the programs are doing then is not.
"""

import sys

import common
from network import endure

# Beyond the time asked for: undisturbed runs first, and the last program.
SLACK_S = 200


def main() -> int:
    options = common.arguments(__doc__, add_options)
    words = ["--mean", str(options.mean)]
    codes = []
    for more in ([], ["--clusters", "2"]):
        codes.append(endure("punish", options, [*words, *more], SLACK_S))
    return max(codes)


def add_options(parser):
    parser.add_argument("--minutes", type=float, default=0.75, help="how long ranks are killed, each time [0.75]")
    parser.add_argument("--mean", type=float, default=3, help="seconds between two kills on average [3]")
    parser.add_argument("--seed", type=int, default=1, help="who and when [1]")


if __name__ == "__main__":
    sys.exit(main())
