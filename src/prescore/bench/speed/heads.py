"""Attention inputs of real models as files: random tensors have no structure to search for.

A file is a safetensors with `query [1, Hq, N, D]` and `key`, `value [1, Hkv, N, D]` of one causal layer as they
reach attention, after the rotation; its metadata holds `scale` where the layer does not use `D ** -0.5`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prescore.bench.speed.timing import Inputs
from prescore.errors import Unsupported
from prescore.integrations.apply import Layers, find_adapter, pick_layers, replace_attention
from prescore.integrations.attention import AttentionContext, original_attention

SUFFIX = ".safetensors"
NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class SavedHeads:
    """One file of attention inputs.

    Attributes:
        path: The file.
        digest: First characters of its SHA-256, which identify it in records.
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

    @property
    def sizes(self) -> dict[str, int]:
        """Record fields of the layer."""
        (_, query_heads, _, dim), (_, kv_heads, _, _), _ = self.shapes
        return {"dim": dim, "query_heads": query_heads, "kv_heads": kv_heads}

    def inputs(self, n: int, dtype: str = "float32") -> Inputs:
        """Query, key and value of the first `n` positions."""
        from safetensors.torch import load_file

        if not 1 <= n <= self.length:
            raise ValueError(f"n must be between 1 and the {self.length} positions of {self.name}, got {n}")
        saved: dict[str, Tensor] = load_file(self.path)
        query, key, value = (saved[name][:, :, :n].to(getattr(torch, dtype)).contiguous() for name in NAMES)
        return query, key, value


def find_heads(directory: str | Path) -> list[SavedHeads]:
    """All saved heads of a directory, by name; a file without the inputs of a causal layer is refused."""
    from safetensors import SafetensorError, safe_open

    paths, saved = sorted(Path(directory).glob(f"*{SUFFIX}")), []
    if not paths:
        raise FileNotFoundError(f"--heads must be a directory with {SUFFIX} files, got {str(directory)!r}")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
                scale = (file.metadata() or {}).get("scale")
        except SafetensorError as error:
            raise ValueError(f"{path.name} must be a safetensors file, got {error}") from error
        query, key, value = (shapes.get(name, ()) for name in NAMES)
        if not all(len(shape) == 4 and shape[0] == 1 and 0 not in shape for shape in (query, key, value)) or not (
            query[1] % key[1] == 0 and key[1] == value[1] and query[2] == key[2] == value[2] and query[3] == key[3]
        ):
            raise ValueError(
                f"{path.name} must hold query [1, Hq, N, D], key and value [1, Hkv, N, D], got {shapes}"
            )
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()[:12]
        saved.append(SavedHeads(path, digest, (query, key, value), None if scale is None else float(scale)))
    return saved


def heads_at_lengths(saved: Sequence[SavedHeads], lengths: Sequence[int] | None) -> list[tuple[SavedHeads, int]]:
    """Each file at each of the lengths that it holds; None = at its full length."""
    pairs = []
    for heads in saved:
        fitting = [heads.length] if lengths is None else [n for n in lengths if n <= heads.length]
        if not fitting:
            raise ValueError(f"-n must be at most the {heads.length} positions of {heads.name}, got {lengths}")
        pairs += [(heads, n) for n in fitting]
    return pairs


@torch.no_grad()
def save_heads(
    model: Any, ids: Tensor, directory: str | Path, *, layers: Layers = "all", dtype: torch.dtype = torch.float16
) -> list[Path]:
    """Run a model over tokens `[1, N]` with exact attention, and save the attention inputs of some layers.

    Args:
        model: A causal model that `prescore.apply` supports.
        ids: The tokens.
        directory: Receives `layer-00.safetensors` and so on.
        layers: Which layers, as in `prescore.apply`.
        dtype: Of the files.

    Example:
        >>> save_heads(model, ids, "heads", layers=[0, 8, 16])
    """
    from safetensors.torch import save_file

    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids must be one sequence [1, N], got {tuple(ids.shape)}")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = pick_layers(layers, list(find_adapter(model).layers(model)))
    paths = {number: folder / f"layer-{number:02d}{SUFFIX}" for number in chosen}

    def save(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        form = context.form(query, key)
        if form.kind != "causal" or form.valid is not None or query.shape[2] != key.shape[2] or context.is_local:
            what = "a sliding window" if context.is_local else f"a {form.kind} mask"
            reason = f"it must be causal over all positions, got {what}"
            raise Unsupported(f"saving layer {context.layer}", [reason])
        usual = context.scale is None or context.scale == query.shape[-1] ** -0.5
        tensors = zip(NAMES, (query, key, value), strict=True)
        contiguous = {name: tensor.detach().to(dtype).contiguous().cpu() for name, tensor in tensors}
        save_file(contiguous, paths[context.layer], {} if usual else {"scale": repr(context.scale)})
        return original_attention(query, key, value, context)

    base: nn.Module = model.base_model
    undo = replace_attention(model, dict.fromkeys(paths, save))
    try:
        # the base model: logits of all positions are not needed, and a large vocabulary does not fit
        base(input_ids=ids, use_cache=False)
    finally:
        undo()
    return list(paths.values())
