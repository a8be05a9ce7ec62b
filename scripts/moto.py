#!/usr/bin/env python3
"""Installs moto, a server for the S3 protocol, under build/tools/moto, for checkpoint tests.

What enters: PyPI, at the versions below. What leaves: a virtual environment of its own; a second
call does nothing.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths  # noqa: E402

PACKAGES = ["moto==5.2.5", "flask==3.1.3", "flask-cors==6.0.5", "werkzeug==3.1.9", "boto3==1.44.5"]


def main() -> int:
    folder = paths.MOTO.parents[1]
    stamp = folder / ".stamp"
    if stamp.exists() and stamp.read_text() == "\n".join(PACKAGES):
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install", *PACKAGES]
    found = subprocess.run(pip, capture_output=True, text=True)
    if found.returncode:
        words = found.stderr.strip().splitlines()
        print(f"moto: not installed: {words[-1] if words else 'pip says nothing'}; tests of object stores are skipped")
        return 0
    stamp.write_text("\n".join(PACKAGES))
    print(f"moto: {PACKAGES[0]} is ready", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
