#!/usr/bin/env python3
"""Puts the stock MPI libraries and the mpi4py test suite under build/ (`make wheels`).

What enters: scripts/wheels.txt and the user's Python package index. What leaves: one virtual
environment per MPI library and the unpacked mpi4py sources, each with a stamp that holds what it
was made from, so that a second call does nothing and a changed pin makes it anew.
"""

import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths  # noqa: E402

PINS = Path(__file__).resolve().parent / "wheels.txt"
MPI4PY = "mpi4py==4.1.2"
MPI4PY_SHA256 = "56860286dc45f20e8821e93cb06669e30462348bf866f685553fa4b712d58d02"


def main() -> int:
    for mpi in ("mpich", "ompi", "impi"):
        ensure_venv(mpi, pins(mpi))
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
    print(f"wheels: {mpi}: {', '.join(requirements)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit("wheels: Python cannot make a virtual environment here; type: "
                 "sudo apt-get install -y python3-venv")
    pip(mpi, "install", "--only-binary", ":all:", *requirements)
    stamp(folder, content)


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


def pip(mpi: str, *arguments: str) -> None:
    command = [paths.python(mpi), "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"wheels: pip failed:\n{done.stdout}\nwheels: the command was {' '.join(command)}")


def stamped(folder: Path, content: str) -> bool:
    file = folder / ".stamp"
    return file.exists() and file.read_text() == content


def stamp(folder: Path, content: str) -> None:
    (folder / ".stamp").write_text(content)


if __name__ == "__main__":
    sys.exit(main())
