#!/usr/bin/env python3
"""Checks licences, bans and sources of all dependencies by deny.toml (`make lint`, `make test`).

What enters: a cargo-deny of the user's, or else the pinned version, which the first call builds
under build/: two minutes of one core without optimisation, because a check takes only a second.
What leaves: the exit code of cargo-deny, or 77 with the reason on the last line if cargo-deny is
not available. The answer depends on deny.toml, the Cargo.toml of each crate and Cargo.lock
alone, which names each dependency with its checksum: if their digest is that in CHECKED, which a passed check writes, nothing is built or
checked again. Known vulnerabilities are not checked: their database comes from the network, and its
answer for the same tree changes from day to day (`cargo deny check advisories` checks them).
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths  # noqa: E402

VERSION = "0.20.2"
# The oldest version that reads the project's deny.toml and Cargo.lock.
OLDEST = (0, 16)
CHECKS = ["licenses", "bans", "sources"]
TOOLS = paths.BUILD / "tools"
# The digest of what the last check has passed; it belongs to the commit.
CHECKED = paths.ROOT / "scripts" / "deny.checked"
SKIPPED = 77


def main() -> int:
    if CHECKED.is_file() and CHECKED.read_text().split() == [digest()]:
        print("bans, licenses and sources are those that were checked")
        return 0
    tool = installed() or build()
    if not tool:
        print(f"no cargo-deny and no way to build it; type: {' '.join(install_command([]))}")
        return SKIPPED
    code = subprocess.run([tool, "check", *CHECKS], cwd=paths.ROOT).returncode
    if code == 0:
        CHECKED.write_text(digest() + "\n")
    return code


def digest() -> str:
    files = ["deny.toml", "Cargo.lock", "Cargo.toml", *sorted(paths.ROOT.glob("crates/*/Cargo.toml"))]
    inputs = [VERSION.encode(), *((paths.ROOT / name).read_bytes() for name in files)]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()


def installed() -> str:
    """A cargo-deny that is new enough, on the user's path or built here before; empty if there is
    none."""
    for found in (shutil.which("cargo-deny"), shutil.which("cargo-deny", path=TOOLS / "bin")):
        if found and version(found) >= OLDEST:
            return found
    return ""


def version(tool: str) -> tuple[int, ...]:
    said = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)\.\d+", said)
    return tuple(map(int, found.groups())) if found else ()


def build() -> str:
    print(f"deny: building cargo-deny {VERSION} into {TOOLS.relative_to(paths.ROOT)}", flush=True)
    words = ["--debug", "--quiet", "--root", str(TOOLS), "--target-dir", str(TOOLS / "target")]
    done = subprocess.run(install_command(words))
    shutil.rmtree(TOOLS / "target", ignore_errors=True)
    return installed() if done.returncode == 0 else ""


def install_command(words: list[str]) -> list[str]:
    return ["cargo", "install", "--locked", *words, "cargo-deny", "--version", VERSION]


if __name__ == "__main__":
    sys.exit(main())
