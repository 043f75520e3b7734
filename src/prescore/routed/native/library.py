"""Find and load the library of this processor's level, at first use and from this folder only.

`PRESCORE_NATIVE` switches it off (`0`) or names a level (`baseline`, `avx2`, `dotprod`); it is read at every call.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.errors import Unsupported
from prescore.routed.native.build import ABI, NOT_BUILT, checksum, checksum_file, levels_of_machine, library_name

VARIABLE = "PRESCORE_NATIVE"
_AUTOMATIC = ("", "1", "auto")
_OFF = "0"
NO_LEVEL = "none"
"""Where no compiled code runs."""
REBUILD = "build it again by `make native` or `pip install -e .`"
"""What mends a library of another version of the sources, as after `git pull`."""
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_NEEDED = {
    "baseline": frozenset[str](),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "dotprod": frozenset({"asimddp", "asimdrdm", "atomics"}),
}
"""What a processor must have for a level, in the words of /proc/cpuinfo."""
_CAPABILITIES = {"AVX2": ("baseline", "avx2"), "AVX512": ("baseline", "avx2", "avx512", "avx512_bf16")}
"""Levels of x86 that torch's own choice of kernels allows."""


@dataclass(frozen=True)
class _Found:
    level: str | None = None
    library: ctypes.CDLL | None = None
    reasons: list[str] = field(default_factory=list)


FUNCTIONS = (
    *("prescore_native_follow", "prescore_native_threads", "prescore_native_compiler"),
    *("prescore_build_index", "prescore_routed_forward", "prescore_routed_backward"),
    *("prescore_exact_step", "prescore_attend_lists", "prescore_int8_linear"),
    *("prescore_layer_before", "prescore_layer_after"),
)
"""What a library of our interface must have."""

_FOLDER = Path(__file__).resolve().parent
"""The only place libraries are loaded from."""
_found: dict[str, _Found] = {}
_lock = Lock()


def load() -> ctypes.CDLL | None:
    """The library for this processor; None = there is none, and plain torch must do.

    Call it before every use and in the thread of that use: it tells the library how many threads torch uses there.

    Raises:
        ValueError: `PRESCORE_NATIVE` is none of the known values.
        Unsupported: It names a level that cannot run here.
    """
    library = _find().library
    if library is not None:
        # a thread hears of torch.set_num_threads only when it asks
        library.prescore_native_follow(torch.get_num_threads())
    return library


def loaded_level() -> str:
    """The level whose library `load` gives; `none` = plain torch must do."""
    return _find().level or NO_LEVEL


def describe_native() -> str:
    """Which level runs, or why none does."""
    found = _find()
    reasons = "; ".join(found.reasons)
    if found.level is None:
        return f"{NO_LEVEL} ({reasons})"
    return f"{found.level} ({reasons})" if reasons else found.level


def describe_compiler() -> str:
    """What compiled the library that runs, and whose threads it uses; empty where none does."""
    library = _find().library
    return "" if library is None else str(library.prescore_native_compiler().decode(errors="replace"))


def levels_of_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Levels that this processor certainly has, the plainest first."""
    built = tuple(levels_of_machine())
    is_arm = "dotprod" in built
    allowed = built if is_arm else _CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        # torch asks for less than the highest level of x86 needs; every ARM processor of Apple has dot products
        allowed = allowed[:2] if not is_arm or sys.platform == "darwin" else allowed[:1]
        return tuple(level for level in built if level in allowed)
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "").split()
    return tuple(level for level in built if level in allowed and _NEEDED[level] <= set(flags))


def _find() -> _Found:
    # at every call: `get` is slower by far where the variable is not set
    asked = os.environ[VARIABLE].strip().lower() if VARIABLE in os.environ else ""
    found = _found.get(asked)
    if found is None:
        with _lock:
            found = _found.get(asked) or _search(asked)
            _found[asked] = found
    return found


def _search(asked: str) -> _Found:
    if asked == _OFF:
        return _Found(reasons=[f"{VARIABLE}=0"])
    if asked in _AUTOMATIC:
        return _best(levels_of_processor())
    if asked not in _NEEDED:
        raise ValueError(f"{VARIABLE} must be 0, auto or one of {', '.join(_NEEDED)}, got {asked!r}")
    if asked not in levels_of_processor():
        raise Unsupported(f"{VARIABLE}={asked}", ["this processor does not have what the level needs"])
    found = _best((asked,))
    if found.library is None:
        raise Unsupported(f"{VARIABLE}={asked}", found.reasons)
    return found


def _best(levels: tuple[str, ...]) -> _Found:
    note = _FOLDER / NOT_BUILT
    if note.is_file():
        return _Found(reasons=[f"not built: {note.read_text(encoding='utf-8', errors='replace').strip()}"])
    failed: dict[str, list[str]] = {}  # levels by reason: all files of an older checkout have the same one
    for level in reversed(levels):
        path = _FOLDER / library_name(level)
        loaded = _open(path) if path.is_file() else "not built"
        if not isinstance(loaded, str):
            return _Found(level, loaded, _by_reason(failed))
        failed.setdefault(loaded, []).append(level)
    return _Found(reasons=_by_reason(failed))


def _by_reason(failed: dict[str, list[str]]) -> list[str]:
    return [f"{', '.join(levels)}: {reason}" for reason, levels in failed.items()]


def _open(path: Path) -> ctypes.CDLL | str:
    """A library with our signatures, or why it is not one."""
    try:
        # before anything of the file is mapped: a damaged library can end the process
        if checksum(path) != checksum_file(path).read_text(encoding="utf-8", errors="replace").strip():
            return f"cannot be loaded, the file differs from its checksum, {REBUILD}"
        library = ctypes.CDLL(str(path))
        abi = library.prescore_native_abi()
    except FileNotFoundError as error:
        return f"cannot be loaded, {error.filename} is missing, {REBUILD}"
    except (OSError, AttributeError) as error:
        return f"cannot be loaded, {error}"
    if abi != ABI:
        return f"has interface {abi} and not {ABI}, {REBUILD}"
    missing = [name for name in FUNCTIONS if not hasattr(library, name)]
    if missing:
        return f"lacks {', '.join(missing)}, {REBUILD}"
    library.prescore_native_follow.restype = None
    library.prescore_native_compiler.restype = ctypes.c_char_p
    return library


# --- calls


class Expected(NamedTuple):
    """A tensor that C reads or writes as so many numbers of a type, one after the other."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def check_tensors(expected: Sequence[Expected]) -> None:
    """Refuse a tensor that C could read or write outside of."""
    for name, tensor, shape, dtype in expected:
        # a result may have more dimensions than C sees
        fits = tensor.numel() == torch.Size(shape).numel() and tensor.is_contiguous()
        if not fits or tensor.dtype != dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} must be {shape} contiguous {dtype} on the CPU, "
                f"got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that C writes to: torch's default dtype and device have no influence on it."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def call_library(name: str, *structures: ctypes.Structure) -> None:
    """Call a function whose arguments were checked; their tensors must live until it returns."""
    loaded = load()
    if loaded is None:
        raise RuntimeError("a native library must be loaded, got none")
    if getattr(loaded, name)(*(ctypes.byref(structure) for structure in structures)):
        raise MemoryError("native code needs more memory than there is")
