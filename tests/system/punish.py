#!/usr/bin/env python3
"""Unmodified programs under `--recover` whose ranks are killed at random: `landbridge lab punish`.

Runs in one cluster and over two, from the start and from checkpoints of the ranks, and over UDP while
the hosts' network fails; with `--faults` only over two, whose network fails meanwhile. Victims and
moments are a function of the seed, `--seed`; the progress of the programs at these moments is not.
An hour of each, also with relays that log messages, or with ranks on hosts whose rails fail:

    punish.py --minutes 60 --faults all [--set recover_log=relay | --hosts]
"""

import sys

from pathlib import Path

import checkpoint
import common
from network import endured, no_lab
from support import paths, process

# Seconds beyond the requested time: undisturbed runs first, and the last program.
SLACK_S = 200
# Seconds for one run of a program while the network fails, and so many more beyond the requested time.
FAULTS_LIMIT_S = 300
# Messages over UDP, while the rails and interfaces of the hosts fail.
OVER_UDP = ["--program", "udp", "--faults", "all", "--hosts"]
# Last lines of a failed run that are printed again: tables and the ends of the last programs.
END_LINES = 40


def main() -> int:
    options = common.arguments(__doc__, add_options)
    common.quiet_environment()
    process.adopt_orphans()
    if why_not := no_lab(options):
        return common.skipped(f"no lab can be built here: {why_not}")
    over_two = ["--faults", options.faults, "--limit", str(FAULTS_LIMIT_S)] if options.faults else ["--clusters", "2"]
    if options.hosts:
        over_two.append("--hosts")
    # With relays that log messages, ranks of a cluster have no path over UDP.
    by_udp = [] if "recover_log=relay" in common.SETTINGS else [[*OVER_UDP, "--limit", str(FAULTS_LIMIT_S)]]
    ways = [over_two] if options.faults else [[], over_two, *by_udp]
    if why_not := checkpoint.no_criu(options.criu):
        print(f"skipped: with images: {why_not}")
    else:
        ways.append([*over_two, "--checkpoint", str(options.checkpoint), "--criu", str(options.criu)])
    failed = []
    for more in ways:
        slack_s = SLACK_S + (FAULTS_LIMIT_S if "--faults" in more else 0)
        done = endured("punish", options, ["--mean", str(options.mean), *more], slack_s)
        print(done.output)
        if not done.ok:
            failed.append((more, done))
    # Again at the end, because of a failed step often only the end of its output is kept.
    for more, done in failed:
        print(f"{process.tail(done.output, END_LINES)}\nfailed: {' '.join(['punish', *more])}: {done.why or done.code}")
    print(f"{len(ways)} runs with seed {options.seed}, {len(failed)} failed")
    return 1 if failed else 0


def add_options(parser):
    parser.add_argument("--minutes", type=float, default=0.75, help="how long ranks are killed, each time [0.75]")
    parser.add_argument("--mean", type=float, default=3, help="seconds between two kills on average [3]")
    parser.add_argument("--faults", default="", metavar="KIND,…", help="network faults between clusters, or all [none]")
    parser.add_argument("--hosts", action="store_true", help="with --faults: ranks run on hosts, whose network fails, too")
    parser.add_argument("--checkpoint", type=float, default=2, help="seconds between two images of a rank [2]")
    parser.add_argument("--criu", type=Path, default=paths.CRIU, metavar="FILE")
    parser.add_argument("--seed", type=int, default=1, help="who and when [1]")


if __name__ == "__main__":
    sys.exit(main())
