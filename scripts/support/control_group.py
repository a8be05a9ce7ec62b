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
    group = made(f"landbridge-{name}-{os.getpid()}", bytes_max)
    if group is None:
        yield None
        return
    try:
        yield ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        # Processes that have just ended may still count.
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


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
