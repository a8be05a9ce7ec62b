"""Labs for tests: whether this machine can make a lab, and the command lines that run a program in
one.

What enters: the `landbridge` of the build under test, a lab file, a program. What leaves: command
lines. The only program that this module starts is the probe whether a lab is possible.
"""

import os
from pathlib import Path

from . import paths, process

LABS = paths.ROOT / "labs"
# Two hosts of one cluster whose rails lose, corrupt and reorder packets all the time, except for
# the last rail.
LOSSY = LABS / "lossy-rails.toml"
LOSSY_HOSTS = ["near-1", "near-2"]
# The last rail is for daemons that do not check what arrives; Landbridge's provider does not use
# it.
CLEAN_DEVICE, CLEAN_NETWORK = "lan2", "10.1.2.0/24"
# Program that replaces ssh in a lab, and the variable that names the launcher to it.
AGENT = Path(__file__).resolve().parent / "lab-agent"
AGENT_VARIABLE = "LAB_LANDBRIDGE"
PROBE_S = 30.0


def run(landbridge: Path, file: Path, name: str) -> list[str]:
    """The command prefix that runs a program on the first host of the lab in `file`."""
    return [str(landbridge), "lab", "run", str(file), "--name", name, "--"]


def why_not(landbridge: Path, file: Path) -> str:
    """Why this machine or user can have no lab; empty if a lab is possible."""
    probe = process.run([*run(landbridge, file, f"probe-{os.getpid()}"), "true"], PROBE_S)
    return "" if probe.ok else process.tail(probe.output, 1) or probe.why


def daemons(device: str) -> list[str]:
    """Options of Open MPI's mpirun in a lab: how its daemons start, and which interface they
    use."""
    return ["--prtemca", "plm_ssh_agent", str(AGENT), "--prtemca", "prte_if_include", device]


def agent_environment(landbridge: Path) -> dict[str, str]:
    return {AGENT_VARIABLE: str(landbridge)}
