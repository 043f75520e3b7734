"""Results as JSON lines: one record per measured row, appended as soon as it is known.

Shared by the commands that measure and the reports that read; imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from prescore.errors import PrescoreError
from prescore.values import Values

_PACKAGES = ("prescore", "torch", "transformers", "timm")


class RecordFileError(PrescoreError, OSError):
    """A record file that cannot be read or may not be written to."""


@dataclass(frozen=True)
class Row:
    """A result still to be measured.

    Attributes:
        config: Everything that identifies the row beside the seed, in JSON values.
        seed: The seed of the row's randomness; None where there is none.
        measure: Makes the figures, in JSON values.
        cost: Expected share of the work, for the time left.
    """

    config: Mapping[str, Any]
    seed: int | None
    measure: Callable[[], Values]
    cost: float = 1.0


@dataclass(frozen=True)
class Record:
    """One measured row and what is needed to measure it again.

    `key` names the row (command, config and seed, hashed), `seconds` is its wall time, `created` the time it
    was finished (ISO, UTC).
    """

    command: str
    key: str
    config: Values
    seed: int | None
    figures: Values
    seconds: float
    argv: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    threads: int | None = None
    created: str = ""

    def to_json(self) -> str:
        """One line of JSON; numbers that JSON does not have are written as "nan", "inf" and "-inf"."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        try:
            return json.dumps(_finite(values), allow_nan=False)
        except TypeError as error:
            raise TypeError(f"record must hold plain JSON values, got {error}") from error

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `to_json`."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError(f"record must be a JSON object, got {type(values).__name__}")
        known = {f.name for f in fields(cls)}
        missing = {"command", "key", "config", "seed", "figures", "seconds"} - set(values)
        if missing or set(values) - known:
            raise ValueError(f"record must have the fields {sorted(known)}, got {sorted(values)}")
        for name in ("config", "figures"):
            if not isinstance(values[name], dict):
                raise ValueError(f"record must have an object as {name}, got {type(values[name]).__name__}")
        if not values["figures"]:
            raise ValueError("record must have figures, got none")
        named = row_key(values["command"], values["config"], values["seed"])
        if values["key"] != named:
            raise ValueError(f"record must have the key of its settings, {named}, got {values['key']!r}")
        return cls(**values)


def row_key(command: str, config: Mapping[str, Any], seed: int | None) -> str:
    """The name of a row: equal for equal settings, whatever the order they are written in."""
    canonical = json.dumps([_finite(dict(config)), seed], sort_keys=True, allow_nan=False)
    return f"{command}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def measure(
    command: str, row: Row, *, argv: list[str] | None = None, device: str = "cpu", threads: int | None = None
) -> Record:
    """Run one row and wrap its figures."""
    started = time.perf_counter()
    figures = row.measure()
    seconds = time.perf_counter() - started
    return Record(
        command=command,
        key=row_key(command, row.config, row.seed),
        config=dict(row.config),
        seed=row.seed,
        figures=figures,
        seconds=round(seconds, 4),
        argv=list(argv or []),
        versions=versions(),
        device=device,
        threads=threads,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can change a figure."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_records(path: str | Path) -> list[Record]:
    """All records of a file, which must be whole: a damaged line is refused by its number."""
    path = Path(path)
    return parse_records(path.read_bytes(), path)


def parse_records(content: bytes, path: Path) -> list[Record]:
    """The records of a file's content; `path` is what messages call it."""
    found: list[Record] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = Record.from_json(line.decode())
            if record.key in seen:
                raise ValueError(f"key {record.key!r} is already on line {seen[record.key]}")
        except (ValueError, TypeError, RecursionError) as error:
            reason = str(error).splitlines()[0]
            torn = len(without_torn_end(content)) < len(content)
            advice = "continue it with --resume, which drops it," if torn else "remove that line"
            raise RecordFileError(
                f"{path} must hold one record per line, got a damaged line {number} ({reason}); "
                f"the file was not changed: {advice} or choose another --out"
            ) from error
        seen[record.key] = number
        found.append(record)
    return found


def without_torn_end(content: bytes) -> bytes:
    """The content without a last line that a crash left unfinished: cut off, or blocks of zeros never written."""
    used = content.rstrip(b"\0\n")
    begin = used.rfind(b"\n") + 1
    last, behind = used[begin:], content[len(used) :]
    if b"\0" not in last and (b"\n" in behind.split(b"\0")[0] or _is_record(last)):
        # the last line is whole, or was damaged by something else than a crash; only zeros behind it go
        return used + b"\n" if b"\0" in behind else content
    return content[:begin]


def _is_record(line: bytes) -> bool:
    try:
        Record.from_json(line.decode())
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
