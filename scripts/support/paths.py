"""Paths of the project. All generated files lie under target/ (cargo) or build/ (the rest)."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
RELEASE = Path(os.environ.get("LANDBRIDGE_RELEASE", ROOT / "target" / "release"))
LANDBRIDGE = RELEASE / "landbridge"
RELAY = RELEASE / "landbridge-relay"
PROVIDER = RELEASE / "liblandbridge-fi.so"
SUITE = BUILD / "mpi4py-4.1.2" / "test"
RESULTS = BUILD / "results"
# scripts/criu.py installs CRIU.
CRIU = BUILD / "tools" / "criu" / "criu"
# scripts/moto.py installs moto.
MOTO = BUILD / "tools" / "moto" / "bin" / "moto_server"


def use_release(folder: Path) -> None:
    """Takes the binaries from `folder`, as the variable LANDBRIDGE_RELEASE does."""
    global RELEASE, LANDBRIDGE, RELAY, PROVIDER
    RELEASE = folder.resolve()
    LANDBRIDGE, RELAY = RELEASE / "landbridge", RELEASE / "landbridge-relay"
    PROVIDER = RELEASE / "liblandbridge-fi.so"


def venv(mpi: str) -> Path:
    """The virtual environment with the stock MPI library `mpi`: mpich, ompi or impi."""
    return BUILD / "venv" / mpi


def python(mpi: str) -> str:
    return str(venv(mpi) / "bin" / "python")


def missing(paths: list[Path]) -> list[str]:
    """The paths that do not exist, relative to the repository if they lie in it."""
    absent = [path for path in paths if not path.exists()]
    return [str(p.relative_to(ROOT)) if p.is_relative_to(ROOT) else str(p) for p in absent]
