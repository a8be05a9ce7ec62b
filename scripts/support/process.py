"""Runs programs to their end or to a deadline, and leaves no process behind.

The calling process becomes the reaper of its grandchildren, so a process that a launcher loses (a
rank whose mpiexec was killed, say) becomes its child, and `end_descendants` ends it. Every wait has
a deadline.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# Seconds that a process has to end after SIGTERM before it gets SIGKILL. mpiexec and `landbridge
# run` need part of them to end their ranks on other nodes.
GRACE_S = 3.0
POLL_S = 0.05


@dataclass
class Finished:
    """Outcome of a program: `code` is its exit code, or None if it was ended here (`why` says why).

    `busy_s` is the processor time in seconds of the program and all its descendants that were
    waited for.
    """

    code: int | None
    output: str
    seconds: float
    why: str = ""
    busy_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.code == 0


def run(
    command: list[str],
    limit_s: float,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    stalled: Callable[[], bool] | None = None,
    log: Path | None = None,
    keep: list[int] | None = None,
) -> Finished:
    """Runs `command` with its output (both streams) collected in a file, for `limit_s` at most.

    `env` is added to the environment. `stalled`, called a few times a second, may end the program
    before its limit. Afterwards all descendants of the calling process are ended, except those in
    `keep`.
    """
    adopt_orphans()
    started, busy_s = time.monotonic(), processor_seconds()
    log = log or _scratch_log()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        child = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(env),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            code, why = _wait(child, started + limit_s, stalled, {child.pid, *(keep or [])})
        finally:
            end_descendants(keep)
            output = log.read_text(errors="replace")
            if log.name.startswith("scratch-"):
                log.unlink()
    return Finished(code, output, time.monotonic() - started, why, processor_seconds() - busy_s)


def processor_seconds() -> float:
    """Processor time in seconds of all children that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def adopt_orphans() -> None:
    """Makes orphaned grandchildren children of this process, so that `end_descendants` finds them.

    SIGTERM to this process becomes an exception, so that the descendants are ended too.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def environment(added: dict[str, str] | None) -> dict[str, str]:
    return os.environ | (added or {})


def end_descendants(keep: list[int] | None = None) -> list[int]:
    """Ends the descendants of this process: SIGTERM, a grace period, SIGKILL. Returns their ids."""
    kept = set(keep or [])
    found = [pid for pid in descendants() if pid not in kept]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in set(descendants()) - kept:
            _signal(pid, number)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if not kept:
                _reap()
            if not set(descendants()) - kept:
                return found
            time.sleep(POLL_S)
    return found


def descendants() -> list[int]:
    """The ids of all living descendants of this process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            parent, state = _parent_and_state(int(entry))
            if parent is not None and state != "Z":
                children.setdefault(parent, []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _wait(child, deadline, stalled, kept: set[int]) -> tuple[int | None, str]:
    while True:
        _reap_orphans(kept)
        try:
            return child.wait(timeout=POLL_S), ""
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            return None, "time limit"
        if stalled is not None and stalled():
            return None, "no progress"


def _scratch_log() -> Path:
    from .paths import RESULTS

    return RESULTS / f"scratch-{os.getpid()}-{time.monotonic_ns()}.log"


def _parent_and_state(pid: int) -> tuple[int | None, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, ""
    return int(fields[1]), fields[0]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _reap_orphans(kept: set[int]) -> None:
    """Reaps adopted processes that have ended: a test may wait until a process no longer exists."""
    try:
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in kept:
                return
            os.waitpid(found.si_pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
