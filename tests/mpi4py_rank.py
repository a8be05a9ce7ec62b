"""Runs the mpi4py test suite inside one rank and records each outcome at once.

Usage: mpi4py_rank.py SUITE_DIR RECORD_DIR [SKIP_FILE [ONLY_FILE]]

What leaves is RECORD_DIR/rank-N, one line for each event: `start ID`, then `pass ID SECONDS`, `skip
…` or `fail …`; and `end` when the suite is complete. A rank that dies or hangs leaves a `start`
without an outcome, which names the guilty test however garbled the output of the job is. Tests
whose ids match a pattern in SKIP_FILE are not run: so the driver continues after a test that hung.
ONLY_FILE names the tests to run, by ids or patterns.
"""

import fnmatch
import sys
import time
import unittest
from pathlib import Path


class Recorder(unittest.TextTestResult):
    """Writes one line for each event, unbuffered, into the file of this rank."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        from mpi4py import MPI

        self.record = open(RECORDS / f"rank-{MPI.COMM_WORLD.rank}", "a", buffering=1)
        self.outcome = {}

    def startTest(self, test):
        self.outcome[test.id()] = "pass"
        self.started = time.monotonic()
        print("start", test.id(), file=self.record)
        super().startTest(test)

    def stopTest(self, test):
        super().stopTest(test)
        seconds = time.monotonic() - self.started
        print(self.outcome[test.id()], test.id(), f"{seconds:.2f}", file=self.record)

    def stopTestRun(self):
        super().stopTestRun()
        print("end", file=self.record)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note(test, "skip")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.note(test, "fail")

    def addError(self, test, err):
        super().addError(test, err)
        self.note(test, "fail")

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.note(test, "fail")

    def note(self, test, outcome):
        if test.id() in self.outcome:
            self.outcome[test.id()] = outcome
        else:
            # A class or module failed to set up: no startTest was announced for it.
            print(outcome, test.id().replace(" ", "_"), 0, file=self.record)


class Runner(unittest.TextTestRunner):
    resultclass = Recorder


def main():
    """Runs the suite. Called only under the guard below: workers that the suite spawns import this
    file."""
    sys.path.insert(0, str(SUITE))
    sys.dont_write_bytecode = True
    import main as suite

    class Loader(suite.TestLoader):
        def getTestCaseNames(self, testCaseClass):
            prefix = f"{testCaseClass.__module__}.{testCaseClass.__qualname__}."
            names = super().getTestCaseNames(testCaseClass)
            return [name for name in names if not left_out(prefix + name)]

    suite.TestLoader = Loader
    suite.main(module=None, argv=["main.py", "-v"], testRunner=Runner)


def left_out(test: str) -> bool:
    return matches(test, SKIP) or not matches(test, ONLY)


def matches(test: str, names: set[str]) -> bool:
    return test in names or any(fnmatch.fnmatchcase(test, p) for p in names if "*" in p)


if __name__ == "__main__":
    SUITE = Path(sys.argv[1])
    RECORDS = Path(sys.argv[2])
    SKIP = set(Path(sys.argv[3]).read_text().split()) if len(sys.argv) > 3 else set()
    ONLY = set(Path(sys.argv[4]).read_text().split()) if len(sys.argv) > 4 else {"*"}
    main()
