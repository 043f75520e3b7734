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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from prescore import __version__
from prescore.bench.busy import watch
from prescore.errors import PrescoreError
from prescore.types import Values as Values

try:
    import fcntl
except ModuleNotFoundError:  # Windows: nothing keeps two runs from one file
    fcntl = None  # type: ignore[assignment]

SCHEMA = 3
_PACKAGES = ("torch", "transformers", "timm")
_TYPES = {
    **dict.fromkeys(("command", "key", "device", "created"), (str,)),
    **dict.fromkeys(("config", "results", "versions", "load"), (dict,)),
    **{name: (int, type(None)) for name in ("seed", "threads")},
    "seconds": (float, int),
    "argv": (list,),
}
"""Of a record's fields, as JSON has them."""


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

    `key` identifies the row (a hash of command, config and seed), `seconds` is its wall time, `load` what
    `busy.watch` saw meanwhile, `created` the time it was finished (ISO, UTC).
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
    load: Values = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON; numbers that it lacks are `{"float": "nan"}`, likewise `"inf"` and `"-inf"`."""
        try:
            known = {name: value for name, value in vars(self).items() if name != "load" or value}
            return json.dumps(_finite({"schema": SCHEMA, **known}), allow_nan=False)
        except TypeError as error:
            raise TypeError(f"record must hold plain JSON values, got {error}") from error

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `to_json`; refuses a record with other fields, without results, or with a wrong key."""
        values = json.loads(line, object_pairs_hook=_restored, parse_constant=_no_constant)
        if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA:
            raise ValueError(f"record must be a JSON object of schema {SCHEMA}, got another one")
        known = {f.name for f in fields(cls)}
        if not {"command", "key", "config", "seed", "results", "seconds"} <= set(values) <= known:
            raise ValueError(f"record must have the fields {sorted(known)}, got {sorted(values)}")
        if not values["results"]:
            raise ValueError("record must have results, got none")
        for name, kinds in _TYPES.items():
            if name in values and type(values[name]) not in kinds:
                raise ValueError(f"record must have {kinds[0].__name__} as {name}, got {values[name]!r}")
        key = row_key(values["command"], values["config"], values["seed"])
        if values["key"] != key:
            raise ValueError(f"record must have the key of its settings, {key}, got {values['key']!r}")
        return cls(**values)


def row_key(command: str, config: Mapping[str, Any], seed: int | None) -> str:
    """The key of a row: equal for equal settings, whatever their order."""
    canonical = json.dumps([_finite(dict(config)), seed], sort_keys=True, allow_nan=False)
    return f"{command}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def measure(
    command: str, row: Row, *, argv: list[str] | None = None, device: str = "cpu", threads: int | None = None
) -> Record:
    """Measure one row."""
    started, load = time.perf_counter(), watch()
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
        load=load(),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can change a result; from a clone also its commit."""
    installed = {"python": platform.python_version(), "prescore": __version__}
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


def _restored(pairs: list[tuple[str, Any]]) -> Any:
    """The inverse of `_finite` for one JSON object."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"an object must have each name once, got {[name for name, _ in pairs]}")
    return float(value["float"]) if value in ({"float": word} for word in ("nan", "inf", "-inf")) else value


def _no_constant(word: str) -> None:
    raise ValueError(f"numbers must be those of JSON, got {word}")


# Files of records: one process at a time, intact after a crash, continued by `--resume`.


def read_records(path: str | Path) -> list[Record]:
    """All records of a file; a damaged line is refused by its number."""
    return _parse(Path(path).read_bytes(), Path(path))[0]


def find_records(paths: Iterable[str | Path]) -> list[Record]:
    """The records of files, and of all `records.jsonl` below directories; each key once, as first found."""
    records: dict[str, Record] = {}
    for path in map(Path, paths):
        for file in sorted(path.rglob("records.jsonl")) if path.is_dir() else [path]:
            for record in read_records(file):
                records.setdefault(record.key, record)
    if not records:
        raise RecordFileError(f"there must be records below {', '.join(map(str, paths))}, got none")
    return [*records.values()]


def flat_rows(record: Record) -> list[Values]:
    """A record as rows of plain values, with names such as `method.label`: one for each method or claim in it.

    Other results that are lists are left out; what settings and results both have keeps the value of the settings.
    """
    results = dict(record.results)
    compared, claims = results.pop("methods", None), results.pop("checks", None) or [{}]
    shared = {"command": record.command, "seed": record.seed, **_flat(record.config)}
    measured = compared.items() if isinstance(compared, dict) else [(None, claim) for claim in claims]
    rows = []
    for name, entry in measured:
        row = {"row_seconds": record.seconds, **_flat({**results, **entry}), **shared}
        row.pop("methods", None)
        rows.append(row if name is None else {**row, "method": name})
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "") -> Values:
    flat: Values = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            flat[prefix + name] = value
    return flat


def _parse(content: bytes, path: Path, *, resume: bool = False) -> tuple[list[Record], int]:
    """The records of a file and how many bytes hold them; with `resume` an unfinished last line may follow."""
    records: dict[str, Record] = {}
    *lines, last = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = Record.from_json(line.decode())
            if record.key in records:
                raise ValueError(f"key {record.key!r} is on an earlier line too")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise _damaged(path, number, error, "remove that line") from error
        records[record.key] = record
    # a line is finished with its newline; what begins otherwise and stands alone is no file of ours
    if last and not (resume and (lines or last.startswith(b'{"schema": '))):
        raise _damaged(path, len(lines) + 1, "it has no end", "continue it with --resume, which drops it,")
    return [*records.values()], len(content) - len(last)


def _damaged(path: Path, number: int, reason: object, advice: str) -> RecordFileError:
    words = str(reason).splitlines() or [type(reason).__name__]
    return RecordFileError(
        f"{path} must hold one record per line, got a damaged line {number} ({words[0]}); "
        f"the file was not changed: {advice} or choose another --out"
    )


class RecordFile:
    """A JSON-lines file that only grows, one flushed and synced line per record.

    The file is locked until `close`, or until the object is garbage. A crash can leave the last line unfinished:
    that line is dropped when the file is continued. A file that holds anything else is refused and not changed.

    Args:
        path: The file; its directory is created.
        resume: Continue an existing file. Without it a file that holds records is refused, so that two runs never
            mix by accident.

    Attributes:
        dropped: What was dropped from the end of the file, in words; None = nothing.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._absolute = self.path.absolute()
        self._descriptor = _open_locked(self.path)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        content = self.path.read_bytes()
        records, size = _parse(content, self.path, resume=resume)
        if records and not resume:
            raise RecordFileError(
                f"{self.path} must be new or empty, got {len(records)} records in it; "
                "continue it with --resume or choose another --out"
            )
        self._records = {record.key: record for record in records}
        self.dropped: str | None = None
        if size < len(content):
            os.ftruncate(self._descriptor, size)
            self.dropped = (
                f"dropped one unfinished row at the end of {self.path} ({len(content) - size} bytes); "
                "it is measured again"
            )

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
        if not self.close.alive or not self._is_in_place():
            raise RecordFileError(f"{self.path} must be open, got a record after it was closed, moved or deleted")
        line = record.to_json().encode() + b"\n"
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise RecordFileError(
                f"{self.path} must take one more record, got {error}; make room and continue with --resume"
            ) from error
        self._records[record.key] = record

    def _is_in_place(self) -> bool:
        """Whether the open file is the one that its path names."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._absolute.stat())
        except OSError:
            return False


def _open_locked(path: Path) -> int:
    """A descriptor of a regular file that no other run writes to; the file and its directory are created."""
    # checked before it is opened: opening a pipe would wait for its other end
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise RecordFileError(f"{path} must be a regular file, got something else of that name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)  # Windows
    except OSError as error:
        reason = error.strerror or error
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
    """A path to write a file to, which takes the place of `path` in the end; a crash leaves the old file."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the directory of a file must exist, got {path}")
    working = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield working
        working.replace(path)
    finally:
        working.unlink(missing_ok=True)
