"""Memory of the host of a virtual machine, before and during a measurement.

The host provides memory at the first touch, at a tenth of the speed of the machine's own pages. So
as much memory is touched and released as the measurement can use. Some kernels give free pages back
to the host soon after (free page reporting): within `kept` they do not, where the user may say so.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

# How many MiB may wait until they are given back. Only some kernels of virtual machines have it.
WAITING_MIB = Path("/sys/module/page_reporting/parameters/max_waiting_mib")
# Part of the free memory that is touched once: the rest is for everything else.
TOUCHED = 0.7


def memory(size: int) -> None:
    mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


@contextlib.contextmanager
def kept() -> Iterator[bool]:
    """Within it, free pages are not given back to the host, and most of them are the machine's own
    from the start. Gives whether this is so."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        before = WAITING_MIB.read_text()
        WAITING_MIB.write_text(str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20))
    except OSError:
        yield False
        return
    try:
        memory(int(pages * TOUCHED))
        yield True
    finally:
        WAITING_MIB.write_text(before)
