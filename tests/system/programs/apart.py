"""Runs a command in a lab with a changed topology, in which each host is more of its own machine.

Usage: apart.py FOLDER WHAT COMMAND...

WHAT is `disk`, `kernel`, or `disk,kernel`. With `disk`, FOLDER is a file system of each host alone.
With `kernel`, the kernel of each host has a boot id of its own (random(4)).
"""

import os
import re
import sys
import tempfile
import uuid

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def main() -> None:
    folder, what, *command = sys.argv[1:]
    with open(os.environ["LANDBRIDGE_TOPOLOGY"]) as file:
        text = file.read()
    with tempfile.TemporaryDirectory() as scratch:
        host, lines = "", []
        for line in text.splitlines():
            host = found[1] if (found := re.match(r'name = "(.*)"', line)) else host
            if line.startswith("shell = ["):
                line = f'{line.removesuffix("]")}, "unshare", "--mount", "sh", "-c", \'{mounts(scratch, folder, what, host)}\', "sh"]'
            lines.append(line)
        topology = f"{scratch}/topology.toml"
        with open(topology, "w") as file:
            file.write("\n".join(lines) + "\n")
        os.environ["LANDBRIDGE_TOPOLOGY"] = topology
        sys.exit(os.spawnvp(os.P_WAIT, command[0], command))


def mounts(scratch: str, folder: str, what: str, host: str) -> str:
    """The shell commands that separate a host, and then run its agent."""
    steps = []
    if "disk" in what:
        steps.append(f"mount -t tmpfs {host} {folder}")
    if "kernel" in what:
        boot_id = f"{scratch}/{host}"
        with open(boot_id, "w") as file:
            file.write(f"{uuid.uuid5(uuid.NAMESPACE_DNS, host)}\n")
        steps.append(f"mount --bind {boot_id} {BOOT_ID}")
    return " && ".join([*steps, 'exec "$@"'])


main()
