"""Functions that the drivers of this folder share: paths, checks, exit codes.

Every driver takes `--bin DIR` (landbridge, landbridge-relay, liblandbridge-fi.so) and `--venvs DIR`
(a virtual environment for each MPI library: mpich, ompi, impi). A job runs to its end or to its
limit, and leaves nothing behind.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from sample import SAMPLES  # noqa: E402
from support import process  # noqa: E402

PROGRAMS = HERE / "programs"
# Fills memory of the C library (0, and 255 once it is free). IMB sends memory that it has never
# written, if its time is over before it has measured anything: the bytes would depend on earlier
# reads of files.
FILLED = {"MALLOC_PERTURB_": "255"}
# Exit code by which scripts/test.py recognizes "cannot run here".
SKIPPED = 77
# Seconds for a job; on an idle machine no job takes a tenth of it.
LIMIT_S = 120.0
# What `--set` has said.
SETTINGS: list[str] = []
# Names of cases that state `recover_log`, or what goes with one of its values alone: with `--set
# recover_log=…` they are the same as without.
STATES_LOGGER = re.compile("logs of (the senders|relays)|ranks of a node together|relays on other nodes")
# Lines of failed checks that are repeated at the end of a driver's output.
REPEATED_LINES = 60


def fits(restarts: int, kills: int, words=()) -> bool:
    """Whether so many restarts follow from so many kills. Ranks of a node that begin again together
    (`recover_unit=node`) begin once if several are killed at once."""
    is_together = "recover_unit=node" in [*SETTINGS, *words]
    return restarts == kills or is_together and 1 <= restarts <= kills


# What a process says of a peer that confirms more than it was sent: of none that has ended well.
NEVER_SENT = "bytes that were never sent"


class PassedCases:
    """The cases that passed in earlier runs of the same step: a file with a line for each, which are
    left out now. A case passes with a check that has its name, of drivers that ask for all cases
    first. Others pass if they made a check between being asked for and the next one. No case passes
    of which a check fails, then or later."""

    def __init__(self, file: Path | None):
        self.file = file
        self.names = file.read_text().splitlines() if file and file.exists() else []
        self.left_out: set[str] = set()
        self.asked: set[str] = set()
        self.begun: tuple[str, int, int] | None = None

    def begins(self, name: str, made: int, failed: int) -> bool:
        """Whether the case is to run."""
        if name in self.names:
            self.left_out.add(name)
            return False
        self.asked.add(name)
        self.begun = (name, made, failed)
        return True

    def note(self, check: str, is_ok: bool) -> None:
        """Notes the outcome of a check."""
        if not is_ok:
            self.names = [name for name in self.names if not check.startswith(name)]
            self.asked = {name for name in self.asked if not check.startswith(name)}
            self.write()
        elif check in self.asked:
            self.add(check)

    def end(self, made: int, failed: int) -> None:
        if not self.begun:
            return
        name, made_before, failed_before = self.begun
        self.begun = None
        if made > made_before and failed == failed_before:
            self.add(name)

    def add(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)
            self.write()

    def write(self) -> None:
        if self.file:
            self.file.write_text("".join(f"{name}\n" for name in self.names))


class Checks:
    """Prints one line for each check, with the seconds since the check before, and remembers
    failures."""

    def __init__(self, options):
        self.options = options
        self.failed = 0
        self.made = 0
        self.named = []
        # Lines of failed checks, repeated at the end: a log may be read from its end only.
        self.failures: list[str] = []
        # Cases of the sample that have not run yet; empty if all cases run.
        self.sample = set(SAMPLES[Path(sys.argv[0]).stem]) if options.sample else None
        self.unseen = set(self.sample or ())
        self.left_out: set[str] = set()
        # Cases that `--set recover_log=…` does not change.
        self.unchanged: set[str] = set()
        self.is_logger_set = any(setting.startswith("recover_log=") for setting in options.set)
        self.checked_at = time.monotonic()
        self.passed = PassedCases(getattr(options, "passed", None))

    def wants(self, name: str) -> bool:
        """Whether this case is to run. With `--list` none runs, and the names of the selected cases
        are printed."""
        self.passed.end(self.made, self.failed)
        is_wanted = not self.options.only or re.search(self.options.only, name) is not None
        if self.sample is not None:
            self.unseen.discard(name)
            if is_wanted and name not in self.sample:
                self.left_out.add(name)
                return False
        if is_wanted and self.is_logger_set and STATES_LOGGER.search(name):
            self.unchanged.add(name)
            return False
        if is_wanted and getattr(self.options, "list", False):
            self.named += [] if name in self.named else [name]
            return False
        return is_wanted and self.passed.begins(name, self.made, self.failed)

    def wants_compiled(self, name: str) -> bool:
        """Whether this case is to run, which compiles a program."""
        if not self.wants(name):
            return False
        if why_not := no_compiler():
            print(f"skipped: {name}: {why_not}")
        return not why_not

    def check(self, name: str, is_ok: bool, measured: str, output: str = "") -> bool:
        if "exit code 0" in measured and NEVER_SENT in output:
            is_ok, measured = False, f"{measured}, and a process was taken for one that breaks the protocol"
        self.made += 1
        self.failed += not is_ok
        self.passed.note(name, is_ok)
        before, self.checked_at = self.checked_at, time.monotonic()
        print(f"{'ok' if is_ok else 'FAILED':6} {self.checked_at - before:5.1f} s  {name}: {measured}", flush=True)
        if not is_ok:
            lines = [f"FAILED {name}: {measured}", *("       | " + line for line in explanation(output))]
            print("\n".join(lines[1:]), flush=True)
            self.failures += lines
        return is_ok

    def end(self) -> int:
        self.passed.end(self.made, self.failed)
        if getattr(self.options, "list", False):
            print("\n".join(self.named))
            return 0
        for name in sorted(self.unseen):
            print(f"the sample names a case that there is not: {name}")
            self.failed += 1
        if self.unchanged:
            print(f"skipped: {len(self.unchanged)} cases that state themselves who logs messages")
        left_out = f", {len(self.left_out)} cases left to make test-all" if self.left_out else ""
        if self.passed.left_out:
            left_out += f", {len(self.passed.left_out)} cases had passed earlier"
        if self.failures:
            print("\n".join(["", *self.failures[:REPEATED_LINES], ""]))
        print(f"{self.made} checks, {self.failed} failed{left_out}")
        is_any = self.made or self.passed.left_out
        if not is_any:
            print("no check was made")
        return 1 if self.failed or not is_any else 0


def skipped(why_not: str) -> int:
    """Says why a driver cannot run here; returns its exit code."""
    print(f"skipped: {why_not}")
    return SKIPPED


def no_compiler() -> str:
    """Why no C program can be compiled here; empty if one can."""
    return "" if shutil.which("gcc") else "there is no gcc (Debian: apt install gcc)"


def explanation(output: str) -> list[str]:
    """The lines of a failed job that tell why: its end, and before it the panic of one of
    Landbridge's processes and the errors that a program of the tests found, which may be far above
    the end."""
    lines = output.splitlines()
    end = lines[-15:]
    first = next((number for number, line in enumerate(lines) if "panicked at" in line), None)
    above = lines[first : first + 12] if first is not None else []
    above += [line for line in lines[:-15] if line.startswith("wrong: ")][:12]
    return [*above, "...", *end] if above else end


def arguments(description: str, add=None):
    """Parses and checks the options of a driver; ends the driver if a required file is missing."""
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument("--bin", type=Path, default=ROOT / "target" / "release", metavar="DIR")
    parser.add_argument("--venvs", type=Path, default=ROOT / "build" / "venv", metavar="DIR")
    parser.add_argument("--only", metavar="REGEX", help="only checks whose names match")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting for all jobs that do not state it")
    parser.add_argument("--sample", action="store_true", help="only the cases of sample.py, as `make test` does")
    parser.add_argument("--passed", type=Path, metavar="FILE", help="leave out the cases in FILE, and add those that pass")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one job")
    if add:
        add(parser)
    options = parser.parse_args()
    SETTINGS.extend(options.set)
    options.bin, options.venvs = options.bin.resolve(), options.venvs.resolve()
    needed = [options.bin / "landbridge", options.bin / "liblandbridge-fi.so"]
    absent = [str(path) for path in needed if not path.exists()]
    if absent:
        print(f"missing: {', '.join(absent)} (make build)")
        sys.exit(2)
    return options


def add_cases(parser) -> None:
    """Further options for `arguments`, of drivers that ask `Checks.wants` for each case."""
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    parser.add_argument("--list", action="store_true", help="name the cases")


def python(options, mpi: str = "mpich") -> str:
    """The interpreter with mpi4py on `mpi`; ends the driver if `make wheels` has not been run."""
    found = options.venvs / mpi / "bin" / "python"
    if not found.exists():
        print(f"skipped: {found} is not there (make wheels)")
        sys.exit(SKIPPED)
    return str(found)


def landbridge_run(options, ranks: int, *words) -> list[str]:
    """`landbridge run` up to the program: `words` are further options."""
    return [str(options.bin / "landbridge"), "run", "-n", str(ranks), *words, "--"]


def settings(options, mpi: str) -> dict[str, str]:
    """The settings that `landbridge env --mpi` prints, as an environment for the library's own
    launcher."""
    words = [str(options.bin / "landbridge"), "env", "--mpi", mpi]
    text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout
    exports = re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE)
    return {name: value.strip("'\"") for name, value in exports}


def run(options, command, environment=None, limit_s=None) -> process.Finished:
    """Runs a job to its end. Its environment is that of this process without settings that would
    change what is tested."""
    return process.run(
        [str(word) for word in command],
        limit_s or options.limit,
        {"PYTHONDONTWRITEBYTECODE": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        | (environment or {}),
        cwd=HERE,
    )


def how(finished: process.Finished) -> str:
    """A short text about the end of a job."""
    return finished.why or f"exit code {finished.code} after {finished.seconds:.1f} s"


def values(output: str, key: str) -> list[str]:
    """The values that programs printed as `key: value`, in order."""
    return re.findall(rf"^{re.escape(key)}: (.*)$", output, re.MULTILINE)


def quiet_environment() -> None:
    """Removes settings from the environment: a driver may run inside a job or with settings, which
    its jobs must not see."""
    for name in list(os.environ):
        if name.startswith(("LANDBRIDGE_", "FI_", "PMI_", "MPIR_", "OMPI_", "I_MPI_")):
            del os.environ[name]
    # With it `print` writes a line and its end apart, and a line of another rank may come between.
    os.environ.pop("PYTHONUNBUFFERED", None)
    # The tests are about Landbridge's provider.
    os.environ["LANDBRIDGE_LOCAL"] = "own"
    for setting in SETTINGS:
        name, _, value = setting.partition("=")
        os.environ[f"LANDBRIDGE_{name.upper()}"] = value
