#!/usr/bin/env python3
"""System calls of one program under the interposer alone, without MPI: seconds for all cases.

Each case runs a function of programs/calls.c with a record in a memory file, as a node agent would
make it, and reads what the interposer prints. Some cases run a second incarnation with the same
record, whose calls are the same or differ in one value.
"""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import common

# Bytes of a record, and where its head has the end of the entries.
RECORD_BYTES, RECORDED_AT = 256 << 20, 56
# Exit code of an incarnation that cannot be replayed.
UNRECOVERABLE = 183
LIMIT_S = 20.0
REFUSED = "if this process is killed it cannot be restarted"
SOCKET, SENDS = "it {} a socket, which is not recorded", "it sends by a socket, which is not recorded"
OTHERS = "it examines or changes limits, priority or processors of another process"
OTHER_THREAD = "it begins a thread otherwise than by pthread_create"
# The reason that is printed at the call, once; empty: none.
CHANNELS = {
    "sendmsg": SENDS,
    "sendmmsg": SENDS,
    "sendto": SENDS,
    "bind": SOCKET.format("binds"),
    "raw connect": SOCKET.format("connects"),
    "own code": SENDS,
    "raw shmat": "it uses shared memory (shmget), which is not recorded",
    "raw semget": "it uses semaphores (semget), which is not recorded",
    "shmget": "it uses shared memory (shmget), which is not recorded",
    "semop": "it uses semaphores (semop), which is not recorded",
    "semctl": "it uses semaphores (semop), which is not recorded",
    "msgsnd": "it uses a message queue (msgsnd), which is not recorded",
    "msgrcv": "it uses a message queue (msgsnd), which is not recorded",
    "raw msgctl": "it uses a message queue (msgsnd), which is not recorded",
    "mq_unlink": "it uses a message queue (mq_send), which is not recorded",
    "keyctl": "it uses keys of the kernel (keyctl), which is not recorded",
    "kill of 0": "it asks whether another process runs (kill), which is not recorded",
    "prlimit": OTHERS,
    "getpriority": OTHERS,
    "sched_getaffinity": OTHERS,
    "itself": "",
    "notice": "it watches files for changes (fcntl), which are not made again",
    "fexecve": "it executes a program by its descriptor, which cannot be observed",
    "terminal": "it opens /dev/ptmx, which keeps nothing",
    "device lock": "it locks a device or a pipe",
    "unspecified": SENDS,
    "look": "another thread than the first looks at ",
    "look at times": "another thread than the first looks at /tmp, which is changed",
    "connect in thread": SOCKET.format("connects"),
    "exchanged directory": "a program that it starts enters ",
    "exchanged file": "a program that it starts opens ",
    "entered directory": "it starts bin/true, which cannot be observed",
    "bad memory": "",
    "bad lock": "",
    "bad buffers": "",
    "failing closes": "nobody holds ",
    "constant mask": "",
    "recvmsg": "it receives by a pair of sockets in a way that is not recorded (recvmsg)",
    "steady directory": "",
    "look at lock": "another thread than the first locks ",
    "look at attribute": "another thread than the first looks at ",
    "own library": SOCKET.format("binds"),
    "syslog": "it writes to the system's log (syslog), which is not recorded",
    "vsyslog": "it writes to the system's log (syslog), which is not recorded",
    "within": "",
    "library": "",
    "directory ioctl": "it uses ioctl(2) 0x80086601 on ",
    "thrd_create": OTHER_THREAD,
    "timer thread": OTHER_THREAD,
    "chroot": "it changes its root directory",
    "32-bit call": "it makes system calls of 32-bit programs",
    "x32 call": "it makes system calls of 32-bit programs",
    "close in thread": "another thread than the first closes a file that the rank has open",
}
# What an incarnation prints that changes a file with another value than the one before. A write of
# other bytes names the file, the place and two digests.
CHANGE, RESIZE = "its change of a name of ", "its change of size or attributes of "
WRITE = r"cannot go on: its write of {} bytes at {} of \S+/of has the digest (?P<now>[0-9a-f]{{16}}), and it wrote (?!(?P=now))[0-9a-f]{{16}} there before"
CHANGES = {
    "write": WRITE.format(20, 4),
    "writev": WRITE.format(20, 4),
    "pwrite": WRITE.format(20, 7),
    "append": WRITE.format(20, "the end"),
    "truncate": CHANGE,
    "ftruncate": RESIZE,
    "chmod": CHANGE,
    "fchmod": RESIZE,
    "symlink": CHANGE,
    "utimens": CHANGE,
    "unlinkat": CHANGE,
    "directory": CHANGE,
    "attribute": RESIZE,
    "answer of a child": "its read of [0-9]+ bytes of a pipe gave other bytes than before",
    "longer answer of a child": "its read of [0-9]+ bytes of a pipe gave other bytes|a pipe has more bytes than before|a pipe has ended",
    "exit code of a child": "a program that it has started ended otherwise than before",
    "waitid": "a program that it has started ended otherwise than before",
    "memory copy": "its copy of .* the file has changed",
    "early end": "is the end of the program, and was system call 1 .write. with",
}


# What a process has open that is killed, and why the next incarnation cannot go on (empty: it can).
KILLED = {
    "swapped names": "",
    "all descriptors": "",
    "replaced descriptors": "",
    "listing": "",
    "listing on ramfs": "and may get other names now: its file system has no lasting positions",
}


class Record:
    """A record of one process, for all its incarnations."""

    def __init__(self, options, program: Path):
        self.options, self.program, self.incarnations = options, program, 0
        self.descriptor = os.memfd_create("record")
        os.ftruncate(self.descriptor, RECORD_BYTES)

    def start(self, name: str, folder: Path, value: int) -> subprocess.Popen:
        """Begins the next incarnation."""
        environment = dict(os.environ) | {
            "LD_PRELOAD": str(self.options.bin / "liblandbridge_interpose.so"),
            "LANDBRIDGE_RECORD": str(self.descriptor),
            "LANDBRIDGE_INCARNATION": str(self.incarnations),
        }
        self.incarnations += 1
        words = [str(self.program), name, str(folder), str(value)]
        return subprocess.Popen(
            words, env=environment, pass_fds=[self.descriptor], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, name: str, folder: Path, value: int = 1) -> tuple[int | None, str]:
        """Exit code (None: killed at its limit) and output of the next incarnation."""
        return finished(self.start(name, folder, value))

    def recorded(self) -> int:
        return int.from_bytes(os.pread(self.descriptor, 8, RECORDED_AT), "little")

    def close(self):
        os.close(self.descriptor)


def finished(child: subprocess.Popen) -> tuple[int | None, str]:
    try:
        output, _ = child.communicate(timeout=LIMIT_S)
        return child.returncode, output
    except subprocess.TimeoutExpired:
        child.kill()
        return None, child.communicate()[0]


def main() -> int:
    options = common.arguments(__doc__, common.add_cases)
    common.quiet_environment()
    checks = common.Checks(options)
    if why_not := common.no_compiler():
        return common.skipped(why_not)
    with tempfile.TemporaryDirectory() as folder:
        program = built(Path(folder))
        for name, reason in CHANNELS.items():
            channel(checks, options, program, name, reason)
        for name, words in CHANGES.items():
            change(checks, options, program, name, words)
        copy_out(checks, options, program)
        connection(checks, options, program)
        two_pipes(checks, options, program)
        clock_of_child(checks, options, program)
        waiting_bytes(checks, options, program)
        steady_results(checks, options, program)
        for name in ("device by a link", "link itself"):
            opened_again(checks, options, program, name)
        deadlock(checks, options, program)
        for case, name in (("locks of many ranges", "range locks"), ("locks of two kinds", "mixed locks")):
            range_locks(checks, options, program, case, name)
        for name, reason in KILLED.items():
            killed(checks, options, program, name, reason)
        for name in ("flock", "fcntl", "restarted lock", "left lock", "blocked lock"):
            lock(checks, options, program, name)
    return checks.end()


def built(folder: Path) -> Path:
    """The program, with a library that is named like one of an MPI library, and one that is not."""
    program, library = folder / "calls", folder / "libmpi_cxx.so"
    sources = [str(common.PROGRAMS / name) for name in ("calls_library.c", "calls.c")]
    for made in (library, folder / "libmpihelper.so"):
        subprocess.run(["gcc", "-O2", "-fPIC", "-shared", sources[0], "-o", str(made)], check=True)
    words = ["gcc", "-O2", sources[1], str(library), f"-Wl,-rpath,{folder}", "-lpthread", "-ldl", "-o", str(program)]
    subprocess.run(words, check=True)
    return program


# A name that has changed counts from this time before the first incarnation on.
SLACK_S = 2.0


def channel(checks, options, program: Path, name: str, reason: str) -> None:
    """A call that nothing repeats is reported at the call, and no other call is."""
    case = f"a program that uses {name}"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        if "exchanged" in name or "steady" in name:
            (folder / "way").symlink_to("/usr" if "directory" in name else "/dev/null")
            time.sleep(SLACK_S + 0.5)
        code, output = record.run(name, folder)
    if "not here" in output:
        print(f"skip   {case}: this system has no such call")
        return
    said = re.findall(rf"landbridge\[\d+\]: Warn: (.*): {REFUSED}$", output, re.M)
    is_named = len(said) == bool(reason) and all(one.startswith(reason) for one in said)
    # The arguments of syslog(3) reach the C library, which prints them as well.
    is_whole = "syslog" not in name or "1 2.50 three 4 5 6 7.5" in output
    measured = f"exit code {code}, " + (said[0] if said else "nothing said")
    checks.check(case, code == 0 and "done" in output and is_named and is_whole, measured, output)


def change(checks, options, program: Path, name: str, words: str) -> None:
    """An incarnation that makes the same change replays; one that makes another change ends."""
    case = f"{name} with another value"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        outcomes, states = [], []
        for value in (1, 1, 2):
            outcomes.append(record.run(name, folder, value))
            states.append(state(folder))
    codes, output = [code for code, _ in outcomes], outcomes[2][1]
    if "not here" in outcomes[0][1]:
        print(f"skip   {case}: no such attributes in {tempfile.gettempdir()}")
        return
    is_named = "this process cannot go on: " in output and re.search(words, output) is not None
    is_once = states[0] == states[1] == states[2]
    measured = f"exit codes {codes}, {'named' if is_named else 'not named'}, {'the same' if is_once else 'other'} files"
    checks.check(case, codes == [0, 0, UNRECOVERABLE] and is_named and is_once, measured, output)


def state(folder: Path) -> dict[str, tuple]:
    """Mode, times of the last change and content of everything in a folder. The status change
    shows a call that has written the same again."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path)] = (about.st_mode, about.st_mtime_ns, about.st_ctime_ns, content)
    return found


def copy_out(checks, options, program: Path) -> None:
    """A file that the kernel copies into a pipe is copied again during replay, and compared."""
    case = "a copy into a pipe"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        source = folder / "source"
        source.write_text("a" * 2000)
        outcomes = [record.run("copy out", folder) for _ in range(2)]
        source.write_text("b" * 2000)
        outcomes.append(record.run("copy out", folder))
    codes, output = [code for code, _ in outcomes], outcomes[2][1]
    is_same = outcomes[0][1] == outcomes[1][1] == "a" * 1100 + "done\n"
    is_named = "its copy of " in output and "the file has changed" in output
    measured = f"exit codes {codes}, {'the same' if is_same else 'other'} bytes, {'named' if is_named else 'not named'}"
    checks.check(case, codes == [0, 0, UNRECOVERABLE] and is_same and is_named, measured, outcomes[0][1] + output)


def two_pipes(checks, options, program: Path) -> None:
    """What comes by two pipes is read in the same order in a replay, also if the other program answers first."""
    case = "answers by two pipes"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        outcomes = [record.run("two pipes", folder, value) for value in (1, 2, 1)]
    codes, outputs = [code for code, _ in outcomes], [output for _, output in outcomes]
    is_same = outputs == ["first\nsecond\ndone\n"] * 3
    checks.check(case, codes == [0, 0, 0] and is_same, f"exit codes {codes}", "".join(outputs))


def waiting_bytes(checks, options, program: Path) -> None:
    """How many bytes wait in a pipe is the same in a replay, however many wait."""
    case = "the bytes that wait in a pipe"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        outcomes = [record.run("waiting bytes", folder, value) for value in (1, 2)]
    codes, outputs = [code for code, _ in outcomes], [output for _, output in outcomes]
    is_same = outputs == ["3 bytes\ndone\n"] * 2
    checks.check(case, codes == [0, 0] and is_same, f"exit codes {codes}", "".join(outputs))


def steady_results(checks, options, program: Path) -> None:
    """A replay gets the results of before: the files have changed since, or placeholders are open."""
    case = "results of calls on changed files"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        (folder / "old").write_text("0123456789")
        time.sleep(SLACK_S + 0.5)
        outcomes = [record.run("steady results", folder)]
        with (folder / "old").open("a") as file:
            file.write("more")
        (folder / "new").mkdir()
        outcomes.append(record.run("steady results", folder))
    codes, outputs = [code for code, _ in outcomes], [output for _, output in outcomes]
    is_right = outputs[0] == outputs[1] and "close-on-exec 0\nread 10, 10 letters\n" in outputs[0] and "next 34" in outputs[0]
    checks.check(case, codes == [0, 0] and is_right, f"exit codes {codes}", "".join(outputs))


def opened_again(checks, options, program: Path, name: str) -> None:
    """A device, or a link that is open itself, cannot be opened again if its name leads elsewhere."""
    case = f"{name} that is replaced"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        (folder / "way").symlink_to("/dev/zero")
        outcomes = [record.run(name, folder) for _ in range(2)]
        (folder / "way").unlink()
        (folder / "way").symlink_to("/dev/full")
        outcomes.append(record.run(name, folder))
    codes, output = [code for code, _ in outcomes], outcomes[2][1]
    is_named = "which it had open, cannot be opened again" in output
    checks.check(case, codes == [0, 0, UNRECOVERABLE] and is_named, f"exit codes {codes}", output)


def clock_of_child(checks, options, program: Path) -> None:
    """A program that a replay starts again reads another clock: the replay ends."""
    case = "a child that reads a clock"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        outcomes = [record.run("clock of a child", folder) for _ in range(2)]
    codes, output = [code for code, _ in outcomes], outcomes[1][1]
    is_named = "of a pipe gave other bytes than before" in output
    checks.check(case, codes == [0, UNRECOVERABLE] and is_named, f"exit codes {codes}", output)


def connection(checks, options, program: Path) -> None:
    """A connection that failed fails again in the replay, for the same reason, also if somebody listens by then."""
    case = "a connection that fails"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder), socket.socket(socket.AF_UNIX) as listener:
        outcomes = [record.run("connection that fails", folder)]
        (folder / "of").write_text("")
        outcomes.append(record.run("connection that fails", folder))
        (folder / "of").unlink()
        listener.bind(str(folder / "of"))
        listener.listen()
        outcomes.append(record.run("connection that fails", folder))
    codes, outputs = [code for code, _ in outcomes], [output for _, output in outcomes]
    is_same = outputs == [f"error {errno.ENOENT}\ndone\n"] * 3
    measured = f"exit codes {codes}, {'the same' if is_same else 'other'} errors"
    checks.check(case, codes == [0, 0, 0] and is_same, measured, "".join(outputs))


def lock(checks, options, program: Path, name: str) -> None:
    """Signals reach a program that waits for a lock of another process, as without the interposer."""
    case = f"a wait for a lock: {name}"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder), open(folder / "locked", "w") as locked:
        (fcntl.lockf if name == "fcntl" else fcntl.flock)(locked, fcntl.LOCK_EX)
        child, before = record.start(name, folder, 1), time.monotonic()
        if name == "restarted lock":
            threading.Timer(1.0, fcntl.flock, (locked, fcntl.LOCK_UN)).start()
        if name == "blocked lock":
            time.sleep(0.5)
            child.terminate()
        code, output = finished(child)
        took_s, recorded = time.monotonic() - before, record.recorded()
    wanted = -signal.SIGTERM if name == "blocked lock" else 0
    is_right = code == wanted and ("done" in output) == (wanted == 0) and took_s < LIMIT_S / 2
    is_right &= name != "restarted lock" or took_s > 0.9
    # A thousand writes after the wait: each has an entry of more than 16 bytes.
    is_right &= name != "left lock" or recorded > 16_000
    checks.check(case, is_right, f"exit code {code} after {took_s:.1f} s, {recorded} bytes recorded", output)


def deadlock(checks, options, program: Path) -> None:
    """Two processes that wait for a range of each other get no EDEADLK."""
    case = "two that wait for locks of each other"
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder), Case(options, program) as (other, _):
        children = [which.start("deadlock", folder, value) for which, value in ((record, 1), (other, 2))]
        outcomes = [finished(child) for child in children]
    codes = [code for code, _ in outcomes]
    checks.check(case, codes == [0, 0], f"exit codes {codes}", "".join(output for _, output in outcomes))


def killed(checks, options, program: Path, name: str, reason: str) -> None:
    """The first incarnation is killed with its files open; the next one goes on, or says why it
    cannot."""
    case, (call, _, kind) = f"killed with {name}", name.partition(" on ")
    if not checks.wants(case):
        return
    with Case(options, program) as (record, folder):
        if kind and subprocess.run(["mount", "-t", kind, "none", folder], capture_output=True).returncode:
            print(f"skip   {case}: nothing can be mounted")
            return
        outcomes = [record.run(call, folder, value) for value in (1, 2)]
        if kind:
            subprocess.run(["umount", folder], check=True)
    codes, output = [code for code, _ in outcomes], outcomes[1][1]
    is_right = codes == [-9, UNRECOVERABLE] and reason in output if reason else codes == [-9, 0] and "done" in output
    checks.check(case, is_right, f"exit codes {codes}", output)


def range_locks(checks, options, program: Path, case: str, name: str) -> None:
    """Locks of ranges by several descriptors are those of POSIX, and a replay takes their results."""
    if not checks.wants(case):
        return
    outcomes = []
    for values in ((1,), (2, 2)):
        with Case(options, program) as (record, folder):
            outcomes += [record.run(name, folder, value) for value in values]
    codes, outputs = [code for code, _ in outcomes], [output for _, output in outcomes]
    is_right = all("done" in output for output in outputs)
    checks.check(case, codes == [0, 0, 0] and is_right, f"exit codes {codes}", "".join(outputs))


class Case:
    """A record and a folder of files, for one case."""

    def __init__(self, options, program: Path):
        self.record, self.folder = Record(options, program), tempfile.TemporaryDirectory()

    def __enter__(self) -> tuple[Record, Path]:
        return self.record, Path(self.folder.name)

    def __exit__(self, *_):
        self.record.close()
        self.folder.cleanup()


if __name__ == "__main__":
    sys.exit(main())
