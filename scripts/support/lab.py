"""Labs around programs: whether one can be built here, and the words that run a program in one.

What enters: the `landbridge` of the build that is tested, a lab file, a program. What leaves: command lines; nothing is
started here but the probe whether there can be a lab at all.
"""

import os
from pathlib import Path

from . import paths, process

LABS = paths.ROOT / "labs"
# Two hosts of one cluster whose rails lose, damage and reorder packets all the time, but for the last one.
LOSSY = LABS / "lossy-rails.toml"
LOSSY_HOSTS = ["near-1", "near-2"]
# That last rail is for daemons that do not check what arrives, and no way for our provider.
CLEAN_DEVICE, CLEAN_NETWORK = "lan2", "10.1.2.0/24"
# What stands for ssh in a lab, and the variable by which it learns of our launcher.
AGENT = Path(__file__).resolve().parent / "lab-agent"
AGENT_VARIABLE = "LAB_LANDBRIDGE"
PROBE_S = 30.0


def run(landbridge: Path, file: Path, name: str) -> list[str]:
    """What comes before a command so that it runs on the first host of the lab in `file`."""
    return [str(landbridge), "lab", "run", str(file), "--name", name, "--"]


def why_not(landbridge: Path, file: Path) -> str:
    """Why this machine or user can have no lab; empty if it can."""
    probe = process.run([*run(landbridge, file, f"probe-{os.getpid()}"), "true"], PROBE_S)
    return "" if probe.ok else process.tail(probe.output, 1) or probe.why


def daemons(device: str) -> list[str]:
    """Options of Open MPI's mpirun in a lab: how its daemons are started, and over which interface they talk."""
    return ["--prtemca", "plm_ssh_agent", str(AGENT), "--prtemca", "prte_if_include", device]


def agent_environment(landbridge: Path) -> dict[str, str]:
    return {AGENT_VARIABLE: str(landbridge)}
