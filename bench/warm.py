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

# Free blocks of at least this order (powers of two of pages) are given back to the host. Only kernels
# of virtual machines have it.
REPORTED_ORDER = Path("/sys/module/page_reporting/parameters/page_reporting_order")
# Greater than the order of every free block (MAX_PAGE_ORDER of the kernel, with pages of 4 KiB).
NO_ORDER = "11"
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
        before = REPORTED_ORDER.read_text()
        REPORTED_ORDER.write_text(NO_ORDER)
    except OSError:
        yield False
        return
    try:
        memory(int(pages * TOUCHED))
        yield True
    finally:
        REPORTED_ORDER.write_text(before)
