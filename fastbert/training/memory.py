"""Freed memory that stays with the process, so that the next step finds it mapped.

By default glibc hands every block above 32 MiB back to the kernel when it is freed, and the next step pays a page
fault, and the zeroing of the page, for each 4 KiB of it again: more than a memory-bound kernel itself costs.
"""

from __future__ import annotations

import ctypes
import sys

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Let the allocator of this process keep what is freed; returns whether it could (glibc can)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
