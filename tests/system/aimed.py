#!/usr/bin/env python3
"""Ranks are killed at chosen points of a job under `landbridge run --recover`, or for want of memory.

Points: as a rank starts, at the first contact of two ranks, in the middle of a frame that it appends
to a log, within MPI_Finalize, as it is restored from a checkpoint, while another rank is stopped, while
a rank puts into the memory of one that calls no MPI (programs/puts_to_sleeper.c).
The program (programs/phases.c) goes through these phases slowly. Kills at a system call are exact
(programs/kill_at_call.c), those in a log as well (programs/kill_in_logs.c); others are a function of
`--seed`. The output must be that of an undisturbed run. Where memory or a disk ends, the job either
has this output, or ends with an error that says why.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoint
import common
import network
import recovery
from support import control_group, paths, process

RANKS, RELAY, TWO_CLUSTERS = recovery.RANKS, recovery.RELAY, recovery.TWO_CLUSTERS
PLACES = {"": [], ", two clusters": TWO_CLUSTERS}
# A rank is killed more often than a job allows by default.
OFTEN = ["--max-restarts", "1000"]
# Milliseconds of each pause, rounds, bytes of a message.
SHORT, LONG = ["400", "40", "500"], ["50", "100", "200000"]
BEGIN_KILLS, LOG_KILLS, RESTORE_KILLS = 20, 30, 6
# So many of these kills must have found what they are aimed at.
WITHIN_MIN = 20
# A process is there, and calls MPI, within so many seconds after its start.
BEGIN_S = 0.2
# Seconds from the start of a restore within which CRIU is at work.
RESTORE_S = 0.1
# A killed rank is to be restored within so many seconds.
RESTORE_WAIT_S = 5.0
# Numbers of system calls, x86-64.
CLOSE, MMAP, MUNMAP, MADVISE, SENDTO, RECVFROM, EXIT_GROUP, EPOLL_CTL = 3, 9, 11, 28, 44, 45, 231, 233
MIB = 1 << 20
# Pieces that are put, the bytes of each, pieces between two flushes, and the milliseconds for which the
# target calls no MPI: 512 MiB in all.
PUTS, PUT_BYTES, FLUSH, SLEEP_MS = 128, 4 * MIB, 16, 3000
# Memory of each node for logs: less than is put, and more than is put for each of its ranks.
LITTLE, MUCH = 64, 3072
# Largest logs of a node while the target sleeps. 16 MiB may be under way to a peer; 18 MiB are measured.
UNDER_WAY_MAX = 24 * MIB
LOOK = "look"


def main() -> int:
    def add(parser):
        common.add_cases(parser)
        parser.add_argument("--criu", type=Path, default=paths.CRIU, metavar="FILE")

    options = common.arguments(__doc__, add)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    if why_not := common.no_compiler():
        return common.skipped(why_not)
    with tempfile.TemporaryDirectory() as folder:
        options.programs = Path(folder)
        build(options)
        as_they_begin(options, checks)
        at_calls(options, checks)
        within_appends(options, checks)
        within_restores(options, checks)
        stopped(options, checks)
        puts(options, checks)
        without_memory(options, checks)
        on_full_disks(options, checks)
    return checks.end()


def build(options) -> None:
    root = options.venvs / "mpich"
    mpi = [f"-I{root}/include", f"-L{root}/lib", "-lmpi", f"-Wl,-rpath,{root}/lib"]
    for name, libraries in (("phases", mpi), ("puts_to_sleeper", mpi), ("kill_at_call", []), ("kill_in_logs", [])):
        subprocess.run(["gcc", "-O2", str(common.PROGRAMS / f"{name}.c"), "-o", str(options.programs / name), *libraries], check=True)


def phases(options, words: list[str]) -> list[str]:
    return [str(options.programs / "phases"), *words]


def alone(options, words: list[str]) -> list[str]:
    """The sorted lines of an undisturbed job without recovery."""
    code, lines, output = recovery.job(options, phases(options, words), [], recover=False)
    if code:
        print(f"undisturbed, the program ends with {code}\n{process.tail(output)}")
    return sorted(lines)


def as_they_begin(options, checks) -> None:
    """Many kills, each at a random moment of the start of a rank: before it is an MPI process,
    within MPI_Init, or soon after."""
    for place, words in PLACES.items():
        name = f"as they begin, {BEGIN_KILLS} times{place}"
        if checks.wants(name):
            chance = random.Random(f"{options.seed} {name}")
            kills = [(0.0, soon_killed(chance.randrange(RANKS), chance.uniform(0.0, BEGIN_S))) for _ in range(BEGIN_KILLS)]
            undisturbed = alone(options, SHORT)
            outcome = recovery.job(options, phases(options, SHORT), kills, *words, *OFTEN)
            recovery.check_same(checks, f"{name}, seed {options.seed}", outcome, undisturbed, BEGIN_KILLS)


def soon_killed(rank: int, delay_s: float) -> Callable[[], bool]:
    """Kills a rank so many seconds after there is a process of it."""

    def strike() -> bool:
        if not recovery.pids_of(rank):
            return False
        time.sleep(delay_s)
        return recovery.kill_rank(rank)

    return strike


def at_calls(options, checks) -> None:
    """Kills at system calls. The first contact of two ranks of a node is a mapping of their log; the
    first one over two clusters is a message of rank 1 to the transport of the other one."""
    contact, end = "rank 1 begins", "rank 1 finalizes"
    cases = {
        "at a first contact": (contact, [(MMAP, "enter"), (MMAP, "exit"), (MADVISE, "enter"), (MADVISE, "exit")], []),
        "at a first contact, two clusters": (contact, [(SENDTO, "enter"), (SENDTO, "exit"), (RECVFROM, "exit")], TWO_CLUSTERS),
        "in MPI_Finalize": (end, [(EPOLL_CTL, "enter"), (CLOSE, "exit"), (MUNMAP, "enter"), (MUNMAP, "exit"), (EXIT_GROUP, "enter")], []),
        "in MPI_Finalize, two clusters": (end, [(SENDTO, "enter"), (SENDTO, "exit"), (CLOSE, "exit"), (EXIT_GROUP, "enter")], TWO_CLUSTERS),
    }
    names = {CLOSE: "close", MMAP: "mmap", MUNMAP: "munmap", MADVISE: "madvise", SENDTO: "sendto"}
    names |= {RECVFROM: "recvfrom", EXIT_GROUP: "exit_group", EPOLL_CTL: "epoll_ctl"}
    undisturbed = None
    for what, (line, calls, words) in cases.items():
        for call, moment in calls:
            name = f"{what}, {names[call]} {moment}"
            if checks.wants(name):
                undisturbed = undisturbed or alone(options, SHORT)
                kills = [(recovery.after_output(line), killed_by(options, "kill_at_call", 1, str(call), moment))]
                outcome = recovery.job(options, phases(options, SHORT), kills, *words)
                recovery.check_same(checks, name, outcome, undisturbed, 1)


def killed_by(options, program: str, rank: int, *words: str, seen: list[str] | None = None) -> Callable[[], bool]:
    """Kills a rank by a program that watches it, and waits for that. What the program prints is
    added to `seen`."""

    def strike() -> bool:
        if not (pids := recovery.pids_of(rank)):
            return False
        watcher = [str(options.programs / program), str(pids[0]), *words]
        try:
            done = subprocess.run(watcher, capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            return False
        if seen is not None and done.returncode == 0:
            seen.extend(done.stdout.split())
        return done.returncode == 0

    return strike


def within_appends(options, checks) -> None:
    """Long messages go round. A kill finds its rank in the middle of a copy into a log, if that can
    be seen soon, or else anywhere."""
    for place, words in PLACES.items():
        name = f"within appended frames, {LOG_KILLS} times{place}"
        if checks.wants(name):
            chance = random.Random(f"{options.seed} {name}")
            seen: list[str] = []
            kills = [(chance.uniform(0.0, 0.15), killed_by(options, "kill_in_logs", chance.randrange(RANKS), seen=seen)) for _ in range(LOG_KILLS)]
            undisturbed = alone(options, LONG)
            outcome = recovery.job(options, phases(options, LONG), kills, *words, *OFTEN)
            recovery.check_same(checks, f"{name}, seed {options.seed}", outcome, undisturbed, LOG_KILLS)
            count = seen.count("within")
            checks.check(f"{name}: where", count >= WITHIN_MIN, f"{count} of {len(seen)} within a copy into a log")


def within_restores(options, checks) -> None:
    """A rank is killed again and again while CRIU restores it: CRIU itself, or what it has begun."""
    for what, is_tool in (("the process", False), ("CRIU", True)):
        name = f"as it is restored, {what}, {RESTORE_KILLS} times"
        if not checks.wants(name):
            continue
        if why_not := checkpoint.no_criu(options.criu):
            print(f"skipped: {name}: {why_not}")
            continue
        chance = random.Random(f"{options.seed} {name}")
        ring = [common.python(options), str(common.PROGRAMS / "ring.py"), "--rounds", "1500"]
        hits: list[bool] = []
        kills = []
        for _ in range(RESTORE_KILLS):
            delay_s = chance.uniform(0.0, RESTORE_S)
            moment = checkpoint.once_imaged(chance.uniform(0.6, 1.2), 1)
            kills.append((moment, lambda delay_s=delay_s: killed_and_in_restore(1, delay_s, is_tool, hits)))
        undisturbed = sorted(recovery.job(options, ring, [])[1])
        code, lines, output = checkpoint.job(options, ring, kills, *OFTEN)
        is_same = sorted(lines) == undisturbed and len(undisturbed) > RANKS
        measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {sum(hits)} kills within a restore, {checkpoint.restores(output)} restores"
        is_met = sum(hits) > RESTORE_KILLS // 2 and checkpoint.restores(output) > 0
        checks.check(f"{name}, seed {options.seed}", code == 0 and is_same and is_met, measured, output)


def killed_and_in_restore(rank: int, delay_s: float, is_tool: bool, hits: list[bool]) -> bool:
    """Kills a rank, and a while after its restore has begun CRIU, or the process that it restores,
    which has the process id of before. The restore may be over then."""
    if not (pids := recovery.pids_of(rank)):
        return False
    agent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pids[0], signal.SIGKILL)
    deadline = time.monotonic() + RESTORE_WAIT_S
    while not (tool := restoring(agent)) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay_s)
    is_hit = False
    while not is_hit and tool and restoring(agent) == tool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(tool if is_tool else pids[0], signal.SIGKILL)
            is_hit = True
    hits.append(is_hit)
    return True


def restoring(agent: int) -> int | None:
    """The process of CRIU that restores a process of this agent."""
    children = "".join(file.read_text() for file in Path(f"/proc/{agent}/task").glob("*/children"))
    for pid in map(int, children.split()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"restore" in words and any(word.endswith(b"/criu") for word in words):
                return pid
    return None


def stopped(options, checks) -> None:
    """A rank is stopped for some seconds, as a debugger or a scheduler does, and another one, or the
    same one, is killed meanwhile."""
    ring = [common.python(options), str(common.PROGRAMS / "ring.py"), "--rounds", "900"]
    others = {", and another one is killed": [1], ", and two others are killed": [1, 3], ", and killed": [2]}
    for place, words in (PLACES | {", logs of relays": RELAY}).items():
        for what, killed in others.items():
            name = f"a rank that is stopped{what}{place}"
            if checks.wants(name):
                undisturbed = sorted(recovery.job(options, ring, [])[1])
                kills = [(recovery.START_S + 0.5, lambda: signalled(2, signal.SIGSTOP)), *((0.5, rank) for rank in killed)]
                # A rank that was killed is there again, and runs.
                kills.append((3.0, lambda: signalled(2, signal.SIGCONT)))
                recovery.check_same(checks, name, recovery.job(options, ring, kills, *words), undisturbed, len(killed))


def signalled(rank: int, number: int) -> bool:
    pids = recovery.pids_of(rank)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


def puts(options, checks) -> None:
    """Rank 0 puts far more than may be under way into the window of rank 1, which calls no MPI for some
    seconds. Meanwhile either is killed, or neither and there is little memory for logs. The content of
    the window is right, and the logs of no node exceed what may be under way, and their memory."""
    halfway = f"rank 0 has put {PUTS // 2}\n"
    # The next incarnation of rank 1 sleeps as long, and is looked at, too.
    cases = {
        "": (LITTLE, lambda: []),
        ", who is killed": (MUCH, lambda: [(0.0, 1), (1.5, LOOK)]),
        ", by one who is killed, and again after the sleep": (MUCH, lambda: [(0.0, 0), (recovery.after_output(halfway), 0)]),
    }
    for place, nodes in (("", 1), (", two nodes over TCP", 2)):
        for what, (memory, kills_of) in cases.items():
            name = f"puts into the memory of one who calls no MPI{what}{place}"
            if not checks.wants(name):
                continue
            if nodes == 2 and (why_not := network.no_lab(options)):
                print(f"skipped: {name}: no lab can be built here: {why_not}")
                continue
            within = network.lab_run(options, f"aimed-{os.getpid()}") if nodes == 2 else []
            words = ["--set", f"recover_memory={memory}MiB", "--set", "log=info", *(["--ranks-per-node", "1"] if nodes == 2 else [])]
            check_puts(checks, name, nodes, memory, kills_of(), words, within)


def check_puts(checks, name: str, nodes: int, memory: int, kills: list, words: list[str], within: list[str]) -> None:
    """Checks a job of `puts`. The logs are looked at in the sleep, before the kill, and after each flush
    that follows."""
    asleep: list[int] = []
    later: list[int] = []
    woke: list[bool] = []

    def in_the_sleep(output: str) -> bool:
        is_met = begun(output)
        woke.extend(["rank 1 wakes" in output] if is_met else [])
        return is_met

    begun = recovery.after_output("rank 1 sleeps", 1.0)
    counts = range(FLUSH, PUTS + 1, FLUSH)
    looks = [] if kills else [(recovery.after_output(f"rank 0 has put {count}\n"), lambda: noted(later)) for count in counts]
    look = lambda: noted(asleep)  # noqa: E731
    events = [(in_the_sleep, look), *((moment, look if what == LOOK else what) for moment, what in kills), *looks]
    program = [str(checks.options.programs / "puts_to_sleeper"), *map(str, (PUTS, PUT_BYTES, FLUSH, SLEEP_MS))]
    code, lines, output = recovery.job(checks.options, program, events, *words, within=within)
    wanted = ["rank 1 sleeps", "rank 1 wakes", "rank 0 has put all", f"rank 1 found: {PUTS} right pieces"]
    is_right = sorted(lines) == sorted([*wanted, *(f"rank 0 has put {count}" for count in counts)])
    # Something is under way, and the log is full exactly where it is meant to be.
    is_bounded = MIB < max(asleep, default=0) <= UNDER_WAY_MAX and max(later, default=0) <= memory * MIB
    is_full = "memory for message logs is full" in output
    is_by_tcp = re.search(r"Info: rank [01] .*: tcp [\d.]+ to [\d.]+: \d{8,} bytes sent", output) is not None
    is_met = woke == [False] and is_full == (memory == LITTLE) and is_by_tcp == (nodes == 2)
    starts = len(re.findall(r"^landbridge: rank \d+ was killed by .*: restarted", output, re.M))
    is_hit = starts == sum(what != LOOK for _, what in kills)
    measured = f"exit code {code}, {'the right' if is_right else 'other'} content and output, {starts} restarts"
    measured += f", logs of a node: {max(asleep, default=0) / MIB:.0f} MiB in the sleep"
    measured += f", {max(later) / MIB:.0f} MiB later" if later else ""
    measured += "" if is_met else f"; not as meant: awake {woke}, full {is_full}, by TCP {is_by_tcp}"
    checks.check(name, code == 0 and is_right and is_bounded and is_met and is_hit, measured, output)


def noted(sizes: list[int]) -> bool:
    """Adds the memory that the logs of each node of this driver's job take now."""
    found = {}
    for pid in process.descendants():
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                # Descriptors come and go.
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(descriptor).startswith("/memfd:landbridge-logs"):
                        file = descriptor.stat()
                        found[file.st_dev, file.st_ino] = file.st_blocks * 512
    sizes += found.values()
    return True


def without_memory(options, checks) -> None:
    """The kernel kills a rank because its control group has no memory left. A rank whose next
    incarnation has more comes back; if there is none, the job ends and says who was killed."""
    words = [*SHORT, "300"]
    name = "killed by the kernel for want of memory"
    if checks.wants(name):
        with control_group.existing("aimed", 100 * MIB) as group:
            if group is None:
                print(f"skipped: {name}: no control group with a limit of memory can be made here")
            else:
                undisturbed = alone(options, words)
                # The next incarnation is in the group of its agent.
                outcome = recovery.job(options, phases(options, words), [(recovery.after_output("rank 1 begins"), lambda: put_into(group, 1))])
                count = control_group.killed_for_memory(group)
                recovery.check_same(checks, name, outcome, undisturbed, 1)
                checks.check(f"{name}: by the kernel", count == 1, f"{count} processes killed", outcome[2])
    name = "killed by the kernel for want of memory, each time"
    if checks.wants(name):
        with control_group.limited("aimed", 500 * MIB) as within:
            if within is None:
                print(f"skipped: {name}: no control group with a limit of memory can be made here")
            else:
                program = phases(options, [*SHORT, "1000"])
                code, lines, output = recovery.job(options, program, [], "--max-restarts", "3", within=within)
                is_named = re.search(r"^landbridge: rank 1 on node .*\(SIGKILL\)", output, re.M) is not None
                is_given_up = recovery.is_given_up(output, 3, "it has been 3 times within")
                measured = f"exit code {code}, {'names' if is_named else 'does not name'} rank 1, {output.count(': restarted')} restarts"
                is_wrong = any("ends:" in line for line in lines)
                checks.check(name, code == 128 + signal.SIGKILL and is_named and is_given_up and not is_wrong, measured, output)


def put_into(group: Path, rank: int) -> bool:
    """Puts the process of a rank into a control group."""
    pids = recovery.pids_of(rank)
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    return bool(pids)


def on_full_disks(options, checks) -> None:
    """`recover_dir` is a file system without room for the logs: by itself, or because another
    process writes there. The job goes on, and ranks cannot be restarted."""
    full = {"": "memory for message logs is full (recover_memory): this process and", ", logs of relays": "cannot be restarted"}
    for logs, said in full.items():
        for what in ("", " that others fill"):
            name = f"logs on a full disk{what}{logs}"
            if not checks.wants(name):
                continue
            with small_disk((400 if what else 24) * MIB) as folder:
                if folder is None:
                    print(f"skipped: {name}: no file system can be mounted here")
                    continue
                undisturbed = alone(options, LONG)
                # The file of the others takes what is left, after a while.
                kills = [(recovery.after_output("rank 1 round 30"), lambda folder=folder: fill(folder))] if what else []
                words = [*(RELAY if logs else []), "--set", "recover_memory=1MiB", "--set", f"recover_dir={folder}"]
                code, lines, output = recovery.job(options, phases(options, LONG), kills, *words)
            is_same, is_said = sorted(lines) == undisturbed, said in output
            measured = f"exit code {code}, {'the same' if is_same else 'other'} output, {output.count(': restarted')} restarts, {'says' if is_said else 'does not say'} what is full"
            checks.check(name, code == 0 and is_same and is_said and ": restarted" not in output, measured, output)


@contextlib.contextmanager
def small_disk(bytes_max: int) -> Iterator[Path | None]:
    """A folder on a file system of so many bytes. `None`: none can be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={bytes_max},mode=700", "landbridge-test", folder]
        is_there = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield Path(folder) if is_there else None
        finally:
            if is_there:
                subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> bool:
    """Writes a file there until no room is left."""
    with open(folder / "others", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(MIB // 4))
    return True


if __name__ == "__main__":
    sys.exit(main())
