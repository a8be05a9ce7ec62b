#!/usr/bin/env python3
"""A rank is killed within one system call that changes a file, while another rank acts on it too.

The kill is exact (programs/kill_at_call.c): before the kernel performs the call, or after it and
before the rank has seen the result. The job has the result of an undisturbed run, or says that
nothing shows whether the call had happened. Where no other rank acts, and the call has not
happened, it always comes back.

On a file system whose times of change have the steps of a slow clock (here ramfs), the call follows
another change within one such step.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import common
import recovery
from support import process

RANKS = 2
LIMIT_S = 60.0
CANNOT_TELL = r"killed within its .* cannot be known"
# Numbers of system calls on x86-64.
WRITE, CLOSE, PWRITE, RENAME, MKDIR, UNLINK, LINK, SYMLINK = 1, 3, 18, 82, 83, 87, 86, 88
TRUNCATE, CHMOD, SETXATTR, OPENAT, SENDFILE, DUP2 = 76, 90, 188, 257, 40, 33


@dataclass
class Effect:
    """A case of programs/interrupted.c. `leaves_trace`: the call leaves a trace by which it is known to
    have happened, where no other rank acts. `has_answer`: another rank can act. `grows`: the
    file that the call fills, if the rank is killed in its middle. `is_hidden`: nothing shows whether
    the call has happened, or not."""

    name: str
    call: int
    leaves_trace: bool = False
    is_exact: bool = False
    has_answer: bool = True
    grows: str = ""
    is_hidden: bool = False


LONG = 192 << 20
EFFECTS = [
    Effect("claim-removal", UNLINK),
    Effect("claim-renaming", RENAME),
    Effect("rename-here", RENAME, has_answer=False),
    Effect("close-locked", CLOSE, is_exact=True, has_answer=False),
    Effect("close-range-locked", CLOSE, is_exact=True, has_answer=False),
    Effect("replace-locked", DUP2, is_exact=True, has_answer=False),
    Effect("open", OPENAT),
    Effect("open-link", OPENAT, is_hidden=True),
    Effect("open-moved", OPENAT),
    Effect("open-cleared", OPENAT),
    Effect("exclusive", OPENAT),
    Effect("folder", MKDIR),
    Effect("symlink", SYMLINK),
    Effect("link", LINK),
    Effect("append", WRITE, is_exact=True),
    Effect("append-same", WRITE, is_exact=True),
    Effect("append-more", WRITE, is_exact=True),
    Effect("write", PWRITE, leaves_trace=True),
    Effect("write-pages", PWRITE, leaves_trace=True, is_exact=True),
    Effect("write-taken", PWRITE, leaves_trace=True, is_exact=True),
    Effect("long-write", PWRITE, grows="form"),
    Effect("long-append", WRITE, grows="log"),
    Effect("long-copy", SENDFILE, has_answer=False, grows="log"),
    Effect("copy", SENDFILE, leaves_trace=True, is_exact=True),
    Effect("truncate", TRUNCATE),
    Effect("chmod", CHMOD),
    Effect("attribute", SETXATTR, has_answer=False),
    Effect("shift", SENDFILE, is_exact=True, has_answer=False),
]


def main() -> int:
    options = common.arguments(__doc__)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    if why_not := common.no_compiler():
        return common.skipped(why_not)
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder)
        build(options, programs)
        for effect in EFFECTS:
            for company in ["alone", "answered"][: 1 + effect.has_answer]:
                play_both(checks, options, programs, effect, Setting(company, programs))
        with slow_times(programs) as place:
            for effect in [effect for effect in EFFECTS if place and not effect.grows]:
                for company in ["alone", "answered"][: 1 + effect.has_answer]:
                    soon = Setting(company, place, is_soon=True)
                    play_both(checks, options, programs, effect, soon)
    return checks.end()


@dataclass
class Setting:
    """`company`: `alone` or `answered`. `is_soon`: the call follows another change at once."""

    company: str
    place: Path
    is_soon: bool = False

    def words(self) -> list[str]:
        return [self.company, *["soon"][: self.is_soon]]


# Changes a file whose time was asked before, many times within each tick. Since Linux 6.13 the kernel
# then gives precise times, and each of them is the least time of other file systems until the next tick.
PRECISE = """
import os, sys, time
while True:
    os.utime(sys.argv[1])
    os.stat(sys.argv[1])
    time.sleep(0.0005)
"""


@contextlib.contextmanager
def slow_times(folder: Path):
    """A file system whose times have steps of a tick, also where other file systems have precise
    ones; `None` without the right to mount one."""
    place = folder / "ramfs"
    place.mkdir()
    mount = ["mount", "-t", "ramfs", "ramfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        print("skipped: calls within a tick: no right to mount a file system (ramfs)")
        yield None
        return
    precise = folder / "precise"
    precise.write_text("")
    other = subprocess.Popen([sys.executable, "-c", PRECISE, str(precise)])
    try:
        yield place
    finally:
        other.kill()
        other.wait()
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def play_both(checks, options, programs: Path, effect: Effect, setting: Setting) -> None:
    undisturbed = None
    for moment in ("middle",) if effect.grows else ("enter", "exit"):
        name = f"{', '.join([effect.name, *setting.words()])}, killed at its {moment}"
        if checks.wants(name):
            undisturbed = undisturbed or play(options, programs, effect, setting, None)
            found = play(options, programs, effect, setting, moment)
            check(checks, name, (found, undisturbed), effect, setting, moment)


def build(options, folder: Path) -> None:
    root = options.venvs / "mpich"
    mpi = [f"-I{root}/include", f"-L{root}/lib", "-lmpi", f"-Wl,-rpath,{root}/lib"]
    for name, libraries in (("interrupted", mpi), ("kill_at_call", [])):
        subprocess.run(["gcc", "-O2", str(common.PROGRAMS / f"{name}.c"), "-o", str(folder / name), *libraries], check=True)


def play(options, programs: Path, effect: Effect, setting: Setting, moment: str | None):
    """Exit code, result, and all output of a job. `moment`: rank 0 is killed there; `None`: nobody
    is killed, and nothing is recorded."""
    with tempfile.TemporaryDirectory(dir=setting.place) as folder:
        recover = ["--recover"] if moment else []
        limit = ["--timeout", f"{LIMIT_S:.0f}"]
        command = [*common.landbridge_run(options, RANKS, *recover, *limit)]
        command += [str(programs / "interrupted"), folder, effect.name, *setting.words()]
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        watchdog = threading.Timer(LIMIT_S + 10, job.kill)
        watchdog.start()
        lines = []
        for line in job.stdout:
            lines.append(line)
            if line == "ready\n" and moment:
                if effect.grows:
                    # Both ranks append, one after the other.
                    both = effect.name == "long-append" and setting.company == "answered"
                    then = LONG * 3 // 2 if both else LONG // 5
                    watch = (Path(folder) / effect.grows, then)
                    threading.Thread(target=kill_within, args=watch).start()
                else:
                    kill(programs, effect.call, moment)
                moment = None
        code = job.wait()
        watchdog.cancel()
        process.end_descendants(None)
    output = "".join(lines)
    return code, re.findall("^result .*$", output, re.M), output


def kill(programs: Path, call: int, moment: str) -> None:
    """Kills rank 0 at its next such call, which it makes a while later."""
    (pid,) = recovery.pids_of(0)
    tracer = subprocess.Popen([str(programs / "kill_at_call"), str(pid), str(call), moment], stdout=subprocess.PIPE)
    if tracer.stdout.readline() != b"attached\n":
        raise RuntimeError(f"rank 0 (process {pid}) cannot be traced")


def kill_within(path: Path, bytes_then: int) -> None:
    """Kills rank 0 when it has written so much, or to there if the file was as long before."""
    (pid,) = recovery.pids_of(0)
    deadline = time.monotonic() + LIMIT_S / 2
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            was_long = os.fstat(file.fileno()).st_size == LONG
            is_there = os.pread(file.fileno(), 1, bytes_then)
            if is_there and not (was_long and is_there == b"\0"):
                break
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def check(checks, name: str, runs, effect: Effect, setting: Setting, moment: str) -> None:
    (code, results, output), undisturbed = runs
    is_killed = "rank 0 was killed by SIGKILL" in output
    is_refused = code != 0 and re.search(CANNOT_TELL, output) is not None
    is_right = code == 0 and results == undisturbed[1] and len(results) == 1
    # Within a tick the times show nothing, and what was written is counted.
    is_counted = effect.call in (WRITE, PWRITE, SENDFILE)
    leaves_trace = (moment == "enter" or effect.leaves_trace) and (is_counted or not setting.is_soon)
    is_shown = leaves_trace and not effect.grows and not effect.is_hidden
    must_return = effect.is_exact or setting.company == "alone" and is_shown
    measured = "right" if is_right else "refused, by name" if is_refused else f"exit code {code}, {results}, not {undisturbed[1]}"
    checks.check(name, is_killed and (is_right or is_refused and not must_return), measured, output)


if __name__ == "__main__":
    sys.exit(main())
