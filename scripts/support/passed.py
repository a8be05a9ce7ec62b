"""Which steps of `scripts/test.py` have passed on the present commit, in earlier runs.

A step counts if its command is the same as now, and if nothing was changed since the commit. So
`make test-all`, which takes hours, can be interrupted and go on: `scripts/test.py --slow --resume`.
"""

import json
import subprocess
from pathlib import Path


class Passed:
    """The steps that have passed on one commit. The file holds one commit alone: the newest."""

    def __init__(self, file: Path, commit: str):
        self.file, self.commit = file, commit
        try:
            kept = json.loads(file.read_text())
        except (OSError, ValueError):
            kept = {}
        self.steps = kept.get("steps", {}) if commit and kept.get("commit") == commit else {}

    def find(self, name: str, command: list[str]) -> dict | None:
        """What was noted of a step, if it has passed."""
        found = self.steps.get(name)
        return found if found and found["command"] == command else None

    def note(self, name: str, command: list[str], outcome: dict) -> None:
        """Notes that a step has passed. Without a commit nothing is noted."""
        if not self.commit:
            return
        self.steps[name] = {**outcome, "command": command}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"commit": self.commit, "steps": self.steps}, indent=1))
        new.replace(self.file)


def present_commit(root: Path) -> str:
    """The commit that is checked out; empty if something was changed since, or there is none."""
    try:
        changed = git(root, "status", "--porcelain", "--untracked-files=no")
        return "" if changed else git(root, "rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return ""


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout.strip()
