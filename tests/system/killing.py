#!/usr/bin/env python3
"""A rank is killed with SIGKILL in the middle of a job: the job ends and leaves nothing behind.

The other ranks end, and a message names the cause. Or a rank calls _exit(0) before a barrier: the
message names that rank, and not the rank that notices. Or a relay is killed under `--recover`, which
restarts no relay: the message names the relay. Or the launcher is interrupted while the output of a
finished job is read."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import common
from support import process

RANKS = 4
VICTIM = 2
START_LIMIT_S = 30.0
# Seconds from the kill until the whole job has ended. The launcher gives ranks a moment to end by
# themselves.
END_LIMIT_S = 15.0
# Seconds until ranks notice a lost rank without a notification; they should within a second.
FIND_OUT_LIMIT_S = 6.0


def main() -> int:
    options = common.arguments(__doc__)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    program = [common.python(options), str(common.PROGRAMS / "loop.py")]
    ours = {"shared memory": "shm,tcp", "tcp": "tcp"}
    for path, allowed in ours.items():
        command = [*common.landbridge_run(options, RANKS), *program]
        kill(checks, f"landbridge run, {path}", command, {"LANDBRIDGE_PATHS": allowed}, True)
    two = [*common.landbridge_run(options, RANKS, "--clusters", "2"), *program]
    kill(checks, "landbridge run, two clusters", two, {}, True)
    own = [str(options.venvs / "mpich" / "bin" / "mpiexec"), "-n", str(RANKS), *program]
    alone = common.settings(options, "mpich")
    kill(checks, "mpiexec", own, alone, False)
    for path, udp in (("tcp", "off"), ("udp", "on")):
        more = {"LANDBRIDGE_PATHS": "tcp", "LANDBRIDGE_UDP": udp}
        command = [*own, "--alone"]
        kill(checks, f"mpiexec that sleeps, {path}", command, alone | more, False, is_asleep=True)
    forgotten(checks, two)
    for logs in ("sender", "relay"):
        words = ["--clusters", "2", "--recover", "--set", f"recover_log={logs}"]
        relay_killed(checks, f"a relay is killed, recover_log={logs}", [*common.landbridge_run(options, RANKS, *words), *program])
    local = ["--set", "local=library"]
    for library, places in (("mpich", []), ("mpich", ["--clusters", "2"]), ("mpich", local), ("impi", [])):
        quits(checks, options, library, places)
    unread(checks, options)
    return checks.end()


# More than a pipe holds.
PRINTS = """from mpi4py import MPI
print('x' * 300_000, flush=True)"""


def unread(checks, options) -> None:
    """Two interrupts while the output of a finished job waits for its reader drop it: then the job
    has not ended well."""
    name = "interrupted while its output is read"
    if not checks.wants(name):
        return
    program = [common.python(options), "-c", PRINTS]
    job = subprocess.Popen([*common.landbridge_run(options, 1), *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        begun, _, _ = select.select([job.stdout], [], [], START_LIMIT_S)
        # The rank ends at once when it has printed.
        time.sleep(2.0)
        job.send_signal(signal.SIGINT)
        time.sleep(0.5)
        is_there = job.poll() is None
        job.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(END_LIMIT_S)
        code = job.poll()
    finally:
        job.kill()
    output, said = job.communicate()
    said = said.decode(errors="replace")
    is_said = "its output is still being read" in said
    measured = f"exit code {code}, {len(output)} bytes were read, {'said' if is_said else 'not said'}"
    checks.check(name, bool(begun) and is_there and is_said and code == 128 + signal.SIGINT and len(output) < 300_000, measured, said)


# Of several ranks, the second ends without MPI_Finalize while the others continue.
QUITS = """from mpi4py import MPI; import os; c = MPI.COMM_WORLD; c.barrier()
if c.rank == 1: os._exit(0)
c.barrier()"""


def quits(checks, options, library, places) -> None:
    name = f"_exit(0) before a barrier, {' '.join([library, *places])}"
    if not checks.wants(name):
        return
    program = [str(options.venvs / library / "bin" / "python"), "-c", QUITS]
    command = [*common.landbridge_run(options, RANKS - 1, *places), *program]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=END_LIMIT_S + START_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        checks.check(name, False, "it hangs")
        return
    last = (done.stderr.splitlines() or [""])[-1]
    is_named = "rank 1 on node" in last and "exit code 0 without MPI_Finalize, and others go on" in last
    checks.check(f"{name}: the rank that left is named", is_named and done.returncode == 1, last, done.stderr)


def forgotten(checks, command) -> None:
    """Launcher and agents are killed at once, so the next job must delete their files."""
    name = "launcher and agents are killed"
    if not checks.wants(name):
        return
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    os.set_blocking(job.stdout.fileno(), False)
    output = bytearray()
    ranks = find_ranks(job, output) or []
    own = mpich_files(ranks)
    agents = [pid for pid in process.descendants() if b"\0agent\0" in command_line(pid)]
    for pid in [job.pid, *agents]:
        # Agents end when their launcher does, maybe before the kill.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()
    wait_until_alone()
    left = shared_files() & own
    hour_ago = time.time() - 3600
    for file in left:
        os.utime(f"/dev/shm/{file}", (hour_ago, hour_ago))
    again = [*command[: command.index("--clusters")], "/bin/true"]
    code = subprocess.run(again, stdin=subprocess.DEVNULL, capture_output=True, timeout=END_LIMIT_S).returncode
    more = sorted(shared_files() & left)
    measured = f"{len(left)} files left, after the next job (exit code {code}) {len(more)}"
    checks.check(f"{name}: the next job removes what they have left", bool(left) and not more, measured, output.decode(errors="replace"))


def relay_killed(checks, name, command) -> None:
    """The relay of a cluster is killed in a job whose ranks would be restarted: the job ends with an
    error, and restarts no rank."""
    if not checks.wants(name):
        return
    files, sockets = shared_files(), socket_names()
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    os.set_blocking(job.stdout.fileno(), False)
    output = bytearray()
    try:
        is_started = find_ranks(job, output) is not None
        relays = [pid for pid in process.descendants() if command_line(pid).split(b"\0")[0].endswith(b"landbridge-relay")]
        if is_started and relays:
            os.kill(relays[-1], signal.SIGKILL)
        seconds = wait_for_end(job, output)
        wait_until_alone()
    finally:
        left = process.end_descendants()
    text = output.decode(errors="replace")
    measured = f"{len(relays)} relays, {'does not end' if seconds is None else f'after {seconds:.2f} s with {job.returncode}'}"
    checks.check(f"{name}: ends", len(relays) == 2 and seconds is not None and job.returncode not in (0, None), measured, text)
    causes = [line for line in text.splitlines() if re.search(r"the relay of cluster \S+ was killed by signal 9 \(SIGKILL\)", line)]
    restarts = text.count(": restarted")
    checks.check(f"{name}: says why", bool(causes) and not restarts, f"{causes[0] if causes else 'nothing'}, {restarts} restarts", text)
    checks.check(f"{name}: no process is left", not left, f"{len(left)} left")
    leftovers(checks, name, files, sockets, is_ours=True)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(checks, name, command, environment, is_ours, is_asleep=False):
    """Kills a rank. `is_asleep`: the launcher is stopped until the other ranks have ended by
    themselves."""
    if not checks.wants(name):
        return
    files, sockets = shared_files(), socket_names()
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | environment,
        start_new_session=True,
    )
    os.set_blocking(job.stdout.fileno(), False)
    output = bytearray()
    try:
        ranks = find_ranks(job, output)
        if ranks is None:
            checks.check(name, False, "the ranks did not start", output.decode(errors="replace"))
            return
        own = mpich_files(ranks)
        launchers = [pid for pid in process.descendants() if is_asleep and pid not in ranks]
        for pid in launchers:
            os.kill(pid, signal.SIGSTOP)
        os.kill(ranks[VICTIM], signal.SIGKILL)
        if is_asleep:
            alone_s = wait_for_ranks(ranks)
            measured = "they do not" if alone_s is None else f"after {alone_s:.2f} s"
            checks.check(f"{name}: the others find out", alone_s is not None, measured)
        for pid in launchers:
            os.kill(pid, signal.SIGCONT)
        seconds = wait_for_end(job, output)
        wait_until_alone()
    finally:
        left = process.end_descendants()
    judge(checks, name, job, output.decode(errors="replace"), seconds, left, is_ours, not is_asleep)
    leftovers(checks, name, files, sockets, is_ours)
    if not is_ours:
        # MPICH's own launcher leaves its files behind.
        for file in shared_files() & own:
            Path("/dev/shm", file).unlink(missing_ok=True)


def mpich_files(ranks) -> set[str]:
    """The files that these ranks have mapped: other jobs on this machine have such files as
    well."""
    return set(re.findall(r"/dev/shm/(mpich_\w+)", "\n".join(Path(f"/proc/{pid}/maps").read_text() for pid in ranks)))


def find_ranks(job, output):
    """The process of each rank, once every rank runs."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and job.poll() is None:
        read(job, output)
        found = dict(re.findall(rb"^pid: (\d+) (\d+)$", output, re.M))
        if len(found) == RANKS:
            return [int(found[str(rank).encode()]) for rank in range(RANKS)]
        time.sleep(0.02)
    return None


def wait_for_ranks(ranks):
    """Seconds until all ranks have ended; None if they do not."""
    started = time.monotonic()
    while time.monotonic() < started + FIND_OUT_LIMIT_S:
        if not set(ranks) & set(process.descendants()):
            return time.monotonic() - started
        time.sleep(0.02)
    return None


def wait_for_end(job, output):
    """Seconds until the job has ended; None if it does not."""
    started = time.monotonic()
    while time.monotonic() < started + END_LIMIT_S:
        read(job, output)
        if job.poll() is not None:
            read(job, output)
            return time.monotonic() - started
        time.sleep(0.02)
    return None


def wait_until_alone():
    """Waits until no descendant is left: a launcher may end a moment before the last of its
    processes."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and process.descendants():
        time.sleep(0.02)


def read(job, output):
    output += job.stdout.read() or b""


def judge(checks, name, job, output, seconds, left, is_ours, is_awake):
    """Checks the end of a job. A launcher that was stopped may not pass on the last output of
    ranks."""
    if seconds is None:
        checks.check(f"{name}: ends", False, f"still runs after {END_LIMIT_S} s", output)
        return
    expected = job.returncode == 128 + signal.SIGKILL if is_ours else job.returncode != 0
    checks.check(f"{name}: ends", expected, f"after {seconds:.2f} s with {job.returncode}", output)
    causes = [line for line in output.splitlines() if re.search(CAUSE, line, re.I)]
    names_it = not is_ours or any(f"rank {VICTIM}" in line and "SIGKILL" in line for line in causes)
    if is_awake:
        measured = causes[-1] if causes else "nothing"
        # MPICH's launcher may end a rank that aborts before it has read the rank's last lines.
        is_cut = not is_ours and job.returncode == ABORTED
        checks.check(f"{name}: says why", (bool(causes) or is_cut) and names_it, measured, output)
    checks.check(f"{name}: no process is left", not left, f"{len(left)} left")


# Under another launcher the MPI library ends the other ranks, with the error of the connection.
# Exit code of MPICH's launcher after a rank has aborted with an error of another process.
ABORTED = 143
CAUSE = r"killed|signal 9|SIGKILL|reset by peer"


def leftovers(checks, name, files, sockets, is_ours):
    """Checks for new files in /dev/shm and new listening or abstract sockets of this project."""
    kinds = ("mpich", "landbridge") if is_ours else ("landbridge",)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and (new_files(files, kinds) or socket_names() - sockets):
        time.sleep(0.05)
    more = new_files(files, kinds)
    checks.check(f"{name}: /dev/shm is clean", not more, " ".join(more) or "nothing new")
    more = sorted(socket_names() - sockets)
    checks.check(f"{name}: no socket is left", not more, " ".join(more) or "nothing new")


def new_files(before: set[str], kinds: tuple[str, ...]) -> list[str]:
    """New files of these kinds. Landbridge's launcher removes the files that MPICH leaves behind as
    well; MPICH's own launcher does not."""
    return sorted(name for name in shared_files() - before if name.startswith(kinds))


def shared_files() -> set[str]:
    """Files of MPICH and of this project; other files that appear meanwhile belong to other jobs on
    this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("mpich", "landbridge"))}


def socket_names() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@landbridge-" in line}


if __name__ == "__main__":
    sys.exit(main())
