"""Attention inputs of real models as files: what random tensors flatter is measured on these.

A file is a safetensors with `query [1, Hq, N, D]` and `key`, `value [1, Hkv, N, D]` as they reach attention, after
rotation, of one causal layer; `scale` in its metadata, where the layer does not use `D ** -0.5`. Any model's are
saved with one line:

    >>> save_heads(model, ids, "heads", layers=[0, 8, 16])
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prescore.errors import Unsupported
from prescore.evaluation.speed.check import Inputs
from prescore.integrations.apply import find_adapter, replace_attention
from prescore.integrations.attend import Attend, Situation, attend_exactly
from prescore.integrations.layers import Layers, pick_layers

SUFFIX = ".safetensors"
_NAMES = ("query", "key", "value")
_LARGEST_HEADER = 1 << 24


@dataclass(frozen=True)
class SavedHeads:
    """One file of attention inputs.

    Attributes:
        path: The file.
        digest: The first letters of its SHA-256, by which records know it.
        shapes: Of query, key and value.
        scale: Factor of the logits; None = `D ** -0.5`.
    """

    path: Path
    digest: str
    shapes: tuple[tuple[int, ...], ...]
    scale: float | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.path.stem

    @property
    def length(self) -> int:
        """Positions that it holds."""
        return self.shapes[0][2]

    def inputs(self, n: int, dtype: torch.dtype) -> Inputs:
        """Query, key and value of the first `n` positions, each in memory of its own."""
        from safetensors.torch import load_file

        if not 1 <= n <= self.length:
            raise ValueError(f"n must be between 1 and the {self.length} positions of {self.name}, got {n}")
        saved: dict[str, Tensor] = load_file(self.path)
        query, key, value = (saved[name][:, :, :n].to(dtype).contiguous() for name in _NAMES)
        return query, key, value


def find_heads(directory: str | Path) -> list[SavedHeads]:
    """All files of a directory, by name; one that is something else is refused."""
    files = sorted(Path(directory).glob(f"*{SUFFIX}"))
    if not files:
        raise FileNotFoundError(f"--heads must be a directory with {SUFFIX} files, got {str(directory)!r}")
    return [read_heads(path) for path in files]


def read_heads(path: Path) -> SavedHeads:
    """What a file holds, without its tensors."""
    header = _header(path)
    shapes = tuple(tuple(header.get(name, {}).get("shape", ())) for name in _NAMES)
    rule = "query [1, Hq, N, D], key and value [1, Hkv, N, D]"
    good = all(len(shape) == 4 and shape[0] == 1 and 0 not in shape for shape in shapes)
    if not good or not _fit(*shapes):
        raise ValueError(f"{path.name} must hold {rule}, got {dict(zip(_NAMES, shapes, strict=True))}")
    scale = header.get("__metadata__", {}).get("scale")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return SavedHeads(path, digest, shapes, None if scale is None else float(scale))


@torch.no_grad()
def save_heads(
    model: Any,
    ids: Tensor,
    directory: str | Path,
    *,
    layers: Layers = "all",
    dtype: torch.dtype = torch.float16,
) -> list[Path]:
    """Run a model over tokens `[1, N]` as it always does, and save what reaches the attention of some layers.

    Args:
        model: A causal model that `prescore.apply` knows.
        ids: The tokens.
        directory: Where `layer-00.safetensors` and so on go.
        layers: Which layers, as in `prescore.apply`.
        dtype: Of the files.
    """
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids must be one sequence [1, N], got {tuple(ids.shape)}")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = pick_layers(layers, len(find_adapter(model).layers(model)))
    paths = [folder / f"layer-{number:02d}{SUFFIX}" for number in chosen]
    functions: dict[int, Attend] = {
        number: partial(_save_and_attend, path, dtype) for number, path in zip(chosen, paths, strict=True)
    }
    base: nn.Module = model.base_model
    undo = replace_attention(model, functions)
    try:
        # logits of all positions are not needed, and for a large vocabulary do not fit
        base(input_ids=ids, use_cache=False)
    finally:
        undo()
    return paths


def _save_and_attend(
    path: Path, dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, situation: Situation
) -> Tensor:
    from safetensors.torch import save_file

    form = situation.form(query, key)
    if form.kind != "causal" or form.valid is not None or query.shape[2] != key.shape[2] or situation.is_local:
        what = "a sliding window" if situation.is_local else f"a {form.kind} mask"
        raise Unsupported(f"saving layer {situation.layer}", [f"it must be causal over all positions, got {what}"])
    found = dict(zip(_NAMES, (query, key, value), strict=True))
    ours = situation.scale is None or situation.scale == query.shape[-1] ** -0.5
    metadata = {} if ours else {"scale": repr(situation.scale)}
    save_file({name: t.detach().to(dtype).contiguous().cpu() for name, t in found.items()}, path, metadata)
    return attend_exactly(query, key, value, situation)


def _header(path: Path) -> dict[str, Any]:
    """The names, shapes and metadata of a safetensors file."""
    with path.open("rb") as file:
        begin = file.read(8)
        size = struct.unpack("<Q", begin)[0] if len(begin) == 8 else _LARGEST_HEADER + 1
        text = file.read(size) if size <= _LARGEST_HEADER else b""
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} must be a safetensors file, got {begin!r} at its beginning")
    return header


def _fit(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> bool:
    """Whether shapes are those of one causal layer."""
    grouped = query[1] % key[1] == 0 and key[1] == value[1]
    return grouped and query[2] == key[2] == value[2] and query[3] == key[3]
