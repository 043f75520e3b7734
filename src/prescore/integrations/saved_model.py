"""Whether a directory holds a model that was written to its end, told without reading its weights."""

from __future__ import annotations

import json
from pathlib import Path

_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_LENGTH_BYTES = 8


def damage_of(directory: Path) -> str | None:
    """What is wrong with a converted model, in words; None = nothing.

    Every file that loading needs is there, JSON can be read, and the weights are as long as their header says.
    """
    for name in _NEEDED:
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.suffix == ".json" and not _is_json(path.read_bytes()):
            return f"{name} is no JSON"
    weights = directory / "model.safetensors"
    expected, size = _length_by_header(weights), weights.stat().st_size
    if expected is None:
        return f"{weights.name} has no readable header"
    return None if size == expected else f"{weights.name} has {size} bytes instead of {expected}"


def _is_json(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


def _length_by_header(path: Path) -> int | None:
    """Bytes of a safetensors file as its own header gives them: the header's length, the header, the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= path.stat().st_size:
            return None
        header = file.read(length)
    if not _is_json(header):
        return None
    entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
    try:
        return _LENGTH_BYTES + length + max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (KeyError, IndexError, TypeError, ValueError):
        return None
