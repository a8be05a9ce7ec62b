#!/usr/bin/env python3
"""Killed ranks are restored from checkpoints (`landbridge run --recover --checkpoint`).

The job's output must be that of a job without kills; the amount of replayed output shows where a
rank was restored. Needs CRIU (scripts/criu.py), and a kernel that supports it.
"""

import contextlib
import functools
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import common
import network
import nodes
import recovery
from support import paths, process

RANKS = recovery.RANKS
EVERY_S = 1.0
# Seconds after which each rank has a checkpoint, and soon another one.
FIRST_S = recovery.START_S + 2 * EVERY_S
KEPT = 2
# Its images are taken after the spawn.
BEHIND = "a rank had spawned before"
# The launcher is not the parent of this topology's agent, which notices the launcher's end only by
# the end of its input.
ELSEWHERE = """
[[cluster]]
name = "one"
[cluster.relay]
host = "n1"
listen = "127.0.0.1:0"
[[cluster.host]]
name = "n1"
slots = 4
shell = ["sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & wait', "sh"]
"""


def begin(description: str):
    """Options and checks of a driver that needs CRIU; no checks, and a printed reason, if CRIU does
    not work here."""

    def add(parser):
        common.add_cases(parser)
        parser.add_argument("--criu", type=Path, default=paths.CRIU, metavar="FILE")

    options = common.arguments(description, add)
    common.quiet_environment()
    process.adopt_orphans()
    if not options.list and (why_not := no_criu(options.criu)):
        print(f"skipped: {why_not}")
        return options, None
    return options, common.Checks(options)


def main() -> int:
    options, checks = begin(__doc__)
    if checks is None:
        return common.SKIPPED
    chance = random.Random(options.seed)
    moment = lambda: FIRST_S + chance.uniform(0.0, 1.0)  # noqa: E731
    program = [common.python(options), str(common.PROGRAMS / "ring.py")]
    ring = [*program, "--rounds", "1200"]
    cases = {
        "nobody is killed": ([], []),
        "rank 0": ([(moment(), 0)], []),
        "two at once": ([(moment(), 1), (0.0, 3)], []),
        "one after another, one twice": ([(moment(), 1), (0.6, 2), (0.6, 1)], []),
        "all": ([(moment(), 0), (0.0, 1), (0.0, 2), (0.0, 3)], []),
        "two clusters, one in each": ([(moment(), 1), (0.0, 2)], recovery.TWO_CLUSTERS),
    }
    undisturbed = []
    for name, (kills, words) in cases.items():
        if not checks.wants(name):
            continue
        undisturbed = undisturbed or sorted(recovery.job(options, ring, [])[1])
        outcome = job(options, ring, kills, *words)
        check_same(checks, name, outcome, undisturbed, len(kills))
    name = "who sends addresses of memory that it has got since its image"
    if checks.wants(name):
        # A rank that gets other addresses than before sends other frames, and says so.
        kills = [(moment(), 1), (0.0, 2), (1.5, 1)]
        code, lines, output = job(options, [*ring, "--addresses"], kills)
        measured = f"exit code {code}, {len(lines)} lines, {restores(output)} from images"
        checks.check(name, code == 0 and len(lines) > RANKS and restores(output) == len(kills), measured, output)
    name = "who takes whatever comes"
    if checks.wants(name):
        kills = [(moment(), 0), (1.0, 2), (0.8, 0)]
        code, lines, output = job(options, [*program, "--any", "--rounds", "250"], kills)
        heard = sorted(re.findall(r"^heard (\d+: rank \d message \d+)$", "\n".join(lines), re.M))
        printed = sorted(re.findall(r"^place (\d+: rank \d message \d+)$", "\n".join(lines), re.M))
        is_one = heard == printed and len(set(heard)) == 250 * (RANKS - 1) == len(heard)
        measured = f"exit code {code}, {'one' if is_one else 'no one'} history, {restores(output)} from images"
        checks.check(name, code == 0 and is_one and restores(output) == len(kills), measured, output)
    ranks_together(checks, options, [*program, "--rounds"])
    little_memory(checks, options, [*program, "--rounds"], moment)
    logs_of_relays(checks, options, [*program, "--rounds"], moment)
    recorded_nondeterminism(checks, options, program[0])
    unrecoverable_ranks(checks, options, program)
    renamed_folders(checks, options, program[0])
    programs_beside(checks, options, program[0])
    name = "who reads standard input"
    if checks.wants(name):
        undisturbed = sorted(recovery.job_with_input(options, [])[1])
        kills = [(moment(), 0), (0.8, 2), (0.8, 0)]
        outcome = recovery.job_with_input(options, kills, job=job)
        check_same(checks, name, outcome, undisturbed, len(kills))
    name = "whose threads wait in the kernel"
    if checks.wants(name):
        waiting = [program[0], str(common.PROGRAMS / "waiting_threads.py")]
        undisturbed = sorted(recovery.job(options, waiting, [])[1])
        kills = [(recovery.after_output("round 70\n"), 1), (recovery.after_output("round 110\n"), 2), (0.9, 1)]
        outcome = job(options, waiting, kills)
        check_same(checks, name, outcome, undisturbed, len(kills))
    recovery.asked_for(options, checks, job, ": restarted from checkpoint", FIRST_S + 1)
    checkpoint_on_request(checks, options, ring)
    little_space(checks, options, ring)
    open_folder(checks, options, ring)
    left_behind(checks, options, ring)
    launcher_killed(checks, options, ring)
    object_store(checks, options, ring)
    silent_store(checks, options, ring)
    remote_relay(checks, options, ring)
    logs_between_nodes(checks, options, [*program, "--rounds"])
    spare_node(checks, options, ring)
    other_programs(checks, options)
    lost_by_chance(checks, options)
    lost_apart_from_mpi(checks, options)
    lost_in_turn(checks, options)
    killed_during_dump(checks, options, ring)
    criu_killed(checks, options, ring)
    corrupt_checkpoints(checks, options, ring)
    without_criu(checks, options, ring)
    return checks.end()


def ranks_together(checks, options, ring) -> None:
    """All ranks of a node begin again from one round of images (`recover_unit=node`)."""
    together = ["--set", "recover_unit=node"]
    # On a busy machine a round of images takes seconds.
    third = lambda rank: recovery.after_output(f"checkpoint 3 of rank {rank}: ")  # noqa: E731
    cases = {
        "ranks of a node together": ([(third(1), 1), (0.8, 2), (0.8, 2)], []),
        "ranks of a node together, two clusters": ([(third(1), 1), (third(2), 2)], recovery.TWO_CLUSTERS),
    }
    for name, (kills, words) in cases.items():
        if checks.wants(name):
            undisturbed = sorted(recovery.job(options, [*ring, "1500"], [])[1])
            outcome = job(options, [*ring, "1500"], kills, *together, *words)
            check_same(checks, name, outcome, undisturbed, len(kills))


def little_memory(checks, options, ring, moment) -> None:
    """What images cover is released, so that the logs never fill. Each rank sends 40 KB in a round,
    and a share of 32 MiB holds what is sent between three images."""
    little = ["--set", "recover_memory=128MiB"]
    cases = {
        "in little memory": ("1600", [(moment(), 1), (3.0, 2)], checkpoint_options(options)),
        # No image is due in an hour: all are taken because half of a share is full. Logs of relays ask
        # by the setting `checkpoint_log` alone.
        "logs that ask for images": (
            "1000",
            [(recovery.after_output("checkpoint 2 of rank 1: "), 1), (recovery.after_output("checkpoint 3 of rank 2: "), 2)],
            [*checkpoint_options(options, "1h"), *nodes.SENDER],
        ),
        # More than memory holds between two images: an image begins within a log that is on disk.
        "logs on disk": (
            "1800",
            [(recovery.after_output("checkpoint 2 of rank 1: "), 1), (recovery.after_output("checkpoint 3 of rank 2: "), 2)],
            [*checkpoint_options(options, "3s"), "--set", "recover_memory=8MiB", "--set", "recover_dir=/var/tmp"],
        ),
    }
    for name, (rounds, kills, images) in cases.items():
        if checks.wants(name):
            program = [*ring, rounds, "--numbers", "5000"]
            undisturbed = sorted(recovery.job(options, program, [])[1])
            code, lines, output = recovery.job(options, program, kills, *little, *images)
            lines = [line for line in lines if not line.startswith("landbridge")]
            check_same(checks, name, (code, lines, output), undisturbed, len(kills))


def logs_of_relays(checks, options, ring, moment) -> None:
    """Relays log messages (`recover_log=relay`), and release what images cover."""
    cases = {
        "logs of relays, one after another, one twice": ([(moment(), 1), (0.6, 2), (0.6, 1)], []),
        "logs of relays, all": ([(moment(), 0), (0.0, 1), (0.0, 2), (0.0, 3)], []),
        "logs of relays, two clusters, one in each": ([(moment(), 1), (0.0, 2)], recovery.TWO_CLUSTERS),
    }
    for name, (kills, words) in cases.items():
        if checks.wants(name):
            undisturbed = sorted(recovery.job(options, [*ring, "1200"], [])[1])
            outcome = job(options, [*ring, "1200"], kills, *recovery.RELAY, *words)
            check_same(checks, name, outcome, undisturbed, len(kills))


def recorded_nondeterminism(checks, options, python) -> None:
    """Programs whose behaviour depends on clocks and random numbers, also with unrecorded
    children."""
    for name, words in (("who draws from clocks and random numbers", []), ("who starts programs all the time", ["--children"])):
        if not checks.wants(name):
            continue
        chancy = [python, str(common.PROGRAMS / "chance.py"), "--rounds", "300", *words]
        kills = [(FIRST_S + 0.5, 1), (0.7, 2), (0.7, 0)]
        code, lines, output = job(options, chancy, kills)
        words = recovery.DRAW_WORDS
        printed = {word: sorted(line.split(" ", 1)[1] for line in lines if line.startswith(word)) for word in words}
        is_one = printed["now "] == printed["drew "] == printed["heard "] and len(set(printed["now "])) == len(printed["now "]) > 150
        measured = f"exit code {code}, {'one' if is_one else 'no one'} history, {restores(output)} from images"
        checks.check(name, code == 0 and is_one and restores(output) == len(kills), measured, output)


def renamed_folders(checks, options, python) -> None:
    """An image is restored although its working directory has another name by now, and another
    directory has its name."""
    name = "whose working directory is renamed after the image"
    if not checks.wants(name):
        return
    program = [python, str(common.PROGRAMS / "moves_folder.py"), "--rounds", "400"]
    outputs = []
    for kills in ([], [(FIRST_S + 0.9, 1), (0.9, 2), (0.9, 1)]):
        with tempfile.TemporaryDirectory() as folder:
            code, lines, output = (job if kills else recovery.job)(options, [*program, folder], kills)
            outputs.append(sorted(line for line in lines if not line.startswith("landbridge")))
    is_same = outputs[0] == outputs[1] and sum("is here, 400 turns" in line for line in outputs[0]) == RANKS
    measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {restores(output)} from images"
    checks.check(name, code == 0 and is_same and restores(output) == len(kills), measured, output)


def programs_beside(checks, options, python) -> None:
    """While a program that a rank has started runs, or while the rank has something open that no
    image restores, the rank has no images, and the program is left alone. Of a rank that must not
    be restarted no images are taken."""
    program = [python, str(common.PROGRAMS / "beside.py")]
    name, cause = "who has a semaphore open", "while it has an eventfd with EFD_SEMAPHORE open"
    if checks.wants(name):
        counting = [python, str(common.PROGRAMS / "semaphore.py")]
        undisturbed = sorted(recovery.job(options, counting, [])[1])
        kills = [(recovery.after_output("round 30\n"), 1), (recovery.after_output("round 80\n"), 2)]
        code, lines, output = job(options, counting, kills)
        said, is_same = output.count(f"has no checkpoint {cause}"), sorted(lines) == undisturbed
        starts, from_images = output.count(" SIGKILL: restarted"), restores(output)
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, said {said} times"
        measured += f", {starts} restarts, {from_images} from images"
        is_right = code == 0 and is_same and said == RANKS and (starts, from_images) == (2, 1)
        checks.check(name, is_right, measured, output)
    name = "who waits for a periodic timer"
    if checks.wants(name):
        timer = [python, str(common.PROGRAMS / "timer.py")]
        undisturbed = sorted(recovery.job(options, timer, [])[1])
        kills = [(recovery.after_output("round 15\n"), 1), (recovery.after_output("round 25\n"), 2)]
        code, lines, output = job(options, timer, kills)
        is_same, starts = sorted(lines) == undisturbed, output.count(" SIGKILL: restarted")
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {starts} restarts, {restores(output)} from images"
        checks.check(name, code == 0 and is_same and starts == 2 and restores(output) > 0, measured, output)
    name = "beside whom a program runs"
    if checks.wants(name):
        undisturbed = sorted(recovery.job(options, program, [])[1])
        kills = [(recovery.after_output("round 30\n"), 1), (recovery.after_output("round 80\n"), 2)]
        code, lines, output = job(options, program, kills)
        is_same = sorted(lines) == undisturbed and sum("ended with 0" in line for line in lines) == RANKS
        said = output.count("has no checkpoint while a program that it has started runs")
        failures = output.count("has no checkpoint: ")
        starts, from_images = output.count(" SIGKILL: restarted"), restores(output)
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, said {said} times"
        measured += f", {failures} failed images, {starts} restarts, {from_images} from images"
        is_right = code == 0 and is_same and said == RANKS and not failures and (starts, from_images) == (2, 1)
        checks.check(name, is_right, measured, output)
    name = "beside whom a program writes a file"
    if checks.wants(name):
        with tempfile.TemporaryDirectory() as folder:
            code, lines, output = job(options, [*program, folder], [])
            files = [path.read_text().count("\n") for path in Path(folder).iterdir()]
        ended = sum("ended with 0" in line for line in lines)
        taken = len(re.findall(r"^landbridge: checkpoint \d+ of rank", output, re.M))
        failures = output.count("has no checkpoint: ")
        is_whole = ended == len(files) == RANKS and len(set(files)) == 1
        is_right = code == 0 and is_whole and taken == failures == 0
        measured = f"exit code {code}, {ended} programs ended well, {taken} images"
        measured += f", {failures} failed, files of {files} lines"
        checks.check(name, is_right, measured, output)


def unrecoverable_ranks(checks, options, program) -> None:
    """Ranks with too much data to log at first become recoverable with their next checkpoints."""
    name = "whose record was too much to be kept"
    if checks.wants(name):
        ring = [*program, "--rounds", "900", "--numbers", "20", "--heavy", "50000"]
        undisturbed = sorted(recovery.job(options, ring, [])[1])
        kills = [(lambda said, rank=rank: is_recoverable_again(said, rank), rank) for rank in (1, 2)]
        outcome = job(options, ring, kills, *recovery.RELAY, "--set", "recover_memory=4MiB")
        lost, found = outcome[2].count("its bound: it cannot be restarted"), outcome[2].count("checkpoint on: it can be restarted")
        check_same(checks, name, outcome, undisturbed, len(kills))
        measured = f"{lost} times too much, {found} times begun again"
        checks.check(f"{name}: it is said", lost > 0 < found, measured, outcome[2])


def checkpoint_on_request(checks, options, ring) -> None:
    """Checkpoints are taken on request, by command and by signal, and when the message log has
    grown."""
    name = "images that somebody asks for"
    if checks.wants(name):
        more = ["--set", f"criu={options.criu}", "--checkpoint", "24h"]
        said = {"command": [], "signal": []}

        def ask(how, ask_for_it) -> None:
            def ready(text) -> bool:
                if "rank 0 turn 100" in text and not said[how]:
                    said[how].append(ask_for_it())
                return bool(said[how]) and all(f"of rank {rank} is there" in text for rank in range(RANKS))

            return ready

        def command():
            words = [options.bin / "landbridge", "checkpoint"]
            return subprocess.run(words, capture_output=True, text=True).stdout

        def by_signal():
            for pid in launchers():
                os.kill(pid, signal.SIGUSR1)
            return True

        undisturbed = sorted(recovery.job(options, ring, [])[1])
        for how, asking in (("command", command), ("signal", by_signal)):
            kills = [(ask(how, asking), 1), (0.3, 2)]
            code, lines, output = recovery.job(options, ring, kills, *more)
            is_same, starts = sorted(lines) == undisturbed, restores(output)
            taken = len(re.findall(r"checkpoint \d+ of rank \d is there: ", output))
            measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {taken} images, {starts} restarts from one"
            checks.check(f"{name}: {how}", code == 0 and is_same and (starts, taken) == (2, RANKS), measured, output)
        heavy = [*ring, "--heavy", "20000"]
        undisturbed = sorted(recovery.job(options, heavy, [])[1])
        log = [*recovery.RELAY, "--set", "checkpoint_log=2MiB", "--verbose"]
        code, lines, output = recovery.job(options, heavy, [], *more, *log)
        taken = len(re.findall(r"^landbridge: checkpoint \d+ of rank", output, re.M))
        is_same = sorted(line for line in lines if not line.startswith("landbridge")) == undisturbed
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {taken} images"
        checks.check("images of whom much was given", code == 0 and is_same and taken >= RANKS, measured, output)


def launchers() -> list[int]:
    """The children of this process that are launchers."""
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-x", "landbridge"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def little_space(checks, options, ring) -> None:
    """Without space for a checkpoint none is taken, each rank reports this once, and the job
    continues."""
    name = "no room for images"
    if checks.wants(name):
        code, _, output = job(options, ring, [], "--set", "checkpoint_space=1MiB")
        said = output.count("(checkpoint_space)")
        checks.check(name, code == 0 and said == RANKS, f"exit code {code}, said {said} times", output)


def open_folder(checks, options, ring) -> None:
    """A checkpoint directory in a world-writable directory is refused in one line, no file is
    written, and the job continues."""
    name = "a folder that others could exchange"
    if not checks.wants(name):
        return
    with tempfile.TemporaryDirectory() as scratch:
        above = Path(scratch, "open")
        above.mkdir()
        above.chmod(0o777)
        code, _, output = job(options, ring, [], "--set", f"checkpoint_dir={above}/mine")
        said = output.count(f"checkpoint_dir: {above} may be written by everybody")
        left = len(list(above.iterdir()))
    checks.check(name, code == 0 and said == 1 and not left, f"exit code {code}, said {said} times, {left} left", output)


def left_behind(checks, options, ring) -> None:
    """The checkpoints of a job whose agent was killed are deleted when the next job begins."""
    name = "images that a killed agent has left"
    if not checks.wants(name):
        return
    with tempfile.TemporaryDirectory() as folder:
        def kill_agent(text) -> bool:
            if images := list(Path(folder).glob("*/rank-0/[0-9]*")):
                for pid in process.descendants():
                    # The process may have ended meanwhile.
                    with contextlib.suppress(OSError):
                        if b"\0agent\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                            os.kill(pid, signal.SIGKILL)
            return bool(images)

        where = ["--set", f"checkpoint_dir={folder}"]
        code, _, output = job(options, ring, [(kill_agent, 9)], *where)
        left = len(list(Path(folder).glob("*/rank-*/[0-9]*")))
        again, _, _ = job(options, [*ring, "--rounds", "100"], [], *where)
        found = list(Path(folder).rglob("*"))
        measured = f"exit codes {code} and {again}, {left} images left, {len(found)} things after the next job"
        checks.check(name, code != 0 and again == 0 and left > 0 and not found, measured, output)


def launcher_killed(checks, options, ring) -> None:
    """The checkpoints of a job whose launcher was killed are deleted by its agents, which run on
    other hosts and get no signal."""
    name = "images of a job whose launcher was killed"
    if not checks.wants(name):
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder, topology, left = Path(scratch, "images"), Path(scratch, "grid.toml"), []
        topology.write_text(ELSEWHERE)

        def kill_launcher(text) -> bool:
            images = list(folder.glob("*/rank-0/[0-9]*"))
            if images:
                [os.kill(pid, signal.SIGKILL) for pid in launchers()]
                deadline = time.monotonic() + 30
                while (found := sorted(path.name for path in folder.glob("*"))) and time.monotonic() < deadline:
                    time.sleep(0.1)
                left.append(found)
            return bool(images)

        words = ["--topology", str(topology), "--set", f"checkpoint_dir={folder}"]
        code, _, output = job(options, ring, [(kill_launcher, 9)], *words)
        measured = f"exit code {code}, left: {left}"
        checks.check(name, code == -signal.SIGKILL and left == [[]], measured, output)


def object_store(checks, options, ring) -> None:
    """Checkpoints are copied to an object store, and fetched from there if their node has lost
    them."""
    name = "an object store"
    if not checks.wants(name):
        return
    if not paths.MOTO.exists():
        print(f"skipped: {name}: {paths.MOTO} is not there (make criu)")
        return
    undisturbed = sorted(recovery.job(options, ring, [])[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([paths.MOTO, "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    keys = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "us", "AWS_SECRET_ACCESS_KEY": "hush"}
    try:
        make_bucket(f"{url}/images")

        def lose(text) -> bool:
            sent = [key for key in objects(f"{url}/images") if "/rank-2/" in key and "/manifest." in key]
            pids = recovery.pids_of(2)
            if len(sent) < KEPT or not pids:
                return False
            os.kill(pids[0], signal.SIGSTOP)
            for image in Path(f"/tmp/landbridge-{os.getuid()}/checkpoints").glob(f"{sent[0].split('/')[1]}/rank-2/[0-9]*"):
                shutil.rmtree(image)
            return True

        where = ["--set", "checkpoint_dir=s3://images/of"]
        outcome = job(options, ring, [(lose, 2)], *where, environment=keys, keep=[server.pid])
        check_same(checks, name, outcome, undisturbed, 1)
        left = objects(f"{url}/images")
        checks.check(f"{name}: nothing is left", not left, f"{len(left)} objects", outcome[2])
    finally:
        server.terminate()
        server.wait()
    code, _, output = job(options, ring, [], *where, environment=keys)
    said = output.count("is on its node alone")
    checks.check(f"{name} that is gone", code == 0 and said > 0, f"exit code {code}, said {said} times", output)


def silent_store(checks, options, ring) -> None:
    """While a checkpoint is fetched from a store that does not answer, other ranks are restarted,
    and the job can be ended."""
    name = "a store that does not answer"
    if not checks.wants(name):
        return
    began = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        keys = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "us", "AWS_SECRET_ACCESS_KEY": "hush"}

        def lose(text) -> bool:
            found = [checkpoints_of(rank) for rank in (1, 2)]
            if all(found):
                os.kill(recovery.pids_of(2)[0], signal.SIGSTOP)
                [shutil.rmtree(image) for image in checkpoints_of(2)]
                began.append(time.monotonic())
            return all(found)

        def interrupt(text) -> bool:
            is_back = "rank 1 was killed by SIGKILL: restarted from checkpoint" in text
            if is_back:
                began.append(time.monotonic())
                [os.kill(pid, signal.SIGINT) for pid in launchers()]
            return is_back

        where = ["--set", "checkpoint_dir=s3://images/of"]
        code, _, output = job(options, ring, [(lose, 2), (0.5, 1), (interrupt, 9)], *where, environment=keys)
    took = began[1] - began[0] if len(began) > 1 else float("inf")
    ended = time.monotonic() - began[-1] if began else float("inf")
    measured = f"exit code {code}, another rank is back after {took:.1f} s, ended {ended:.1f} s later"
    checks.check(name, code == 128 + signal.SIGINT and took < 20 and ended < 20, measured, output)


def checkpoints_of(rank: int) -> list[Path]:
    """Complete checkpoints of a rank of this job, in the default directory."""
    for pid in recovery.pids_of(rank):
        try:
            job = re.search(rb"LANDBRIDGE_JOB=(\w+)", Path(f"/proc/{pid}/environ").read_bytes())
        except OSError:
            continue
        if job:
            folder = Path(f"/tmp/landbridge-{os.getuid()}/checkpoints/{job[1].decode()}")
            return sorted(folder.glob(f"rank-{rank}*/[0-9]*"), key=lambda path: int(path.name))
    return []


def remote_relay(checks, options, ring) -> None:
    """Checkpoints of ranks on other nodes than their relay: the ranks close the connection to the
    relay, and make another one."""
    cases = {
        "one rank": [(2.5, 1)],
        "two on one node, one of them twice": [(2.5, 2), (2.5, 3), (3.5, 2)],
        "a cable that is out for 2 s": [(1.8, "north-2 lan0 down"), (3.8, "north-2 lan0 up"), (5.5, 3)],
    }
    names = {f"relays on other nodes, {name}": events for name, events in cases.items()}
    names = {name: events for name, events in names.items() if checks.wants(name)}
    if not names:
        return
    if why_not := network.no_lab(options):
        for name in names:
            print(f"skipped: {name}: {why_not}")
        return
    undisturbed = sorted(nodes.lab_job(options, ring, [], [])[1])
    for name, events in names.items():
        outcome = nodes.lab_job(options, ring, events, [*recovery.RELAY, *checkpoint_options(options)])
        check_same(checks, name, outcome, undisturbed, sum(isinstance(what, int) for _, what in events))


def logs_between_nodes(checks, options, ring) -> None:
    """Messages stay in the logs of their senders on several nodes: while an image of a rank is taken,
    the rank has no transport to other nodes."""
    cases = {
        "logs of the senders on several nodes": ([], [(3.0, 1), (4.0, 3)]),
        "logs of the senders on several nodes, all": ([], [(3.0, rank) for rank in range(RANKS)]),
        "logs of the senders of two clusters": (nodes.EACH_NODE_ONE, [(3.0, 1), (4.0, 2)]),
    }
    names = [name for name in cases if checks.wants(name)]
    if why_not := network.no_lab(options):
        for name in names:
            print(f"skipped: {name}: {why_not}")
        return
    ring = [*ring, "900"]
    undisturbed = sorted(nodes.lab_job(options, ring, [], nodes.SENDER)[1]) if names else []
    for name in names:
        words, events = cases[name]
        outcome = nodes.lab_job(options, ring, events, [*words, *nodes.SENDER, *checkpoint_options(options)])
        check_same(checks, name, outcome, undisturbed, len(events))


def spare_node(checks, options, ring) -> None:
    """A node with checkpointed ranks is lost: a spare node restores them if it can read the
    checkpoints."""
    alone, shared = "a node is lost, and nobody else sees its images", "a node is lost, and its images are seen by others"
    stored, unable = "a node is lost, and its images are in a store", "a node is lost, and the spare one has no CRIU"
    names = [name for name in (shared, alone, stored, unable) if checks.wants(name)]
    if not names:
        return
    if why_not := network.no_lab(options):
        for name in names:
            print(f"skipped: {name}: {why_not}")
        return
    undisturbed = sorted(nodes.lab_job(options, ring, [], nodes.SPARE)[1])
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            words = [*nodes.SPARE, *checkpoint_options(options), "--set", f"checkpoint_dir={folder}"]
            is_over = threading.Event()
            hider = threading.Thread(target=hide, args=(Path(folder), is_over), daemon=True)
            if name == alone:
                hider.start()
            events, within = [(4.0, nodes.KILLED)], []
            if name in (stored, unable):
                if not paths.MOTO.exists():
                    print(f"skipped: {name}: {paths.MOTO} is not there (make criu)")
                    continue
                # All hosts of a lab share one file system: deleting the checkpoints stands for
                # losing the node's disk.
                events = [(5.0, lambda: [shutil.rmtree(image) for rank in (0, 1) for image in checkpoints_of(rank)]), (5.0, nodes.KILLED)]
                words[-1] = "checkpoint_dir=s3://images/of"
                words += ["--set", "checkpoint_open=on"]
                within = [sys.executable, str(common.PROGRAMS / "with_store.py"), str(paths.MOTO), "images"]
            if name == unable:
                words += ["--set", f"criu={criu_but_on(Path(folder), 'north-2', options.criu)}"]
            code, lines, output = nodes.lab_job(options, ring, events, words, within=within)
            is_over.set()
            left = [path.name for path in Path(folder).rglob("*")]
        moves = output.count("ranks 0, 1 are restarted on north-2")
        found = len(re.findall(r"rank [01] is restored from checkpoint \d+ on north-2", output))
        said = output.count("checkpoints of node north-1 are on it alone")
        repeated = [int(count) for count in re.findall(r"restarted: (\d+) polls are replayed", output)]
        is_same = sorted(lines) == undisturbed and len(undisturbed) > RANKS
        is_right = (found, said) == ((0, 1) if name in (alone, unable) else (2, 0))
        is_right &= output.count("spare node north-2 cannot use checkpoints") == (name == unable)
        is_right &= name != stored or "store: 0 objects left" in output
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {moves} moves, {found} from images, {repeated} polls again, said {said} times, {len(left)} files left"
        checks.check(name, code == 0 and is_same and moves == 1 and is_right, measured, output)


def other_programs(checks, options) -> None:
    """Third-party programs with one checkpoint each, which all nodes can read; their node is
    lost."""
    if not options.list and (why_not := network.no_lab(options)):
        print(f"skipped: programs of others whose node is lost: {why_not}")
        return
    nodes.other_programs(checks, options, ["--checkpoint", "24h", "--set", f"criu={options.criu}", "--set", "log=info"])


def lost_by_chance(checks, options) -> None:
    """The node of ranks whose behaviour depends on clocks, random numbers or the order of arrival is
    lost at a moment drawn from the seed, once each rank has an image, which all nodes can read."""
    if not options.list and network.no_lab(options):
        return
    python = common.python(options)
    drawer = [python, str(common.PROGRAMS / "chance.py"), "--rounds", "200"]
    taker = [python, str(common.PROGRAMS / "ring.py"), "--any", "--rounds", "250"]
    rows = [
        ("who draws from clocks and random numbers", drawer, "now 1 0", nodes.drew_once),
        ("who takes whatever comes", taker, "heard 0:", lambda output: nodes.took_once(output, 250)),
    ]
    for (what, program, first, is_right), (by, logs) in itertools.product(rows, (("", []), (nodes.RELAYS, recovery.RELAY))):
        name = f"{by}{nodes.LOST}{what}, from images"
        if not checks.wants(name):
            continue
        after_s = random.Random(f"{options.seed} {name}").uniform(0.1, 0.7)
        events = [("", nodes.ask_for_images), *((f" of rank {rank} is there: ", lambda: None) for rank in range(RANKS))]
        events += [("", functools.partial(time.sleep, after_s)), ("", nodes.KILLED)]
        with tempfile.TemporaryDirectory() as scratch:
            words = [*nodes.WIDE, *logs, *checkpoint_options(options, "24h"), "--set", f"checkpoint_dir={scratch}/images"]
            lab_file = nodes.wide_lab(Path(scratch), nodes.SLOW_LAN)
            code, _, output = nodes.lab_job(options, program, events, words, first, lab_file=lab_file)
        moves, found = output.count(" is lost ("), restored_elsewhere(output)
        measured = f"exit code {code}, {'one' if is_right(output) else 'no one'} history, lost {moves}, {found} from images"
        checks.check(name, code == 0 and is_right(output) and (moves, found) == (1, 2), measured, output)


def lost_apart_from_mpi(checks, options) -> None:
    """A node is lost while its ranks call no MPI, when one of them has ended, or when one has spawned
    processes. Before, all ranks meet until each has an image; or they meet after the spawn."""
    if not options.list and network.no_lab(options):
        return
    silent = [f"rank {rank}: {what}" for rank in (0, 1) for what in ("300 messages", "waits")]
    spawns = 2 * ["rank of a spawned group is there"] + ["rank 0 hears [7, 8]"]
    spawns += [f"rank {rank} {what}" for rank in range(RANKS) for what in ("begins", "ends")]
    # The program; what is printed before the node is lost, and how long before; what the job prints.
    cases = {
        "who receive from ranks that do nothing meanwhile": (["silent.py", "FOLDER"], "rank 0: waits", 0.0, silent),
        "who send and then do nothing": (
            ["sends_and_waits.py", "FOLDER"],
            "rank 1: has sent",
            0.0,
            ["rank 1: has sent", "rank 3: 300 messages"],
        ),
        "one works on after MPI_Finalize": (["works_on.py", "1"], "rank 3: exchanged", 1.5, ["rank 0: 14850", "rank 3: exchanged"]),
        # Rank 0 does nothing for 4 s then, and talks to the spawned processes after that.
        "a rank has spawned since": (["spawns_late.py", "north-2", "0.5", "4"], "rank of a spawned group", 1.5, spawns),
        BEHIND: (["spawns_late.py", "north-2", "0.5"], "rank 0 hears", 0.0, spawns),
    }
    for what, ((program, *rest), first, pause_s, wanted) in cases.items():
        name = f"{nodes.LOST}{what}, from images"
        if not checks.wants(name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            go, images = Path(scratch) / "go", Path(scratch) / "images"
            image = ("", functools.partial(take_images, images))
            lose = [(first, functools.partial(time.sleep, pause_s)), ("", nodes.KILLED)]
            events = [image, ("", go.touch), *lose] if what != BEHIND else [lose[0], image, lose[1], ("", go.touch)]
            behind = ["--behind"] if what == BEHIND else []
            rest = [scratch if word == "FOLDER" else word for word in rest]
            command = [common.python(options), str(common.PROGRAMS / "meets.py"), *behind, str(go), str(common.PROGRAMS / program), *rest]
            words = [*nodes.WIDE, *checkpoint_options(options, "24h"), "--set", f"checkpoint_dir={images}"]
            lab_file = nodes.wide_lab(Path(scratch), nodes.SLOW_LAN)
            code, lines, output = nodes.lab_job(options, command, events, words, "", lab_file=lab_file)
        moves, found = output.count(" is lost ("), restored_elsewhere(output)
        is_same = sorted(lines) == sorted(wanted)
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, lost {moves}, {found} from images"
        checks.check(name, code == 0 and is_same and (moves, found) == (1, 2), measured, output)


def take_images(folder: Path) -> None:
    """Requests an image of each rank, until all are there."""
    nodes.wait_for_ranks(recovery.pids_of)
    nodes.wait_for_ranks(lambda rank: any(folder.glob(f"*/rank-{rank}/[0-9]*")), nodes.ask_for_images)


def restored_elsewhere(output: str) -> int:
    """How many ranks of the first node were restored from images on a spare one."""
    return len(re.findall(r"rank [01] is restored from checkpoint \d+ on north-[34]", output))


def lost_in_turn(checks, options) -> None:
    """Periodic checkpoints, which all nodes can read; a rank is killed, its node is lost, a rank is
    killed on the next node, and that is lost as well, all at moments drawn from the seed. Messages
    are logged by relays, and by senders."""
    if not options.list and network.no_lab(options):
        return
    for program in nodes.programs_of_others(options, True):
        long = {"heat": "--steps 1200", "wildcards and probes": "--rounds 600"}.get(program.name, "-time 4 -iter 100000")
        for by, words in (("", []), (nodes.RELAYS, recovery.RELAY)):
            name = f"{by}nodes are lost in turn, {program.name}, from images"
            if not checks.wants(name) or not Path(program.words[0]).exists():
                continue
            draw = random.Random(f"{options.seed} {name}")
            moments = [draw.uniform(low, low + 0.8) for low in (1.0, 1.8, 2.6, 3.4)]
            whats = [draw.randrange(2), nodes.KILLED, draw.randrange(4), ("north-3", nodes.KILLED)]
            with tempfile.TemporaryDirectory() as scratch:
                lab_file = nodes.wide_lab(Path(scratch), nodes.SLOW_LAN)
                folder = ["--set", f"checkpoint_dir={scratch}/images", "--set", f"criu={options.criu}"]
                run = [*nodes.WIDE, *words, *nodes.given(options), "--checkpoint", "500ms", *folder, "--set", "log=info"]
                events = list(zip(moments, whats))
                code, _, output = nodes.lab_job(options, [*program.words, *long.split()], events, run, program.begun, lab_file=lab_file)
            moves, found = output.count(" is lost ("), len(re.findall(r"rank [01] is restored from checkpoint \d+ on north-[34]", output))
            is_whole = program.is_whole(output)
            measured = f"exit code {code}, {'a' if is_whole else 'no'} whole answer, lost {moves}, {found} moved ranks from images"
            # A node may be lost before its ranks have two images.
            checks.check(name, code == 0 and is_whole and moves == 2, measured, output)


def criu_but_on(folder: Path, host: str, criu: Path) -> Path:
    """A program that runs CRIU on all hosts but this one."""
    tool = folder / "criu-elsewhere"
    tool.write_text(f'#!/bin/sh\n[ "$(hostname)" = {host} ] && exit 1\nexec {criu} "$@"\n')
    tool.chmod(0o755)
    return tool


def hide(folder: Path, is_over: threading.Event) -> None:
    """Removes the files by which nodes detect that they share a checkpoint directory."""
    while not is_over.wait(0.01):
        for sign in folder.glob(".*.[0-9]*"):
            if int(sign.name.rpartition(".")[2]) >> 31:
                sign.unlink(missing_ok=True)


def checkpoint_options(options, every: str = "1s") -> list[str]:
    return ["--checkpoint", every, "--set", f"criu={options.criu}", "--set", "log=info", "--verbose"]


def make_bucket(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def objects(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}?list-type=2", timeout=10) as answer:
        return re.findall(r"<Key>([^<]*)</Key>", answer.read().decode())


def is_recoverable_again(said: str, rank: int) -> bool:
    """Whether the rank sends little by now, and is recoverable."""
    found = re.findall(rf"rank {rank}\b[^\n]*(it cannot be restarted|it can be restarted)", said)
    return f"rank {rank} turn 80:" in said and found[-1:] == ["it can be restarted"]


def killed_during_dump(checks, options, ring) -> None:
    """Ranks with several threads are killed while CRIU takes their checkpoint; CRIU then waits for
    threads that no process can reap. Or a signal that an image may hold ends them, or stops them,
    which must not happen to the next incarnation once more: also not where all threads of a rank
    block it as long as the image is taken."""
    name = "who is ended by SIGTERM as its image is taken, with one thread"
    if checks.wants(name):
        with tempfile.TemporaryDirectory() as folder:
            tool = criu_that_kills(Path(folder), options.criu, after="0", how='kill -TERM "$pid"')
            outcome = job(options, ring, [], "--set", f"criu={tool}")
        check_same(checks, name, outcome, sorted(recovery.job(options, ring, [])[1]), RANKS)
    heat = [common.python(options), str(common.ROOT / "examples" / "heat.py"), "--check", "--steps", "2000"]
    ways = {
        "killed": ("SIGKILL", KILLS_IT),
        "ended by SIGTERM": ("SIGTERM", 'kill -TERM "$pid"'),
        "stopped": ("SIGKILL", f'kill -STOP "$pid"; sleep 0.4; {KILLS_IT}'),
        "stopped and continued": ("SIGKILL", f'kill -STOP "$pid"; sleep 0.4; kill -CONT "$pid"; sleep 0.2; {KILLS_IT}'),
    }
    names = {what: f"who is {what} as its image is taken" for what in ways}
    wanted = [what for what, name in names.items() if checks.wants(name)]
    began = time.monotonic()
    if wanted:
        job(options, heat, [], "--set", f"criu={options.criu.resolve()}")
    undisturbed = time.monotonic() - began
    for what in wanted:
        name, (end, how) = names[what], ways[what]
        with tempfile.TemporaryDirectory() as folder:
            tool = criu_that_kills(Path(folder), options.criu, how=how)
            began = time.monotonic()
            code, _, output = job(options, heat, [], "--set", f"criu={tool}")
            seconds = time.monotonic() - began
        is_same, killed = "identical to the serial run" in output, output.count(f"was killed by {end}: restarted")
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {killed} restarts, {seconds:.0f} s, undisturbed {undisturbed:.0f} s"
        # The agent would end CRIU after 60 s.
        checks.check(name, code == 0 and is_same and killed >= 2 and seconds < undisturbed + 60, measured, output)


KILLS_IT = 'kill -9 "$pid"'


def criu_that_kills(folder: Path, criu: Path, after: str = "2 + $$ % 8", how: str = KILLS_IT) -> Path:
    """A program that takes the first checkpoint of each process, and kills the process at the
    second one, so many hundredths of a second after it begins. `how`: the shell command for that."""
    tool = folder / "criu"
    lines = [
        "#!/bin/sh",
        'if [ "$1" = dump ]; then',
        f'  for word; do [ "$last" = --tree ] && pid=$word; last=$word; done; mark={folder}/$pid',
        f'  if [ -e "$mark" ] && [ ! -e "$mark.killed" ]; then : > "$mark.killed"; (sleep 0.0$(({after})); {how}) & fi',
        '  : > "$mark"',
        "fi",
        f'exec {criu} "$@"',
    ]
    tool.write_text("\n".join(lines) + "\n")
    tool.chmod(0o755)
    return tool


def criu_killed(checks, options, ring) -> None:
    """CRIU is killed while it takes a checkpoint, as an agent kills a CRIU that takes too long: what it
    leaves in the rank does not end the job."""
    name = "whose CRIU is killed as it takes an image"
    if not checks.wants(name):
        return
    undisturbed = sorted(recovery.job(options, ring, [])[1])
    with tempfile.TemporaryDirectory() as folder:
        tool, marks = criu_that_is_killed(Path(folder), options.criu)
        code, lines, output = job(options, ring, [], "--set", f"criu={tool}")
        killed = len(list(marks.iterdir()))
    is_same, starts = sorted(lines) == undisturbed, output.count(" SIGKILL: restarted")
    taken = len(re.findall(r"^landbridge: checkpoint \d+ of rank", output, re.M))
    measured = f"exit code {code}, {'the same' if is_same else 'other'} output, CRIU killed {killed} times, {taken} images, {starts} restarts"
    checks.check(name, code == 0 and is_same and killed > 3 and taken > 0, measured, output)


def criu_that_is_killed(folder: Path, criu: Path) -> tuple[Path, Path]:
    """A program that runs CRIU and kills two of three that take an image, 0.02 to 0.17 seconds after
    they begin; and a folder with a file for each of them that had not ended."""
    tool, marks = folder / "criu", folder / "killed"
    marks.mkdir()
    lines = [
        "#!/bin/sh",
        f'if [ "$1" != dump ] || [ $(($$ % 3)) = 0 ]; then exec {criu} "$@"; fi',
        f'{criu} "$@" & child=$!',
        "sleep 0.$(printf %02d $((2 + $$ % 16)))",
        f'kill -9 $child 2>/dev/null && : > "{marks}/$$"',
        "wait $child",
    ]
    tool.write_text("\n".join(lines) + "\n")
    tool.chmod(0o755)
    return tool, marks


def corrupt_checkpoints(checks, options, ring) -> None:
    """The newest checkpoint of a rank is corrupted before the rank is killed; then all its
    checkpoints."""
    for name, images in (("the newest checkpoint is corrupt", 1), ("all checkpoints are corrupt", KEPT)):
        if not checks.wants(name):
            continue
        undisturbed = sorted(recovery.job(options, ring, [])[1])
        with tempfile.TemporaryDirectory() as folder:
            corrupter = threading.Thread(target=corrupt_images, args=(Path(folder), images), daemon=True)
            corrupter.start()
            outcome = job(options, ring, [], "--set", f"checkpoint_dir={folder}")
            corrupter.join()
            output = outcome[2]
            said = len(re.findall(r"checkpoint \d+ of rank 2 cannot be used: \S+ is damaged", output))
            left = [path.name for path in Path(folder).rglob("*") if path.is_file()]
        is_right = said == images and not left and restores(output) == (images < KEPT)
        code, lines, _ = outcome
        is_same = sorted(lines) == undisturbed
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {said} refused, {len(left)} files left"
        checks.check(name, code == 0 and is_same and is_right, measured, output)


def corrupt_images(folder: Path, count: int) -> None:
    """Waits until rank 2 has two checkpoints, corrupts `count` of them, the newest first, and kills
    the rank."""
    deadline = time.monotonic() + recovery.LIMIT_S
    while time.monotonic() < deadline:
        images = sorted(folder.glob("*/rank-2/[0-9]*"), key=lambda path: int(path.name))
        if len(images) >= KEPT and (pids := recovery.pids_of(2)):
            # Nothing changes while the rank is stopped.
            os.kill(pids[0], signal.SIGSTOP)
            images = sorted(folder.glob("*/rank-2/[0-9]*"), key=lambda path: int(path.name))
            for image in images[-count:]:
                pages = max(image.glob("pages-*.img*"), key=lambda path: path.stat().st_size)
                with open(pages, "r+b") as file:
                    file.seek(5000)
                    file.write(b"damage")
            os.kill(pids[0], signal.SIGKILL)
            return
        time.sleep(0.02)


def without_criu(checks, options, ring) -> None:
    """Without CRIU one message says so, and killed ranks are restarted all the same."""
    name = "where there is no CRIU"
    if checks.wants(name):
        undisturbed = sorted(recovery.job(options, ring, [])[1])
        kills = [(recovery.START_S + 1.0, 1)]
        words = ["--checkpoint", "1s", "--set", "criu=/nowhere/criu"]
        outcome = recovery.job(options, ring, kills, *words)
        said = outcome[2].count("no checkpoints on node")
        recovery.check_same(checks, name, outcome, undisturbed, 1)
        checks.check(f"{name}: it is said", said == 1, f"{said} times", outcome[2])


def job(options, program, kills, *words, **more_of_it):
    """Runs `recovery.job` with a checkpoint of each rank every second. A kill whose moment is a
    number of seconds waits for an image of its rank, which may take longer on a busy machine."""
    kills = [(moment if callable(moment) else once_imaged(moment, rank), rank) for moment, rank in kills]
    code, lines, output = recovery.job(options, program, kills, *checkpoint_options(options), *words, **more_of_it)
    return code, [line for line in lines if not line.startswith("landbridge")], output


def once_imaged(seconds: float, rank: int):
    """A moment at least so many seconds after its first question, at which the rank has an image."""
    asked = []
    image = re.compile(rf"^landbridge: checkpoint \d+ of rank {rank}: ", re.M)

    def is_now(output: str) -> bool:
        asked.append(time.monotonic())
        return asked[-1] - asked[0] >= seconds and bool(image.search(output))

    return is_now


def kills_within_restores(output: str) -> int:
    """Kills that hit a process which CRIU is restoring: the restore is repeated, and one restart is
    reported for both kills."""
    return len(re.findall(r"checkpoint \d+ of rank \d+ is tried once more", output))


def restores(output: str) -> int:
    """Number of restarts from a checkpoint."""
    return len(re.findall(r": restarted from checkpoint \d+", output))


def check_same(checks, name: str, outcome, undisturbed, kills: int) -> None:
    code, lines, output = outcome
    is_same = sorted(lines) == undisturbed and len(undisturbed) > RANKS
    starts, taken = restores(output), len(re.findall(r"^landbridge: checkpoint \d+ of rank", output, re.M))
    measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {taken} images, {starts} restarts from one"
    checks.check(name, code == 0 and is_same and common.fits(starts, kills) and taken > RANKS, measured, output)


def no_criu(tool: Path) -> str:
    """Why no checkpoints can be taken here; empty if they can."""
    if not tool.exists():
        return f"{tool} is not there (make criu)"
    found = subprocess.run([tool, "check"], capture_output=True, text=True)
    return "" if found.returncode == 0 else f"CRIU cannot work here: {process.tail(found.stderr, 1)}"


if __name__ == "__main__":
    sys.exit(main())
