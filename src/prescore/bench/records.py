"""Results as JSON lines: one record per measured row, on disk as soon as it is measured.

The commands that measure and the code that makes tables share this module. It does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from prescore.errors import PrescoreError

try:
    import fcntl
except ModuleNotFoundError:  # Windows: nothing keeps two runs from one file
    fcntl = None  # type: ignore[assignment]

Values: TypeAlias = dict[str, Any]
"""JSON values by name. `prescore.types` has the same alias, but imports torch."""

SCHEMA = 3
_PACKAGES = ("prescore", "torch", "transformers", "timm")


class RecordFileError(PrescoreError, OSError):
    """A record file that cannot be read or must not be written to."""


@dataclass(frozen=True)
class Row:
    """A result still to be measured.

    Attributes:
        config: Everything that identifies the row apart from the seed, in JSON values.
        seed: The seed of the row's randomness; None where there is none.
        measure: Computes the results, in JSON values.
        cost: Expected share of the work, for the estimate of the time left.
    """

    config: Mapping[str, Any]
    seed: int | None
    measure: Callable[[], Values]
    cost: float = 1.0


@dataclass(frozen=True)
class Record:
    """One measured row and what is needed to measure it again.

    `key` identifies the row (a hash of command, config and seed), `seconds` is its wall time, `created` the time
    it was finished (ISO, UTC).
    """

    command: str
    key: str
    config: Values
    seed: int | None
    results: Values
    seconds: float
    argv: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    threads: int | None = None
    created: str = ""

    def to_json(self) -> str:
        """One line of JSON; numbers that it lacks are `{"float": "nan"}`, likewise `"inf"` and `"-inf"`."""
        values = {"schema": SCHEMA, **{f.name: getattr(self, f.name) for f in fields(self)}}
        try:
            return json.dumps(_finite(values), allow_nan=False)
        except TypeError as error:
            raise TypeError(f"record must hold plain JSON values, got {error}") from error

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `to_json`; refuses a record with other fields, without results, or with a wrong key."""
        values = json.loads(line, object_hook=_restored)
        if not isinstance(values, dict):
            raise ValueError(f"record must be a JSON object, got {type(values).__name__}")
        schema = values.pop("schema", 1)
        if schema == 2:
            values = upgrade(values)
        elif schema != SCHEMA:
            raise ValueError(f"record must have schema {SCHEMA}, got {schema!r} of another version")
        known, needed = {f.name for f in fields(cls)}, {"command", "key", "config", "seed", "results", "seconds"}
        if needed - set(values) or set(values) - known:
            raise ValueError(f"record must have the fields {sorted(known)}, got {sorted(values)}")
        for name in ("config", "results"):
            if not isinstance(values[name], dict):
                raise ValueError(f"record must have an object as {name}, got {type(values[name]).__name__}")
        if not values["results"]:
            raise ValueError("record must have results, got none")
        key = row_key(values["command"], values["config"], values["seed"])
        if values["key"] != key:
            raise ValueError(f"record must have the key of its settings, {key}, got {values['key']!r}")
        return cls(**values)


def upgrade(values: Values) -> Values:
    """A record of schema 2 as one of today: `Routed` has no tolerance, and a key of its settings without it."""

    def without_tolerance(value: Any) -> Any:
        if isinstance(value, list):
            return [without_tolerance(item) for item in value]
        if not isinstance(value, dict):
            return value
        gone = ("tolerance", "confidence") if value.get("type") == "Routed" else ()
        return {name: without_tolerance(item) for name, item in value.items() if name not in gone}

    config = without_tolerance(values["config"])
    return {**values, "config": config, "key": row_key(values["command"], config, values["seed"])}


def row_key(command: str, config: Mapping[str, Any], seed: int | None) -> str:
    """The key of a row: equal for equal settings, whatever their order."""
    canonical = json.dumps([_finite(dict(config)), seed], sort_keys=True, allow_nan=False)
    return f"{command}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def measure(
    command: str, row: Row, *, argv: list[str] | None = None, device: str = "cpu", threads: int | None = None
) -> Record:
    """Measure one row."""
    started = time.perf_counter()
    results = row.measure()
    seconds = time.perf_counter() - started
    return Record(
        command=command,
        key=row_key(command, row.config, row.seed),
        config=dict(row.config),
        seed=row.seed,
        results=results,
        seconds=round(seconds, 4),
        argv=list(argv or []),
        versions=versions(),
        device=device,
        threads=threads,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can change a result; from a clone also its commit."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    commit = _commit()
    return {**installed, "commit": commit} if commit else installed


@cache
def _commit() -> str:
    """The last commit of the package's own source, with a + where files were changed since; empty outside git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent.parent), *words, "--", "."]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("log", "-1", "--format=%h")
        return commit + ("+" if commit and git("diff", "--name-only", "HEAD") else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return ""


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _restored(value: Values) -> Any:
    """The inverse of `_finite` for one JSON object."""
    return float(value["float"]) if value in ({"float": word} for word in ("nan", "inf", "-inf")) else value


# Files of records: one process at a time, intact after a crash, continued by `--resume`.

_BEGINNING = b'{"schema": %d, "command": "' % SCHEMA
"""How every line of ours begins."""


def read_records(path: str | Path) -> list[Record]:
    """All records of a file; a damaged line is refused by its number."""
    path = Path(path)
    return _parse(path.read_bytes(), path)


def _parse(content: bytes, path: Path) -> list[Record]:
    records: list[Record] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = Record.from_json(line.decode())
            if record.key in lines:
                raise ValueError(f"key {record.key!r} is already on line {lines[record.key]}")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            is_torn = len(without_torn_end(content)) < len(content)
            advice = "continue it with --resume, which drops it," if is_torn else "remove that line"
            raise RecordFileError(
                f"{path} must hold one record per line, got a damaged line {number} ({reason}); "
                f"the file was not changed: {advice} or choose another --out"
            ) from error
        lines[record.key] = number
        records.append(record)
    return records


def without_torn_end(content: bytes) -> bytes:
    """The content without a last line that a crash left unfinished: the beginning of a record, and no newline.

    Anything else stays, zeros too: this module did not write it.
    """
    begin = content.rfind(b"\n") + 1
    last = content[begin:]
    is_ours = last.startswith(_BEGINNING) or (begin > 0 and _BEGINNING.startswith(last))
    if not is_ours or b"\0" in last:
        return content
    try:
        Record.from_json(last.decode())
    except (ValueError, TypeError, LookupError, RecursionError):
        return content[:begin]
    return content


class RecordFile:
    """A JSON-lines file that only grows, one flushed and synced line per record.

    The file is locked until `close`, or until the object is garbage. Another process is refused; opening the file
    again in this process takes it over. A crash or a full disk can leave the last line unfinished: it is dropped
    when the file is continued. A file that holds anything else than records is refused and stays as it is.

    Args:
        path: The file; its directory is created.
        resume: Continue an existing file. Without it a file that holds records is refused, so that two runs never
            mix by accident.

    Attributes:
        dropped: What was dropped from the end of the file, in words; None = nothing.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._file = descriptor = _open_locked(self.path)
        self._closing = weakref.finalize(self, os.close, descriptor)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            content = file.read()
        intact = without_torn_end(content) if resume else content
        self._records = {record.key: record for record in _parse(intact, self.path)}
        if self._records and not resume:
            raise RecordFileError(
                f"{self.path} must be new or empty, got {len(self._records)} records in it; "
                "continue it with --resume or choose another --out"
            )
        _OPEN[self.path.absolute()] = self
        self.dropped: str | None = None
        size = len(content) - len(intact)
        if size:
            os.ftruncate(descriptor, len(intact))
            os.fsync(descriptor)
            self.dropped = (
                f"dropped one unfinished row at the end of {self.path} ({size} bytes); it is measured again"
            )

    def close(self) -> None:
        """Unlock the file; a second call does nothing."""
        self._closing()

    def __contains__(self, key: object) -> bool:
        """Whether the row with this key is finished."""
        return key in self._records

    def __getitem__(self, key: str) -> Record:
        return self._records[key]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: Record) -> None:
        """Add one record; when this returns it is on the disk."""
        if record.key in self._records:
            raise ValueError(f"key must be new in {self.path}, got {record.key!r} again")
        if not self._closing.alive:
            raise RecordFileError(f"{self.path} must be open, got a record after it was closed or opened again")
        line = record.to_json().encode() + b"\n"
        end = os.lseek(self._file, 0, os.SEEK_END)
        # a last line that was completed by hand may lack its newline; two records must not share a line
        if end and os.lseek(self._file, end - 1, os.SEEK_SET) == end - 1 and os.read(self._file, 1) != b"\n":
            line = b"\n" + line
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise RecordFileError(
                f"{self.path} must take one more record, got {error}; make room and continue with --resume"
            ) from error
        self._records[record.key] = record


_OPEN: weakref.WeakValueDictionary[Path, RecordFile] = weakref.WeakValueDictionary()
"""The open record files of this process."""


def _open_locked(path: Path) -> int:
    """A descriptor of a regular file that no other process writes to; the file and its directory are created."""
    earlier = _OPEN.get(path.absolute())
    if earlier is not None:
        earlier.close()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise RecordFileError(f"{path} must be a file, got a symbolic link to {path.readlink()}")
        # checked before it is opened: opening a pipe would wait for its other end
        if path.exists() and not path.is_file():
            raise RecordFileError(f"{path} must be a regular file, got something else of that name")
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)  # of POSIX; of Windows
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except RecordFileError:
        raise
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordFileError(f"{path} must be a file that can be written in a directory, got {reason}") from error
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RecordFileError(
            f"{path} must not be in use, got another run that writes to it; wait for it or choose another --out"
        ) from error
    except OSError:
        pass  # a file system without locks
    return descriptor


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write a file to, which takes the place of `path` in the end.

    A crash leaves the old file, and a symbolic link is replaced instead of the file that it names.
    """
    path = Path(path)
    working = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield working
        working.replace(path)
    finally:
        working.unlink(missing_ok=True)
