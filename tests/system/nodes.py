#!/usr/bin/env python3
"""Ranks are killed in a lab (`landbridge run --recover`): the job's result is unaffected.

The link between two clusters is cut meanwhile, the relays are on other nodes, or whole nodes are
lost and spare ones take over. The lab is labs/two-sites.toml, two clusters of two hosts. Cases that
need no lab are in recovery.py, cases that need checkpoints in checkpoint.py.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import common
import network
from recovery import LIMIT_S, RANKS, RELAY, DRAW_WORDS, check_divergence, check_same, kill_rank, pids_of
from support import process

LAB = common.ROOT / "labs" / "two-sites.toml"
FULL = "wide-area link that is full, three ranks"
CUT, MENDED = (1.0, "--down"), (3.0, "--up")
LAB_CASES = {
    "wide-area link cut for 2 s": [CUT, MENDED],
    "wide-area link cut for 2 s, one in each cluster": [CUT, (2.0, 1), (2.0, 2), MENDED],
    # During the cut several status requests about unconfirmed data are sent.
    "wide-area link cut for 14 s, one in each cluster": [CUT, (14.0, 1), (14.2, 2), (15.0, "--up")],
    # The last messages of a killed rank may wait for the link.
    FULL: [(0.0, "--rate=20Mbit/s"), (2.0, 1), (4.0, 2), (5.0, 3), (9.0, "--rate=1Gbit/s")],
    "wide-area link cut for 2 s, as it is cut and as it is mended": [(0.95, 3), CUT, MENDED, (3.05, 0)],
}
# Ranks on other nodes than their relay, which logs messages: options of the launcher, kills. Without
# options all ranks are in one cluster, two on a node.
EACH_NODE_ONE = ["--ranks-per-node", "1"]
APART = "relays on other nodes, "
CABLE = "a cable that is out for longer than they have patience"
# The agent of a host is killed or stopped: its ranks are restarted on another host.
KILLED, STOPPED, WOKEN = "agent killed", "agent stopped", "agent woken"
SPARE = ["--spares", "1"]
# Stands for `--recover` and one spare host.
NODE = "--recover=node"
SPARE_CASES = {
    "a node is lost": ([NODE], [(1.0, KILLED)]),
    "a node is lost, as its ranks come back": (SPARE, [(1.0, 0), (1.1, 1), (1.4, KILLED)]),
    "a node is lost, and its ranks are killed on the next one": (SPARE, [(1.0, KILLED), (1.5, 0), (2.2, 1)]),
    "a node is lost, and at once a rank of another node is killed": (SPARE, [(1.0, KILLED), (1.0, 2)]),
    "a rank is killed, and at once another node is lost": (SPARE, [(1.0, 2), (1.0, KILLED)]),
    "a node falls silent": ([*SPARE, "--set", "peer_timeout=20s"], [(1.0, STOPPED)]),
}
# Programs that behave differently on the next node unless their reads and their last deliveries are
# replicated. Four hosts in the first cluster, the last two spare, and all ranks on the first two.
WIDE = ["--spares", "2"]
LOST = "a node is lost, "
# Moments are drawn from the seed. The second case loses the host that takes the ranks of the first
# host as well.
ONCE, IN_TURN = [("north-1", KILLED)], [("north-1", KILLED), ("north-3", KILLED)]
BOTH = [("north-1", KILLED), ("north-2", KILLED)]
# At the same moment: a host, and a rank of the second one.
AND_A_RANK = [("north-1", KILLED), 2]
# With this delay a step takes about the same time on an idle machine as on most others.
SLOW_LAN = 'lan = { delay = "2 ms" }\n'
# Without the length 0, at which some patterns do nothing.
PATTERNS, LENGTHS = ["Allreduce", "Alltoall", "Sendrecv"], ["1024", "2048"]
BENCHMARK_BOUNDS = ["-npmin", str(RANKS), "-zero_size", "off", "-msglog", "10:11"]
APART_CASES = {
    APART + "one rank": ([], [(1.0, 1)]),
    APART + "two on one node": ([], [(1.0, 2), (1.0, 3)]),
    APART + "one on each, again while it comes back": ([], [(1.0, 1), (1.05, 3), (1.4, 1), (1.6, 1)]),
    APART + "all": ([], [(1.0, 0), (1.0, 1), (1.0, 2), (1.0, 3)]),
    APART + "a cable that is out for 3 s": ([], [(1.0, "north-2 lan0 down"), (4.0, "north-2 lan0 up"), (4.5, 3)]),
    # The ranks of that node lose their relay, and attach to it again when the cable is back.
    APART + CABLE: (["--set", "peer_timeout=2s"], [(1.0, "north-2 lan0 down"), (6.5, "north-2 lan0 up")]),
    APART + "two clusters, one in each": (EACH_NODE_ONE, [(1.0, 1), (1.0, 2)]),
    APART + "two clusters, the wide-area link cut for 2 s": (EACH_NODE_ONE, [CUT, (2.0, 1), (2.2, 3), MENDED, (3.05, 0)]),
}
# As above, with messages in the logs of their senders.
SENDERS = "logs of the senders, "
SENDER = ["--set", "recover_log=sender"]
SENDER_CASES = {
    SENDERS + "one rank": ([], [(1.0, 1)]),
    SENDERS + "two on one node": ([], [(1.0, 2), (1.0, 3)]),
    SENDERS + "one on each, again while it comes back": ([], [(1.0, 1), (1.05, 3), (1.4, 1), (1.6, 1)]),
    SENDERS + "all": ([], [(1.0, 0), (1.0, 1), (1.0, 2), (1.0, 3)]),
    SENDERS + "a cable that is out for 3 s": ([], [(1.0, "north-2 lan0 down"), (1.5, 3), (4.0, "north-2 lan0 up"), (4.5, 2)]),
    SENDERS + CABLE: (["--set", "peer_timeout=2s"], [(1.0, "north-2 lan0 down"), (6.5, "north-2 lan0 up")]),
    SENDERS + "two clusters, one in each": (EACH_NODE_ONE, [(1.0, 1), (1.0, 2)]),
    SENDERS + "two clusters, the wide-area link cut for 2 s": (EACH_NODE_ONE, [CUT, (2.0, 1), (2.2, 3), MENDED, (3.05, 0)]),
}


# The default is that senders log messages.
RELAYS = "logs of relays, "
RELAY_SPARE_CASES = {RELAYS + name: ([*words, *RELAY], events) for name, (words, events) in SPARE_CASES.items()}


def main() -> int:
    options = common.arguments(__doc__, common.add_cases)
    common.quiet_environment()
    process.adopt_orphans()
    if not options.list and (why_not := network.no_lab(options)):
        return common.skipped(f"no lab can be built here: {why_not}")
    checks = common.Checks(options)
    # More rounds than all kills of a case take.
    ring = [common.python(options), str(common.PROGRAMS / "ring.py"), "--rounds", "900"]
    in_a_lab(checks, options, ring)
    remote_relay(checks, options, ring)
    sender_logs(checks, options, ring)
    closing_ranks(checks, options)
    spare_node(checks, options, ring)
    replicated_nondeterminism(checks, options, ring)
    unrecorded_values(checks, options)
    spawning(checks, options)
    other_programs(checks, options)
    silent_ranks(checks, options)
    ended_ranks(checks, options)
    sent_otherwise(checks, options)
    written_again(checks, options)
    not_written_again(checks, options)
    ended_otherwise(checks, options)
    return checks.end()


def in_a_lab(checks, options, ring) -> None:
    """The wide-area link is cut for two seconds, and a rank is killed: before, during or after the
    cut."""
    names = [name for name in LAB_CASES if checks.wants(name)]
    long = [*ring[:2], "--numbers", "300000", "--rounds", "16"]
    for program, ours in ((ring, [name for name in names if name != FULL]), (long, [name for name in names if name == FULL])):
        undisturbed = sorted(lab_job(options, program, [])[1]) if ours else []
        for name in ours:
            events = LAB_CASES[name]
            kills = sum(isinstance(what, int) for _, what in events)
            check_same(checks, name, lab_job(options, program, events), undisturbed, kills)


def remote_relay(checks, options, ring) -> None:
    """The message log of ranks is at a relay on another node, so determinants cross a network."""
    names = [name for name in APART_CASES if checks.wants(name)]
    wild, other = APART + "who takes whatever comes", APART + "who does something else than before"
    undisturbed = sorted(lab_job(options, ring, [], RELAY)[1]) if names else []
    for name in names:
        words, events = APART_CASES[name]
        outcome = lab_job(options, ring, events, [*words, *RELAY])
        kills = sum(isinstance(what, int) for _, what in events)
        if name == APART + CABLE:
            # Both ranks of that node lose their relay, maybe more than once.
            kills = max(outcome[2].count("lost the connection to its relay: restarted"), 2)
        check_same(checks, name, outcome, undisturbed, kills)
    if checks.wants(other):
        code, _, output = lab_job(options, [*ring, "--drift"], [(1.0, 3)], RELAY)
        check_divergence(checks, other, code, output, 3)
    if checks.wants(wild):
        kills = [(1.0, 0), (1.6, 2), (2.2, 0)]
        code, lines, output = lab_job(options, [*ring[:2], "--any", "--rounds", "150"], kills, RELAY, "")
        is_one = took_once(output)
        measured = f"exit code {code}, {'one' if is_one else 'no one'} history"
        checks.check(wild, code == 0 and is_one and output.count(": restarted") == len(kills), measured, output)


def sender_logs(checks, options, ring) -> None:
    """Messages to other nodes stay in the logs of their senders, and ranks are killed."""
    names = [name for name in SENDER_CASES if checks.wants(name)]
    undisturbed = sorted(lab_job(options, ring, [], SENDER)[1]) if names else []
    for name in names:
        words, events = SENDER_CASES[name]
        kills = sum(isinstance(what, int) for _, what in events)
        check_same(checks, name, lab_job(options, ring, events, [*words, *SENDER]), undisturbed, kills)
    other = SENDERS + "who does something else than before"
    if checks.wants(other):
        code, _, output = lab_job(options, [*ring, "--drift"], [(1.0, 3)], SENDER)
        check_divergence(checks, other, code, output, 3)
    wild = SENDERS + "who takes whatever comes"
    if checks.wants(wild):
        kills = [(1.0, 0), (1.6, 2), (2.2, 0)]
        code, _, output = lab_job(options, [*ring[:2], "--any", "--rounds", "150"], kills, SENDER, "")
        is_one = took_once(output)
        measured = f"exit code {code}, {'one' if is_one else 'no one'} history"
        checks.check(wild, code == 0 and is_one and output.count(": restarted") == len(kills), measured, output)


def closing_ranks(checks, options) -> None:
    """A rank closes its transport while a rank of another node, to which it has sent its last
    message, is stopped, killed and begun again: what the transport does to reach the new
    incarnation is not the program's, so the closing rank can be killed and begun again, too."""
    name = SENDERS + "who closes while a peer of another node comes back"
    if not checks.wants(name):
        return

    def stop_both() -> None:
        for pid in pids_of(0) + pids_of(1):
            os.kill(pid, signal.SIGSTOP)

    events = [(0.8, stop_both), (2.6, 0), (2.6, 1), ("rank 2: closed", 2)]
    program = [common.python(options), str(common.PROGRAMS / "closes.py")]
    code, lines, output = lab_job(options, program, events, SENDER, "rank 3: begins")
    wanted = sorted(f"rank {rank}: {what}" for rank in range(RANKS) for what in ("begins", "closed", "ends"))
    starts = output.count(": restarted")
    is_same = sorted(lines) == wanted
    measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {starts} restarts"
    checks.check(name, code == 0 and is_same and starts == 3, measured, output)


def spare_node(checks, options, ring) -> None:
    """Ranks 0 and 1 are on the first host of one cluster, 2 and 3 on that of the other; the second
    hosts are spare."""
    cases = SPARE_CASES | RELAY_SPARE_CASES
    names = [name for name in cases if checks.wants(name)]
    undisturbed = sorted(lab_job(options, ring, [], SPARE)[1]) if names else []
    for name in names:
        words, events = cases[name]
        code, lines, output = lab_job(options, ring, events, words)
        kills = sum(isinstance(what, int) for _, what in events)
        moves = len(re.findall(r"^landbridge: node north-1 is lost \(.*\): ranks 0, 1 are restarted on north-2$", output, re.M))
        is_same = sorted(lines) == undisturbed and len(undisturbed) > RANKS
        starts = output.count(": restarted")
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {moves} moves, {starts} restarts in place"
        checks.check(name, code == 0 and is_same and moves == 1 and starts == kills, measured, output)
    name = "a node is lost, while the job starts"
    if checks.wants(name):
        # From about the moment at which its agent is ready to that at which its ranks have printed.
        moments = [0.06 + 0.03 * step for step in range(10)]
        wanted = sorted(lab_job(options, [*ring[:-1], "100"], [], SPARE)[1])
        outcomes = [lab_job(options, [*ring[:-1], "100"], [(at, KILLED)], SPARE, "") for at in moments]
        wrong = [f"at {at:.2f} s" for at, (code, lines, _) in zip(moments, outcomes, strict=True) if code != 0 or sorted(lines) != wanted]
        moved = sum(" is lost (" in output for _, _, output in outcomes)
        measured = f"{len(moments)} moments, wrong: {wrong}, {moved} moves"
        checks.check(name, not wrong and moved > 0 and len(wanted) > RANKS, measured, "".join(output for *_, output in outcomes))
    name = "a node is lost, and the next one has a longer name"
    if checks.wants(name):
        # The program sends addresses: of the stack, which has the environment above it, of the heap
        # and of mappings.
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            named = LAB.read_text().replace("hosts = 2 ", 'hosts = ["north-1", "north-the-other"] ', 1)
            file.write(named)
            file.flush()
            outcome = lab_job(options, [*ring, "--addresses"], [(1.0, KILLED)], SPARE, lab_file=Path(file.name))
        code, lines, output = outcome
        is_moved = "are restarted on north-the-other" in output
        measured = f"exit code {code}, {len(lines)} lines, {'moved' if is_moved else 'not moved'}"
        checks.check(name, code == 0 and is_moved and len(lines) > RANKS, measured, output)
    name = "a node is lost, and there is no other one"
    if checks.wants(name):
        code, _, output = lab_job(options, ring, [(1.0, KILLED)], [])
        is_said = "node north-1 is lost" in output and "there is no spare node left" in output
        checks.check(name, code == 1 and is_said, f"exit code {code}, {'says' if is_said else 'does not say'} why", output)
    for logs, words in (("", []), (RELAYS, RELAY)):
        name = logs + "the agent of a relay's host is lost"
        if checks.wants(name):
            events = [(1.0, lambda: signal_agent(KILLED, "north-gw"))]
            code, _, output = lab_job(options, ring, events, [*SPARE, *words])
            is_said = bool(re.search(r"^landbridge: .*north-gw.*", output, re.M))
            measured = f"exit code {code}, {'names it' if is_said else 'does not name it'}, {len(pids_of(0))} ranks are left"
            checks.check(name, isinstance(code, int) and code != 0 and is_said and not pids_of(0), measured, output)


def replicated_nondeterminism(checks, options, ring) -> None:
    """The nondeterminism of ranks on a lost node is known elsewhere: clocks, random numbers, and
    the last deliveries."""
    chance = random.Random(options.seed)
    drawer = [common.python(options), str(common.PROGRAMS / "chance.py"), "--rounds", "200"]
    taker = [*ring[:2], "--any", "--rounds", "150"]
    rows = [("who draws from clocks and random numbers", drawer, drew_once), ("who takes whatever comes", taker, took_once)]
    for what, program, is_right in rows:
        kinds = (("", ONCE), (", and the next one", IN_TURN), (", and a second one", BOTH), (", and at once a rank of another one", AND_A_RANK))
        for (how, losses), (logs, words) in itertools.product(kinds, (("", []), (RELAYS, RELAY))):
            name = logs + LOST + what + how
            if not checks.wants(name):
                continue
            events = [(1.0 + 1.5 * place + chance.uniform(0, 0.9), loss) for place, loss in enumerate(losses)]
            if losses is AND_A_RANK:
                events = [(events[0][0], loss) for loss in losses]
            first = "now 1 0" if program is drawer else ""
            with tempfile.TemporaryDirectory() as scratch:
                code, _, output = lab_job(options, program, events, [*WIDE, *words], first, lab_file=wide_lab(Path(scratch)))
            lost, starts = output.count(" is lost ("), output.count(" was killed by SIGKILL: restarted")
            measured = f"exit code {code}, {'one' if is_right(output) else 'no one'} history, lost {lost}, {starts} restarts in place"
            kills = sum(isinstance(loss, int) for loss in losses)
            is_lost = (lost, starts) == (len(losses) - kills, kills)
            checks.check(name, code == 0 and is_right(output) and is_lost, measured, output)


def unrecorded_values(checks, options) -> None:
    """A rank looks up names and ids of its process and node, and its node is lost. The next
    incarnation has the name of before, and the process id where it is free. It has another parent,
    so the job ends and names both."""
    for what in ("hostname", "uname", "pid", "parent"):
        for how, first in (("prints", "drew "), ("sends", "heard ")):
            name = f"{LOST}who {how} its {what}"
            if not checks.wants(name):
                continue
            program = [common.python(options), str(common.PROGRAMS / "tells.py"), what, how]
            code, _, output = lab_job(options, program, [(0.3, KILLED)], SPARE, first)
            printed = [re.findall(rf"^{word} (.*)$", output, re.M) for word in ("drew", "heard")]
            shown = printed[0] if how == "prints" else printed[1]
            is_moved = "are restarted on north-2" in output
            is_right = code == 0 and len(printed[1]) == 1 and printed[0] == printed[1] and what != "parent"
            may_differ = what in ("pid", "parent")
            is_named = code == 1 and may_differ and len(shown) == 1 and names_both(output, how, shown[0])
            outcome = "the same value" if is_right else "both values are named" if is_named else f"other values: {printed}"
            measured = f"exit code {code}, {'moved' if is_moved else 'not moved'}, {outcome}"
            checks.check(name, is_moved and (is_right or is_named), measured, output)


def names_both(output: str, how: str, shown: str) -> bool:
    """Whether the job has ended because rank 1 prints, or sends, another value than `shown`."""
    if how == "sends":
        version = r"\w+ to rank 3, \d+ bytes(?:, tag 0x[0-9a-f]+)?, digest ([0-9a-f]+)"
        found = re.search(rf"of rank 1 sends as its frame \d+: {version}; it was: {version}", output)
        by_digest = "what it sends to process 3 is not what it sent before it moved"
        return by_digest in output or found is not None and found[1] != found[2]
    found = re.search(r'^landbridge: rank 1 does not repeat .* on standard output line 1 is "drew (.*)", and was "drew (.*)"$', output, re.M)
    return found is not None and found[1] != found[2] == shown and "heard" not in output


class Other(NamedTuple):
    """A third-party program. `counts`: options for its amount of work in one cluster, and over a
    wide-area link of 5 ms. `begun`: part of its first line; `within_s`: seconds after that line
    during which the program still runs on any machine. `is_whole`: whether an output is complete.
    """

    name: str
    words: list[str]
    counts: tuple[str, str]
    begun: str
    within_s: float
    is_whole: Callable[[str], bool]


def programs_of_others(options, has_images: bool) -> list[Other]:
    """A heat equation that checks its result bit for bit, IMB-MPI1, and a program that receives
    with every kind of wildcard."""
    heat = [common.python(options), str(common.ROOT / "examples" / "heat.py"), "--check", "--size", "128"]
    # The program prints nothing when it begins, and has no checkpoint before.
    steps = ("--steps 300", "--steps 400") if has_images else ("--steps 1500", "--steps 300")
    imb = [str(options.venvs / "impi" / "bin" / "IMB-MPI1"), *PATTERNS, *BENCHMARK_BOUNDS]
    # In one cluster the recorded clock limits the repetitions: a fixed number takes no time, or a
    # minute on a busy machine.
    repeats = ("-time 1 -iter 100000", "-time 10 -iter 35 -iter_policy off")
    wild = [heat[0], str(common.ROOT / "crates" / "lab" / "src" / "soak" / "wildcards.py"), "--pause", "0.01"]
    rounds = ("--rounds 250", "--rounds 180")
    return [
        Other("heat", heat, steps, "", 0.7, lambda output: "identical to the serial run" in output),
        Other(f"IMB-MPI1 {' '.join(PATTERNS)}", imb, repeats, "# List of Benchmarks", 1.2, measured_all),
        Other("wildcards and probes", wild, rounds, "heard 0:", 1.2, took_each),
    ]


def other_programs(checks, options, images=()) -> None:
    """Third-party programs, whose node is lost at a moment drawn from the seed. `images`: options
    of the launcher for checkpoints on request, in a folder that all nodes share; ranks are then
    restored from these."""
    for program in programs_of_others(options, bool(images)):
        logs = [("", []), (RELAYS, RELAY)]
        for (place, clusters), (by, words) in itertools.product(enumerate(("", ", two clusters")), logs):
            name = by + LOST + program.name + clusters + (", from images" if images else "")
            if not checks.wants(name) or not Path(program.words[0]).exists():
                continue
            after_s = random.Random(f"{options.seed} {name}").uniform(0.1, 0.7 if images else program.within_s)
            run = [*program.words, *program.counts[place].split()]
            code, output = lost_once(options, program, run, bool(clusters), images, after_s, words)
            moves, found = output.count(" is lost ("), len(re.findall(r"rank [01] is restored from checkpoint \d+ on north-[23]", output))
            is_whole = program.is_whole(output)
            measured = f"exit code {code}, {'a' if is_whole else 'no'} whole answer, lost {moves}, {after_s:.1f} s after "
            measured += f"the images were there, {found} from these" if images else "the ranks were there"
            checks.check(name, code == 0 and is_whole and moves == 1 and found == (2 if images else 0), measured, output)


def silent_ranks(checks, options) -> None:
    """A node is lost while ranks call no MPI, so agents send again what is missing. Ranks of another
    cluster have sent to it, and call MPI again only when that has arrived; or a rank of it sends, and
    the agents first compare what it sends again on the spare node."""
    cases = {
        "who receive from ranks that do nothing meanwhile": (
            "silent.py",
            "rank 0: waits",
            ["rank 0: 300 messages", "rank 0: waits", "rank 1: 300 messages", "rank 1: waits"],
            0.2,
        ),
        "who send and then do nothing": ("sends_and_waits.py", "rank 1: has sent", ["rank 1: has sent", "rank 3: 300 messages"], 0.2),
    }
    for what, (program, first, wanted, after_s) in cases.items():
        name = LOST + what
        if not checks.wants(name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            silent = [common.python(options), str(common.PROGRAMS / program), folder]
            code, lines, output = lab_job(options, silent, [(after_s, KILLED)], SPARE, first)
        moves = output.count(" is lost (")
        checks.check(name, code == 0 and sorted(lines) == wanted and moves == 1, f"exit code {code}, {len(lines)} lines, lost {moves}", output)


def ended_ranks(checks, options) -> None:
    """Nodes are lost when ranks have left MPI or have ended. Ranks that have ended are executed again
    if their own node is lost with what they had sent (not with logs of relays); ranks 0 and 1, or 0
    alone, work on."""
    lost, other, spare = (1.5, KILLED), (1.5, ("south-1", KILLED)), (6.0, ("south-2", KILLED))
    both = ["rank 0: 14850", "rank 1: 0", "rank 3: exchanged"]
    cases = {
        LOST + "who work on after MPI_Finalize": (2, [lost], both, 0, 1),
        LOST + "one works on after MPI_Finalize": (1, [lost], ["rank 0: 14850", "rank 3: exchanged"], 0, 1),
        LOST + "whose ranks have ended, and at once one whose ranks have not": (2, [lost, other], both, 0, 2),
        # With logs of the senders nobody has what the ranks on it had sent.
        LOST + "whose ranks have ended, then the last spare node, then the other": (2, [other, spare, (6.5, KILLED)], None, 1, 3),
    }
    for name, (count, events, wanted, code_wanted, losses) in cases.items():
        if not checks.wants(name):
            continue
        program = [common.python(options), str(common.PROGRAMS / "works_on.py"), str(count)]
        words = SPARE if wanted else [*SPARE, *SENDER]
        code, lines, output = lab_job(options, program, events, words, "rank 3: exchanged")
        is_right = sorted(lines) == wanted if wanted else "not kept any more: 2, 3" in output
        seen = output.count(" is lost (")
        checks.check(name, code == code_wanted and is_right and seen == losses, f"exit code {code}, {len(lines)} lines, lost {seen}", output)


def sent_otherwise(checks, options) -> None:
    """A rank of a lost node sends something else than before to a rank of another node that has ended,
    or nothing to one that computes. Nobody else can compare the first than the agents, and they do
    before the rank's end counts."""
    cases = [
        ("", "something else to one that has ended", []),
        (RELAYS, "something else to one that has ended", []),
        ("", "nothing to one that computes", ["nothing"]),
    ]
    for logs, what, arguments in cases:
        name, words = logs + LOST + "who sends " + what, RELAY if logs else []
        if not checks.wants(name):
            continue
        program = [common.python(options), str(common.PROGRAMS / "otherwise.py"), *arguments]
        code, _, output = lab_job(options, program, [(1.5, KILLED)], [*SPARE, *words], "rank 3: heard")
        by_relay = r"incarnation \d+ of rank 0 sends as its frame"
        by_sender = f"what {'it sends to process' if arguments else 'rank 0 sends to rank'} 3 is not what it sent before it moved"
        is_said = bool(re.search(by_relay if logs else by_sender, output))
        checks.check(name, code == 1 and is_said and " is lost (" in output, f"exit code {code}, {'says' if is_said else 'does not say'} why", output)


def written_again(checks, options) -> None:
    """Calls on files are not recorded, and a rank that had written a file and ended is executed again
    when its node is lost with the logs of what it had sent: the job does not end before the file is
    written again."""
    name = LOST + "and what writes a file there again is waited for"
    if not checks.wants(name):
        return
    with tempfile.TemporaryDirectory() as folder:
        program = [common.python(options), str(common.PROGRAMS / "writes_late.py"), folder]
        words = [*SPARE, *SENDER, "--set", "recover_files=off"]
        code, lines, output = lab_job(options, program, [(0.5, KILLED)], words, "rank 1: ends")
        count = len((Path(folder) / "result").read_text().splitlines())
    is_right = code == 0 and sorted(lines) == ["rank 0: ends", "rank 1: ends"] and count == 20
    checks.check(name, is_right and output.count(" is lost (") == 1, f"exit code {code}, {count} lines written", output)


def ended_otherwise(checks, options) -> None:
    """A rank that had ended with an error is executed again when its node is lost with its logs, and
    ends without one: the job does not end as if there had been none."""
    name = LOST + "and a rank that had ended ends otherwise"
    if not checks.wants(name):
        return
    program = [common.python(options), str(common.PROGRAMS / "ends_otherwise.py")]
    code, _, output = lab_job(options, program, [(0.5, ("south-1", KILLED))], [*SPARE, *SENDER], "rank 2: ends")
    is_named = "rank 2 had ended, is needed again, and does not end as before" in output
    measured = f"exit code {code}, {'says' if is_named else 'does not say'} why"
    checks.check(name, code not in (0, None) and is_named and " is lost (" in output, measured, output)


def not_written_again(checks, options) -> None:
    """A node whose ranks have written a file and ended is lost while the last other rank ends: the
    launcher may end the job any time then, so no rank begins to write again before it has said
    that it waits for it."""
    name = LOST + "whose ranks have ended, as the last other rank ends"
    if not checks.wants(name):
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:

        begun = []

        def end_and_lose() -> None:
            launchers = ours("run")
            for pid in launchers:
                os.kill(pid, signal.SIGSTOP)
            Path(folder, "end").touch()
            while pids_of(0):
                time.sleep(0.02)
            signal_agent(KILLED, "north-2")
            for _ in range(30):
                time.sleep(0.05)
                begun.extend(pids_of(2))
            for pid in launchers:
                os.kill(pid, signal.SIGCONT)

        program = [common.python(options), str(common.PROGRAMS / "writes_late.py"), folder, "2"]
        words = [*WIDE, *SENDER, "--set", "recover_files=off"]
        code, lines, output = lab_job(options, program, [(0.5, end_and_lose)], words, "rank 2: ends", lab_file=wide_lab(Path(scratch)))
        count = len((Path(folder) / "result").read_text().splitlines())
    is_right = code == 0 and not begun and " is lost (" in output and sorted(lines) == ["rank 0: ends", "rank 2: ends"] and count == 20
    measured = f"exit code {code}, {count} lines written, {'some' if begun else 'none'} began again before"
    checks.check(name, is_right, measured, output)


def lost_once(options, program: Other, run, has_clusters: bool, images, after_s: float, logs):
    with tempfile.TemporaryDirectory() as scratch:
        lab_file = LAB if has_clusters else wide_lab(Path(scratch), SLOW_LAN if images else "")
        folder = Path(scratch) / "images" if images else None
        words = [*(SPARE if has_clusters else WIDE), *logs, *given(options), *images]
        words += ["--set", f"checkpoint_dir={folder}"] if folder else []
        events = [(0.0, lambda: lose_running(after_s, folder))]
        code, _, output = lab_job(options, run, events, words, program.begun, lab_file=lab_file)
    return code, output


def lose_running(after_s: float, images: Path | None = None) -> None:
    """Ends the first host `after_s` seconds after all ranks have begun, and with a folder for
    checkpoints after one of each rank."""
    wait_for_ranks(pids_of)
    if images:
        wait_for_ranks(lambda rank: any(images.glob(f"*/rank-{rank}/[0-9]*")), ask_for_images)
    time.sleep(after_s)
    signal_agent(KILLED)


def wait_for_ranks(is_there, meanwhile=lambda: None) -> None:
    """Waits until `is_there` is true for all ranks, and calls `meanwhile` each second."""
    began = time.monotonic()
    asked = 0
    while time.monotonic() < began + LIMIT_S and not all(map(is_there, range(RANKS))):
        if time.monotonic() >= began + asked:
            asked += 1
            meanwhile()
        time.sleep(0.02)


def ask_for_images() -> None:
    """Requests checkpoints of all ranks that have begun."""
    for pid in ours("run"):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)


def given(options) -> list[str]:
    """Options for the environment: IMB-MPI1 runs on MPICH, which has the same binary interface."""
    variables = {"LD_LIBRARY_PATH": options.venvs / "mpich" / "lib", "OPENBLAS_NUM_THREADS": "1", **common.FILLED}
    return [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]


def measured_all(output: str) -> bool:
    """Whether IMB-MPI1 has completed with a row for each length of each pattern, up to one for
    which no time was left."""
    tables = re.split(r"^# Benchmarking ", output, flags=re.M)[1:]
    rows = [re.findall(r"^ +(\d+) +(?:\d+ +[\d.]+|time-out)", table, re.M) for table in tables]
    is_right = all(found and found == LENGTHS[: len(found)] for found in rows)
    names = [table.split(maxsplit=1)[0] for table in tables]
    return is_right and names == PATTERNS and "# All processes entering MPI_Finalize" in output


def took_each(output: str) -> bool:
    """Whether there is one history: every position occurs once, and senders and receiver report the
    same message at it."""
    heard, printed = (sorted(re.findall(rf"^{word} (\d+): (.*)$", output, re.M)) for word in ("heard", "place"))
    is_each = sorted(int(place) for place, _ in heard) == list(range(len(heard))) and len({what for _, what in heard}) == len(heard)
    return heard == printed and is_each and len(re.findall(r"^rank \d ends$", output, re.M)) == RANKS


def spawning(checks, options) -> None:
    """The first node, on which rank 0 spawns processes, is lost. Ranks 2 and 3 are on the second
    node; the first word of a case names the host of the spawned processes."""
    program = [common.python(options), str(common.PROGRAMS / "spawns_late.py")]
    # The agent that must start the processes receives the request only after the node of the
    # requesting ranks is lost.
    standing = [(0.5, ("north-2", STOPPED)), (2.5, ("north-1", KILLED)), (7.0, ("north-2", WOKEN))]
    cases = {
        "while a rank spawns": (["north-2", "1.5"], standing),
        "before a rank spawns": (["anywhere", "4"], [(1.0, ("north-1", KILLED))]),
    }
    hears = "rank 0 hears [7, 8]"
    for how, (words, losses) in cases.items():
        name = LOST + how
        if not checks.wants(name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            lab_file = wide_lab(Path(scratch))
            code, lines, output = lab_job(options, [*program, *words], losses, WIDE, "rank 0 begins", lab_file=lab_file)
        spawned, moves = lines.count("rank of a spawned group is there"), output.count(" is lost (")
        is_right = (spawned, moves, lines.count(hears)) == (2, 1, 1)
        checks.check(name, code == 0 and is_right, f"exit code {code}, {spawned} processes spawned, lost {moves}", output)
    name = LOST + "once spawned processes of another node have ended"
    if checks.wants(name):
        with tempfile.TemporaryDirectory() as scratch:
            go, lab_file = Path(scratch) / "go", wide_lab(Path(scratch))
            meets = [program[0], str(common.PROGRAMS / "meets.py"), "--behind", str(go), program[1], "north-2", "0.5"]
            # Rank 0 receives again from them what it had received before.
            events = [(0.3, ("north-1", KILLED)), (0.3, go.touch)]
            code, lines, output = lab_job(options, meets, events, WIDE, "rank 0 hears", lab_file=lab_file)
        heard, moves = lines.count(hears), output.count(" is lost (")
        checks.check(name, code == 0 and (heard, moves) == (1, 1), f"exit code {code}, heard {heard} times, lost {moves}", output)
    name = LOST + "with processes that were spawned"
    if checks.wants(name):
        events = [(2.5, ("north-1", KILLED))]
        with tempfile.TemporaryDirectory() as scratch:
            lab_file = wide_lab(Path(scratch))
            held = [*program, "north-1", "0.5", "9"]
            code, _, output = lab_job(options, held, events, WIDE, "rank of a spawned group", lab_file=lab_file)
        is_said = "with processes that ranks have spawned: these cannot be restarted" in output
        checks.check(name, code == 1 and is_said, f"exit code {code}, {'says' if is_said else 'does not say'} why", output)


def drew_once(output: str) -> bool:
    printed = {word: sorted(re.findall(rf"^{word}(.*)$", output, re.M)) for word in DRAW_WORDS}
    return printed["now "] == printed["drew "] == printed["heard "] and len(set(printed["now "])) == len(printed["now "]) > 150


def took_once(output: str, rounds: int = 150) -> bool:
    heard, printed = (sorted(re.findall(rf"^{word} (\d+: rank \d message \d+)$", output, re.M)) for word in ("heard", "place"))
    return heard == printed and len(set(heard)) == rounds * (RANKS - 1) == len(heard)


def wide_lab(folder: Path, lan: str = "") -> Path:
    """The lab with two more hosts in the first cluster, and a `lan` setting for that cluster."""
    file = folder / "wide.toml"
    file.write_text(LAB.read_text().replace("hosts = 2 ", f"{lan}hosts = 4 ", 1))
    return file


def ours(command: str) -> list[int]:
    """Processes of `landbridge` with this command."""
    found = []
    for pid in process.descendants():
        # The process may have ended meanwhile.
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"landbridge") and words[1:2] == [command.encode()]:
                found.append(pid)
    return found


def signal_agent(what: str, host: str = "north-1") -> None:
    """Signals the agent of a host."""
    for pid in ours("agent"):
        try:
            names = ["nsenter", f"--uts=/proc/{pid}/ns/uts", "hostname"]
            is_it = subprocess.check_output(names).strip() == host.encode()
        except subprocess.CalledProcessError:
            continue
        if is_it:
            os.kill(pid, {KILLED: signal.SIGKILL, STOPPED: signal.SIGSTOP, WOKEN: signal.SIGCONT}[what])


def lab_job(options, program, events, words=None, first="turn 0:", within=(), lab_file=LAB, limit_s=LIMIT_S):
    """Runs a job in a lab. Events: seconds after the first line of output, or a text that is printed,
    and then a rank to kill, a change of the link, or a function to call.

    With options for the launcher the ranks are where the lab places them, else on the gateways.
    `within`: a command prefix that runs the launcher."""
    lab = f"recovery-{os.getpid()}"
    placed = [sys.executable, str(common.PROGRAMS / "on_gateways.py")] if words is None else []
    said = words or []
    recover = [] if NODE in said else ["--recover"]
    running = [*common.landbridge_run(options, RANKS, *recover, "--timeout", f"{limit_s:.0f}", *said), *program]
    command = [*network.lab_run(options, lab, lab_file), *placed, *within, *running]
    started = network.Job(command, {})
    try:
        is_met = started.wait_for(first, limit_s)
        started.started = time.monotonic()
        for at, what in events if is_met else []:
            is_time = started.wait_for(at, limit_s) if isinstance(at, str) else started.sleep_until(started.started + at)
            if not is_time:
                break
            if isinstance(what, int):
                # The rank may be between two incarnations.
                while not kill_rank(what) and started.sleep_until(time.monotonic() + 0.01):
                    pass
            elif callable(what):
                what()
            elif isinstance(what, tuple):
                signal_agent(what[1], what[0])
            elif what in (KILLED, STOPPED):
                signal_agent(what)
            elif not what.startswith("--"):
                interface = [str(options.bin / "landbridge"), "lab", "interface", lab, *what.split()]
                network.change(interface, 0).check_returncode()
            else:
                link = [str(options.bin / "landbridge"), "lab", "link", lab, "north-south", what]
                network.change(link, 0).check_returncode()
        seconds = started.wait(limit_s)
    finally:
        started.end()
    output = started.output.decode(errors="replace")
    lines = [line for line in output.splitlines() if line.startswith("rank ") and "restarted" not in line]
    return started.process.returncode if seconds is not None else f"none within {limit_s:.0f} s", lines, output


if __name__ == "__main__":
    sys.exit(main())
