#!/usr/bin/env python3
"""Ranks that use files are killed: all reads and the final files are those of an undisturbed run.

Under `landbridge run --recover` a job either has the results of an undisturbed run, or ends with a
line that names what cannot be recovered. A job never ends with exit code 0 and a wrong result. A
row is one way to use files (programs/files); the table ROWS names them all. Rows that recover run
together, one job for each program, because a kill costs more than a row; other rows have a job
each. Victims and moments are a function of `--seed`. `--all`: more kinds of kills, one and two
clusters, from the start and from checkpoints; `--apart`: one job for each row. In a lab the node of
two ranks is lost, and they are restarted on a spare node, which sees the same files.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import common
import network
import nodes
import recovery
from support import paths, process

RANKS, STEPS = recovery.RANKS, 11
# On a quiet machine a job takes 8 s with its kills.
LIMIT_S = 120.0
# Seconds: a node that has been silent for 20 s counts as lost; its ranks run elsewhere when the
# node resumes.
SILENT_S = 22.5
# Seconds: the agent of a node whose connection is cut resumes, and ends its ranks.
CUT_S = 4.0
# The kills of the row `renamed-over`.
AFTER_THE_CHANGE = "rank 1 after the change"
# Kills of ranks on several nodes of a lab.
ON_NODES = "one on each node"
SOURCES = common.PROGRAMS / "files"
# Message of a job that ends because a rank cannot be recovered. A rank that reports before any kill
# that it is not recoverable has refused nothing yet.
REFUSAL = (
    r"^landbridge(\[\d+\]: Warn: this process cannot go on|"
    r": .*(cannot be restarted|cannot be started on|is not restarted(?!.*fault of the program)))"
)
# A rank that is killed while it holds a lock may be refused, because others may have taken the lock
# since. A rank without a checkpoint that has an open file without a name may be refused, too.
RIGHT, REFUSED, EITHER = "right", "refused", "right or refused"


@dataclass
class Row:
    """A way to use files. `outcome`: the required result. `is_chance`: the order in the files is
    random. `shell`: the shell command that starts the program. `is_local`: the rank keeps a file
    without a name, which no other node has. `kind`: the only kills of the row. `is_held`: the rank
    holds something over steps, so that images run without `--all` too. `words`: of the launcher.
    `says`: a line that the job prints. `wrapper`: the program is started by the static program."""

    name: str
    program: str
    outcome: str = RIGHT
    is_chance: bool = False
    shell: str = ""
    is_local: bool = False
    kind: str = ""
    is_held: bool = False
    words: tuple = ()
    says: str = ""
    wrapper: bool = False


def rows_of(program: str, names: str, outcome: str = RIGHT, **more) -> list[Row]:
    return [Row(name, program, outcome, **more) for name in names.split()]


# Rows of nodes that have a disk or a kernel of their own: files that are appended to, written again
# and again, replaced by new ones, and read by the rank that has written them.
APART = ("append", "rewrite", "rename", "scratch")
PROGRAMS = ("libc", "mpiio", "python", "fortran", "odd", "rules")
TO_FILE = 'export ROWS_ON_STDOUT=1; exec "$0" "$@" 2> "$1/redirected-stderr.of.$PMI_RANK"'
AFTER_APPEND = 'exec >> "$1/redirected-append.of.$PMI_RANK"; echo start; exec "$0" "$@"'
ROWS = [
    *rows_of("libc", "rewrite rename renames trunc truncate append scratch owner stdio stdio-update names list dup vectors await"),
    *rows_of("libc", "workdir tree"),
    *rows_of("libc", "exclusive attributes"),
    *rows_of("libc", "append-shared", is_chance=True),
    *rows_of("libc", "flock fcntl-lock range-locks", EITHER, is_chance=True),
    *rows_of("libc", "lock-timeout", EITHER),
    *rows_of("libc", "tmpfile unlinked", EITHER),
    *rows_of("libc", "redirected", shell='exec "$0" "$@" > "$1/redirected.of.$PMI_RANK"'),
    *rows_of("libc", "redirected-stderr", shell=TO_FILE, words=("--set", "log=info"), says="a thread reads clocks"),
    *rows_of("libc", "redirected-append", EITHER, shell=AFTER_APPEND),
    *rows_of("libc", "failed-exec", EITHER),
    *rows_of("libc", "renamed-over", kind=AFTER_THE_CHANGE),
    *rows_of("mpiio", "write-at-all write-at-all:automatic write-at-all:enable write-at-all:disable"),
    *rows_of("mpiio", "write-at write-view write-view:enable write-view:disable iwrite-at write-split set-size write-ordered"),
    *rows_of("mpiio", "iwrite-at-all iwrite-at-all:enable iwrite-at-all:disable"),
    *rows_of("mpiio", "write-shared iwrite-shared", is_chance=True),
    *rows_of("python", "text python_append binary tofile checkpoint document zipped"),
    *rows_of("python", "copies memmap_input started mpi_all mpi_later mpi_shared"),
    *rows_of("python", "sqlite", EITHER),
    *rows_of("fortran", "fortran-sequential fortran-append fortran-direct fortran-stream"),
    *rows_of("fortran", "fortran-scratch", is_local=True),
    *rows_of("odd", "sendfile copy-range io_uring aio-linux aio-posix longjmp directory thread-read constructor"),
    *rows_of("odd", "memfd vm-write map-input sync-failed deadline fork-shared wiped refused-connect"),
    *rows_of("odd", "dev-urandom dev-random getrandom-raw", is_chance=True),
    *rows_of("odd", "threads-read", kind="several", is_held=True),
    *rows_of("odd", "mmap-shared mmap-private", REFUSED, is_held=True),
    *rows_of("odd", "map-held map-stored map-stored-later", REFUSED, kind="rank 1", is_held=True),
    *rows_of("odd", "map-late map-late.so", EITHER, kind="rank 1 at the change", is_held=True),
    *rows_of("odd", "splice thread children static-child bare-child", REFUSED),
    *rows_of("odd", "vfork-child spawn-open child-position passed handler grandchild child-look socket shmat signal inotify ioctl", REFUSED),
    *rows_of("odd", "removed thread-lock thread-copy thread-close thread-map", REFUSED),
    *rows_of("odd", "replaced", REFUSED, kind="rank 1"),
    *rows_of("odd", "longjmp-clock child-link thread-link child-directory", REFUSED),
    *rows_of("odd", "spawn-directory child-times child-exists child-process", REFUSED),
    *rows_of("odd", "thread-way thread-space own-name file-handle other-process", REFUSED),
    *rows_of("odd", "static-main", REFUSED, wrapper=True),
    # Logs of the senders need more address space at the start of a rank.
    *rows_of("odd", "no-room", REFUSED, shell='ulimit -v 250000; exec "$0" "$@"', words=("--set", "recover_log=relay")),
    *rows_of("odd", "sendmsg raw-connect syslog", REFUSED),
    *rows_of("rules", "no-append copy-memory size-limit bad-address"),
    *rows_of("rules", "set-append lock-closed", EITHER),
    *rows_of("rules", "lock-child", REFUSED),
    *rows_of("python", "memmap", REFUSED),
    *rows_of("libc", "fifo truncate-chance", REFUSED),
]


# Of the rows that are refused or may be, those that run without `--all`: at least one for each of
# those who can make the call (the rank, another thread, a handler, a child, a program at its start),
# for each time at which it is found (at the call, at the kill, in the replay), and for each kind of
# lock and of file without a name. `calls.py` makes each call.
SAMPLE = set(
    "mmap-shared map-stored-later splice thread children static-child spawn-open handler socket removed replaced"
    " thread-way static-main no-room memmap truncate-chance"
    " flock range-locks unlinked redirected-append failed-exec map-late set-append".split()
)

# What a rank of a refused row says at the call that cannot be recorded, before any kill. The first
# line of a rank counts: later ones are not printed.
REASONS = {
    "mmap-shared": r"it maps FOLDER/mmap-shared\S+ shared and writable",
    "splice": r"it uses splice\(2\) on FOLDER/splice\.from",
    "thread": r"another thread than the first writes FOLDER/thread\.of",
    "children": r"a program that it has started opens FOLDER/children\.of\S+ for writing",
    "static-child": r"it starts \S+/odd-appender, .*linked statically",
    "bare-child": r"it starts /bin/sh, .*LD_PRELOAD is taken out of its environment",
    "vfork-child": r"a program that it has started opens FOLDER/vfork-child\.of\S+ for writing",
    "spawn-open": r"a program that it starts opens FOLDER/spawn-open\.of\S+ for writing",
    "child-position": r"a program that it has started reads \S+ by the rank's own descriptor",
    "passed": r"(?:it receives by a pair of sockets|a program that it has started opens FOLDER/passed\.of|it uses FOLDER/passed\.of\S+ by a descriptor that it did not open)",
    "handler": r"a handler of a signal writes FOLDER/handler\.of",
    "grandchild": r"a program that it has started opens FOLDER/grandchild\.of\S+ for writing",
    "child-look": r"a program that it has started looks for FOLDER/child-look\.flag",
    "socket": r"it binds a socket, which is not recorded",
    "shmat": r"it (?:uses|attaches) shared memory \(shm(?:get|at)\)",
    "signal": r"another process has sent it signal 10|it sends a signal to another process",
    "inotify": r"it watches files for changes \(inotify\)",
    "ioctl": r"it uses ioctl\(2\) 0x541b on FOLDER/ioctl\.of",
    "child-link": r"a program that it has started executes FOLDER/child-link\.link\S+ by a link or directory that is changed",
    "thread-link": r"another thread than the first opens FOLDER/thread-link\.link\S+ by a link or directory that is changed",
    "child-directory": r"a program that it has started looks at FOLDER/child-directory\.made\S+, which is changed",
    "spawn-directory": r"a program that it starts enters FOLDER/spawn-directory\.link\S+ by a link or directory that is changed",
    "child-times": r"a program that it has started looks at FOLDER(?:, which is| by a link or directory that is) changed",
    "child-exists": r"a program that it has started opens FOLDER/child-exists\.of\S+, which is changed",
    "child-process": r"a program that it has started opens /proc/1/comm, which is about another process",
    "thread-way": r"another thread than the first changes /proc/self/fd/\d+",
    "thread-space": r"another thread than the first asks for the file system of FOLDER/thread-space\.of",
    "own-name": r"it writes /proc/\w+/comm, which a restarted process would not write again",
    "file-handle": r"it uses handles of files \(name_to_handle_at\), which is not recorded",
    "other-process": r"it asks about another process \(getpgid\), which is not recorded",
    "thread-map": r"another thread than the first maps \S+odd",
    "thread-lock": r"another thread than the first locks FOLDER/thread-lock\.of",
    "thread-copy": r"another thread than the first reads \S+, which the rank has open",
    "mmap-private": r"it maps FOLDER/mmap-private\S+, which is changed while the job runs",
    "thread-close": r"another thread than the first closes a file that the rank has open",
    "map-stored": r"it maps FOLDER/map-stored\S+(?: shared and writable|, which is changed while the job runs)",
    "longjmp-clock": r"a signal handler has jumped out of a call that was being recorded",
    "static-main": r"what \S+ does with files is not seen \(it is linked statically\)",
    "no-room": r"nothing can record what it does with files",
    "sendmsg": r"it sends by a socket, which is not recorded",
    "raw-connect": r"it connects a socket, which is not recorded",
    "syslog": r"it writes to the system's log \(syslog\)",
    "lock-child": r"a program that it has started keeps its lock on FOLDER/lock-child\.of\S+",
    "memmap": r"it maps FOLDER/memmap\.of\S+ shared and writable",
    "fifo": r"it opens FOLDER/fifo\.of\S+, which keeps nothing",
}
# What a restarted rank of a refused row says where the call itself could be recorded: only its
# replay shows that the file has changed since.
REPLAY_REASONS = {
    "map-held": r"FOLDER/map-held\.of\S+, which it had mapped, has changed since",
    "map-stored-later": r"FOLDER/map-stored-later\.of\S+, which it had mapped, has changed since",
    "truncate-chance": r"its change of a name of FOLDER/truncate-chance\.of",
    "removed": r"FOLDER/removed\.of\S+, which it has open, is not there any more",
    "replaced": r"FOLDER/replaced\.of\S+, which it has open, is not there any more, or is another file by now",
}


@dataclass
class Case:
    """One job: its rows and its kills."""

    name: str
    rows: list[Row]
    kind: str
    words: list[str]
    has_images: bool
    is_lost: bool = False  # the node of two ranks is lost
    # the node is silent for so long that it counts as lost, and then resumes
    is_silent: bool = False
    # the connection of the node's agent is cut, and the ranks of the node go on for a while
    is_cut: bool = False
    # the ranks are on several nodes of a lab, and none is lost
    is_in_lab: bool = False
    # What each node has for itself (programs/apart.py), and what follows for a lost one.
    apart: str = ""
    outcome: str = RIGHT


def main() -> int:
    def add(parser):
        common.add_cases(parser)
        parser.add_argument("--criu", type=Path, default=paths.CRIU, metavar="FILE")
        parser.add_argument("--all", action="store_true", help="the whole matrix")
        parser.add_argument("--apart", action="store_true", help="a job for each row")
        parser.add_argument("--row", action="append", metavar="NAME", help="only this row (again: these)")

    options = common.arguments(__doc__, add)
    common.quiet_environment()
    process.adopt_orphans()
    checks = common.Checks(options)
    cases = [case for case in every_case(options) if checks.wants(case.name)]
    cases = possible(cases, "images", lambda case: case.has_images, lambda: checkpoint.no_criu(options.criu))
    cases = possible(cases, "a lab", lambda case: case.is_lost or case.is_in_lab, lambda: network.no_lab(options))
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(options, Path(folder))
        undisturbed, undecided, either = {}, 0, []
        for case in cases:
            if why_not := programs.why_not(case.rows[0].program):
                print(f"skipped: {case.name}: {why_not}")
                continue
            key = tuple(row.name for row in case.rows)
            if key not in undisturbed:
                undisturbed[key] = alone(options, programs, case)
            measured = check(checks, options, programs, case, undisturbed[key])
            undecided += bool(re.search(CANNOT_TELL, measured))
            either += [REFUSED in measured] * (case.rows[0].outcome == EITHER)
    if undecided:
        checks.check("kills of which nobody can tell what they hit are rare", undecided * 8 <= max(len(cases), 8), f"{undecided} of {len(cases)}")
    if sum(either) > 1:
        checks.check("rows that may be refused are mostly right", sum(either) * 2 <= len(either), f"{sum(either)} of {len(either)} refused")
    return checks.end()


def possible(cases: list[Case], what: str, needs_it, no_reason) -> list[Case]:
    """The cases that this machine can run; prints the reason for the others."""
    able = [case for case in cases if not needs_it(case)]
    if len(able) == len(cases) or not (why_not := no_reason()):
        return cases
    print(f"skipped: {len(cases) - len(able)} cases with {what}: {why_not}")
    return able


class Programs:
    """The programs of the rows, each compiled once with the MPI library of the wheels."""

    def __init__(self, options, folder: Path):
        self.folder, self.root, self.python = folder, options.venvs / "mpich", common.python(options)
        self.made: dict[str, str] = {}

    def why_not(self, name: str) -> str:
        """Why this program cannot be run here; empty if it can."""
        if name != "python" and name not in self.made:
            self.made[name] = self.build(name)
        return "" if name == "python" else self.made[name]

    def command(self, name: str) -> list[str]:
        return [self.python, str(SOURCES / "python.py")] if name == "python" else [str(self.folder / name)]

    def build(self, name: str) -> str:
        mpi = [f"-I{self.root}/include", "-o", str(self.folder / name), f"-L{self.root}/lib", "-lmpi", f"-Wl,-rpath,{self.root}/lib"]
        tool = "gfortran" if name == "fortran" else "gcc"
        if not shutil.which(tool):
            return f"there is no {tool} (Debian: apt install {tool})"
        if name == "fortran":
            kernels = str(self.folder / "kernels.o")
            words = ["gfortran", "-O2", "-J", str(self.folder), "-c", str(SOURCES / "kernels.f90"), "-o", kernels]
            subprocess.run(words, check=True)
            words = ["gcc", "-O2", str(SOURCES / "fortran.c"), kernels, *mpi, "-lgfortran"]
        else:
            words = ["gcc", "-O2", str(SOURCES / f"{name}.c"), *mpi, "-lpthread", "-lrt"]
        if name == "odd":
            library = str(self.folder / "libodd.so")
            subprocess.run(["gcc", "-O2", "-fPIC", "-shared", str(SOURCES / "odd_library.c"), "-o", library], check=True)
            words += [library, f"-Wl,-rpath,{self.folder}"]
        subprocess.run(words, check=True)
        if name == "odd":
            for other in ("appender", "wrapper"):
                words = ["gcc", "-O2", "-static", str(SOURCES / f"{other}.c"), "-o", str(self.folder / f"odd-{other}")]
                subprocess.run(words, check=True)
        return ""


# --- cases


def every_case(options) -> list[Case]:
    ways = [("one cluster", []), ("two clusters", recovery.TWO_CLUSTERS)]
    cases = []
    for name, rows in groups(options).items():
        is_seldom = rows[0].outcome != RIGHT and not rows[0].is_held
        # Where a lost node's processes may still be there.
        untold = [row for row in rows if row.name not in TELL_PROCESS_IDS]
        for has_images in (False, True):
            for place, words in ways:
                # Without `--all` each group runs once from the start, and once from checkpoints
                # over two clusters.
                if not options.all and (bool(words) != has_images or is_seldom and has_images):
                    continue
                inside = ["within writes"] * (name == "mpiio")
                inside += ["within images"] * (has_images and (name == "libc" or options.all and name in PROGRAMS))
                for kind in [rows[0].kind] if rows[0].kind else [*kinds_of(rows[0], bool(words), has_images, options.all), *inside]:
                    start = "from images" if has_images else "from the start"
                    cases.append(Case(f"{name}, {place}, {start}, {kind}", rows, kind, words, has_images))
            if rows[0].kind == AFTER_THE_CHANGE:
                # At another moment the rank has a file open that another rank has removed.
                continue
            if rows[0].outcome == RIGHT and (options.all or name in ("libc", "mpiio") and not has_images):
                # On the second node of a cluster messages and determinants reach the relay by TCP.
                places = [("two nodes", []), ("two nodes of two clusters", nodes.EACH_NODE_ONE)]
                for place, words in places if options.all else places[:1]:
                    case = Case(f"{name}, {place}, {start}", rows, ON_NODES, words, has_images, is_in_lab=True)
                    cases.append(case)
            if rows[0].outcome == RIGHT and (options.all or name == "libc"):
                start = "from images" if has_images else "from the start"
                cases.append(Case(f"{name}, a node is lost, {start}", rows, "", nodes.SPARE, has_images, is_lost=True))
            if rows[0].outcome == RIGHT and (options.all or name == "libc") and not has_images:
                cases.append(Case(f"{name}, the agent of a node is cut off", untold, "", nodes.SPARE, False, is_lost=True, is_cut=True))
            if name == "libc" and (options.all or not has_images):
                cases += apart_cases(rows, start, has_images, options.all)
            if options.all and rows[0].outcome == RIGHT and not has_images:
                words = [*nodes.SPARE, "--set", "peer_timeout=20s"]
                cases.append(Case(f"{name}, a node falls silent", untold, "", words, False, is_lost=True, is_silent=True))
    return cases


def kinds_of(row: Row, is_over_two: bool, has_images: bool, has_all: bool) -> list[str]:
    """The kinds of kills of a row in one of its four jobs: over one or two clusters, with images or
    without. The first kill ends a refused job, whatever its kind, so each of the four has one kind;
    together they have all."""
    kinds = ["rank 0", "rank 1", "several"] if has_all else ["several"]
    return kinds if row.outcome != REFUSED else [kinds[(2 * is_over_two + has_images) % len(kinds)]]


def apart_cases(rows: list[Row], start: str, has_images: bool, has_all: bool) -> list[Case]:
    """A node is lost that has more for itself than its processes. With a disk of its own, what its
    ranks have written and closed is lost with it."""
    rows = [row for row in rows if row.name in APART]
    ways = [("a disk", "disk", REFUSED), ("a kernel", "kernel", RIGHT), ("a disk and a kernel", "disk,kernel", REFUSED)]
    cases = []
    for what, apart, outcome in ways:
        # Where the job must be refused, each row needs a job: one refused row hides the others.
        jobs = [rows] if outcome == RIGHT else [[row] for row in rows if has_all or row.name == APART[0]]
        for these in filter(None, jobs):
            row = "" if outcome == RIGHT or these[0].name == APART[0] else f" {these[0].name}"
            name = f"libc{row}, a node with {what} of its own is lost, {start}"
            cases.append(Case(name, these, "", nodes.SPARE, has_images, is_lost=True, apart=apart, outcome=outcome))
    return cases


def groups(options) -> dict[str, list[Row]]:
    """The rows of each job."""
    found: dict[str, list[Row]] = {}
    for row in ROWS:
        if options.row and row.name not in options.row:
            continue
        if row.outcome != RIGHT and not (options.row or options.all or row.name in SAMPLE):
            continue
        is_alone = options.apart or row.outcome != RIGHT or row.shell or row.is_local or row.kind
        found.setdefault(f"{row.program} {row.name}" if is_alone else row.program, []).append(row)
    return found


def at(step: int, delay_s: float):
    """A condition: `delay_s` seconds have passed since this step began."""
    return after(f"step {step}\n", delay_s)


def after(words: str, delay_s: float):
    """A condition: `delay_s` seconds have passed since these words were printed."""
    seen = []

    def is_due(output: str) -> bool:
        if not seen and words in output:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() >= seen[0] + delay_s

    return is_due


def of_rank(rank: int):
    return lambda chance: [(at(step, chance.uniform(0.0, 0.4)), rank) for step in (3, 7)]


def several(chance) -> list:
    """Kills each rank once, two of them at the same time, and one a second time during its
    restart."""
    first, second, third, fourth = chance.sample(range(RANKS), RANKS)
    moment = lambda: chance.uniform(0.0, 0.4)  # noqa: E731
    kills = [(at(2, moment()), first), (chance.uniform(0.15, 0.5), first), (at(5, moment()), second), (0.0, third)]
    return [*kills, (at(8, moment()), fourth)]


def at_the_change(chance) -> list:
    """Kills rank 1 as the step begins in which the row `map-late` changes its files."""
    return [(at(7, chance.uniform(0.0, 0.1)), 1)]


def after_the_change(chance) -> list:
    """Kills rank 1 in the looks of the step in which the row `renamed-over` renames."""
    return [(after("changed in 8\n", chance.uniform(0.0, 0.2)), 1)]


def on_nodes(chance) -> list:
    """Kills a rank of the relay's node and one of another node, at moments after the first line of a
    step, and the latter again."""
    near, far = chance.randrange(2), chance.randrange(2, RANKS)
    first, second = chance.uniform(0.0, 0.4), chance.uniform(0.5, 0.9)
    return [(first, far), (second, near), (second + chance.uniform(0.3, 0.6), far)]


def within_writes(chance) -> "WithinWrites":
    ways = ["before", "after", str(chance.randrange(2000)), str(chance.randrange(2000))]
    stops = [f"{rank}:{chance.randrange(10, 120)}:{way}" for rank, way in enumerate(chance.sample(ways, RANKS))]
    kills = [1] * RANKS
    kills[chance.randrange(RANKS)] += 1
    return WithinWrites(",".join(stops), kills)


@dataclass
class WithinWrites:
    """Kills ranks that have stopped themselves inside a call of MPI that writes a file (within.h),
    one of them again when its replay has come there. `kills`: those of each rank."""

    stops: str
    kills: list[int]

    def __len__(self) -> int:
        return sum(self.kills)

    def run(self, is_over: threading.Event) -> None:
        """Kills stopped ranks that have kills left, and resumes the others."""
        left = list(self.kills)
        while not is_over.wait(0.01):
            for rank in range(RANKS):
                for pid in filter(is_stopped, recovery.pids_of(rank)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if left[rank] else signal.SIGCONT)
                    left[rank] = max(left[rank] - 1, 0)


class WithinImages:
    """Kills each rank while CRIU takes its second image (checkpoint.criu_that_kills). `folder`: of
    the program that stands for CRIU, and of what it notes."""

    def __init__(self, _):
        self.folder = tempfile.TemporaryDirectory()

    def criu(self, options) -> Path:
        # The shortest dumps take five hundredths.
        return checkpoint.criu_that_kills(Path(self.folder.name), options.criu, "1 + $$ % 4")

    def __len__(self) -> int:
        return len(list(Path(self.folder.name).glob("*.killed")))


def unfinished_images(output: str) -> int:
    """Number of images that were begun and not finished, as their numbers show."""
    numbers = [set(map(int, re.findall(rf"^landbridge: checkpoint (\d+) of rank {rank}: it stood", output, re.M))) for rank in range(RANKS)]
    return sum(len(set(range(1, max(found, default=0))) - found) for found in numbers)


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    return False


KINDS = {
    "rank 0": of_rank(0),
    "rank 1": of_rank(1),
    "several": several,
    "rank 1 at the change": at_the_change,
    AFTER_THE_CHANGE: after_the_change,
    "within writes": within_writes,
    "within images": WithinImages,
    ON_NODES: on_nodes,
}


# --- one job


def play(options, programs: Programs, case: Case, kills, *words):
    """Exit code, all output, and the final content of the files. `kills` are those of ranks, or
    WithinWrites, or a moment at which a node is lost."""
    with tempfile.TemporaryDirectory(dir=programs.folder) as folder:
        program = [*programs.command(case.rows[0].program), folder, str(STEPS), ",".join(row.name for row in case.rows)]
        if shell := case.rows[0].shell:
            program = ["sh", "-c", shell, *program]
        if case.rows[0].wrapper:
            program = [f"{program[0]}-wrapper", *program]
        if isinstance(kills, float):
            # By then each rank has an image.
            begun = "step 6" if case.has_images else "step 4"
            code, _, output = nodes.lab_job(options, program, loss(case, kills), words, begun, topology(case, folder))
        elif case.is_in_lab and kills:
            code, _, output = nodes.lab_job(options, program, kills, words, "step 4")
        elif isinstance(kills, WithinWrites):
            is_over = threading.Event()
            killer = threading.Thread(target=kills.run, args=[is_over])
            killer.start()
            stops = {"ROWS_STOPPED": kills.stops}
            code, _, output = recovery.job(options, program, [], *words, limit_s=LIMIT_S, environment=stops)
            is_over.set()
            killer.join()
        else:
            is_by_criu = isinstance(kills, WithinImages)
            job = functools.partial(recovery.job, limit_s=LIMIT_S, recover=is_by_criu or bool(kills))
            code, _, output = job(options, program, [] if is_by_criu else kills, *words)
        return code, output.replace(folder, "FOLDER"), contents(Path(folder))


def topology(case: Case, folder: str) -> list[str]:
    """The command that changes the lab for this case, and then runs the launcher."""
    if case.is_cut:
        return [sys.executable, str(common.PROGRAMS / "through_pipes.py")]
    return [sys.executable, str(common.PROGRAMS / "apart.py"), folder, case.apart] if case.apart else []


def loss(case: Case, moment: float) -> list:
    """The events by which the first node is lost at this moment."""
    if case.is_silent:
        return [(moment, ("north-1", nodes.STOPPED)), (moment + SILENT_S, ("north-1", nodes.WOKEN))]
    if case.is_cut:
        # A stopped agent does not end its ranks, as a slow one would do late.
        cut = (moment, lambda: cut_agent("north-1"))
        return [(moment, ("north-1", nodes.STOPPED)), cut, (moment + CUT_S, ("north-1", nodes.WOKEN))]
    return [(moment, nodes.KILLED)]


def cut_agent(host: str) -> None:
    """Ends the processes between the launcher and the agent of this host (through_pipes.py)."""
    for pid in process.descendants():
        # The process may have ended meanwhile.
        with contextlib.suppress(OSError):
            is_of_host = f"THROUGH={host}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if is_of_host and Path(f"/proc/{pid}/comm").read_text().strip() in ("cat", "sh"):
                os.kill(pid, signal.SIGKILL)


def alone(options, programs: Programs, case: Case):
    """The counts and the files of an undisturbed job."""
    code, output, files = play(options, programs, case, [])
    found = counts(output)
    if code or wrong_rows(case, found, found):
        print(f"undisturbed, {case.name} ends with {code}\n{process.tail(output)}")
    return found, files


def contents(folder: Path) -> dict[str, bytes]:
    """The content of each file, by its name in the folder; of a link its target without the
    folder's own name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path).replace(str(folder), "").encode()
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def counts(output: str) -> dict[tuple[str, int], str]:
    """The count of each rank in each row; a count that was printed twice is marked."""
    found: dict[tuple[str, int], str] = {}
    for row, rank, what in re.findall(r"^row (\S+) rank (\d+): (.*)$", output, re.M):
        found[row, int(rank)] = "said twice" if (row, int(rank)) in found else what
    return found


def wrong_rows(case: Case, found, wanted) -> list[str]:
    """Rows whose counts differ from those of an undisturbed run, or that report an error."""
    wrong = []
    for row in case.rows:
        own = [found.get((row.name, rank), "nothing said") for rank in range(RANKS)]
        same = own == [wanted.get((row.name, rank)) for rank in range(RANKS)]
        if not same or not all(what.startswith("wrong 0 of ") for what in own):
            wrong.append(row.name)
    return wrong


def other_files(case: Case, files, wanted) -> list[str]:
    """Rows whose files differ from those of an undisturbed run. Where the order is random, only
    their lengths are compared."""
    wrong = []
    for row in case.rows:
        parts = [{name: what for name, what in all_of.items() if name.startswith(row.name + ".")} for all_of in (files, wanted)]
        if row.is_chance:
            parts = [{name: len(what) for name, what in part.items()} for part in parts]
        if parts[0] != parts[1]:
            wrong.append(row.name)
    return wrong


def check(checks, options, programs: Programs, case: Case, undisturbed) -> str:
    # The seed includes the name, so a case is the same one with `--only`.
    chance = random.Random(f"{options.seed} {case.name}")
    kills = chance.uniform(0.0, 0.8) if case.is_lost else KINDS[case.kind](chance)
    words = [*case.words, *case.rows[0].words]
    if case.has_images:
        criu = kills.criu(options) if case.kind == "within images" else options.criu
        words += ["--checkpoint", "1s", "--set", f"criu={criu}"]
        # A line for each image that was taken.
        words += ["--verbose"] * (case.kind == "within images")
    code, output, files = play(options, programs, case, kills, *words)
    outcome, measured = judge(case, code, output, files, undisturbed)
    starts, images = len(re.findall("^landbridge: .*: restarted", output, re.M)), checkpoint.restores(output)
    images += len(re.findall(r"^landbridge: rank \d is restored from checkpoint \d+ on north-2", output, re.M))
    within = checkpoint.kills_within_restores(output)
    is_met = starts + within == len(kills) if not case.is_lost else "are restarted on north-2" in output
    is_met &= images > 0 or not case.has_images
    if case.kind == "within images":
        is_met &= starts >= RANKS - 1 and unfinished_images(output) > 0
    if outcome == REFUSED and (missing := missing_reason(case, output)):
        outcome, measured = "failed", f"{missing}; {measured}"
    measured += f", {starts} restarts" + (f", {images} from images" if case.has_images else "")
    if case.kind == "within images":
        unfinished, why = unfinished_images(output), re.findall(r"has no checkpoint.*|no checkpoints on.*", output)
        measured += f", {unfinished} images unfinished" + (f" ({why[0] if why else 'without a line'})" if unfinished > len(kills) else "")
    if not is_met:
        said = re.findall(r"^landbridge: (.*(?:restarted|restored|once more).*)", output, re.M)
        measured += f", of {1 if case.is_lost else len(kills)} kills: {said}"
    is_said = bool(re.search(case.rows[0].says, output))
    measured += "" if is_said else f", {case.rows[0].says!r} is not said"
    is_right = outcome == RIGHT and is_met and case.outcome == RIGHT or outcome == REFUSED and may_refuse(case, measured)
    checks.check(case.name, is_right and is_said, f"exit code {code}, {measured}", output)
    return measured


# A kill while a rank creates a file or folder that others may create or remove as well (a lock,
# say), or just before a write within one page of a file that others write meanwhile: nothing shows
# which rank did. Such a job is refused, which must be rare.
CANNOT_TELL = r"killed within its (open|change of a name|change of size or attributes|copy within the kernel|write of \d+ bytes at \d+) .*cannot be known"
# Why a row that may be refused is: any other reason would be a failure.
EITHER_REASON = (
    CANNOT_TELL + r"|killed while it held a lock on|which it had mapped, has changed since|is not there any more"
    # With images the agent may have seen the change before the kill, and then the launcher says it.
    r"|cannot be restarted: it has mapped .*, which has changed since|is on a file system of that node"
)

# MPICH's library for files sends its process id to other ranks, as the rows of TELL_PROCESS_IDS do. The
# nodes of a lab share their process ids, and a rank of a node that is only cut off still has its own:
# the next incarnation then gets another one, and says so.
TELL_PROCESS_IDS = ("memfd", "vm-write")
WITH_MPI_FILES = ("mpiio", "python")
OTHER_PROCESS_ID = r"sent something else than before|sends as its frame|is not what it sent (?:there )?before"


def may_refuse(case: Case, measured: str) -> bool:
    """Whether the job may refuse: rows that are refused, and on another node rows that keep a file
    that only the lost node has, or send a process id that the lost node still uses."""
    first = case.rows[0]
    if case.outcome == REFUSED:
        is_elsewhere = "which it has changed on another node, is on a file system of that node" in measured
        return is_elsewhere or bool(re.search(CANNOT_TELL, measured))
    if first.outcome == EITHER:
        return bool(re.search(EITHER_REASON, measured))
    if (case.is_cut or case.is_silent) and first.program in WITH_MPI_FILES and re.search(OTHER_PROCESS_ID, measured):
        return True
    cannot_tell = re.search(CANNOT_TELL, measured)
    return first.outcome == REFUSED or bool(cannot_tell) or case.is_lost and first.is_local


def missing_reason(case: Case, output: str) -> str:
    """What the output of a refused job lacks: the row's own reason, said by each rank before the
    first kill, and repeated when the rank is not restarted. Empty if it lacks nothing."""
    row = case.rows[0]
    if row.outcome != REFUSED:
        return ""
    if reason := REPLAY_REASONS.get(row.name):
        # With images the agent has the reason from the look before the next image.
        seen_before = reason.replace(", which it had mapped, ", ", which ")
        own = rf"Warn: this process cannot go on: {reason}|cannot be restarted: it has mapped {seen_before}"
        return "" if re.search(own, output) else "NOT ITS OWN REASON"
    if not (reason := REASONS.get(row.name)):
        return "NO REASON IN THE TABLE"
    lines = output.splitlines()
    killed = next((at for at, line in enumerate(lines) if "was killed by SIGKILL" in line), len(lines))
    own = rf"^landbridge(\[\d+\]: Warn|: rank \d+): ({reason}).*: if this process is killed it cannot be restarted$"
    said = [match for line in lines[:killed] if (match := re.match(own, line))]
    if len({match[1] for match in said}) < RANKS:
        return f"SAID BY {len(said)} RANKS BEFORE THE KILL"
    is_repeated = any(re.search(rf"cannot be restarted: ({reason})", line) for line in lines[killed:])
    return "" if is_repeated else "REFUSED FOR ANOTHER REASON"


def judge(case: Case, code, output: str, files, undisturbed) -> tuple[str, str]:
    counted, kept = undisturbed
    wrong = wrong_rows(case, counts(output), counted)
    wrong += [f"{name} (files)" for name in other_files(case, files, kept) if name not in wrong]
    if code == 0:
        return ("wrong", f"WRONG: {', '.join(wrong)}") if wrong else (RIGHT, "right")
    said = re.findall(f"{REFUSAL}.*$", output, re.M) and re.search(f"{REFUSAL}.*$", output, re.M)[0]
    return (REFUSED, f"refused: {said[:200]}") if said else ("failed", "ended without saying what cannot be restarted")


if __name__ == "__main__":
    sys.exit(main())
