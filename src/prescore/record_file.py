"""The file that records are appended to: one process at a time, whole after a crash, continued by `--resume`."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from prescore.records import Record, RecordFileError, parse_records, without_torn_end

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]


class RecordFile:
    """A JSON-lines file that only grows, one flushed and synced line per record.

    It is this object's alone until `close`, or until the object is gone: another process is refused, and whoever
    opens it again in this one takes it over. A crash or a full disk can leave the last line unfinished: that is no
    record, and is dropped when the file is continued.

    Args:
        path: The file; its directory is created.
        resume: Continue an existing file. Without it a file that already holds records is refused, so that
            two runs never mix by accident.

    Attributes:
        dropped: What was dropped of the end of the file, in words; None = nothing.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        earlier = _OPEN.get(self.path.resolve())
        if earlier is not None:
            earlier.close()
        self._file = descriptor = _open_alone(self.path)
        self._closing = weakref.finalize(self, os.close, descriptor)
        _OPEN[self.path.resolve()] = self
        content = self.path.read_bytes()
        whole = without_torn_end(content) if resume else content
        self._records = {record.key: record for record in parse_records(whole, self.path)}
        if self._records and not resume:
            raise RecordFileError(
                f"{self.path} must be new or empty, got {len(self._records)} records in it; "
                "continue it with --resume or choose another --out"
            )
        self.dropped: str | None = None
        if len(whole) < len(content):
            os.ftruncate(descriptor, len(whole))
            os.fsync(descriptor)
            size = f"{len(content) - len(whole)} bytes"
            self.dropped = f"dropped one unfinished row at the end of {self.path} ({size}); it is run again"

    def close(self) -> None:
        """Let others write to the file; a second call does nothing."""
        self._closing()

    def __contains__(self, key: object) -> bool:
        """Whether the row named `key` is finished."""
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
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            line = b"\n" + line
        try:
            _write_all(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise RecordFileError(
                f"{self.path} must take one more record, got {error}; make room and continue with --resume"
            ) from error
        self._records[record.key] = record


_OPEN: weakref.WeakValueDictionary[Path, RecordFile] = weakref.WeakValueDictionary()
"""Who holds which file in this process."""


def _open_alone(path: Path) -> int:
    """A descriptor of a regular file that no other process writes to; the file and its directory are made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise RecordFileError(f"{path} must lie in a directory, got {error}") from error
    # asked before it is opened, which would wait for the other end of a pipe
    if path.exists() and not path.is_file():
        raise RecordFileError(f"{path} must be a regular file, got something else of that name")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if fcntl is None:
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RecordFileError(
            f"{path} must not be in use, got another run that writes to it; wait for it or choose another --out"
        ) from error
    except OSError:
        pass  # a file system without locks
    return descriptor


def _write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]
