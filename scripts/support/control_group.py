"""Control groups with a limit of memory (cgroups(7), version 1 or 2), for tests.

What enters: a limit in bytes. What leaves: a command that runs another one in such a group. What
may never happen: the group outlives its use.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(name: str, bytes_max: int) -> Iterator[list[str] | None]:
    """The beginning of a command whose processes may take so much memory together. `None`: no group
    can be made here. A group is empty and gone afterwards."""
    with existing(name, bytes_max) as group:
        yield group and ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]


@contextlib.contextmanager
def existing(name: str, bytes_max: int) -> Iterator[Path | None]:
    """A group whose processes may take so much memory together, and which is gone afterwards.
    `None`: no group can be made here."""
    group = made(f"landbridge-{name}-{os.getpid()}", bytes_max)
    try:
        yield group
    finally:
        # Processes that have just ended may still count.
        for _ in range(100 if group else 0):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


def killed_for_memory(group: Path) -> int:
    """How many processes of this group the kernel has killed because of its limit."""
    for file in ("memory.events", "memory.oom_control"):
        if (group / file).exists() and (found := re.search(r"^oom_kill (\d+)$", (group / file).read_text(), re.M)):
            return int(found[1])
    return 0


def made(name: str, bytes_max: int) -> Path | None:
    """A new group below that of this process."""
    own = Path("/proc/self/cgroup").read_text()
    for pattern, folder, file in ((r"^0::/(.*)$", "", "memory.max"), (r"^\d+:memory:/(.*)$", "memory", "memory.limit_in_bytes")):
        if not (found := re.search(pattern, own, re.M)):
            continue
        group = ROOT / folder / found[1] / name
        with contextlib.suppress(OSError):
            group.mkdir()
            # In a folder that is no control group nothing appears by itself.
            with contextlib.suppress(OSError):
                if (group / "cgroup.procs").exists() and (group / file).exists():
                    (group / file).write_text(str(bytes_max))
                    return group
            group.rmdir()
    return None
