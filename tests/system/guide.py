#!/usr/bin/env python3
"""Runs the commands of docs/GUIDE.md: every `sh` block, in order, in one shell.

The blocks run in one bash with `set -eu -o pipefail`, from the root of the clone, without a
terminal and with empty standard input; each block has `--limit` seconds. A block fails if one of
its commands fails. Later blocks use what earlier ones have made, so none runs after a block that
has failed. Blocks that use a lab are skipped where no lab can be built. The directory `build/guide`
is removed at the end; one that was there before is restored.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import common
from support import lab, process

GUIDE = common.ROOT / "docs" / "GUIDE.md"
MADE = common.ROOT / "build" / "guide"
LAB_FILE = lab.LABS / "two-sites.toml"
LAB_WORDS = "landbridge lab"


@dataclass
class Block:
    """A block of the guide: the line of its first command, the heading above, the commands."""

    line: int
    heading: str
    commands: str

    @property
    def name(self) -> str:
        return f"line {self.line}, {self.heading}"


def main() -> int:
    options = common.arguments(__doc__)
    common.python(options)
    for place, tested in (("target/release", options.bin), ("build/venv", options.venvs)):
        if (common.ROOT / place).resolve() != tested:
            return common.skipped(f"the guide uses {place}, and what is tested is {tested}")
    common.quiet_environment()
    # A reader of the guide has no setting.
    os.environ.pop("LANDBRIDGE_LOCAL", None)
    checks = common.Checks(options)
    blocks = blocks_of(GUIDE.read_text())
    left_out = 0
    in_labs = [block for block in blocks if LAB_WORDS in block.commands]
    if in_labs and (why_not := lab.why_not(options.bin / "landbridge", LAB_FILE)):
        for block in in_labs:
            print(f"skipped: {block.name}: no lab can be built here: {why_not}")
            blocks.remove(block)
            left_out += 1
    before = MADE.with_name(f"guide-before-{time.time_ns()}")
    if MADE.exists():
        MADE.rename(before)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            Walk(checks, blocks, Path(scratch)).run()
    finally:
        shutil.rmtree(MADE, ignore_errors=True)
        if before.exists():
            before.rename(MADE)
    if left_out:
        print(f"{left_out} blocks skipped, because no lab can be built here")
    return checks.end()


def blocks_of(text: str) -> list[Block]:
    """The `sh` blocks of a document, in order."""
    blocks, heading, commands = [], "", None
    for number, line in enumerate(text.splitlines(), 1):
        if commands is not None:
            if line == "```":
                blocks.append(Block(number - len(commands), heading, "\n".join(commands) + "\n"))
                commands = None
            else:
                commands.append(line)
        elif line == "```sh":
            commands = []
        elif found := re.match(r"#+ (.+)", line):
            heading = found[1]
    return blocks


class Walk:
    """One run of the blocks. The shell notes in a file when it begins and ends each block."""

    def __init__(self, checks: common.Checks, blocks: list[Block], folder: Path):
        self.checks, self.blocks, self.folder = checks, blocks, folder
        self.marks = folder / "marks"
        self.ended = 0
        self.began_at = time.monotonic()

    def run(self) -> None:
        lines = ["set -eu -o pipefail"]
        for number, block in enumerate(self.blocks):
            source = self.folder / f"{number}.sh"
            source.write_text(block.commands)
            lines.append(f"{{ . {source}; }} > {self.output(number)} 2>&1 < /dev/null")
            lines.append(f"echo $EPOCHREALTIME >> {self.marks}")
        script = self.folder / "guide.sh"
        script.write_text("\n".join(lines) + "\n")
        self.marks.touch()
        self.began_at = time.monotonic()
        limit_s = self.checks.options.limit * (len(self.blocks) + 1)
        command = ["bash", str(script)]
        finished = process.run(command, limit_s, cwd=common.ROOT, stalled=self.is_late)
        self.report()
        if self.ended < len(self.blocks):
            why = "time limit" if finished.why else common.how(finished)
            output = self.output(self.ended)
            text = output.read_text(errors="replace") if output.exists() else finished.output
            self.checks.check(self.blocks[self.ended].name, False, why, text)
            for block in self.blocks[self.ended + 1 :]:
                print(f"not run: {block.name}")

    def output(self, number: int) -> Path:
        return self.folder / f"{number}.out"

    def is_late(self) -> bool:
        """Whether the present block has used up its time. Reports the blocks that have ended."""
        self.report()
        return time.monotonic() - self.began_at > self.checks.options.limit

    def report(self) -> None:
        for _ in self.marks.read_text().splitlines()[self.ended :]:
            block = self.blocks[self.ended]
            self.checks.check(block.name, True, shown(block.commands))
            self.ended += 1
            self.began_at = time.monotonic()


def shown(commands: str) -> str:
    """The first line of a block that runs Landbridge, or else its first line."""
    lines = [line.strip() for line in commands.splitlines()]
    first = next((line for line in lines if "landbridge " in line), lines[0])
    return first[:70]


if __name__ == "__main__":
    sys.exit(main())
