"""Memory of the host of a virtual machine, before a measurement.

The host provides memory at the first touch, at a tenth of the speed of the machine's own pages. So
as much memory is touched and released as the measurement can use.
"""

import mmap


def memory(size: int) -> None:
    mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
