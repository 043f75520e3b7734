"""Whether other processes took the processors while something was measured: then its times say little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prescore.types import Values

if TYPE_CHECKING:
    from prescore.bench.records import Record

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Fields of a processor in /proc/stat: idle, and waiting for a disk."""
_GUEST = 8
"""From here on fields repeat time that is counted before."""
TOLERATED = 0.15
"""Share of the threads' time that others may take."""
_SHORTEST = 1.0
"""Seconds: the clock of /proc/stat ticks every 10 ms."""


def watch() -> Callable[[], Values]:
    """Begin now; the function returned gives `processor_seconds` of this process since, `cores`, and `others`.

    `others` is the mean number of cores that other processes, or other guests of the host, had meanwhile. It is
    missing where the system does not tell.
    """
    begin, spent_before, all_processes = time.perf_counter(), _own_seconds(), _all_seconds()

    def load() -> Values:
        wall, spent, total = time.perf_counter() - begin, _own_seconds() - spent_before, _all_seconds()
        values: Values = {"processor_seconds": round(spent, 3), "cores": len(_usable())}
        if all_processes is not None and total is not None and wall > 0:
            values["others"] = round(max(0.0, total - all_processes - spent) / wall, 2)
        return values

    return load


def busy_words(records: Sequence[Record]) -> str:
    """A warning for tables and headlines; empty = the threads had their cores for themselves, or none is known."""
    most = 0.0
    for record in records:
        others, cores = record.load.get("others"), record.load.get("cores")
        if others is None or not cores or record.seconds < _SHORTEST:
            continue
        threads = min(record.threads or cores, cores)
        if others > cores - threads + TOLERATED * threads:
            most = max(most, others)
    return f"busy machine: other processes had up to {most:.1f} cores; times are not comparable" if most else ""


def _own_seconds() -> float:
    return sum(os.times()[:4])  # ended children included


def _all_seconds() -> float | None:
    """Processor time of all processes since the start of the system, on the processors that this one may use."""
    try:
        lines = _STAT.read_text(encoding="ascii").splitlines()
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):  # macOS, Windows
        return None
    usable, total = {f"cpu{number}" for number in _usable()}, 0
    for name, *fields in map(str.split, lines):
        if name in usable:
            total += sum(int(value) for number, value in enumerate(fields[:_GUEST]) if number not in _IDLE)
    return total / ticks


def _usable() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
