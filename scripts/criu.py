#!/usr/bin/env python3
"""Installs CRIU, which takes and restores checkpoint images, under build/tools/criu.

CRIU of Debian 12 (3.17) refuses the vDSO of kernels from 6.16 on. CRIU of Debian 13 works with
these kernels, and on any distribution if it runs with the C library of its own release. So this
script unpacks CRIU with all its libraries into one folder, and a small script,
`build/tools/criu/criu`, starts it through that release's loader.

What enters: Debian's archive, through apt with lists and caches under build/, so that the package
management of the machine stays untouched. What leaves: the folder, with a stamp that names its
sources; a second call does nothing. What may never happen: the script unpacks a file that Debian
has not signed, or another CRIU than the pinned one.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support import paths  # noqa: E402

RELEASE = "trixie"
VERSION = "4.1.1-1"
# Digest of the CRIU package. The libraries have the newest version of the release, because Debian
# keeps no older ones.
SHA256 = "f3120d90b37d893879213d799c83696d6175ac8df3dc290e4e6c1fd0d2c2f82f"
KEYRINGS = ("debian-archive-trixie-stable.gpg", "debian-archive-keyring.gpg")
LIBRARIES = "usr/lib/x86_64-linux-gnu"
SCRIPT = f"""#!/bin/sh
# CRIU with the loader and the libraries of its own release; made by scripts/criu.py.
here=$(dirname "$(readlink -f "$0")")/root
exec "$here/{LIBRARIES}/ld-linux-x86-64.so.2" --library-path "$here/{LIBRARIES}" "$here/usr/sbin/criu" "$@"
"""


def main() -> int:
    stamp = paths.CRIU.parent / ".stamp"
    made_from = SHA256 + SCRIPT
    if stamp.exists() and stamp.read_text() == made_from:
        return 0
    if lack := why_not():
        print(f"criu: not installed: {lack}; tests of checkpoints are skipped", flush=True)
        return 0
    started = time.monotonic()
    work = paths.BUILD / "download" / "criu"
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(paths.CRIU.parent, ignore_errors=True)
    paths.CRIU.parent.mkdir(parents=True)
    try:
        for package in fetch(work):
            run("dpkg-deb", "-x", str(package), str(paths.CRIU.parent / "root"))
    except subprocess.CalledProcessError as error:
        words = (error.stderr or error.stdout or "").strip().splitlines()
        print(f"criu: not installed: {error.cmd[0]}: {words[-1] if words else error}", flush=True)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    paths.CRIU.write_text(SCRIPT)
    paths.CRIU.chmod(0o755)
    stamp.write_text(made_from)
    print(f"criu: {VERSION}, ready in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def why_not() -> str:
    """Why the package cannot be fetched here; empty if it can."""
    if platform.machine() != "x86_64":
        return f"only the package for x86_64 is pinned, and this is {platform.machine()}"
    missing = [tool for tool in ("apt-get", "dpkg-deb") if not shutil.which(tool)]
    if missing:
        return f"this machine has no {' and no '.join(missing)}"
    return "" if keyring() else "Debian's keys are not here (package debian-archive-keyring)"


def keyring() -> Path | None:
    files = [Path("/usr/share/keyrings") / name for name in KEYRINGS]
    return next((file for file in files if file.exists()), None)


def fetch(work: Path) -> list[Path]:
    """Downloads the packages; returns them as files under `work`."""
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    # An empty list of installed packages makes apt fetch the C library as well.
    (work / "state/status").touch()
    source = f"deb [signed-by={keyring()} arch=amd64] http://deb.debian.org/debian {RELEASE} main\n"
    (work / "sources.list").write_text(source)
    places = {
        "Dir::State": work / "state",
        "Dir::State::status": work / "state/status",
        "Dir::Cache": work / "cache",
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "-",
        # Otherwise apt fetches as a user of its own, who may have no access to these folders.
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-qq", *(word for key, value in places.items() for word in ("-o", f"{key}={value}"))]
    run(*apt, "update")
    run(*apt, "install", "-y", "--download-only", "--no-install-recommends", f"criu={VERSION}")
    packages = sorted((work / "cache/archives").glob("*.deb"))
    own = [package for package in packages if package.name.startswith("criu_")]
    found = hashlib.sha256(own[0].read_bytes()).hexdigest() if own else "nothing"
    if found != SHA256:
        sys.exit(f"criu: Debian's package of CRIU {VERSION} is another one than it was: SHA-256 {found}")
    return packages


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
