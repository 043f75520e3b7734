"""What becomes of memory that is freed: kept for the next call, or given back to the system.

glibc gives large blocks back at once, and the next call pays a page fault for every 4 KiB it touches. Exact
attention touches little besides its output; methods that gather and sort touch much more, and on a virtual machine
the faults can cost as much as their arithmetic. Services that run for long keep freed memory (jemalloc, tcmalloc,
or glibc with its two thresholds raised, as PyTorch's tuning guide advises). A benchmark must say which it saw.
"""

from __future__ import annotations

import ctypes

from prescore import checks

KEPT, SYSTEM = "kept", "system"
CHOICES = (KEPT, SYSTEM)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 1 << 30


def choose_freed_memory(choice: str) -> str:
    """Make this process keep freed blocks up to 1 GiB, or leave it as it is; returns what holds from now on.

    Where the C library has no `mallopt`, nothing changes and the answer is `system`.
    """
    checks.one_of("memory", choice, CHOICES)
    if choice == SYSTEM:
        return SYSTEM
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is None:
        return SYSTEM
    done = [mallopt(name, _LARGEST) for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)]
    return KEPT if all(done) else SYSTEM


def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # no C library to be had by that name: Windows
        return None
