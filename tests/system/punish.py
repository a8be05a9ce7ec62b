#!/usr/bin/env python3
"""Unmodified programs under `--recover` whose ranks are killed at random: `landbridge lab punish`.

Runs in one cluster and over two, from the start and from checkpoints of the ranks. Victims and
moments are a function of the seed, `--seed`; the progress of the programs at these moments is not.
"""

import sys

from pathlib import Path

import checkpoint
import common
from network import endure
from support import paths

# Seconds beyond the requested time: undisturbed runs first, and the last program.
SLACK_S = 200


def main() -> int:
    options = common.arguments(__doc__, add_options)
    words = ["--mean", str(options.mean)]
    codes, failed = [], []
    ways = [[], ["--clusters", "2"]]
    if why_not := checkpoint.no_criu(options.criu):
        print(f"skipped: with images: {why_not}")
    else:
        ways.append(["--clusters", "2", "--checkpoint", str(options.checkpoint), "--criu", str(options.criu)])
    for more in ways:
        codes.append(endure("punish", options, [*words, *more], SLACK_S))
        if codes[-1] not in (0, common.SKIPPED):
            failed.append(" ".join(["landbridge lab punish", *more]))
    # At the end, because of a failed step often only the end of its output is kept.
    for one in failed:
        print(f"failed: {one}")
    return max(codes)


def add_options(parser):
    parser.add_argument("--minutes", type=float, default=0.75, help="how long ranks are killed, each time [0.75]")
    parser.add_argument("--mean", type=float, default=3, help="seconds between two kills on average [3]")
    parser.add_argument("--checkpoint", type=float, default=2, help="seconds between two images of a rank [2]")
    parser.add_argument("--criu", type=Path, default=paths.CRIU, metavar="FILE")
    parser.add_argument("--seed", type=int, default=1, help="who and when [1]")


if __name__ == "__main__":
    sys.exit(main())
