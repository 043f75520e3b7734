"""Compile the C files of the package, once per level of processor.

Needs the standard library alone: setup.py and make run this file before the package is installed. Run as a program
it builds into its own folder when a source is newer than the libraries there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = (FOLDER, FOLDER.parents[1] / "int8")
"""Folders whose C files make one library; they share the headers of the first."""
NOT_BUILT = "not_built.txt"
"""A file with the reason, where nothing could be built: `prescore info` shows it."""
ABI = 17
"""Which signatures the C functions have; a library with another number is not used."""

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_X86 = {"baseline": (), "avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": (*_AVX512, "-mavx512bf16")}
_ARM = {"baseline": (), "dotprod": ("-march=armv8.2-a+dotprod",)}
# no -ffast-math: infinities and NaN are values here, and sums keep their order
CODE_FLAGS = (
    *("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-unknown-pragmas"),
    f"-DPRESCORE_ABI={ABI}",
)
_OPENMP = "-fopenmp"
_IS_OPENMP_OF_TORCH = """
#if defined(__clang__) || !defined(__linux__)
#error "this runtime is not the one that torch uses"
#endif
"""
"""On Linux GCC's runtime is the one of torch's builds. Two runtimes in a process take cores from each other, and
some end it. threads.c does without."""
PLAIN_FLAGS = ("-U__SSE2__", "-U__aarch64__")
"""Added to those of `baseline`, these leave out what is written for one kind of processor: for tests."""
_FLAGS = (*CODE_FLAGS, "-shared", "-fvisibility=hidden", *(() if sys.platform == "win32" else ("-fPIC",)))
_LINKED = () if sys.platform == "win32" else ("-lm",)
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
# GCC on Windows does not align the stack for vectors of 32 bytes, and its programs failed under Wine
_COMPILERS = ("clang",) if sys.platform == "win32" else ("cc", "gcc", "clang")
_NONE = "none"
"""As `CC`: build nothing."""


def levels_of_machine(machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """Levels that are built for a kind of processor and their flags, the plainest first; None = this machine."""
    name = (platform.machine() if machine is None else machine).lower()
    if name in ("x86_64", "amd64"):
        return _X86  # the baseline has SSE2
    return _ARM if name in ("aarch64", "arm64") else {"baseline": ()}  # the baseline of 64-bit ARM has NEON


def library_name(level: str) -> str:
    """The file of a level."""
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return f"prescore_native_{level}.{suffix}"


def checksum_file(library: Path) -> Path:
    """Where the checksum of a library is: a damaged library can end the process of its loader."""
    return library.with_name(f"{library.name}.sha256")


def checksum(library: Path) -> str:
    """The SHA-256 of a library's bytes."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def build(out_dir: Path, *, sanitize: bool = False) -> list[Path]:
    """Compile every level into a folder.

    What cannot be built is left out: nothing here is needed to run. One line on stderr says what was built, or why
    nothing was.

    Args:
        out_dir: Where the libraries go; those of an earlier build are removed from it.
        sanitize: Check addresses and undefined behaviour while running.

    Returns:
        The libraries made, the plainest first.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    for old in out_dir.glob(library_name("*")):
        old.unlink()  # a library of other sources must not outlive them
        checksum_file(old).unlink(missing_ok=True)
    (out_dir / NOT_BUILT).unlink(missing_ok=True)
    command = find_command(_SANITIZE if sanitize else ())
    if isinstance(command, str):
        return _nothing(out_dir, command)
    levels = levels_of_machine()
    with ThreadPoolExecutor(len(levels)) as pool:
        made = list(pool.map(lambda level: _compile(command, level, levels[level], out_dir), levels))
    paths = [path for path in made if isinstance(path, Path)]
    if not paths:
        return _nothing(out_dir, f"{command[0]} failed: {made[0]}")
    _say(f"{command[0]} built {', '.join(path.stem.removeprefix('prescore_native_') for path in paths)}")
    return paths


def is_up_to_date(out_dir: Path) -> bool:
    """Whether a folder holds libraries, none of them older than a source."""
    libraries = [path.stat().st_mtime for path in out_dir.glob(library_name("*"))]
    sources = [*c_files(), *FOLDER.glob("*.h"), Path(__file__)]
    return bool(libraries) and min(libraries) >= max(path.stat().st_mtime for path in sources)


def c_files() -> list[Path]:
    """All sources of the library."""
    return [path for folder in SOURCES for path in sorted(folder.glob("*.c"))]


def find_command(extra: Sequence[str] = ()) -> list[str] | str:
    """The first compiler that makes a library and its flags, or why there is none; `CC` is tried alone."""
    asked = shlex.split(os.environ.get("CC", ""))
    if asked == [_NONE]:
        return "made for any system, without native code; GCC or clang compile it from the sources"
    reasons = []
    for compiler in [asked] if asked else [[path] for name in _COMPILERS if (path := shutil.which(name))]:
        command = [*compiler, *_FLAGS, *extra]
        refused = _refuses(command)
        if refused is None:
            with_openmp = [*command, _OPENMP]
            return command if _refuses(with_openmp, _IS_OPENMP_OF_TORCH) else with_openmp
        reasons.append(f"{shlex.join(compiler)} failed: {refused}")
    return "; ".join(reasons) or f"no C compiler found (tried {', '.join(_COMPILERS)})"


def _compile(command: list[str], level: str, flags: Sequence[str], out_dir: Path) -> Path | str:
    """The library of a level, or why it is left out."""
    refused = _refuses([*command, *flags]) if flags else None
    if refused is not None:
        _say(f"level {level} is left out: {refused}")
        return refused
    target = out_dir / library_name(level)
    with tempfile.TemporaryDirectory(dir=out_dir) as scratch:
        # whoever loads it meanwhile finds a whole library or none
        made = Path(scratch) / target.name
        sources = ["-I", str(FOLDER), *map(str, c_files())]
        failed = _run([*command, *flags, *sources, "-o", str(made), *_LINKED])
        if failed is not None:
            _say(f"level {level} is left out: {failed}")
            return failed
        checksum_file(target).write_text(f"{checksum(made)}\n", encoding="utf-8")
        made.replace(target)
    return target


def _refuses(command: Sequence[str], text: str = "") -> str | None:
    """Why a library of next to nothing cannot be made; None = it can."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "empty.c"
        source.write_text(f"{text}\nint prescore_empty(void) {{ return 0; }}\n", encoding="utf-8")
        made = source.with_name(library_name("empty"))
        failed = _run([*command, str(source), "-o", str(made), *_LINKED])
        return failed or (None if made.exists() else "it made no library")


def _run(command: Sequence[str]) -> str | None:
    """Run a compiler; the first line of what it complains of, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[0]).strip()


def _nothing(out_dir: Path, reason: str) -> list[Path]:
    _say(f"not built, plain torch is used: {reason}")
    (out_dir / NOT_BUILT).write_text(f"{reason}\n", encoding="utf-8")
    return []


def _say(text: str) -> None:
    sys.stderr.write(f"prescore native: {text}\n")


if __name__ == "__main__" and not is_up_to_date(FOLDER):
    build(FOLDER)
