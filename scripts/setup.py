#!/usr/bin/env python3
"""Checks for the required tools, installs those that apt has, and names the rest (`make setup`).

What leaves: exit code 0 and no output if everything is present; otherwise one command line for each
missing tool. `--bench` and `--test` add what benchmarks and tests use. Only Debian or Ubuntu
packages are installed, and only by root or with a sudo that asks for no password.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Required command -> the package that has it. Rust needs ld to link.
PACKAGES = {
    "cc": "gcc",
    "python3": "python3",
    "ip": "iproute2",
    "nft": "nftables",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
}
# Packages for `make bench` alone: the two-hop comparison.
BENCH_PACKAGES = {"haproxy": "haproxy"}
# Packages for tests alone: installed where apt may, else the tests that need one are skipped, which
# is reported. File that shows the package -> the package.
TEST_PACKAGES = {"/usr/bin/gfortran": "gfortran", "/usr/include/rdma/fabric.h": "libfabric-dev"}
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin"
RUSTUP = "curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y && . ~/.cargo/env"


def main() -> int:
    wanted = PACKAGES | (BENCH_PACKAGES if "--bench" in sys.argv else {})
    packages = [name for command, name in wanted.items() if not shutil.which(command, path=SEARCH)]
    if not have_venv():
        packages.append("python3-venv")
    missing = install(packages) if packages else []
    if "--test" in sys.argv:
        for package in [name for file, name in TEST_PACKAGES.items() if not Path(file).exists()]:
            install([package])
    advice = [f"sudo apt-get install -y {' '.join(missing)}"] if missing else []
    advice += rust_advice()
    if sys.version_info < (3, 10):
        advice.append("install Python 3.10 or newer (this is " + sys.version.split()[0] + ")")
    for line in advice:
        print(f"setup: something is missing; type:  {line}")
    return 1 if advice else 0


def have_venv() -> bool:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


def install(packages: list[str]) -> list[str]:
    """Installs `packages` if no password is needed; returns the packages that are still missing."""
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    allowed = shutil.which("apt-get") and (not prefix or quiet(["sudo", "-n", "true"]))
    if not allowed:
        return packages
    print(f"setup: apt-get install {' '.join(packages)}", flush=True)
    command = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    installing = [*command, "install", "-y", "--no-install-recommends", *packages]
    if quiet(installing) or (quiet([*command, "update"]) and quiet(installing)):
        return []
    return packages


def quiet(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def rust_advice() -> list[str]:
    needed = re.search(r'rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text())[1]
    if not shutil.which("cargo"):
        return [f"{RUSTUP}   (Rust {needed} or newer)"]
    text = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", text)
    if not found or tuple(map(int, found.groups())) < tuple(map(int, needed.split(".")[:2])):
        update = "rustup update stable" if shutil.which("rustup") else RUSTUP
        return [f"{update}   (Rust {needed} or newer is needed; found: {text.strip() or 'none'})"]
    return []


if __name__ == "__main__":
    sys.exit(main())
