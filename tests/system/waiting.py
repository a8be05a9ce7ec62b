#!/usr/bin/env python3
"""The cost of waiting is bounded: in crowds of ranks, in long waits, and during computing.

A crowd has more ranks than processors. Times depend on other load of the machine: bounds are wide,
and a measurement that misses its bound is repeated before it counts. Everything is measured without
`--recover`, and with it (messages are then in the logs of their senders): on one node, where
messages go through the log that both ranks have mapped, and between two nodes of a lab, where they
also go over TCP. LANDBRIDGE_PATHS=tcp would not do: ranks of one node use their log all the same.
"""

import os
import re
import sys

import common
import network
from support import process

CROWD = 16
# Milliseconds for one collective operation of the crowd. Two idle cores need a tenth.
COLLECTIVE_MS_MAX = 60.0
# Per cent of a processor for a rank that waits.
SHARE_MAX = 20.0
WAKE_MS_MAX = 20.0
# Per cent by which looking for a message may slow computing.
SLOWDOWN_MAX = 5.0
# Microseconds for a message of 8 bytes inside a node, with the cost of mpi4py; several ranks of a
# core pass the core around for each message.
TURN_US_MAX, SHARED_TURN_US_MAX = 20.0, 200.0
# The same between two nodes of the lab, whose links delay each message by 100 us: 150 to 190 us, 130 to
# 155 us without `--recover`.
FAR_TURN_US_MAX = 500.0
ATTEMPTS = 3
TURNS = [
    ("a core each", 2, [], TURN_US_MAX),
    ("more ranks than cores", 4, [], SHARED_TURN_US_MAX),
    ("two clusters", 4, ["--clusters", "2"], SHARED_TURN_US_MAX),
]
PATHS = [("shared memory", [], "shm,tcp"), ("tcp", [], "tcp"), ("two clusters", ["--clusters", "2"], "")]
RECOVER = ["--recover", "--set", "log=info"]
# What ranks say at their end of a message that went so.
BY_LOG = r"Info: rank \d+: message logs: [1-9]\d* bytes sent"
BY_TCP = r"Info: rank \d+ .*: tcp [\d.]+ to [\d.]+: [1-9]\d* bytes sent"


def main() -> int:
    options = common.arguments(__doc__)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    for path in PATHS:
        bounds = {"allreduce": COLLECTIVE_MS_MAX, "alltoall": COLLECTIVE_MS_MAX}
        measure(checks, path, f"{CROWD} ranks at once", "collectives", CROWD, bounds, "ms")
        bounds = {"share": SHARE_MAX, "wake": WAKE_MS_MAX}
        measure(checks, path, "blocked for 2 s", "blocked", 2, bounds, "% of a processor, ms to wake")
        bounds = {"share": SHARE_MAX}
        measure(checks, path, "sending to a rank that computes for 2 s", "pressed", 2, bounds, "% of a processor")
        for ranks in (2, 4):
            bounds = {"slowdown": SLOWDOWN_MAX}
            measure(checks, path, f"computing, {ranks} ranks", "computing", ranks, bounds, "%")
    # The provider sees nothing of messages that the MPI library carries.
    for carrier in ("own", "library"):
        for name, ranks, words, most in TURNS:
            path = (f"local={carrier}, {name}", ["--set", f"local={carrier}", *words], "")
            measure(checks, path, "taking turns", "turns", ranks, {"turn": most}, "µs")
    recovering(checks, "recovering, one node", [], 1, BY_LOG, TURN_US_MAX)
    if why_not := network.no_lab(options):
        print(f"skipped: recovering, two nodes over TCP: no lab can be built here: {why_not}")
    else:
        within = network.lab_run(options, f"waiting-{os.getpid()}")
        recovering(checks, "recovering, two nodes over TCP", within, 2, BY_TCP, FAR_TURN_US_MAX)
        for way, words in (("", []), (", recovering", ["--recover"])):
            keeps_paths(checks, f"who sleeps keeps its paths, two nodes{way}", within, words)
    return checks.end()


def recovering(checks, where, within, nodes, carrier, turn_us_max):
    """The same measurements with `--recover`, on so many nodes."""
    rows = [
        (f"{CROWD} ranks at once", "collectives", CROWD, {"allreduce": COLLECTIVE_MS_MAX, "alltoall": COLLECTIVE_MS_MAX}, "ms"),
        ("blocked for 2 s", "blocked", 2, {"share": SHARE_MAX, "wake": WAKE_MS_MAX}, "% of a processor, ms to wake"),
        ("sending to a rank that computes for 2 s", "pressed", 2, {"share": SHARE_MAX}, "% of a processor"),
        ("computing, 2 ranks", "computing", 2, {"slowdown": SLOWDOWN_MAX}, "%"),
        ("taking turns", "turns", 2, {"turn": turn_us_max}, "µs"),
    ]
    for title, mode, ranks, bounds, unit in rows:
        words = [*RECOVER, "--ranks-per-node", str(ranks // nodes)] if nodes > 1 else RECOVER
        measure(checks, (where, words, ""), title, mode, ranks, bounds, unit, within, carrier)


def keeps_paths(checks, name, within, words):
    """No path is given up because a rank is busy for seconds: its kernel confirms what arrives."""
    if not checks.wants(name):
        return
    program = [common.python(checks.options), str(common.PROGRAMS / "to_sleeper.py")]
    command = [*within, *common.landbridge_run(checks.options, 2, *words, "--ranks-per-node", "1"), *program]
    finished = common.run(checks.options, command)
    given_up = finished.output.count("acknowledgements have stopped")
    is_done = finished.ok and all(f"rank {rank} is done" in finished.output for rank in (0, 1))
    checks.check(name, is_done and not given_up, f"{common.how(finished)}, {given_up} paths given up", finished.output)


def measure(checks, path, title, mode, ranks, bounds, unit, within=(), carrier=""):
    """Checks that every value in `bounds` is below its bound in one of ATTEMPTS attempts. `within` is
    the beginning of the command; the output of each attempt must contain `carrier`."""
    where, words, allowed = path
    name = f"{title}, {where}"
    if not checks.wants(name):
        return
    interpreter = common.python(checks.options)
    program = [interpreter, str(common.PROGRAMS / "waiting.py"), mode]
    command = [*within, *common.landbridge_run(checks.options, ranks, *words), *program]
    seen, finished = [], None
    for _ in range(ATTEMPTS):
        finished = common.run(checks.options, command, {"LANDBRIDGE_PATHS": allowed})
        found = {key: common.values(finished.output, key) for key in bounds}
        is_carried = re.search(carrier, finished.output) is not None
        if not finished.ok or not all(found.values()) or not is_carried:
            how = common.how(finished) + ("" if is_carried else ", and messages went another way")
            checks.check(name, False, how, finished.output)
            return
        numbers = {key: float(value[0]) for key, value in found.items()}
        seen.append(", ".join(f"{key} {value}" for key, value in numbers.items()))
        if all(numbers[key] <= bound for key, bound in bounds.items()):
            checks.check(name, True, f"{'; before: '.join(reversed(seen))} ({unit})")
            return
    limits = ", ".join(f"{key} {bound}" for key, bound in bounds.items())
    checks.check(name, False, f"{'; '.join(seen)}; at most {limits} ({unit})", finished.output)


if __name__ == "__main__":
    sys.exit(main())
