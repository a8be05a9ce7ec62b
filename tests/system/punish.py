#!/usr/bin/env python3
"""Unmodified programs under `--recover` whose ranks are killed at random: a short `landbridge lab punish`.

Who is killed and when is a function of the seed, `--seed`; what the programs are doing then is not.
"""

import sys

import common
from network import no_lab
from support import process

# Beyond the time asked for: undisturbed runs first, and the last program.
SLACK_S = 200


def main() -> int:
    options = common.arguments(__doc__, add_options)
    common.quiet_environment()
    process.adopt_orphans()
    why_not = no_lab(options)
    if why_not:
        print(f"skipped: no lab can be built here: {why_not}")
        return common.SKIPPED
    seed, mean = str(options.seed), str(options.mean)
    words = ["--minutes", str(options.minutes), "--mean", mean, "--seed", seed, "--venvs", str(options.venvs)]
    command = [str(options.bin / "landbridge"), "lab", "punish", *words]
    done = process.run(command, options.minutes * 60 + SLACK_S)
    print(done.output)
    print(f"punish with seed {seed}: {'every program ended right' if done.ok else done.why or done.code}")
    return 0 if done.ok else 1


def add_options(parser):
    parser.add_argument("--minutes", type=float, default=1.25, help="how long ranks are killed [1.25]")
    parser.add_argument("--mean", type=float, default=3, help="seconds between two kills on average [3]")
    parser.add_argument("--seed", type=int, default=1, help="who and when [1]")


if __name__ == "__main__":
    sys.exit(main())
