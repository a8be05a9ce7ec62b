#!/usr/bin/env python3
"""Unmodified programs run over and over in a lab whose network fails at random: a short `landbridge lab soak`.

The schedule of faults is that of a seed, `--seed`; what the programs do when they come is not.
"""

import sys

import common
from network import no_lab
from support import process

# Beyond the time asked for: undisturbed runs first, and the last program.
SLACK_S = 150


def main() -> int:
    options = common.arguments(__doc__, add_options)
    common.quiet_environment()
    process.adopt_orphans()
    why_not = no_lab(options)
    if why_not:
        print(f"skipped: no lab can be built here: {why_not}")
        return common.SKIPPED
    seed = str(options.seed)
    words = ["--minutes", str(options.minutes), "--seed", seed, "--venvs", str(options.venvs)]
    command = [str(options.bin / "landbridge"), "lab", "soak", *words]
    done = process.run(command, options.minutes * 60 + SLACK_S)
    print(done.output)
    print(f"soak with seed {seed}: {'every program ended right' if done.ok else done.why or done.code}")
    return 0 if done.ok else 1


def add_options(parser):
    parser.add_argument("--minutes", type=float, default=3, help="how long faults come [3]")
    parser.add_argument("--seed", type=int, default=1, help="which faults [1]")


if __name__ == "__main__":
    sys.exit(main())
