"""What is compared: exact attention, local-only attention, pre-scored configurations and baselines, as values."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from prescore import checks
from prescore.attention import exact_attention
from prescore.baselines import get_baseline, list_baselines, third_party_baselines
from prescore.config import Config, Exact, Hyper, Routed, Selected, config_from_dict
from prescore.errors import Unsupported
from prescore.integrations.apply import Layers, find_adapter, pick_layers, replace_attention
from prescore.integrations.attention import AttentionContext, PrescoredAttention, attend_exactly, layer_seed
from prescore.ops.parts import merge
from prescore.registry import list_scorers
from prescore.types import Reads, Result, Values

KINDS = ("exact", "local", "prescored", "baseline")
SINKS = 4
"""First tokens that a "+ sinks" method keeps."""
LEAVES_PER_TEXT = 8
"""The paper read 32768 tokens in leaves of 4096."""


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionContext], Result]
"""Causal attention of one layer whose rows can be counted, called as `Attend` is."""


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

    def attention(self, seed: int) -> Attend:
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


def counted(output: Tensor, count: Callable[[], float], stats: Values | None = None) -> Result:
    """A result of which only the output and the number of keys read are known."""
    return Result(output, output.new_empty(0), lambda: Reads(count()), stats or {})


def _exactly(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Result:
    return counted(attend_exactly(query, key, value, context), lambda: exact_rows(query.shape[2]))


def _prescored(
    attention: PrescoredAttention, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
) -> Result:
    output = attention(query, key, value, context)

    last = attention.last

    def count_keys() -> float:
        reads = None if last is None else last.reads
        if reads is None:
            raise RuntimeError(f"keys read must be known after a causal call, got {last}")
        return sum(reads)

    return counted(output, count_keys)


def _by_baseline(
    settings: Mapping[str, Any], seed: int, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
) -> Result:
    arguments = {name: setting for name, setting in settings.items() if name != "name"}
    run, seed = get_baseline(settings["name"]), layer_seed(seed, context.layer)
    output = run(query, key, value, is_causal=True, scale=context.scale, generator=seed, **arguments).output
    return counted(output, lambda: baseline_rows(settings["name"], query.shape[2], arguments))


def _locally(
    settings: Mapping[str, int], query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
) -> Result:
    leaf, length = settings["leaf"], query.shape[2]
    if "before" not in settings:
        output = leaves_alone(query, key, value, leaf=leaf, scale=context.scale)
        return counted(output, lambda: leaf_rows(length, leaf))
    sinks = settings["sinks"]
    output = near_chunks(query, key, value, chunk=leaf, sinks=sinks, scale=context.scale)
    return counted(output, lambda: near_rows(length, leaf, sinks))


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


# Fields of a configuration by name, dotted where they are nested: how experiments and `--set` change one.

Overrides = Mapping[str, Any]
"""New values by field name, such as `{"top_k": 64, "scorer.n_clusters": 32, "inner.block_size": 128}`."""

AnyConfig = TypeVar("AnyConfig", bound=Config)

_IDENTITY = ("type", "name")


def field_names(config: Config) -> list[str]:
    """All fields of a configuration, those of its scorer, `Lsh` and `Coupling` by their paths."""
    return list(_paths(config.to_dict()))


def changed(config: AnyConfig, overrides: Overrides) -> AnyConfig:
    """A copy with some fields changed.

    A word for a nested field names its type (`inner=Exact`, `scorer=leverage`), with that type's defaults.

    Raises:
        ValueError: The configuration has no such field; the nearest name is said.
    """
    # a whole part comes before the fields inside it
    config = _with(config, {name: value for name, value in overrides.items() if "." not in name})
    return _with(config, {name: value for name, value in overrides.items() if "." in name})


def fitting(config: Config, overrides: Overrides) -> Values:
    """Those overrides that a configuration has fields for, in a run of configurations of several types."""
    own = field_names(config)
    parts = {name: value for name, value in overrides.items() if "." not in name and name in own}
    inside = field_names(changed(config, parts))
    return {name: value for name, value in overrides.items() if name in parts or ("." in name and name in inside)}


def check_overrides(overrides: Overrides, configs: Sequence[Config]) -> None:
    """Refuse an override that none of a run's configurations has a field for."""
    for name in overrides:
        if not any(name in fitting(config, overrides) for config in configs):
            kinds = " or ".join(dict.fromkeys(type(config).__name__ for config in configs))
            known = dict.fromkeys(field for config in configs for field in field_names(config))
            checks.known_field(kinds or "a run without a configuration", name, [f for f in known if f != name])


def _with(config: AnyConfig, overrides: Overrides) -> AnyConfig:
    if not overrides:
        return config
    values, known = config.to_dict(), field_names(config)
    for path, value in overrides.items():
        checks.known_field(type(config).__name__, path, known)
        *parents, name = path.split(".")
        owner = values
        for parent in parents:
            owner = owner[parent]
        owner[name] = _plain(name, value, owner[name])
    return cast("AnyConfig", config_from_dict(values))  # its type is not among the fields


def _plain(name: str, value: Any, before: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    # a remainder that is no object is a word
    if isinstance(before, Mapping) and isinstance(value, str) and name != "remainder":
        return {"name" if "name" in before else "type": value}
    return value


def _paths(values: Mapping[str, Any], owner: str = "") -> Iterator[str]:
    for name, value in values.items():
        if name not in _IDENTITY:
            yield owner + name
            if isinstance(value, Mapping):
                yield from _paths(value, f"{owner}{name}.")


# Any method in any causal model, measured: through the door by which `prescore.apply` enters a model.


@contextmanager
def measured_attention(
    model: nn.Module, method: LanguageMethod, *, layers: Layers | None = None, seed: int = 0
) -> Iterator[Meter]:
    """Let a model attend by `method` inside the block, and time it.

    Layers that are local by design (sliding windows) and layers not asked for stay exact. Only plain causal
    forwards without a cache are served.

    Args:
        model: A causal model of transformers, or a ChatGLM with `core_attention` modules.
        method: How the chosen layers attend.
        layers: Which layers, as in `prescore.apply`.
        seed: Every layer draws from a seed of its own, made from this one.
    """
    n_layers = len(find_adapter(model).layers(model))
    meter = Meter(replaced=frozenset(pick_layers(layers, n_layers)))
    undo = replace_attention(
        model, {number: _Measured(meter, method.attention(seed)) for number in range(n_layers)}
    )
    try:
        yield meter
    finally:
        undo()


@dataclass(frozen=True, eq=False)
class _Measured:
    """Stands in the place of a layer's attention: by the method where it can, else exactly; timed always."""

    meter: Meter
    attention: Attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        meter, layer, form = self.meter, context.layer, context.form(query, key)
        _refuse(query, key, context, context.obstacles if layer in meter.replaced else ())
        is_causal = form.kind == "causal" and form.valid is None and not context.is_local
        if layer in meter.replaced and is_causal:
            result = meter.timed(layer, lambda: self.attention(query, key, value, context), key.device)
            meter.rows[layer] = sum(result.count_reads())
            return result.output
        if is_causal:
            meter.exact_rows[layer] = exact_rows(query.shape[2])
        return meter.timed(layer, lambda: attend_exactly(query, key, value, context), key.device)


def _refuse(query: Tensor, key: Tensor, context: AttentionContext, obstacles: Sequence[str]) -> None:
    reasons = list(obstacles)
    if query.shape[2] != key.shape[2]:
        reasons.append(f"it has {query.shape[2]} queries for {key.shape[2]} keys; measure without a cache")
    if context.dropout > 0:
        reasons.append(f"it drops attention weights with probability {context.dropout}; call model.eval() first")
    if reasons:
        raise Unsupported(f"measuring attention in layer {context.layer} ({context.owner})", reasons)


# What an attention costs: key rows met per query, and seconds spent in the attention function itself.

Timed = TypeVar("Timed")


@dataclass(eq=False)
class Meter:
    """Time and rows of one forward, by layer number.

    Attributes:
        seconds: Time inside the attention function, scoring included.
        processor_seconds: The same as processor time summed over threads, which a busy machine does not stretch;
            empty where the work is done by another device.
        rows: Rows per query of replaced layers, counted beside the time.
        exact_rows: Rows per query of the other layers, where they read everything before them.
        replaced: Layers that ran the method; the others were exact.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    processor_seconds: dict[int, float] = field(default_factory=dict)
    rows: dict[int, float] = field(default_factory=dict)
    exact_rows: dict[int, float] = field(default_factory=dict)
    replaced: frozenset[int] = frozenset()

    def timed(self, layer: int, work: Callable[[], Timed], device: torch.device) -> Timed:
        """Run a layer's attention and add its time to the books; work queued on a GPU before is not counted."""
        _wait(device)
        begin, processor = time.perf_counter(), time.process_time()
        output = work()
        _wait(device)
        self.seconds[layer] = self.seconds.get(layer, 0.0) + time.perf_counter() - begin
        if device.type == "cpu":
            spent = time.process_time() - processor
            self.processor_seconds[layer] = self.processor_seconds.get(layer, 0.0) + spent
        return output

    def figures(self) -> Values:
        """The sums that a record carries."""
        replaced = [seconds for layer, seconds in self.seconds.items() if layer in self.replaced]
        processor = self.processor_seconds.values()
        own = sum(self.rows.values()) / len(self.rows) if self.rows else None
        mean = None
        if own is not None:
            counted = [*self.rows.values(), *self.exact_rows.values()]
            mean = sum(counted) / len(counted)
        return {
            "attention_seconds": round(sum(self.seconds.values()), 4),
            "attention_processor_seconds": round(sum(processor), 4) if processor else None,
            "replaced_seconds": round(sum(replaced), 4),
            "layers_replaced": len(replaced),
            "keys_per_query": None if mean is None else round(mean, 2),
            "replaced_rows_per_query": None if own is None else round(own, 2),
        }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exact_rows(length: int) -> float:
    """Keys that a query meets under plain causal attention."""
    return (length + 1) / 2


def leaf_rows(length: int, leaf: int) -> float:
    """Keys that a query meets inside its own leaf."""
    return float((torch.arange(length, dtype=torch.float64) % leaf + 1).mean())


def near_rows(length: int, chunk: int, sinks: int) -> float:
    """Keys that a query meets in its own chunk, the one before and the first positions."""
    position = torch.arange(length, dtype=torch.float64)
    begin = position - position % chunk
    first = (begin - chunk).clamp_min(0)
    return float((position + 1 - first + first.clamp_max(sinks)).mean())


def baseline_rows(name: str, length: int, settings: Mapping[str, Any]) -> float:
    """Keys that a query meets in a baseline, from its settings; what choosing them cost is in the time alone.

    For `performer` it is the number of features, which take the place of rows; for `reformer` an upper bound.
    """
    third_party = third_party_baselines()
    if name in third_party:
        return float(third_party[name].keys_read(length, settings))
    position = torch.arange(length, dtype=torch.float64)
    if name == "streaming":
        beyond = (position + 1 - settings["window"]).clamp_min(0)
        seen = (position + 1).clamp_max(settings["window"]) + beyond.clamp_max(settings["sinks"])
    elif name == "performer":
        seen = torch.full_like(position, settings["n_features"])
    elif name == "reformer":
        seen = (position + 1).clamp_max(2 * settings["chunk_size"] * settings["n_rounds"])
    else:
        own = position % settings["chunk_size"]
        seen = own + 1 + (position - own).clamp_max(settings["budget"])
    return float(seen.mean())
