"""What is compared: exact attention, local-only attention, pre-scored configurations and baselines, as values."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from prescore import checks
from prescore.api.attention import exact_attention
from prescore.api.run import Counted
from prescore.baselines import get_baseline, list_baselines, third_party_baselines
from prescore.config import Config, Exact, Hyper, Routed, Selected, config_from_dict
from prescore.evaluation.language.cost import baseline_rows, exact_rows, leaf_rows, near_rows
from prescore.evaluation.language.overrides import Overrides, changed, fitting
from prescore.integrations.attend import PrescoredAttention, Situation, attend_exactly, layer_seed
from prescore.ops.merge import merge
from prescore.registry import list_scorers
from prescore.values import Values

KINDS = ("exact", "local", "prescored", "baseline")
SINKS = 4
"""First tokens that a "+ sinks" method keeps."""
LEAVES_PER_TEXT = 8
"""The paper read 32768 tokens in leaves of 4096."""


CountedAttend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Situation], Counted]
"""Causal attention of one layer whose rows can be counted, called as `prescore.integrations.attend.Attend` is."""


@dataclass(frozen=True)
class LanguageMethod:
    """One way to compute causal attention, in JSON values.

    Attributes:
        label: What tables call it.
        kind: `exact`, `local` (causal leaves, far context dropped), `prescored` or `baseline`.
        settings: `local`: `leaf`, and where more is read `before` and `sinks`; `prescored`: a configuration as
            `to_dict` gives it; `baseline`: `name` and its arguments.
        axes: What the method is in the terms of an experiment (top_k, sample size, ...), for its table.
    """

    label: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, KINDS)

    @property
    def config(self) -> Config | None:
        """The configuration of a pre-scored method; None = it has none."""
        return config_from_dict(self.settings) if self.kind == "prescored" else None

    def attention(self, seed: int) -> CountedAttend:
        """A new attention function for one layer; every layer makes a seed of its own from this one."""
        if self.kind == "exact":
            return _exactly
        if self.kind == "local":
            return partial(_locally, dict(self.settings))
        if self.kind == "baseline":
            return partial(_by_baseline, dict(self.settings), seed)
        return partial(_prescored, PrescoredAttention(self.config, seed=seed))

    def describe(self) -> Values:
        """Everything that identifies the method, for a record."""
        return {
            "label": self.label,
            "kind": self.kind,
            "settings": dict(self.settings),
            "axes": dict(self.axes),
        }


def exact() -> LanguageMethod:
    """The reference: softmax over every key."""
    return LanguageMethod("exact", "exact")


def local(leaf: int) -> LanguageMethod:
    """The floor: the same exact leaves, far context dropped."""
    checks.integer("leaf", leaf, minimum=1)
    return LanguageMethod("local only", "local", {"leaf": leaf})


def nearby(chunk: int, sinks: int) -> LanguageMethod:
    """What the default reads without its far part: the query's own chunk, the one before, and the first tokens."""
    checks.integer("chunk", chunk, minimum=1)
    checks.integer("sinks", sinks, minimum=0)
    return LanguageMethod("local only", "local", {"leaf": chunk, "before": chunk, "sinks": sinks})


def sliding_window(length: int, rows: float, sinks: int, **axes: Any) -> LanguageMethod:
    """The narrowest window that reads no fewer than so many rows per query, the first tokens included."""
    checks.integer("sinks", sinks, minimum=0)

    def read(window: int) -> float:
        return baseline_rows("streaming", length, {"window": window, "sinks": sinks})

    window = 1 + bisect.bisect_left(range(1, length), rows, key=read)
    return baseline("sliding window", "streaming", {"window": window, "sinks": sinks}, **axes)


def prescored(label: str, config: Config, **axes: Any) -> LanguageMethod:
    """Attention by a configuration."""
    return LanguageMethod(label, "prescored", config.to_dict(), axes)


def baseline(label: str, name: str, settings: Mapping[str, Any], **axes: Any) -> LanguageMethod:
    """One of `prescore.baselines`."""
    checks.one_of("baseline", name, tuple(list_baselines()))
    return LanguageMethod(label, "baseline", {"name": name, **settings}, axes)


def method_names() -> list[str]:
    """Names that `named` understands."""
    return ["exact", "local", "default", "hyper", "random", *list_scorers(), *list_baselines()]


def named(name: str, *, leaf: int, top_k: int | float = 256, overrides: Overrides | None = None) -> LanguageMethod:
    """A method by the name used on the command line, at a budget.

    `default` is `Routed()` with the given leaves; `hyper` and scorer names are the paper's algorithms; `random` is
    uniform selection with the first tokens kept; the rest are baselines at the same far budget.

    Args:
        name: One of `method_names()`.
        leaf: Exact causal leaves, chunks and the local part of baselines.
        top_k: Far keys kept by scorers and baselines; `default` and `hyper` do not use it.
        overrides: Fields to change where the method's configuration has them, see `overrides.check_overrides`.
    """
    checks.one_of("method", name, method_names())
    if name in ("exact", "local"):
        return exact() if name == "exact" else local(leaf)
    if name in list_baselines():
        return baseline(name, name, _baseline_settings(name, leaf, top_k), top_k=top_k)
    config: Config
    axes: Values
    if name == "default":
        label, config, axes = name, Routed(chunk_size=leaf, exact_until=leaf), {}
    elif name == "hyper":
        label, config, axes = "HyperAttention", Hyper.published(min_seq_len=leaf), {"top_k": 0}
    elif name == "random":
        config = Selected.paper("uniform", top_k, sinks=SINKS, inner=Exact(), min_seq_len=leaf)
        label, axes = "random + sinks", {"top_k": top_k}
    else:
        label, config = name, Selected.paper(name, top_k, min_seq_len=leaf)
        axes = {"scorer": name, "top_k": top_k}
    return prescored(label, changed(config, fitting(config, overrides or {})), **axes)


def asked_for(
    name: str, *, length: int, leaf: int | None, top_k: int | float = 256, overrides: Overrides | None = None
) -> LanguageMethod:
    """A method as a command asks for it by name, at a length.

    Without a leaf `default` is `Routed()` itself, and the others have leaves of the paper's share of the length.

    Args:
        name: One of `method_names()`.
        length: Tokens read.
        leaf: What every method reads nearby, as in `named`; None = not asked for.
        top_k: As in `named`.
        overrides: As in `named`.
    """
    if name == "default" and leaf is None:
        own = Routed()
        return prescored(name, changed(own, fitting(own, overrides or {})))
    return named(name, leaf=leaf or max(1, length // LEAVES_PER_TEXT), top_k=top_k, overrides=overrides)


def _baseline_settings(name: str, leaf: int, top_k: int | float) -> Values:
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise ValueError(f"top_k must be a count of keys for the baseline {name!r}, got {top_k!r}")
    checks.integer("top_k", top_k, minimum=0)
    if name in third_party_baselines():
        return dict(third_party_baselines()[name].settings(leaf, top_k))
    if name == "streaming":
        return {"window": leaf // 2 + max(1, top_k - SINKS), "sinks": SINKS}
    if name == "performer":
        return {"n_features": max(1, top_k)}
    if name == "reformer":
        return {"chunk_size": max(1, top_k // 8), "n_rounds": 4}
    return {"budget": top_k, "chunk_size": leaf}


def _exactly(query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Counted:
    return Counted(attend_exactly(query, key, value, situation), lambda: exact_rows(query.shape[2]))


def _prescored(
    attention: PrescoredAttention, query: Tensor, key: Tensor, value: Tensor, situation: Situation
) -> Counted:
    output = attention(query, key, value, situation)

    last = attention.last

    def count_rows() -> float:
        rows = None if last is None else last.rows
        if rows is None:
            raise RuntimeError(f"rows must be known after a causal call, got {last}")
        return rows

    return Counted(output, count_rows)


def _by_baseline(
    settings: Mapping[str, Any], seed: int, query: Tensor, key: Tensor, value: Tensor, situation: Situation
) -> Counted:
    arguments = {name: setting for name, setting in settings.items() if name != "name"}
    run, seed = get_baseline(settings["name"]), layer_seed(seed, situation.layer)
    output = run(query, key, value, is_causal=True, scale=situation.scale, generator=seed, **arguments).output
    return Counted(output, lambda: baseline_rows(settings["name"], query.shape[2], arguments))


def _locally(
    settings: Mapping[str, int], query: Tensor, key: Tensor, value: Tensor, situation: Situation
) -> Counted:
    leaf, length = settings["leaf"], query.shape[2]
    if "before" not in settings:
        output = leaves_alone(query, key, value, leaf=leaf, scale=situation.scale)
        return Counted(output, lambda: leaf_rows(length, leaf))
    sinks = settings["sinks"]
    output = near_chunks(query, key, value, chunk=leaf, sinks=sinks, scale=situation.scale)
    return Counted(output, lambda: near_rows(length, leaf, sinks))


def leaves_alone(query: Tensor, key: Tensor, value: Tensor, *, leaf: int, scale: float | None) -> Tensor:
    """Exact causal attention inside leaves of so many positions, and nothing beyond them."""
    batch, _, length, _ = query.shape
    whole = length // leaf * leaf
    outputs = []
    if whole:  # whole leaves are sequences of a batch
        folded = (
            t[:, :, :whole].unflatten(2, (-1, leaf)).transpose(1, 2).flatten(0, 1) for t in (query, key, value)
        )
        attended = exact_attention(*folded, is_causal=True, scale=scale).output
        outputs.append(attended.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3))
    if whole < length:
        rest = (t[:, :, whole:] for t in (query, key, value))
        outputs.append(exact_attention(*rest, is_causal=True, scale=scale).output)
    return torch.cat(outputs, dim=2)


def near_chunks(
    query: Tensor, key: Tensor, value: Tensor, *, chunk: int, sinks: int, scale: float | None
) -> Tensor:
    """Exact causal attention to the query's own chunk, the chunk before it, and the first positions."""
    outputs = []
    for begin in range(0, query.shape[2], chunk):
        first, own = max(0, begin - chunk), query[:, :, begin : begin + chunk]
        near, near_value = (t[:, :, first : begin + chunk] for t in (key, value))
        attended = exact_attention(own, near, near_value, is_causal=True, scale=scale)
        kept = min(sinks, first)
        if kept:
            attended = merge(attended, exact_attention(own, key[:, :, :kept], value[:, :, :kept], scale=scale))
        outputs.append(attended.output)
    return torch.cat(outputs, dim=2)
