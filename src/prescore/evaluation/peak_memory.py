"""How much memory this process holds, and the most that it held since a moment."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

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
