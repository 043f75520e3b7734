"""How much memory this process uses, and whether freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

from prescore import checks

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Free unused memory, and let the peak begin with what is left.

    Where the system cannot reset it, the peak is that of the whole process.
    """
    if not _CLEAR.exists():
        return
    gc.collect()
    # otherwise memory that an earlier measurement freed counts as used
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    _CLEAR.write_text("5", encoding="ascii")


def peak_megabytes() -> float:
    """The largest resident memory since `reset_peak`."""
    if _STATUS.exists():
        return _kilobytes("VmHWM:") / 2**10
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def resident_megabytes() -> float:
    """Resident memory now; the peak where the system tells nothing else."""
    return _kilobytes("VmRSS:") / 2**10 if _STATUS.exists() else peak_megabytes()


def _kilobytes(name: str) -> int:
    return int(_STATUS.read_text(encoding="utf-8").split(name)[1].split()[0])


# Freed memory is kept for the next call, or given back to the system. glibc gives large blocks back at once, and
# the next call pays a page fault for every 4 KiB that it touches. Exact attention touches little apart from its
# output; methods that gather and sort touch much more, and on a virtual machine the faults can cost as much as the
# arithmetic. Services that run for long keep freed memory (jemalloc, tcmalloc, or glibc with raised thresholds, as
# PyTorch's tuning guide advises). A benchmark must say which of the two it measured.

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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is None:
        return SYSTEM
    done = [mallopt(name, _LARGEST) for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)]
    return KEPT if all(done) else SYSTEM
