"""Inputs of one causal layer with grouped heads, random or saved, for studies that look closer at one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias

import torch

from prescore.evaluation.speed.check import Inputs
from prescore.evaluation.speed.freed_memory import SYSTEM
from prescore.evaluation.speed.saved_heads import SavedHeads
from prescore.records import Row
from prescore.values import Values


@dataclass(frozen=True)
class LayerSetting:
    """One layer; every field goes into the record.

    Attributes:
        n: Positions.
        query_heads: Heads of the queries.
        key_heads: Heads of keys and values.
        dim: Of every head.
        dtype: That all run in.
        heads: Name of the file with saved inputs; None = random ones.
        digest: What identifies that file.
        repeats: Timed rounds, or steps.
        memory: See `freed_memory.py`.
    """

    n: int
    query_heads: int = 14
    key_heads: int = 2
    dim: int = 64
    dtype: str = "float32"
    heads: str | None = None
    digest: str | None = None
    repeats: int = 5
    memory: str = SYSTEM


@dataclass(frozen=True)
class LayerInputs:
    """Query `[1, Hq, N, D]`, key and value `[1, Hkv, N, D]`, and the factor of the logits."""

    tensors: Inputs
    scale: float


Measure: TypeAlias = Callable[[LayerSetting, LayerInputs], Values]


def saved_setting(saved: SavedHeads, n: int, *, dtype: str, repeats: int, memory: str) -> LayerSetting:
    """The first `n` positions of a file."""
    (_, query_heads, _, dim), (_, key_heads, _, _), _ = saved.shapes
    return LayerSetting(n, query_heads, key_heads, dim, dtype, saved.name, saved.digest, repeats, memory)


def layer_inputs(setting: LayerSetting, saved: SavedHeads | None, seed: int) -> LayerInputs:
    """What a setting names."""
    dtype: torch.dtype = getattr(torch, setting.dtype)
    scale = None if saved is None else saved.scale
    scale = setting.dim**-0.5 if scale is None else scale
    if saved is not None:
        return LayerInputs(saved.inputs(setting.n, dtype), scale)
    generator = torch.Generator().manual_seed(seed)
    sizes = (setting.query_heads, setting.key_heads, setting.key_heads)
    query, key, value = (
        torch.randn(1, heads, setting.n, setting.dim, generator=generator).to(dtype) for heads in sizes
    )
    return LayerInputs((query, key, value), scale)


def layer_rows(
    study: str, settings: Sequence[tuple[LayerSetting, SavedHeads | None]], measure: Measure, seed: int
) -> list[Row]:
    """Rows of a study that looks at single layers."""

    def measured(setting: LayerSetting, saved: SavedHeads | None) -> Values:
        return measure(setting, layer_inputs(setting, saved, seed))

    return [
        Row({"study": study, **asdict(setting)}, seed, partial(measured, setting, saved), float(setting.n))
        for setting, saved in settings
    ]
