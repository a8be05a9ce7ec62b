#!/usr/bin/env python3
"""Ranks are killed with SIGKILL under `landbridge run --recover`: the job's result is unaffected.

In one cluster and in two, on this machine. Cases that need a lab (failing links, other nodes, lost
nodes) are in nodes.py.
"""

import contextlib
import functools
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import common
from support import control_group, process

RANKS = 4
# Largest number of seconds of a job with kills.
LIMIT_S = 120.0
# A rank needs about this many seconds to reach its first message: earlier kills are kills at the
# start.
START_S = 1.2
# Beginnings of lines about the same draw: when it is made, at the end, and when rank 0 receives it.
DRAW_WORDS = ("now ", "drew ", "heard ")
TWO_CLUSTERS = ["--clusters", "2"]
# Relays log messages, where by default the senders do.
RELAY = ["--set", "recover_log=relay"]
# With messages of this size, and this many turns before rank 2 is killed, the replay takes a second
# or two, and several times as long on a busy machine.
LONG_HISTORY, LONG_AGO, LONG_LIMIT_S = ["--rounds", "500", "--numbers", "50000"], "rank 2 turn 300:", 2 * LIMIT_S

# Ranks of a job on this machine, whose processes wait for each other most of the time.
CROWDS, CROWD_ROUNDS, CROWD_LIMIT_S = (256,), 60, 600.0


def main() -> int:
    options = common.arguments(__doc__, common.add_cases)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    chance = random.Random(options.seed)
    moment = lambda: chance.uniform(0.2, 0.9)  # noqa: E731
    program = [common.python(options), str(common.PROGRAMS / "ring.py")]
    # Longer than all kills of a case take.
    ring = [*program, "--rounds", "900"]
    one_cluster = {
        "as a job begins": [(0.3, 1)],
        "rank 0": [(START_S + moment(), 0)],
        "another rank": [(START_S + moment(), 2)],
        "two at once": [(START_S + moment(), 1), (0.0, 3)],
        "one after another": [(START_S + moment(), 1), (moment(), 2), (moment(), 0)],
        "the same again while it comes back": [(START_S + moment(), 2), (0.4, 2), (0.3, 2)],
        "all": [(START_S + moment(), 0), (0.0, 1), (0.0, 2), (0.0, 3)],
    }
    # Ranks 0 and 1 are in the first cluster.
    two_clusters = {
        "two clusters, as a job begins": [(0.3, 3), (0.0, 1)],
        "two clusters, rank 0": [(START_S + moment(), 0)],
        "two clusters, one in each": [(START_S + moment(), 1), (0.0, 2)],
        "two clusters, the same again while it comes back": [(START_S + moment(), 3), (0.4, 3), (0.3, 3)],
        "two clusters, all": [(START_S + moment(), 3), (moment(), 2), (0.0, 1), (0.0, 0)],
    }
    for cases, words in ((one_cluster, []), (two_clusters, TWO_CLUSTERS)):
        wanted = [name for name in cases if checks.wants(name)]
        undisturbed = sorted(job(options, ring, [], *words)[1]) if wanted else []
        for name in wanted:
            check_same(checks, name, job(options, ring, cases[name], *words), undisturbed, len(cases[name]))
    name = "two clusters, with little patience for peers"
    if checks.wants(name):
        # The timeout is shorter than the start of a rank.
        words = [*TWO_CLUSTERS, "--set", "peer_timeout=200ms"]
        undisturbed = sorted(job(options, ring, [], *words)[1])
        kills = [(START_S + moment(), 2), (moment(), 0)]
        check_same(checks, name, job(options, ring, kills, *words), undisturbed, len(kills))
    for name, words in (("who takes whatever comes", []), ("two clusters, who takes whatever comes", TWO_CLUSTERS)):
        if not checks.wants(name):
            continue
        kills = [(START_S + moment(), 0), (moment(), 2), (moment(), 0)]
        code, lines, output = job(options, [*program, "--any", "--rounds", "150"], kills, *words)
        heard = sorted(re.findall(r"^heard (\d+: rank \d message \d+)$", "\n".join(lines), re.M))
        printed = sorted(re.findall(r"^place (\d+: rank \d message \d+)$", "\n".join(lines), re.M))
        is_one = heard == printed and len(set(heard)) == 150 * (RANKS - 1) == len(heard)
        measured = f"exit code {code}, {'one' if is_one else 'no one'} history"
        checks.check(name, code == 0 and is_one and output.count(": restarted") == len(kills), measured, output)
    name = "who fetches from another one's memory"
    if checks.wants(name):
        # MPICH's messages for one-sided operations have a field that MPICH never sets.
        tickets = [common.python(options), str(common.PROGRAMS / "tickets.py"), "--rounds", "2000"]
        kills = [(START_S + moment(), 1), (moment(), 0), (moment(), 3)]
        code, lines, output = job(options, tickets, kills)
        is_right = f"tickets: {2000 * RANKS}, each once" in lines
        measured = f"exit code {code}, {'each number once' if is_right else 'other numbers'}"
        checks.check(name, code == 0 and is_right and output.count(": restarted") == len(kills), measured, output)
    asked_for(options, checks, job, ": restarted", START_S)
    name = "others go on who do not need the lost one"
    if checks.wants(name):
        pairs = [common.python(options), str(common.PROGRAMS / "pairs.py")]
        # The replay takes as long as the rank has computed.
        code, lines, output = job(options, pairs, [(lambda said: "first: 3" in said, 3), (1.0, 3)])
        longest = [float(seconds) for seconds in re.findall(r"^pair \d: longest ([\d.]+) s$", "\n".join(lines), re.M)]
        is_right = len(longest) == 2 and longest[0] < longest[1] / 2
        measured = f"exit code {code}, the longest turns took {longest} s"
        checks.check(name, code == 0 and is_right and output.count(": restarted") == 2, measured, output)
    beside_silent_ranks(options, checks)
    progress_reports(options, checks, program, moment)
    if checks.wants("at the foot of a terminal"):
        on_a_terminal(options, checks, program, "at the foot of a terminal", [])
    log_on_disk(options, checks, program, moment)
    log_command(options, checks, program)
    standard_input(options, checks, moment)
    recorded_nondeterminism(options, checks, moment)
    unrecorded(options, checks, program)
    file_output(options, checks, moment)
    benchmark(options, checks, moment)
    name = "who does something else than before"
    if checks.wants(name):
        code, _, output = job(options, [*ring, "--drift"], [(START_S + 1.0, 1)])
        check_divergence(checks, name, code, output, 1)
    name = "who sends to somebody else than before"
    if checks.wants(name):
        code, _, output = job(options, [*ring, "--stray"], [(START_S + 1.0, 1)])
        is_said = re.search(r"this process cannot go on: its frame \d+, sent at poll \d+, is not what it sent there before", output)
        checks.check(name, code == 1 and bool(is_said), f"exit code {code}, {'says' if is_said else 'does not say'} why", output)
    spawning(options, checks)
    name = "who crashes by its own fault"
    if checks.wants(name):
        crash = [*program, "--rounds", "30", "--crash"]
        code, _, output = job(options, crash, [])
        is_right = is_given_up(output, 2, "a fault of the program")
        measured = f"exit code {code}, {'says' if is_right else 'does not say'} that it is its own fault"
        checks.check(name, code == 128 + signal.SIGSEGV and is_right, measured, output)
    # The last exit code is that of processes which Landbridge's libraries end.
    for name, own in (("who leaves without MPI_Finalize", 3), ("who leaves with the code of those who cannot go on", 183)):
        if not checks.wants(name):
            continue
        code, _, output = job(options, [*program, "--rounds", "30", "--leave", str(own)], [])
        is_right = is_given_up(output, 2, "a fault of the program")
        measured = f"exit code {code}, {'says' if is_right else 'does not say'} that it is its own fault"
        checks.check(name, code == own and is_right, measured, output)
    name = "who leaves without MPI_Finalize as if all were well"
    if checks.wants(name):
        code, _, output = job(options, [*program, "--rounds", "30", "--leave", "0"], [])
        is_said = bool(re.search(r"^landbridge: rank 1 .*without MPI_Finalize: under --recover it counts as lost", output, re.M))
        measured = f"exit code {code}, {'says' if is_said else 'does not say'} who is missing"
        checks.check(name, code == 1 and is_said, measured, output)
    name = "who ends before it has begun again, as if all were well"
    if checks.wants(name):
        # Without a record of files nothing else shows that the rank has not done its work.
        early = [common.python(options), str(common.PROGRAMS / "early.py")]
        kills = [(lambda output: "rank 0: closed" in output, 1)]
        code, _, output = job(options, early, kills, "--set", "recover_files=off")
        is_said = "rank 1 does not repeat in incarnation 1 what it did before: it ended after 0 of" in output
        measured = f"exit code {code}, {'says' if is_said else 'does not say'} what is missing"
        checks.check(name, code == 1 and is_said, measured, output)
    name = "who is killed more often than allowed"
    if checks.wants(name):
        kills = [(START_S + moment(), 1), (START_S + moment(), 1), (START_S + moment(), 1)]
        words = ["--max-restarts", "2", "--max-restarts-within", "1h"]
        code, _, output = job(options, [*program, "--rounds", "3000"], kills, *words)
        is_right = is_given_up(output, 2, "it has been 2 times within 3600 s")
        measured = f"exit code {code}, {'says' if is_right else 'does not say'} how often"
        checks.check(name, code == 128 + signal.SIGKILL and is_right, measured, output)
    name = "where it cannot be"
    if checks.wants(name):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            # A topology without a relay.
            file.write('[[cluster]]\nname = "one"\n[[cluster.host]]\nname = "localhost"\nslots = 4\n')
            file.flush()
            code, _, output = job(options, program, [], "--topology", file.name)
        checks.check(name, code == 1 and "--recover needs a relay" in output, f"exit code {code}", output)
    logs_of_senders(options, checks, ring)
    nodes_together(options, checks, ring)
    logs_of_relays(options, checks, program, moment)
    crowds(options, checks)
    return checks.end()


def crowds(options, checks) -> None:
    """A rank is killed of a job with many more ranks than processors. By itself a job of more than 512
    ranks has logs of relays, so the logs are stated."""
    for ranks in CROWDS:
        name = f"logs of the senders, {ranks} ranks on a node"
        if not checks.wants_compiled(name):
            continue
        words = {"ranks": ranks, "limit_s": CROWD_LIMIT_S}
        logs = ["--set", "recover_log=sender"]
        with tempfile.TemporaryDirectory() as folder:
            program = [crowd_program(options, folder), str(CROWD_ROUNDS)]
            undisturbed = sorted(job(options, program, [], *logs, recover=False, **words)[1])
            half = after_output(f"round {CROWD_ROUNDS // 2}:")
            began = time.monotonic()
            code, lines, output = job(options, program, [(half, ranks // 3)], *logs, **words)
        is_same = sorted(lines) == undisturbed and len(lines) == CROWD_ROUNDS + ranks
        starts, seconds = output.count(": restarted"), time.monotonic() - began
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {starts} restarts, {seconds:.0f} s"
        checks.check(name, code == 0 and is_same and starts == 1, measured, output)


def crowd_program(options, folder: str) -> str:
    """The program, compiled with the MPI library of the wheels."""
    root, program = options.venvs / "mpich", f"{folder}/crowd"
    mpi = [f"-I{root}/include", f"-L{root}/lib", "-lmpi", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(["gcc", "-O2", str(common.PROGRAMS / "crowd.c"), "-o", program, *mpi], check=True)
    return program


def nodes_together(options, checks, ring) -> None:
    """All ranks of a node begin again if one of them is killed (`recover_unit=node`), also those
    that have ended; those of other nodes do not notice."""
    together = ["--set", "recover_unit=node"]
    longer = [*ring[:-1], "1500"]
    cases = {
        "ranks of a node together": ([], [(1.0, 1), (0.3, 3), (0.2, 3), (0.3, 0)], ["0, 2, 3", "0, 1, 2", "1, 2, 3"]),
        "ranks of a node together, two clusters": (TWO_CLUSTERS, [(1.0, 1), (0.5, 2), (0.3, 0)], ["0", "3", "1"]),
    }
    for name, (words, kills, others) in cases.items():
        if checks.wants(name):
            undisturbed = sorted(job(options, longer, [])[1])
            code, lines, output = job(options, longer, kills, *together, *words)
            who = set(re.findall(r"that begin again with rank \d \(recover_unit=node\): ([\d, ]+)$", output, re.M))
            is_right = code == 0 and sorted(lines) == undisturbed and who == set(others)
            starts = output.count(": restarted")
            measured = f"exit code {code}, {'the same' if sorted(lines) == undisturbed else 'other'} output, {starts} restarts, with {sorted(who)}"
            checks.check(name, is_right and starts == len(kills), measured, output)
    # What ranks that have ended had sent is needed again, and kept nowhere.
    program = [common.python(options), str(common.PROGRAMS / "ends_apart.py"), "3"]
    for place, words in (("", []), (", two clusters", TWO_CLUSTERS)):
        name = f"ranks of a node together, and some have ended{place}"
        if checks.wants(name):
            undisturbed = sorted(job(options, program, [])[1])
            have_ended = lambda output: "rank 0 has ended" in output and "rank 2 has ended" in output  # noqa: E731
            kills = [(have_ended, 3), (1.0, 1)]
            code, lines, output = job(options, program, kills, *together, *words)
            is_same = sorted(lines) == undisturbed and len(lines) > RANKS
            is_again = output.count("that begin again with rank") == 2
            measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {output.count(': restarted')} restarts"
            checks.check(name, code == 0 and is_same and is_again and output.count(": restarted") == 2, measured, output)
    name = "ranks of a node together, and one that has ended writes a file again"
    if checks.wants(name):
        with tempfile.TemporaryDirectory() as folder:
            writer = [common.python(options), str(common.PROGRAMS / "writes_late.py"), folder]
            code, lines, output = job(options, writer, [(after_output("rank 1: ends", 0.5), 0)], *together, "--set", "recover_files=off")
            count = len((Path(folder) / "result").read_text().splitlines())
        is_right = code == 0 and sorted(lines) == ["rank 0: ends", "rank 1: ends"] and count == 20
        checks.check(name, is_right and output.count(": restarted") == 1, f"exit code {code}, {count} lines written", output)
    name = "ranks of a node together, and one that has ended does something else"
    if checks.wants(name):
        code, _, output = job(options, [*program, "drift"], [(after_output("rank 0 has ended", 0.5), 1)], *together)
        is_right = "rank 0 had ended, is needed again, and does not end as before" in output
        checks.check(name, code == 1 and is_right, f"exit code {code}, {'says' if is_right else 'does not say'} why", output)


def logs_of_senders(options, checks, ring) -> None:
    """Messages that stay in the logs of their senders (`recover_log=sender`): kills, divergence, a
    full log, and jobs for which the logs do not work yet. kills.py has more programs."""
    logs = ["--set", "recover_log=sender"]
    name = "logs of the senders"
    if checks.wants(name):
        longer = [*ring[:-1], "1500"]
        undisturbed = sorted(job(options, longer, [], *logs)[1])
        kills = [(1.0, 1), (0.3, 3), (0.2, 3), (0.3, 0)]
        check_same(checks, name, job(options, longer, kills, *logs), undisturbed, len(kills))
    name = "logs of the senders, who does something else than before"
    if checks.wants(name):
        code, _, output = job(options, [*ring[:-1], "1500", "--drift"], [(1.0, 1)], *logs)
        check_divergence(checks, name, code, output, 1)
    name = "logs of the senders, which are full"
    full = "memory for message logs is full (recover_memory): this process and"
    for what, kills in (("", []), (", and one is killed", [(after_output(full), 2)])):
        if checks.wants(name + what):
            long = [*ring[:-1], "1500", "--numbers", "5000"]
            code, lines, output = job(options, long, kills, *logs, "--set", "recover_memory=16MiB")
            gone = "messages that it needs are not kept any more, because memory for them was full"
            is_right = full in output and (gone in output) == bool(kills) and (code == 1 if kills else code == 0 and len(lines) > RANKS)
            checks.check(name + what, is_right, f"exit code {code}, {len(lines)} lines, {'says' if gone in output else 'does not say'} what is gone", output)
    name = "logs of the senders, with little memory in a control group"
    if checks.wants(name):
        with control_group.limited("recovery", 600 << 20) as within:
            if within is None:
                print(f"skipped: {name}: no control group with a limit of memory can be made here")
            else:
                # 1 GB of messages of each rank: more than the group may have.
                long = [*ring[:-1], "1500", "--numbers", "20000"]
                code, lines, output = job(options, long, [], *logs, within=within)
                is_right = code == 0 and len(lines) > RANKS and full in output
                measured = f"exit code {code}, {len(lines)} lines, {output.count(': restarted')} restarts"
                checks.check(name, is_right and ": restarted" not in output, measured, output)
    sender_logs_on_disk(checks, options, [*ring[:-1], "250", "--numbers", "50000"], logs, full)
    name = "logs of the senders that are looked at"
    if checks.wants(name):
        seen, watched = {}, threading.Event()
        watcher = threading.Thread(target=watch_log, args=(options, seen, watched), daemon=True)
        watcher.start()
        code, _, output = job(options, [*ring[:-1], "1500", "--numbers", "5000"], [(2.0, 1)], *logs)
        watched.set()
        watcher.join()
        processes = seen.get("all", {}).get("processes", [])
        whole = [one for one in processes if one["sent"] > 0 < one["delivered_frames"] and one["bytes"] > 0]
        most = max((one["determinant_bytes"] / one["delivered_frames"] for one in whole), default=0)
        numbers = [one["determinant"] for one in seen.get("story", {}).get("determinants", [])]
        frames = seen.get("story", {}).get("frames", [])
        is_right = code == 0 and len(whole) == RANKS and 0 < most <= 8 and numbers == list(range(3, 8)) and frames and "of rank" in seen.get("text", "")
        checks.check(name, bool(is_right), f"exit code {code}, {len(whole)} ranks, at most {most:.1f} bytes of deliveries a frame, deliveries {numbers}, {len(frames)} runs of frames", output)


def logs_of_relays(options, checks, program, moment) -> None:
    """Relays log messages (`recover_log=relay`): kills, wildcards, and divergence. kills.py has more
    programs, nodes.py other nodes."""
    ring = [*program, "--rounds", "900"]
    cases = {
        "logs of relays, as a job begins": [(0.3, 1)],
        "logs of relays, the same again while it comes back": [(START_S + moment(), 2), (0.4, 2), (0.3, 2)],
        "logs of relays, all": [(START_S + moment(), 0), (0.0, 1), (0.0, 2), (0.0, 3)],
        "logs of relays, two clusters, one in each": [(START_S + moment(), 1), (0.0, 2)],
    }
    for name, kills in cases.items():
        if checks.wants(name):
            words = [*RELAY, *(TWO_CLUSTERS if "two clusters" in name else [])]
            undisturbed = sorted(job(options, ring, [], *words)[1])
            check_same(checks, name, job(options, ring, kills, *words), undisturbed, len(kills))
    name = "logs of relays, who takes whatever comes"
    if checks.wants(name):
        kills = [(START_S + moment(), 0), (moment(), 2), (moment(), 0)]
        code, lines, output = job(options, [*program, "--any", "--rounds", "150"], kills, *RELAY)
        heard, printed = (sorted(re.findall(rf"^{word} (\d+: .*)$", "\n".join(lines), re.M)) for word in ("heard", "place"))
        is_one = heard == printed and len(set(heard)) == 150 * (RANKS - 1) == len(heard)
        measured = f"exit code {code}, {'one' if is_one else 'no one'} history"
        checks.check(name, code == 0 and is_one and output.count(": restarted") == len(kills), measured, output)
    name = "logs of relays, who does something else than before"
    if checks.wants(name):
        code, _, output = job(options, [*ring, "--drift"], [(START_S + 1.0, 1)], *RELAY)
        check_divergence(checks, name, code, output, 1)
    name = "logs of relays, at the foot of a terminal"
    if checks.wants(name):
        on_a_terminal(options, checks, program, name, RELAY)


def spawning(options, checks) -> None:
    """A rank that has spawned processes is killed: the rank is restarted, and the processes exist
    once. A spawned process is killed: the job ends."""
    program = [common.python(options), str(common.PROGRAMS / "spawned.py")]
    away = "these cannot be restarted: if one is killed"
    for where, words in (("", []), (", logs of relays", RELAY)):
        name = f"who has spawned others{where}"
        if checks.wants(name):
            kills = [(after_output("round 3"), 0), (after_output("round 8"), 0)]
            code, lines, output = job(options, program, kills, *words)
            said = {line: lines.count(line) for line in lines}
            is_once = all(count == 1 for count in said.values()) and said.get("sum 19: 38 38") == 1
            is_right = is_once and output.count(": restarted") == 2 and away in output
            checks.check(name, code == 0 and is_right, f"exit code {code}, {len(lines)} lines", output)
        name = f"who was spawned{where}"
        if checks.wants(name):
            code, _, output = job(options, program, [(after_output("round 3"), 4)], *words)
            is_right = away in output and "rank 0 of spawned group 1" in output and ": restarted" not in output
            checks.check(name, code == 128 + signal.SIGKILL and is_right, f"exit code {code}", output)


def after_output(words: str, since_s: float = 0.0):
    """A condition: the output has contained these words for so many seconds."""
    seen = []

    def is_met(output: str) -> bool:
        if words in output and not seen:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] >= since_s

    return is_met


def is_given_up(output: str, restarts: int, why: str) -> bool:
    """Whether a rank was restarted `restarts` times and then given up for the reason `why`, with a
    line for each incarnation."""
    starts = re.findall(r"^landbridge:   incarnation \d+: after .* s, for .* s: ", output, re.M)
    return output.count(": restarted") == restarts and why in output and len(starts) == restarts + 1


def asked_for(options, checks, job, restarted: str, first_s: float) -> None:
    """A rank asks again and again whether the processes of other ranks exist: they always do."""
    asks = [common.python(options), str(common.PROGRAMS / "asks_for_ranks.py"), str(first_s + 5)]
    kills = [(first_s, 1), (0.7, 0), (0.6, 2), (0.8, 1)]
    # A rank that asks by files of /proc can be restarted itself.
    for name, program, more in (
        ("who is asked for by its process id", asks, []),
        ("who is asked for by files of its process, and who asks", [*asks, "files"], [(0.5, 3), (0.9, 2)]),
    ):
        if not checks.wants(name):
            continue
        code, lines, output = job(options, program, [*kills, *more])
        is_right = bool(re.search(r"^asked: often, missing: [^1-9]*$", "\n".join(lines), re.M))
        measured = f"exit code {code}, {'always there' if is_right else 'not always there'}"
        # A rank that does not call MPI has no images.
        is_right &= output.count(" SIGKILL: restarted") == len(kills) + len(more) and output.count(restarted) >= len(kills)
        checks.check(name, code == 0 and is_right, measured, output)


def progress_reports(options, checks, program, moment) -> None:
    """Messages of Landbridge's libraries and of `landbridge ps` about a restarted rank."""
    name = "beside the lines of our own libraries"
    if checks.wants(name):
        aloud = [*program, "--rounds", "900", "--aloud"]
        # noqa: E731
        own = lambda output: sorted(line for line in output.splitlines() if re.match(r"rank \d (turn|has|ends)", line))
        undisturbed = own(job(options, aloud, [])[2])
        kills = [(START_S + moment(), 2), (START_S + moment(), 2)]
        code, _, output = job(options, aloud, kills, "--set", "log=info")
        lives = len(re.findall(r"^landbridge\[\d+\]: Info: the replay is over", output, re.M))
        is_same = own(output) == undisturbed and len(undisturbed) > 2 * RANKS
        measured = f"exit code {code}, {'the same' if is_same else 'other'} lines, replays over {lives} times"
        checks.check(name, code == 0 and is_same and lives == len(kills), measured, output)
    name = "how far one is on its way back"
    if checks.wants(name):
        seen = []
        watched = threading.Event()
        watcher = threading.Thread(target=watch_ranks, args=(options, "percent", 0.1, seen, watched), daemon=True)
        watcher.start()
        code, _, output = job(options, [*program, *LONG_HISTORY], [(after_output(LONG_AGO), 2)], limit_s=LONG_LIMIT_S)
        watched.set()
        watcher.join()
        is_right = bool(seen) and seen == sorted(seen) and seen[0] < 100
        checks.check(name, code == 0 and is_right, f"exit code {code}, seen: {seen} %", output)


def on_a_terminal(options, checks, program, name, words) -> None:
    """The status line at the bottom of a terminal, and the columns of `landbridge ps`."""
    ours, theirs = pty.openpty()
    shown, seen = bytearray(), []
    readers = [threading.Thread(target=read_terminal, args=(ours, shown), daemon=True)]
    watched = threading.Event()
    readers.append(threading.Thread(target=watch_ranks, args=(options, "logged_bytes", 0.5, seen, watched), daemon=True))
    [reader.start() for reader in readers]
    code, _, output = job(options, [*program, *LONG_HISTORY], [(after_output(LONG_AGO), 2)], *words, terminal=theirs, limit_s=LONG_LIMIT_S)
    watched.set()
    os.close(theirs)
    [reader.join(10) for reader in readers]
    os.close(ours)
    lines = re.findall(r"landbridge: \d ranks? up[^\r\x1b]*", shown.decode(errors="replace"))
    wanted = {
        "all up": r"4 ranks up; logged \d",
        "progress": r"3 ranks up, 1 restarting \(rank 2: \d+ %",
        "rate": r"rank 2: \d+ %, \d+ %/s\)",
        "restarts": r"restarts: 1; logged [\d.]+ MB",
    }
    missing = [what for what, line in wanted.items() if not any(re.search(line, text) for text in lines)]
    is_kept = bool(seen) and max(seen) > 10 << 20
    measured = f"exit code {code}, {len(set(lines))} lines, missing: {missing}, at most {max(seen, default=0) >> 20} MiB of a rank"
    checks.check(name, code == 0 and not missing and is_kept, measured, "\n".join(lines[-10:]) + output)


def read_terminal(terminal: int, shown: bytearray) -> None:
    try:
        while some := os.read(terminal, 65536):
            shown.extend(some)
    except OSError:
        return  # no process has the other side of the terminal open


def watch_ranks(options, key: str, pause_s: float, seen: list[int], is_over: threading.Event) -> None:
    """Collects the values of `key` that `landbridge ps` reports for the ranks of this job."""
    while not is_over.wait(pause_s):
        listed = subprocess.run([str(options.bin / "landbridge"), "ps", "--json"], capture_output=True, text=True)
        jobs = json.loads(listed.stdout) if listed.returncode == 0 else []
        ours = [one for one in jobs if one["launcher"] in process.descendants()]
        seen += [rank[key] for one in ours for rank in one["ranks"] if key in rank]


def sender_logs_on_disk(checks, options, large, logs, full: str) -> None:
    """Logs of the senders exceed memory by some hundred megabytes. Unless they go on on disk, ranks
    cannot be restarted."""
    little = [*logs, "--set", "recover_memory=1MiB"]
    for what, clusters in (("mostly on disk", ()), ("mostly on disk, two clusters", TWO_CLUSTERS)):
        name = f"logs of the senders, {what}"
        if checks.wants(name):
            undisturbed = sorted(job(options, large, [])[1])
            with tempfile.TemporaryDirectory() as directory:
                words = [*little, *clusters, "--set", f"recover_dir={directory}"]
                outcome = job(options, large, [(3.0, 2), (0.4, 0), (0.3, 2)], *words)
                left = os.listdir(directory)
            check_same(checks, name, outcome, undisturbed, 3)
            is_full = full in outcome[2]
            measured = f"{'some' if is_full else 'none'} of them discarded, {len(left)} files are left"
            checks.check(f"{name}: its size", not is_full and not left, measured, outcome[2])
    name = "logs of the senders, for which the disk has no room"
    if checks.wants(name):
        with tempfile.TemporaryDirectory() as directory:
            words = [*little, "--set", f"recover_dir={directory}", "--set", "recover_disk=8MiB"]
            code, lines, output = job(options, large, [], *words)
        measured = f"exit code {code}, {len(lines)} lines, {'says' if full in output else 'does not say'} who cannot be restarted"
        checks.check(name, code == 0 and full in output, measured, output)


def log_on_disk(options, checks, program, moment) -> None:
    """The message logs of the relays exceed their memory bound: some hundred megabytes, of which 32
    fit."""
    large = [*program, "--rounds", "250", "--numbers", "50000"]
    little = [*RELAY, "--set", "recover_memory=1MiB"]
    name = "a record that is mostly on disk"
    if checks.wants(name):
        undisturbed = sorted(job(options, large, [])[1])
        with tempfile.TemporaryDirectory() as directory, tempfile.NamedTemporaryFile("r") as log:
            words = [*little, "--set", f"recover_dir={directory}", "--relay-log", log.name]
            kills = [(START_S + 2.0 + moment(), 2), (moment(), 0), (0.3, 2)]
            outcome = job(options, large, kills, *words)
            written = [int(number) for number in re.findall(r"disk_bytes=(\d+)", log.read())]
            left = os.listdir(directory)
        check_same(checks, name, outcome, undisturbed, len(kills))
        measured = f"{sum(written) >> 20} MiB were on disk, {len(left)} files are left"
        checks.check(f"{name}: its size", sum(written) > 50 << 20 and not left, measured, outcome[2])
    name = "a record for which there is no room"
    if checks.wants(name):
        with tempfile.TemporaryDirectory() as directory:
            words = [*little, "--set", f"recover_dir={directory}", "--set", "recover_disk=8MiB"]
            code, _, output = job(options, large, [], *words)
        said = ["have filled recover_disk", "cannot be restarted"]
        is_said = all(text in output for text in said)
        measured = f"exit code {code}, {'says' if is_said else 'does not say'} who cannot be restarted"
        checks.check(name, code == 0 and is_said, measured, output)
    name = "a record that is to lie where nothing can"
    if checks.wants(name):
        code, _, output = job(options, large, [], *RELAY, "--set", "recover_dir=/nonexistent/landbridge")
        is_said = "recover_dir: no file can be made in /nonexistent/landbridge" in output
        measured = f"exit code {code}, {'says' if is_said else 'does not say'} why"
        checks.check(name, code not in (0, "") and is_said, measured, output)
    name = "a record below a folder that others could exchange"
    if checks.wants(name):
        with tempfile.TemporaryDirectory() as scratch:
            above = Path(scratch, "open")
            above.mkdir()
            (above / "mine").mkdir(0o700)
            above.chmod(0o777)
            code, _, output = job(options, program, [], *RELAY, "--set", f"recover_dir={above}/mine")
            left = list((above / "mine").iterdir())
        is_said = re.search(rf"^landbridge: .*recover_dir: {re.escape(str(above))} may be written by everybody", output, re.M) is not None
        is_begun = "turn" in output or "rank " in output
        measured = f"exit code {code}, {'says' if is_said else 'does not say'} why, {len(left)} files left"
        checks.check(name, code == 1 and is_said and not left and not is_begun, measured, output)


def log_command(options, checks, program) -> None:
    """The output of `landbridge log` about a running job."""
    name = "a record that is looked at"
    if not checks.wants(name):
        return
    seen = {}
    watched = threading.Event()
    watcher = threading.Thread(target=watch_log, args=(options, seen, watched), daemon=True)
    watcher.start()
    with tempfile.TemporaryDirectory() as directory:
        words = [*RELAY, "--set", "recover_memory=1MiB", "--set", f"recover_dir={directory}"]
        code, _, output = job(options, [*program, "--rounds", "250", "--numbers", "50000"], [], *words)
    watched.set()
    watcher.join()
    processes = seen.get("all", {}).get("processes", [])
    whole = [one for one in processes if one["frames"] > 0 < one["delivered_frames"] and one["bytes"] > one["disk_bytes"] > 0]
    most = max((one["determinant_bytes"] / one["delivered_frames"] for one in whole), default=0)
    measured = f"exit code {code}, {len(whole)} ranks, at most {most:.1f} bytes of determinants a frame"
    checks.check(name, code == 0 and len(whole) == RANKS and 0 < most <= 8, measured, output)
    story = seen.get("story", {})
    numbers = [one["determinant"] for one in story.get("determinants", [])]
    text = seen.get("text", "")
    is_shown = numbers == list(range(3, 8)) and bool(story.get("frames")) and "determinant 3: poll " in text
    checks.check(f"{name}: one rank", is_shown, f"determinants {numbers}, {len(story.get('frames', []))} frames", text)


def standard_input(options, checks, moment) -> None:
    """Rank 0 reads typed input, before it is killed and after."""
    cases = [("who reads standard input", []), ("who asks for standard input", [])]
    for name, words in [*cases, ("two clusters, who reads standard input", TWO_CLUSTERS)]:
        if not checks.wants(name):
            continue
        asks = ["asks"] if "asks" in name else []
        undisturbed = sorted(job_with_input(options, [], *words, asks=asks)[1])
        kills = [(START_S + moment(), 0), (moment(), 2), (moment(), 0), (0.2, 0)]
        check_same(checks, name, job_with_input(options, kills, *words, asks=asks), undisturbed, len(kills))


def beside_silent_ranks(options, checks) -> None:
    """Ranks are killed before they have received what ranks of another cluster have sent, which call
    MPI again only when it has arrived."""
    for way, kills in (("", []), (", who are killed", [(lambda said: "rank 0: waits" in said, 0), (0.2, 1), (1.0, 0)])):
        name = f"who receive from ranks that do nothing meanwhile{way}"
        if not checks.wants(name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            silent = [common.python(options), str(common.PROGRAMS / "silent.py"), folder]
            code, lines, output = job(options, silent, kills, *TWO_CLUSTERS)
        wanted = ["rank 0: 300 messages", "rank 0: waits", "rank 1: 300 messages", "rank 1: waits"]
        is_right = sorted(lines) == wanted and output.count(": restarted") == len(kills)
        measured = f"exit code {code}, {len(lines)} lines, {output.count(': restarted')} restarts"
        checks.check(name, code == 0 and is_right, measured, output)


def job_with_input(options, kills, *words, job=None, asks=()):
    """Runs `job` with a rank 0 that reads lines from a process which writes one after the other. The
    lines that rank 0 has written into a file follow those of standard output."""
    typing = "import time\nfor n in range(1300):\n    print('line', n, 'x' * (n % 300), flush=True)\n    time.sleep(0.005 if n % 20 else 0.05)\n"
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen([sys.executable, "-c", typing], stdout=subprocess.PIPE) as typist:
        written = Path(folder) / "written"
        program = [common.python(options), str(common.PROGRAMS / "lines.py"), str(written), *asks]
        try:
            code, lines, output = (job or globals()["job"])(options, program, kills, *words, read=typist.stdout)
        finally:
            typist.kill()
        in_file = written.read_text().splitlines() if written.exists() else []
        return code, [*lines, *(f"line {at} of the file: {line}" for at, line in enumerate(in_file))], output


def watch_log(options, seen: dict, is_over: threading.Event) -> None:
    """Collects the last output of `landbridge log` about this job: about the whole job, and about
    one rank."""
    command = [str(options.bin / "landbridge"), "log"]
    while not is_over.wait(0.3):
        found = log_of_our_job([*command, "--json"])
        seen |= {"all": found["log_status"]} if found.get("log_status", {}).get("processes") else {}
        # Jobs of other users may run at the same time.
        show = [*command, "--job", found.get("job", "none"), "show", "2", "--from", "3", "--count", "5"]
        story = log_of_our_job([*show, "--json"]).get("log_status", {})
        seen |= {"story": story} if story.get("determinants") else {}
        text = subprocess.run(show, capture_output=True, text=True).stdout
        seen |= {"text": text} if "determinant 3" in text else {}


def log_of_our_job(command) -> dict:
    """The entry of this job in the output of `command`; empty if the job has ended."""
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    jobs = json.loads(printed) if printed else []
    return next((one for one in jobs if one["launcher"] in process.descendants()), {})


def unrecorded(options, checks, program) -> None:
    """Processes that are not the one started by the launcher: they work, and a warning names what
    is not recorded. What they send and print does not depend on it, so they come back if they are
    killed; if they change a file, the job ends with that reason."""
    says = "clocks and random numbers are not recorded: this is not the process that the launcher has started"
    child = 'import os, sys\npid = os.fork()\nif pid:\n    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n'
    child += 'os.execv(sys.argv[1], sys.argv[1:]) if len(sys.argv) > 2 else None\n'
    child += 'from mpi4py import MPI\nimport time\ncomm = MPI.COMM_WORLD\n'
    child += 'for turn in range(100):\n    comm.barrier()\n    time.sleep(0.02)\nprint("rank", comm.allreduce(1))\n'
    ring = [*program, "--rounds", "600"]
    cases = {
        "a script that starts the program beside itself": ["sh", "-c", '"$0" "$@"; exit $?', *ring],
        "a child that becomes the program": [program[0], "-c", child, *ring],
        "a child that is the program": [program[0], "-c", child],
    }
    for name, command in cases.items():
        undisturbed = []
        for case, kills in ((name, []), (f"{name}, killed", [(START_S + 0.5, 1)])):
            # The second case compares its output with that of the first.
            if not checks.wants(case) and not (checks.wants(f"{name}, killed") and not kills):
                continue
            code, lines, output = job(options, command, kills)
            said, starts = output.count(says), output.count(": restarted")
            undisturbed = undisturbed or sorted(lines)
            is_same = sorted(lines) == undisturbed and len(lines) >= RANKS
            measured = f"exit code {code}, {starts} restarts, said {said} times, {'the same' if is_same else 'other'} output"
            checks.check(case, code == 0 and is_same and said == RANKS + len(kills) == RANKS + starts, measured, output)
    name = "a child that writes a file, killed"
    if checks.wants(name):
        with tempfile.TemporaryDirectory() as folder:
            writes = child + f'open("{folder}/of." + str(comm.rank), "a").write("once\\n")\ncomm.barrier()\ntime.sleep(3)\ncomm.barrier()\n'
            kills = [(lambda output: output.count("cannot be restarted") == RANKS, 1)]
            code, _, output = job(options, [program[0], "-c", writes], kills)
            found = [file.read_text() for file in Path(folder).iterdir()]
        is_named = "rank 1 was killed by SIGKILL and cannot be restarted: " in output
        measured = f"exit code {code}, {'says' if is_named else 'does not say'} why, {len(found)} files"
        checks.check(name, code == 128 + signal.SIGKILL and is_named and found == ["once\n"] * RANKS, measured, output)


def recorded_nondeterminism(options, checks, moment) -> None:
    """Programs whose behaviour depends on clocks and random numbers."""
    program = [common.python(options), str(common.PROGRAMS / "chance.py")]
    name = "who draws from clocks and random numbers"
    if checks.wants(name):
        kills = [(START_S + moment(), 1), (moment(), 2), (0.3, 2), (moment(), 0)]
        # More rounds than all kills take.
        code, lines, output = job(options, [*program, "--rounds", "200"], kills)
        printed = {word: sorted(line.split(" ", 1)[1] for line in lines if line.startswith(word)) for word in DRAW_WORDS}
        is_one = printed["now "] == printed["drew "] == printed["heard "] and len(set(printed["now "])) == len(printed["now "]) > 150
        measured = f"exit code {code}, {'one' if is_one else 'no one'} history of {len(printed['now '])} draws"
        checks.check(name, code == 0 and is_one and output.count(": restarted") == len(kills), measured, output)
    name = "who draws and is not recorded"
    if checks.wants(name):
        code, _, output = job(options, program, [(START_S + 1.0, 1)], "--set", "recover_clocks=off")
        # The replayed rank sends other messages, or, if the agent notices first, prints other
        # lines.
        is_said = "this process cannot go on" in output or "does not repeat in incarnation" in output
        measured = f"exit code {code}, {'says' if is_said else 'does not say'} that it cannot go on"
        checks.check(name, code == 1 and is_said, measured, output)
    name = "who looks at the clock another number of times"
    if checks.wants(name):
        code, _, output = job(options, [*program, "--drift"], [(START_S + 1.0, 1)])
        is_said = "of clocks and random numbers is" in output and output.count(": restarted") == 1
        measured = f"exit code {code}, {'says' if is_said else 'does not say'} that it cannot go on, once"
        checks.check(name, code == 1 and is_said, measured, output)
    name = "who draws more than can be recorded"
    if checks.wants(name):
        code, _, output = job(options, [*program, "--greedy", "--rounds", "300"], [(START_S + 4.0, 1)])
        said = ["its nondeterminism record is full", "and cannot be restarted: its nondeterminism record"]
        is_said = all(text in output for text in said)
        measured = f"exit code {code}, {'says' if is_said else 'does not say'} why"
        checks.check(name, code == 128 + signal.SIGKILL and is_said, measured, output)


def file_output(options, checks, moment) -> None:
    """Files have the same content as without kills, if a replay writes the same bytes to the same
    positions."""
    program = [common.python(options), str(common.PROGRAMS / "files.py")]
    for name, how in (("who writes a file together with others", "together"), ("who writes a new file each time", "new")):
        if not checks.wants(name):
            continue
        printed = []
        # Rank 0 opens the shared file, and sends a name that contains its process id.
        for kills in ([], [(START_S + moment(), 1), (moment(), 0), (moment(), 3)]):
            with tempfile.TemporaryDirectory() as folder:
                code, lines, output = job(options, [*program, how, folder], kills)
                found = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
            printed.append((code, sorted(lines), found))
        starts, is_same = output.count(": restarted"), printed[0] == printed[1]
        measured = f"exit code {code}, {'the same' if is_same else 'other'} files and output, {starts} restarts"
        checks.check(name, code == 0 and is_same and bool(found) and common.fits(starts, len(kills)), measured, output)


def benchmark(options, checks, moment) -> None:
    """IMB, whose repetitions depend on MPI_Wtime; on MPICH, which has the same binary interface."""
    name = "IMB-MPI1"
    found = options.venvs / "impi" / "bin" / "IMB-MPI1"
    if not checks.wants(name) or not found.exists():
        return
    bounds = ["-npmin", str(RANKS), "-iter", "4000", "-time", "1", "-msglog", "0:6"]
    kills = [(START_S + moment(), 1), (moment(), 0), (moment(), 3)]
    library = {"LD_LIBRARY_PATH": str(options.venvs / "mpich" / "lib"), **common.FILLED}
    code, lines, output = job(options, [str(found), "Sendrecv", "Allreduce", *bounds], kills, environment=library)
    tables = [line for line in lines if "t_max" in line]
    is_whole = len(tables) == 2 and any("Finalize" in line for line in lines)
    starts = output.count(": restarted")
    measured = f"exit code {code}, {len(tables)} tables, {starts} restarts"
    checks.check(name, code == 0 and is_whole and common.fits(starts, len(kills)), measured, output)


def check_divergence(checks, name: str, code, output: str, rank: int) -> None:
    """Checks that the job has ended because the next incarnation of a rank sends another frame, and
    that the messages name the frame, the poll, both versions and the first byte that differs."""
    version = r"\w+ to rank \d, \d+ bytes(?:, tag 0x[0-9a-f]+)?, digest [0-9a-f]+"
    both = re.search(rf"incarnation 1 of rank {rank} sends as its frame (\d+): {version}; it was: {version}", output)
    place = re.search(r"this process cannot go on: its frame (\d+), sent at poll \d+, is not what", output)
    # Over TCP the message seldom fits before the frames of the replay: then the message contains
    # the progress of the replay.
    far = re.search(r"this process has lost its relay: its relay has closed the connection, at poll \d+, after \d+ frames", output)
    is_placed = place[1] == both[1] if place and both else bool(far)
    difference = r"; their content differs from byte \d+ on: \[[0-9a-f, ]+\], and was \[[0-9a-f, ]+\]"
    is_byte_named = bool(both and re.match(difference, output[both.end() :]))
    is_said = bool(both) and is_placed and is_byte_named and output.count(": restarted") == (1 if place else 2)
    measured = f"exit code {code}, {'names' if is_said else 'does not name'} frame, poll, both versions and their first difference, once"
    checks.check(name, code == 1 and is_said, measured, output)


def check_same(checks, name: str, outcome, undisturbed: list[str], kills: int) -> None:
    """Checks that the job has ended well with the output of an undisturbed job, and that each kill
    has hit a rank."""
    code, lines, output = outcome
    is_same = sorted(lines) == undisturbed and len(undisturbed) > RANKS
    starts = output.count(": restarted")
    measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {starts} restarts"
    checks.check(name, code == 0 and is_same and common.fits(starts, kills), measured, output)


def job(
    options, program, kills, *words, environment=None, read=subprocess.DEVNULL, terminal=None, limit_s=LIMIT_S, keep=None, recover=True, within=(), ranks=RANKS
):
    """Runs a job and kills ranks: exit code, lines of standard output, and all output.

    Each kill is a pair of a moment and a rank. The moment is a number of seconds after the kill
    before, or a function of the output that becomes true. Instead of a rank there may be a function,
    which is called until it returns true or the job has ended. `read` is the standard input, `terminal`
    the standard error; `recover` turns the recovery of killed ranks on; `within` is the beginning of
    the command."""
    recover = ["--recover"] if recover else []
    command = [*within, *common.landbridge_run(options, ranks, *recover, "--timeout", f"{limit_s:.0f}", *words), *program]
    # Files instead of pipes: no code reads a pipe while it waits for a kill, and a job waits for
    # its reader.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        running = subprocess.Popen(
            command,
            stdin=read,
            stdout=out,
            stderr=err if terminal is None else terminal,
            start_new_session=True,
            env=os.environ | (environment or {}),
        )
        deadline = time.monotonic() + limit_s
        try:
            for moment, rank in kills:
                if callable(moment):
                    # pread leaves the position at which the job writes.
                    while running.poll() is None and time.monotonic() < deadline:
                        if moment("".join(os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, err))):
                            break
                        time.sleep(0.02)
                else:
                    time.sleep(moment)
                # On a busy machine the rank may not have begun yet.
                strike = rank if callable(rank) else functools.partial(kill_rank, rank)
                while not strike() and running.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
            code = running.wait(max(deadline - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            running.wait()
            code = f"none within {limit_s:.0f} s"
        finally:
            process.end_descendants(keep)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read())
        return code, said[0].splitlines(), "".join(said)


def kill_rank(rank: int) -> bool:
    """Kills the processes of a rank: False if there are none. A program that the rank has started
    may end meanwhile."""
    killed = 0
    for pid in pids_of(rank):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed > 0


def pids_of(rank: int) -> list[int]:
    """The processes of a rank among the descendants of this process."""
    wanted = f"LANDBRIDGE_INDEX={rank}".encode()
    found = []
    for pid in process.descendants():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(pid)
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
