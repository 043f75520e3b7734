"""How much memory this process holds, and the most that it held since a moment."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

from prescore import checks

_STATUS = Path("/proc/self/status")
_FORGET = Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """Give back what is free, and let the peak begin with what is left.

    Where the system cannot forget, the peak is that of the process's whole life.
    """
    if not _FORGET.exists():
        return
    gc.collect()
    # else memory that an earlier measurement freed counts as held
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)
    _FORGET.write_text("5", encoding="ascii")


def peak_megabytes() -> float:
    """The most memory held since `forget_peak`."""
    if _STATUS.exists():
        return _kilobytes("VmHWM:") / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def held_megabytes() -> float:
    """The memory held at this moment; the peak where the system tells nothing else."""
    return _kilobytes("VmRSS:") / 2**10 if _STATUS.exists() else peak_megabytes()


def _kilobytes(name: str) -> int:
    return int(_STATUS.read_text(encoding="utf-8").split(name)[1].split()[0])


# What becomes of memory that is freed: kept for the next call, or given back to the system.
#
# glibc gives large blocks back at once, and the next call pays a page fault for every 4 KiB it touches. Exact
# attention touches little besides its output; methods that gather and sort touch much more, and on a virtual
# machine
# the faults can cost as much as their arithmetic. Services that run for long keep freed memory (jemalloc,
# tcmalloc,
# or glibc with its two thresholds raised, as PyTorch's tuning guide advises). A benchmark must say which it saw.

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
