#!/usr/bin/env python3
"""Installs the stock MPI libraries and the mpi4py test suite under build/ (`make wheels`).

    scripts/wheels.py                everything
    scripts/wheels.py mpich impi     only these libraries (`make demo`)

What enters: scripts/wheels.txt and the user's Python package index. What leaves: one virtual
environment for each MPI library and the unpacked mpi4py sources, each with a stamp that names its
sources. A second call does nothing, and a changed pin rebuilds the environment.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths  # noqa: E402

PINS = Path(__file__).resolve().parent / "wheels.txt"
MPI4PY = "mpi4py==4.1.2"
MPI4PY_SHA256 = "56860286dc45f20e8821e93cb06669e30462348bf866f685553fa4b712d58d02"


LIBRARIES = ("mpich", "ompi", "impi")
# pip's line about a package that it downloads: the name of the file, and its size in words.
COMING = re.compile(
    r"^\s*(?:Downloading|Using cached) (?:\S*/)?([^/\s]+\.(?:whl|tar\.gz))(?: \((.*)\))?\s*$"
)


def main() -> int:
    wanted = sys.argv[1:]
    if unknown := set(wanted) - set(LIBRARIES):
        sys.exit(f"wheels: there is no {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    for mpi in wanted or LIBRARIES:
        ensure_venv(mpi, pins(mpi))
    if not wanted:
        ensure_suite()
    return 0


def pins(mpi: str) -> list[str]:
    lines = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    rows = [line.split(" ", 1) for line in lines]
    return [requirement for which, requirement in rows if which in (mpi, "*")]


def ensure_venv(mpi: str, requirements: list[str]) -> None:
    folder, content = paths.venv(mpi), "\n".join(requirements)
    if folder.is_symlink() or stamped(folder, content):
        return
    print(f"wheels: {mpi}, into {folder.relative_to(paths.ROOT)}", flush=True)
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit("wheels: Python cannot make a virtual environment here; type: "
                 "sudo apt-get install -y python3-venv")
    pip(mpi, "install", "--only-binary", ":all:", *requirements)
    stamp(folder, content)
    print(f"wheels: {mpi}: ready in {time.monotonic() - started:.0f} s", flush=True)


def ensure_suite() -> None:
    folder = paths.SUITE.parent
    if stamped(folder, MPI4PY_SHA256):
        return
    print("wheels: mpi4py's test suite", flush=True)
    download = paths.BUILD / "download"
    download.mkdir(parents=True, exist_ok=True)
    wanted = download / "suite.txt"
    wanted.write_text(f"{MPI4PY} --hash=sha256:{MPI4PY_SHA256}\n")
    pip("mpich", "download", "--no-deps", "--no-binary", "mpi4py", "--require-hashes",
        "--dest", str(download), "--requirement", str(wanted))
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(next(download.glob("mpi4py-*.tar.gz"))) as archive:
        archive.extractall(paths.BUILD, filter="data")
    stamp(folder, MPI4PY_SHA256)


def pip(mpi: str, action: str, *arguments: str) -> None:
    """Runs pip and prints the current package; other output of pip is shown only if pip fails."""
    options = ["--disable-pip-version-check", "--progress-bar", "off"]
    command = [paths.python(mpi), "-m", "pip", action, *options, *arguments]
    said = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        for line in child.stdout:
            said.append(line)
            if note := progress(line):
                print(f"wheels:   {note}", flush=True)
    if child.returncode:
        sys.exit(f"wheels: pip failed:\n{''.join(said)}\nwheels: the command was {' '.join(command)}")


def progress(line: str) -> str:
    """The progress that a line of pip's output shows: `numpy 2.4.6, 16.8 MB`; empty for most
    lines."""
    if found := COMING.match(line):
        name, version = re.split("-", re.sub(r"\.tar\.gz$", "", found[1]))[:2]
        return f"{name.replace('_', '-')} {version}{', ' + found[2] if found[2] else ''}"
    return "unpacking" if line.startswith("Installing collected packages") else ""


def stamped(folder: Path, content: str) -> bool:
    file = folder / ".stamp"
    return file.exists() and file.read_text() == content


def stamp(folder: Path, content: str) -> None:
    (folder / ".stamp").write_text(content)


if __name__ == "__main__":
    sys.exit(main())
