"""Texts to measure on: files, directories, LongBench records, and what every Python ships."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prescore.bench.records import Values

DEFAULT_MODULES = ("argparse", "inspect", "typing", "tarfile", "pydoc", "turtle")
TOPICS = "python-reference"
SOURCE = "python-source"
SOURCE_MODULES = (
    *("difflib", "doctest", "enum", "logging", "mailbox", "subprocess"),
    *("unittest.mock", "urllib.request", "ipaddress", "http.client", "optparse", "configparser"),
)
"""What `python-source` is made of, none of it in the default corpus."""
_SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex", ".html", ".jsonl", ".json")


@dataclass(frozen=True)
class Document:
    """A text and the name that records know it by."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """A short name of the text itself: a changed text is another row."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def load_documents(sources: Sequence[str | Path] | None = None, *, limit: int | None = None) -> list[Document]:
    """Read all documents of the given sources, in order; none given = the default corpus.

    A source is a text file, a directory (its text files, by name), or a `.jsonl` / `.json` file with LongBench
    records (v1 or v2). Of a record `context` alone is read: no question, choice or answer. A name of the default
    corpus (`python-reference`, or a module such as `argparse`) is a source too, and so is `python-source`: modules
    of the same library, one after the other.

    Raises:
        OSError: A source cannot be read, or is not text.
        ValueError: It holds no document.
    """
    documents = list(itertools.islice(_each(sources), limit))
    if not documents:
        listed = ", ".join(map(str, sources)) if sources else "the default corpus"
        raise ValueError(f"documents must hold at least one text, got none in {listed}")
    return documents


def default_corpus() -> Iterator[Document]:
    """The language reference and long modules of Python's own library: real text that needs no network."""
    for name in (TOPICS, *DEFAULT_MODULES):
        yield _python_document(name)


def read_text(path: Path) -> str:
    """The text of a file, UTF-8 or Latin-1, with newlines as line ends; refuses devices and binary content."""
    try:
        if path.is_char_device() or path.is_block_device():
            raise OSError(errno.EINVAL, "a device, which may have no end")
        content = path.read_bytes()
    except OSError as error:
        raise OSError(f"document must be a readable file, got {path} ({error.strerror or error})") from error
    return _decode(content, path.name)


def _decode(content: bytes, name: str) -> str:
    if b"\0" in content[:65536]:
        raise OSError(f"document {name} must be text, got a binary file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _each(sources: Sequence[str | Path] | None) -> Iterator[Document]:
    if not sources:
        yield from default_corpus()
        return
    for source in sources:
        if not str(source).strip():
            raise ValueError(f"document must name a file, directory or text of the default corpus, got {source!r}")
        path = Path(source)
        if path.is_dir():
            for file in sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file()):
                yield from _file_documents(file)
        elif not path.exists() and str(source) in (TOPICS, SOURCE, *DEFAULT_MODULES):
            yield _python_document(str(source))
        else:
            yield from _file_documents(path)


def _file_documents(path: Path) -> Iterator[Document]:
    text = read_text(path)
    if path.suffix.lower() not in (".jsonl", ".json"):
        yield Document(path.name, text)
        return
    for number, record in enumerate(_json_records(text, path), start=1):
        yield Document(f"{path.name}#{record.get('_id', number)}", _record_text(record, path, number))


def _json_records(text: str, path: Path) -> Iterator[Values]:
    """One record or an array over any number of lines; else one record per line."""
    try:
        value = json.loads(text)
        records = [(1, record) for record in (value if isinstance(value, list) else [value])]
    except (json.JSONDecodeError, RecursionError):
        records = []
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                records += [(number, json.loads(line))] if line.strip() else []
            except (json.JSONDecodeError, RecursionError) as error:
                got = f"a damaged line {number} ({getattr(error, 'msg', 'nested too deeply')})"
                raise ValueError(f"document {path.name} must hold JSON, got {got}") from error
    for number, record in records:
        if not isinstance(record, dict):
            got = f"{type(record).__name__} in line {number}"
            raise ValueError(f"document {path.name} must hold JSON objects, got {got}")
        yield record


def _record_text(record: Values, path: Path, number: int) -> str:
    text = record.get("context")
    if not isinstance(text, str):
        got = f"{'none' if text is None else type(text).__name__} in record {number}"
        raise ValueError(f"document {path.name} must have a text 'context' in every record, got {got}")
    return text.replace("\r\n", "\n")


def _python_document(name: str) -> Document:
    if name == TOPICS:
        from pydoc_data.topics import topics

        # in the order of their names, so that it is the same text wherever the same Python runs
        return Document(name, "\n\n".join(topics[topic].strip() for topic in sorted(topics)))
    if name == SOURCE:
        return Document(name, "\n\n".join(_python_document(module).text.strip() for module in SOURCE_MODULES))
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise OSError(f"document must be a readable file, got the module {name!r}, whose source this Python lacks")
    return Document(f"{name}.py", _decode(Path(spec.origin).read_bytes(), name))
