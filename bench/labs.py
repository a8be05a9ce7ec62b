"""Functions for measurements in a lab: commands, changes of links, counters.

A lab lives as long as the command in it. The caller that starts a lab ends it, on errors and Ctrl-C
too.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support import paths, process

TWO_RAILS = paths.ROOT / "labs" / "two-rails.toml"
LINK_LIMIT_S = 10.0
POLL_S = 0.02


class Failed(Exception):
    """The measurement does not run here; the text says why."""


def name(kind: str) -> str:
    """Name of a lab; several may run at the same time on a machine."""
    return f"{kind}-{os.getpid()}"


def command(file: Path, lab: str, words: list[str]) -> list[str]:
    return [str(paths.LANDBRIDGE), "lab", "run", str(file), "--name", lab, "--", *map(str, words)]


def job(ranks: int, per_node: int, settings: dict[str, str], program: list[str]) -> list[str]:
    """`landbridge run` with `settings`, for use inside a lab."""
    said = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words = ["run", "-n", str(ranks), "--ranks-per-node", str(per_node), *said, "--", *program]
    return [str(paths.LANDBRIDGE), *map(str, words)]


def in_turn(commands: list[list[str]]) -> list[str]:
    """One command that runs all of them, until one fails."""
    return ["sh", "-c", " && ".join(shlex.join(words) for words in commands)]


def environment() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib"), "PYTHONDONTWRITEBYTECODE": "1"}


def run(file: Path, lab: str, words: list[str], limit_s: float) -> str:
    """The output of `words` in a lab of their own."""
    paths.RESULTS.mkdir(parents=True, exist_ok=True)
    finished = process.run(command(file, lab, words), limit_s, environment())
    if not finished.ok:
        raise Failed(f"{finished.why or finished.code}: {process.tail(finished.output, 4)}")
    return finished.output


def link(lab: str, *change: str) -> str:
    """Changes a link of a running lab; returns all links if no change is given."""
    words = [str(paths.LANDBRIDGE), "lab", "link", lab, *change]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LINK_LIMIT_S)
    if done.returncode:
        raise Failed(f"lab link {' '.join(change)}: {done.stderr.strip()}")
    return done.stdout


def bytes_on(lab: str, device: str, lan: str) -> int:
    """Number of bytes that a host has sent into a rail."""
    shown = link(lab)
    found = re.search(rf"^{re.escape(device)}>{lan}: .*\bbytes=(\d+)", shown, re.MULTILINE)
    if not found:
        raise Failed(f"no counter of {device}>{lan} in: {shown}")
    return int(found[1])


class Background:
    """A command in a lab that runs in the background; use it in `with`."""

    def __init__(self, file: Path, lab: str, words: list[str]):
        paths.RESULTS.mkdir(parents=True, exist_ok=True)
        process.adopt_orphans()
        self.log = paths.RESULTS / f"scratch-{lab}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command(file, lab, words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=process.environment(environment()),
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        process.end_descendants()
        self.process.wait()
        self.log.unlink(missing_ok=True)

    def sleep(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    def until(self, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Waits until the condition is true; False at the limit. Raises Failed if the command ends
        meanwhile."""
        deadline = time.monotonic() + limit_s
        while not is_true():
            if self.process.poll() is not None:
                raise Failed(f"ended with {self.process.returncode}: {self.tail()}")
            if time.monotonic() >= deadline:
                return False
            time.sleep(max(0.0, min(POLL_S, deadline - time.monotonic())))
        return True

    def wait(self, limit_s: float) -> int:
        """Waits for the command, and returns its exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"still runs after {limit_s:.0f} s: {self.tail()}") from None

    def tail(self) -> str:
        return process.tail(self.log.read_text(errors="replace"), 5)


def main(measure: Callable[[], str | None]) -> int:
    """Runs a measurement as a program of its own: prints the section it returns."""
    if absent := paths.missing([paths.LANDBRIDGE, paths.PROVIDER, paths.venv("mpich")]):
        print(f"missing: {', '.join(absent)} (make build wheels)")
        return 2
    try:
        text = measure()
    except Failed as failed:
        print(f"does not run: {failed}")
        return 1
    except KeyboardInterrupt:
        process.end_descendants()
        print("interrupted", file=sys.stderr)
        return 130
    if text:
        print("\n" + text)
    return 0 if text else 1
