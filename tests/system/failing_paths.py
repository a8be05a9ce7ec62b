#!/usr/bin/env python3
"""Ranks are killed while the paths between their nodes fail: under `--recover` the output is that of
an undisturbed run.

What enters: labs/two-rails.toml, a program whose messages depend on all that came before
(programs/long_ring.py), and logs of the senders, as by default. UDP and TCP, loss, corruption,
reordering, rails that go down and come back, cables and a wide-area link that are out while ranks
replay, and incarnations of a rank that have other paths than the one before. What leaves: exit code
0 if each job prints what an undisturbed one prints, and its paths have met what the case says: a case
whose fault did not happen fails. Cases without `--recover` are in network.py.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import common
import network
import nodes
from recovery import RELAY, kill_rank
from support import process

LIMIT_S = 120.0
SENDER = ["--set", "recover_log=sender"]
UDP = ["--set", "udp=on"]
RAILS = ("near-LAN0", "near-LAN1")
# What a case does besides killing a rank (its number) and changing the lab: it looks at paths and
# links; notes what was printed; waits until each rank has printed another line; waits until the
# replays of all kills are over; waits until a rank was restarted; stops or wakes an agent.
LOOK, PRINTED, GO_ON, REPLAYED, RESTARTED = "look", "printed", "go on", "replayed", "restarted"
# The agent that keeps determinants and records for ranks of other nodes is stopped, and goes on.
KEEPER, KEEPER_STOPPED, KEEPER_WOKEN = "near-gw", "keeper stopped", "keeper woken"
# Longest time that a step waits.
PATIENCE_S = 40.0
CORRUPT = "--corrupt 1% --repair-checksums true"
# Seconds after the step before, and what happens then.
Steps = list[tuple[float, int | str]]
# Both ranks are killed in turn; there is a look at each incarnation that has met the fault.
KILLS: Steps = [(1.0, LOOK), (0.0, 1), (0.0, GO_ON), (0.3, LOOK), (0.0, 0), (0.0, GO_ON), (0.3, LOOK)]


@dataclass
class Look:
    """What a job has printed and how its paths and the links of the lab were at some time."""

    printed: str
    # Bytes, retransmitted bytes, corrupt frames and breaks of all paths of one kind (`tcp`, `udp`).
    sums: dict[str, dict[str, int]]
    rows: list[dict]
    # The counts of each direction of each link.
    links: dict[str, dict[str, int]]

    def count(self, what: str) -> int:
        """A count of the links, over all of them."""
        return sum(counts[what] for counts in self.links.values())

    def carried(self, rail: str) -> int:
        """Bytes that the links of a rail have carried."""
        return sum(counts["bytes"] for link, counts in self.links.items() if rail in link)

    def sum(self, kind: str, what: str) -> int:
        return self.sums.get(kind, {}).get(what, 0)

    def paths_up(self, kind: str, network: str) -> int:
        """Paths of rank 1 of a kind that were made and have not failed, between addresses that begin
        so. On a busy machine a path that works is suspected now and then."""
        states = ("up", "spare", "suspected")
        rows = [row for row in self.rows if row["process"] == 1 and row["what"] == kind and row["state"] in states]
        return sum(network in str(row["ends"]) for row in rows)


# What a case has not met that it is about; empty: nothing.
Verdict = Callable[[list[Look], str], list[str]]


@dataclass
class Case:
    name: str
    steps: Steps
    verdict: Verdict
    words: list[str] = field(default_factory=list)
    ranks: int = 2
    turns: int = 120
    longest: int = 300_000
    fails: bool = False


def main() -> int:
    options = common.arguments(__doc__, common.add_cases)
    common.quiet_environment()
    process.adopt_orphans()
    if not options.list and (why_not := network.no_lab(options)):
        return common.skipped(f"no lab can be built here: {why_not}")
    checks = common.Checks(options)
    undisturbed: dict[tuple, list[str]] = {}
    for case in every_case():
        if checks.wants(case.name):
            check(checks, options, case, undisturbed)
    long_messages(checks, options)
    sends_in_the_log(checks, options)
    return checks.end()


# --- cases


def on_rails(change: str) -> Steps:
    return [(0.0, f"link {rail} {change}") for rail in RAILS]


def every_case() -> list[Case]:
    faults = {
        "5 % loss": ("--loss 5%", "lost"),
        "reordering": ("--reorder 5% --reorder-by 1ms", "reordered"),
        "duplication": ("--duplicate 5%", "duplicated"),
        "corruption": (CORRUPT, "corrupted"),
    }
    cases = []
    for kind, words in (("tcp", []), ("udp", UDP)):
        for fault, (change, counted) in faults.items():
            verdict = by_paths(kind, counted)
            cases.append(Case(f"{fault} over {kind.upper()}", [*on_rails(change), *KILLS], verdict, words))
        cases += [a_rail_comes_back(kind, words), both_rails(kind, words), cable_out(kind, words), other_paths(kind, words)]
    cases += [wide_area_link_out(by, words) for by, words in (("the senders", []), ("relays", RELAY))]
    return [*cases, unchecked(), two_clusters()]


def by_paths(kind: str, counted: str) -> Verdict:
    """All looks have found that messages go by paths of this kind, and the links have done to packets
    what is counted so."""

    def verdict(looks: list[Look], output: str) -> list[str]:
        other = "tcp" if kind == "udp" else "udp"
        wrong = [f"{look.sum(other, 'bytes')} bytes by {other}" for look in looks if look.sum(kind, "bytes") <= look.sum(other, "bytes")]
        wrong += [] if looks[-1].count(counted) > 20 else [f"{looks[-1].count(counted)} packets {counted}"]
        # At its end each rank says what its paths have carried.
        said = re.findall(rf"Info: rank \d \(endpoint \d+\): {kind} [\d.]+ to [\d.]+: (\d+) bytes sent", output)
        wrong += [] if sum(map(int, said)) > 1_000_000 else [f"bytes sent by {kind} at the end: {said}"]
        if counted == "lost" and kind == "udp":
            wrong += [] if any(look.sum(kind, "retransmitted_bytes") for look in looks) else ["nothing is retransmitted"]
        if counted == "corrupted":
            found = sum(look.sum(kind, "corrupt") + look.sum(kind, "losses") for look in looks)
            wrong += [] if found and "arrived corrupt" in output else ["no corrupt frame is found"]
        return wrong

    return verdict


def a_rail_comes_back(kind: str, words: list[str]) -> Case:
    """The second rail is down when the second incarnation of rank 1 begins, and up again when the
    third one does."""
    steps = [(1.0, LOOK), (0.0, "interface near-1 lan1 down"), (0.5, LOOK), (0.0, 1), (0.0, GO_ON), (0.0, LOOK)]
    steps += [(0.0, GO_ON), (0.0, LOOK), (0.0, "interface near-1 lan1 up"), (0.5, 1), (0.0, GO_ON), (2.0, LOOK)]

    def verdict(looks: list[Look], output: str) -> list[str]:
        before, failed, first, last, after = looks
        wrong = [] if before.paths_up(kind, "10.1.1.") else ["no path by the second rail at first"]
        wrong += ["a path by the rail that is down"] if last.paths_up(kind, "10.1.1.") else []
        wrong += ["bytes on the rail that is down"] if last.carried("LAN1") - first.carried("LAN1") > 10_000 else []
        wrong += [] if last.carried("LAN0") - first.carried("LAN0") > 1_000_000 else ["no bytes on the other one"]
        wrong += [] if after.paths_up(kind, "10.1.1.") else ["no path by the second rail after it is up again"]
        wrong += [] if last.paths_up(kind, "10.1.0.") else ["no path by the other rail"]
        is_lost = re.search(r"a path to .* is lost and goes on by another", failed.printed)
        return wrong + ([] if is_lost else ["no path is lost before the kill"])

    return Case(f"a rail that comes back over {kind.upper()}", steps, verdict, words, turns=160)


def both_rails(kind: str, words: list[str]) -> Case:
    """Long messages on two rails of 200 Mbit/s."""
    steps = [*on_rails("--rate 200Mbit/s"), *KILLS]

    def verdict(looks: list[Look], output: str) -> list[str]:
        shares = [[look.carried(rail) for rail in ("LAN0", "LAN1")] for look in looks]
        added = [[late - early for early, late in zip(*pair, strict=True)] for pair in itertools.pairwise(shares)]
        return [f"the rails have carried {pair}" for pair in (shares[0], *added) if min(pair) < 0.2 * sum(pair)]

    return Case(f"long messages by both rails over {kind.upper()}", steps, verdict, words, turns=36, longest=4 << 20)


def cable_out(kind: str, words: list[str]) -> Case:
    """Nothing passes between the nodes while both ranks are killed and replay."""
    cables = ("near-2-LAN0", "near-2-LAN1")
    steps = [(1.0, f"link {cables[0]} --down"), (0.0, f"link {cables[1]} --down"), (0.3, LOOK), (0.1, 1), (0.2, 0)]
    steps += [(0.0, REPLAYED), (1.0, LOOK), (0.0, f"link {cables[0]} --up"), (0.0, f"link {cables[1]} --up")]
    return Case(f"a cable that is out while ranks replay over {kind.upper()}", steps, lambda looks, output: unmoved_replays(looks), words)


def wide_area_link_out(by: str, words: list[str]) -> Case:
    """Nothing passes between the clusters while a rank of each is killed and replays what it has
    received from the other one: what has arrived is logged in the receiver's cluster, on its node or
    in its relay."""
    steps = [(1.0, "link near-far --down"), (0.3, LOOK), (0.1, 0), (0.2, 2), (0.5, REPLAYED), (0.5, LOOK)]
    steps += [(0.0, "link near-far --up")]

    def verdict(looks: list[Look], output: str) -> list[str]:
        wrong = unmoved_replays(looks)
        return wrong if looks[0].sum("relay", "bytes") else [*wrong, "nothing goes by the relays"]

    return Case(f"wide-area link cut while ranks replay, logs of {by}", steps, verdict, words, ranks=4, turns=80, longest=200_000)


def unmoved_replays(looks: list[Look]) -> list[str]:
    """What is wrong unless both replays have ended between two looks, and the job could not go on
    meanwhile."""
    first, last = looks
    replays = last.printed.count("the replay is over")
    wrong = [] if replays == 2 else [f"{replays} replays are over while nothing passes"]
    turns = [len(re.findall(r"^rank \d turn", look.printed, re.M)) for look in looks]
    wrong += [] if turns[0] == turns[1] else [f"lines while nothing passes: {turns}"]
    return wrong if last.count("cut") > first.count("cut") else [*wrong, "no packet is cut"]


def other_paths(kind: str, words: list[str]) -> Case:
    """Rank 1 is killed three times. Its first incarnation has both rails, the second one a single rail
    that loses and delays packets, the third one the other rail alone, the fourth one both again."""
    steps = [(1.0, LOOK), (0.0, "interface near-2 lan1 down"), (0.0, "link near-LAN0 --loss 3% --delay 5ms --jitter 2ms")]
    steps += [(0.1, 1), (0.0, GO_ON), (0.3, LOOK), (0.0, "interface near-2 lan1 up"), (0.0, "link near-LAN0 --restore")]
    steps += [(0.3, "link near-2-LAN0 --down"), (0.0, 1), (0.0, GO_ON), (0.3, LOOK), (0.0, "link near-2-LAN0 --up")]
    steps += [(0.3, 1), (0.0, GO_ON), (2.0, LOOK)]

    def verdict(looks: list[Look], output: str) -> list[str]:
        ways = [[look.paths_up(kind, network) > 0 for network in ("10.1.0.", "10.1.1.")] for look in looks]
        is_meant = ways == [[True, True], [True, False], [False, True], [True, True]]
        return ([] if is_meant else [f"paths by the rails: {ways}"]) + ([] if looks[1].count("lost") else ["no packet is lost"])

    return Case(f"incarnations with other paths over {kind.upper()}", steps, verdict, words, turns=160)


def unchecked() -> Case:
    """Without checksums corruption causes another output or ends the job: this shows that the
    checksums prevent both."""
    steps = [*on_rails(CORRUPT), (1.0, 1)]
    return Case("corruption without integrity", steps, lambda looks, output: [], ["--set", "integrity=off"], fails=True)


def two_clusters() -> Case:
    """The relays' link and a rail fail at once; ranks of both clusters are killed meanwhile."""
    steps = [(0.9, "link near-far --loss 1%"), (0.0, "interface near-1 lan1 down"), (0.0, "link near-LAN0 --loss 2%")]
    steps += [(0.4, 1), (0.5, "link near-far --down"), (0.3, 2), (2.0, LOOK), (0.0, "link near-far --up"), (0.0, GO_ON)]
    steps += [(0.0, "interface near-1 lan1 up"), (0.5, 0), (0.0, 3)]

    def verdict(looks: list[Look], output: str) -> list[str]:
        wrong = [] if looks[0].count("cut") and looks[0].count("lost") else ["no packet is lost or cut"]
        wrong += [] if looks[0].sum("relay", "bytes") else ["nothing goes by the relays"]
        return wrong + (["a path by the rail that is down"] if looks[0].paths_up("tcp", "10.1.1.") else [])

    return Case("two clusters, a rail down and the wide-area link cut", steps, verdict, ranks=4, turns=80, longest=200_000)


# --- jobs


def check(checks, options, case: Case, undisturbed: dict[tuple, list[str]]) -> None:
    program = [common.python(options), str(common.PROGRAMS / "long_ring.py")]
    program += ["--turns", str(case.turns), "--longest", str(case.longest)]
    key = (case.ranks, case.turns, case.longest)
    if key not in undisturbed:
        undisturbed[key] = sorted(lines_of(job(options, program, [], [], case.ranks)[1]))
    code, output, looks = job(options, program, case.steps, case.words, case.ranks)
    is_same = sorted(lines_of(output)) == undisturbed[key] and len(undisturbed[key]) > case.turns // 10 * case.ranks
    restarts, kills = restarts_in(output), sum(isinstance(what, int) for _, what in case.steps)
    is_whole = len(looks) == sum(what == LOOK for _, what in case.steps)
    missed = case.verdict(looks, output) if is_whole else [f"{len(looks)} looks: the job has ended before"]
    is_right = code == 0 and is_same and restarts == kills and not missed
    measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {restarts} restarts, {'; '.join(missed) or 'by the paths meant'}"
    checks.check(case.name, not (code == 0 and is_same) if case.fails else is_right, measured, output)


def long_messages(checks, options) -> None:
    """Many messages of 4 MiB at once in both directions, without any fault: what the processes say of
    what they have received then has no credit now and then, and arrives behind what was said later."""
    for kind, words in (("TCP", []), ("UDP", UDP)):
        name = f"messages that use up all credit over {kind}"
        if checks.wants(name):
            sums = [common.python(options), str(network.SUMS), "--turns", "12"]
            code, output, _ = job(options, sums, [], words, 2, first="started")
            found = common.values(output, "done")
            checks.check(name, code == 0 and found == ["216"], f"exit code {code}, {found or 'no'} messages compared", output)


def sends_in_the_log(checks, options) -> None:
    """A send is complete when it is in the log of its sender, as far as the receiver has given credit
    (longer ones wait for more). It does not wait for the transport: no path between the two nodes works,
    so that agents carry the messages by the launcher, and the sender is killed and comes back. Nor does
    it wait for the keeper, without whose answer no message leaves a node that a spare one may replace."""
    cases = {
        "one and 200 messages of 1 KiB": (200, 1 << 10),
        "one and 50 messages of 16 KiB": (50, 16 << 10),
    }
    for what, (count, size) in cases.items():
        for waited_for, check_sends in (("transport", without_transport), ("keeper", without_keeper)):
            name = f"a send does not wait for the {waited_for}, {what}"
            if not checks.wants_compiled(name):
                continue
            check_sends(checks, options, name, count, size)


def without_transport(checks, options, name: str, count: int, size: int) -> None:
    cables = ("near-2-LAN0", "near-2-LAN1")
    steps = [(0.1, f"link {cable} --down") for cable in cables] + [(1.8, 0), (0.0, RESTARTED), (0.2, PRINTED)]
    steps += [(0.0, f"link {cable} --up") for cable in cables]
    code, output, looks = sends(options, count, size, 700, steps, [])
    sent, answered = sent_and_answered(output)
    is_early = len(sent) == 1 and sent[0] < 1000 and bool(looks) and "sent after ms" in looks[0].printed
    # The program sleeps for two seconds; meanwhile agents carry what it has sent.
    is_late = len(answered) == 1 and answered[0] > 1900
    is_right = common.values(output, "right messages") == [str(count + 1)] and restarts_in(output) == 1
    measured = f"exit code {code}, sent after {sent} ms, answered after {answered} ms, {restarts_in(output)} restarts, {len(looks)} looks"
    checks.check(name, code == 0 and is_early and is_late and is_right, measured, output)


def without_keeper(checks, options, name: str, count: int, size: int) -> None:
    """The program begins to send 1.5 s after its first line, and would be answered 2 s later. The keeper
    wakes 5 s after that line, and passes no line on meanwhile: the program itself takes the times."""
    steps = [(0.1, KEEPER_STOPPED), (4.9, KEEPER_WOKEN)]
    with tempfile.TemporaryDirectory() as folder:
        lab_file = Path(folder) / "three-hosts.toml"
        lab_file.write_text(network.LAB_FILE.read_text().replace("hosts = 2", "hosts = 3", 1))
        code, output, _ = sends(options, count, size, 1500, steps, nodes.SPARE, lab_file)
    sent, answered = sent_and_answered(output)
    is_early, is_late = len(sent) == 1 and sent[0] < 1000, len(answered) == 1 and answered[0] > 3400
    is_right = common.values(output, "right messages") == [str(count + 1)]
    measured = f"exit code {code}, sent after {sent} ms, answered after {answered} ms"
    checks.check(name, code == 0 and is_early and is_late and is_right, measured, output)


def sends(options, count: int, size: int, wait_ms: int, steps: Steps, words: list[str], lab_file: Path = network.LAB_FILE):
    """Runs a job of programs/sends_meanwhile.c."""
    with tempfile.TemporaryDirectory() as folder:
        program = [build(options, Path(folder)), str(count), str(size), str(wait_ms)]
        return job(options, program, steps, words, 2, lab_file=lab_file)


def sent_and_answered(output: str) -> list[list[int]]:
    return [[int(value) for value in common.values(output, key)] for key in ("sent after ms", "answered after ms")]


def build(options, folder: Path) -> str:
    root = options.venvs / "mpich"
    mpi = [f"-I{root}/include", f"-L{root}/lib", "-lmpi", f"-Wl,-rpath,{root}/lib"]
    program = str(folder / "sends_meanwhile")
    subprocess.run(["gcc", "-O2", str(common.PROGRAMS / "sends_meanwhile.c"), "-o", program, *mpi], check=True)
    return program


def restarts_in(output: str) -> int:
    return len(re.findall(r"^landbridge: rank \d+ was killed by .*: restarted", output, re.M))


def lines_of(output: str) -> list[str]:
    return re.findall(r"^rank \d+ (?:turn|ends).*$", output, re.M)


def job(options, program: list[str], steps: Steps, words: list[str], ranks: int, first: str = "turn 0:", lab_file: Path = network.LAB_FILE):
    """Runs a job with a rank on each of the first hosts: exit code, output and looks."""
    lab, looks = f"paths-{os.getpid()}", []
    words = ["--recover", "--ranks-per-node", "1", "--timeout", f"{LIMIT_S:.0f}", "--set", "log=info", *SENDER, *words]
    command = [*network.lab_run(options, lab, lab_file), *common.landbridge_run(options, ranks, *words), *program]
    started = network.Job(command, {})
    try:
        is_met = started.wait_for(first, LIMIT_S)
        started.started = time.monotonic()
        for pause, what in steps if is_met else []:
            if not started.sleep_until(time.monotonic() + pause) or not take(options, started, lab, what, ranks, looks):
                break
        seconds = started.wait(LIMIT_S)
    finally:
        started.end()
    return started.process.returncode if seconds is not None else f"none within {LIMIT_S:.0f} s", printed_by(started), looks


def take(options, started, lab: str, what: int | str, ranks: int, looks: list[Look]) -> bool:
    """Takes a step; False: the job has ended."""
    if isinstance(what, int):
        # The rank may be between two incarnations.
        return wait_until(started, lambda: kill_rank(what))
    if what == GO_ON:
        before = turns_of(started, ranks)
        return wait_until(started, lambda: all(now > then for now, then in zip(turns_of(started, ranks), before, strict=True)))
    if what == REPLAYED:
        return wait_until(started, lambda: printed_by(started).count("the replay is over") >= restarts_in(printed_by(started)) > 0)
    if what == RESTARTED:
        return wait_until(started, lambda: restarts_in(printed_by(started)) > 0)
    if what in (KEEPER_STOPPED, KEEPER_WOKEN):
        nodes.signal_agent(nodes.STOPPED if what == KEEPER_STOPPED else nodes.WOKEN, KEEPER)
        return True
    if what == PRINTED:
        looks.append(Look(printed_by(started), {}, [], {}))
        return True
    if what == LOOK:
        looks += look(options, lab, started)
        return True
    verb, *rest = what.split()
    changed = network.change([str(options.bin / "landbridge"), "lab", verb, lab, *rest], 0)
    # A job that ends meanwhile takes its lab with it.
    if changed.returncode and not started.sleep_until(time.monotonic() + 2.0):
        return False
    changed.check_returncode()
    return True


def wait_until(started, is_so: Callable[[], bool]) -> bool:
    """Waits for a while; False: the job has ended meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline:
        if not started.sleep_until(time.monotonic() + 0.02):
            return False
    return True


def printed_by(started) -> str:
    return started.output.decode(errors="replace")


def turns_of(started, ranks: int) -> list[int]:
    """How many lines each rank has printed."""
    return [len(re.findall(rf"^rank {rank} turn", printed_by(started), re.M)) for rank in range(ranks)]


def look(options, lab: str, started) -> list[Look]:
    """How the paths of the job and the links of the lab are now; nothing if the job has ended."""
    landbridge = str(options.bin / "landbridge")
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(subprocess.SubprocessError, ValueError):
        # A rank answers only from inside MPI.
        while (paths := paths_of(landbridge)) is None and time.monotonic() < deadline:
            if not started.sleep_until(time.monotonic() + 0.02):
                return []
        links = subprocess.run([landbridge, "lab", "link", lab], capture_output=True, text=True, check=True, timeout=10).stdout
        started.sleep_until(time.monotonic() + 0.01)
        counts = re.findall(r"^(\S+): .*?((?: \w+=\d+)+)$", links, re.M)
        by_link = {link: {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", text)} for link, text in counts}
        return [Look(printed_by(started), paths["sums"], paths["rows"], by_link)] if paths else []
    return []


def paths_of(landbridge: str) -> dict | None:
    """What `landbridge ps --paths` says of this driver's job, if all its ranks answer."""
    command = [landbridge, "ps", "--paths", "--all", "--json"]
    jobs = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout)
    ours = [job["paths"] for job in jobs if job["launcher"] in process.descendants()]
    is_whole = ours and ours[0]["unanswered_count"] == 0 and not any(row["is_old"] for row in ours[0]["rows"])
    return ours[0] if is_whole else None


if __name__ == "__main__":
    sys.exit(main())
