"""MPI programs in C beside this file, compiled with the MPI library of the wheels; what applications
say of their elapsed time."""

import re
import subprocess
from pathlib import Path

from support import paths


def program(name: str, folder: Path) -> str:
    """The program of NAME.c, which lies in `folder` from the first call on."""
    made, root = folder / name, paths.venv("mpich")
    if not made.exists():
        words = ["gcc", "-O2", "-fcx-limited-range", f"-I{root}/include", Path(__file__).with_name(f"{name}.c"), "-o", made]
        subprocess.run([*words, f"-L{root}/lib", "-lmpi", "-lm", f"-Wl,-rpath,{root}/lib"], check=True)
    return str(made)


def elapsed_s(said: str) -> float:
    """Seconds without start and end, as gradient.c, transpose.c or examples/heat.py print them."""
    return float(re.search(r"^(?:heat: ([\d.]+) s,|seconds ([\d.]+) )", said, re.M).expand(r"\1\2"))
