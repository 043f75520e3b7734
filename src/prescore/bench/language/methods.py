"""What is compared on language models, by name, and how it is measured."""

from __future__ import annotations

import bisect
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from statistics import fmean
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from prescore import checks
from prescore.attention import Options, attend, exact_attention
from prescore.bench.baselines import get_baseline, list_baselines, third_party_baselines
from prescore.bench.memory import peak_megabytes, reset_peak, resident_megabytes
from prescore.bench.records import Values
from prescore.config import Config, Exact, Hyper, Lsh, Routed, Selected, config_from_dict
from prescore.errors import Unsupported
from prescore.integrations.apply import (
    Layers,
    find_adapter,
    pick_layers,
    replace_attention,
    replace_context_parallel,
)
from prescore.integrations.attention import AttentionContext, attend_exactly, layer_seed
from prescore.ops.parts import merge
from prescore.parallel.comm import Group
from prescore.parallel.entry import OWN_HEADS
from prescore.parallel.ulysses import attend_by_heads
from prescore.registry import list_scorers
from prescore.types import Result

PAPER = "paper:"
"""`paper:kmeans` is `Selected.paper("kmeans")`; `kmeans` is `Selected("kmeans")`."""
SINKS = 4
"""First tokens that sliding windows and "+ sinks" methods keep."""
LEAVES_PER_TEXT, BLOCKS_PER_TEXT = 8, 128
"""The paper read 32768 tokens with leaves of 4096 and LSH blocks of 256."""
TOP_K = 256


@dataclass(frozen=True)
class Local:
    """Exact causal attention to the query's own chunk. Far keys are dropped.

    Attributes:
        chunk_size: Positions of a chunk.
        previous_chunk: Also read the chunk before.
        sinks: Also read the first positions.
    """

    chunk_size: int
    previous_chunk: bool = False
    sinks: int = 0

    def __post_init__(self) -> None:
        checks.integer("chunk_size", self.chunk_size, minimum=1)
        checks.integer("sinks", self.sinks, minimum=0)

    def to_dict(self) -> Values:
        """JSON values, as those of a configuration."""
        return {"type": "Local", **asdict(self)}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, seed: int) -> Tensor:
        """Attention of one layer."""
        outputs = []
        for begin in range(0, query.shape[2], self.chunk_size):
            first = max(0, begin - self.chunk_size) if self.previous_chunk else begin
            local = slice(first, begin + self.chunk_size)
            own = query[:, :, begin : begin + self.chunk_size]
            attended = exact_attention(own, key[:, :, local], value[:, :, local], is_causal=True, scale=scale)
            n_sinks = min(self.sinks, first)
            if n_sinks:
                sinks = exact_attention(own, key[:, :, :n_sinks], value[:, :, :n_sinks], scale=scale)
                attended = merge(attended, sinks)
            outputs.append(attended.output)
        return torch.cat(outputs, dim=2)

    def last_keys(self, length: int) -> list[slice]:
        """What the last of so many positions reads."""
        begin = (length - 1) // self.chunk_size * self.chunk_size
        first = max(0, begin - self.chunk_size) if self.previous_chunk else begin
        return [slice(0, min(self.sinks, first)), slice(first, length)]

    def reads(self, length: int) -> float:
        """Keys that a query reads on average."""
        position = torch.arange(length, dtype=torch.float64)
        begin = position - position % self.chunk_size
        first = (begin - self.chunk_size).clamp_min(0) if self.previous_chunk else begin
        return float((position + 1 - first + first.clamp_max(self.sinks)).mean())


@dataclass(frozen=True)
class Baseline:
    """One of `prescore.bench.baselines` with its arguments."""

    name: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        checks.one_of("baseline", self.name, tuple(list_baselines()))

    @classmethod
    def at_budget(cls, name: str, leaf: int, top_k: int | float) -> Baseline:
        """A baseline that reads about `leaf / 2` local and `top_k` far keys per query."""
        if not isinstance(top_k, int) or isinstance(top_k, bool):
            raise ValueError(f"top_k must be a count of keys for the baseline {name!r}, got {top_k!r}")
        checks.integer("top_k", top_k, minimum=0)
        if name in third_party_baselines():
            return cls(name, dict(third_party_baselines()[name].settings(leaf, top_k)))
        settings: dict[str, Values] = {
            "streaming": {"window": leaf // 2 + max(1, top_k - SINKS), "sinks": SINKS},
            "performer": {"n_features": max(1, top_k)},
            "reformer": {"chunk_size": max(1, top_k // 8), "n_rounds": 4},
        }
        return cls(name, settings.get(name, {"budget": top_k, "chunk_size": leaf}))

    def to_dict(self) -> Values:
        """JSON values, as those of a configuration."""
        return {"type": "Baseline", "name": self.name, **self.settings}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, seed: int) -> Tensor:
        """Attention of one layer."""
        run = get_baseline(self.name)
        return run(query, key, value, is_causal=True, scale=scale, generator=seed, **self.settings).output

    def last_keys(self, length: int) -> list[slice]:
        """What the last of so many positions reads: its sliding window; all keys for every other baseline."""
        if self.name != "streaming":
            return [slice(0, length)]
        first = max(0, length - self.settings["window"])
        return [slice(0, min(self.settings["sinks"], first)), slice(first, length)]

    def reads(self, length: int) -> float:
        """Keys that a query reads on average, from the settings; what choosing them costs is in the time alone.

        For `performer` it is the number of features, for `reformer` an upper bound.
        """
        settings, third_party = self.settings, third_party_baselines()
        if self.name in third_party:
            return float(third_party[self.name].keys_read(length, settings))
        position = torch.arange(length, dtype=torch.float64)
        if self.name == "streaming":
            beyond = (position + 1 - settings["window"]).clamp_min(0)
            reads = (position + 1).clamp_max(settings["window"]) + beyond.clamp_max(settings["sinks"])
        elif self.name == "performer":
            reads = torch.full_like(position, settings["n_features"])
        elif self.name == "reformer":
            reads = (position + 1).clamp_max(2 * settings["chunk_size"] * settings["n_rounds"])
        else:
            inside = position % settings["chunk_size"]
            reads = inside + 1 + (position - inside).clamp_max(settings["budget"])
        return float(reads.mean())


@dataclass(frozen=True)
class Method:
    """One way to compute causal attention.

    Attributes:
        label: Its name in tables.
        config: A configuration of the library, local attention or a baseline.
        axes: Its coordinates in an experiment (top_k, sample size, ...), for tables and pictures.
    """

    label: str
    config: Config | Local | Baseline
    axes: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> Values:
        """Everything that identifies the method, for a record."""
        return {"label": self.label, "config": self.config.to_dict(), "axes": dict(self.axes)}


EXACT = Method("exact", Exact())
"""The reference: softmax over every key."""


def local_only(chunk_size: int, *, previous_chunk: bool = False, sinks: int = 0) -> Method:
    """The floor: far keys are dropped."""
    return Method("local only", Local(chunk_size, previous_chunk, sinks))


def sliding_window(length: int, reads: float, sinks: int, **axes: Any) -> Method:
    """The narrowest sliding window that reads at least so many keys per query, sinks included."""
    checks.integer("sinks", sinks, minimum=0)

    def windowed(window: int) -> Baseline:
        return Baseline("streaming", {"window": window, "sinks": sinks})

    window = 1 + bisect.bisect_left(range(1, length), reads, key=lambda window: windowed(window).reads(length))
    return Method("sliding window", windowed(window), axes)


def leaf_of(length: int) -> int:
    """Causal leaves at a length, as large a share of it as the paper's."""
    return max(1, length // LEAVES_PER_TEXT)


_NAMED: dict[str, Callable[[], Config]] = {"exact": Exact, "default": Routed, "hyper": Hyper.published}


def config_names() -> list[str]:
    """Names that `named_config` knows."""
    scorers = list_scorers()
    return [*_NAMED, *scorers, *(PAPER + name for name in scorers)]


def method_names() -> list[str]:
    """Names that `named_method` knows."""
    return ["local", *config_names(), *list_baselines()]


def named_config(name: str) -> Config:
    """A configuration by its name on the command line.

    `exact`, `default` (`Routed`), `hyper` (`Hyper.published`), `SCORER` (`Selected`), `paper:SCORER`
    (`Selected.paper`).
    """
    checks.one_of("config", name, config_names())
    if name in _NAMED:
        return _NAMED[name]()
    return Selected.paper(name.removeprefix(PAPER)) if name.startswith(PAPER) else Selected(name)


def named_method(
    name: str,
    *,
    length: int,
    leaf: int | None = None,
    top_k: int | float = TOP_K,
    changes: Mapping[str, Any] | None = None,
) -> Method:
    """A method by its name on the command line: `named_config` with sizes for a length, `local`, or a baseline.

    Args:
        name: One of `method_names()`.
        length: Tokens read. LSH blocks have the paper's share of it.
        leaf: Causal leaves, and chunks of the default; None = the paper's share of the length, and the default as
            it is.
        top_k: Keys kept by scorers, far keys of baselines.
        changes: Fields to change where the configuration has them, see `change`.
    """
    checks.one_of("method", name, method_names())
    size, block = leaf or leaf_of(length), max(1, length // BLOCKS_PER_TEXT)
    if name == "local":
        return local_only(size)
    if name in list_baselines():
        return Method(name, Baseline.at_budget(name, size, top_k), {"top_k": top_k})
    lsh = Lsh(block, block, alignment="rank")
    sizes: Values = {"top_k": top_k, "min_seq_len": size, "lsh": lsh}
    sizes |= {"inner": lsh} if name.startswith(PAPER) else {}
    sizes |= {} if leaf is None else {"chunk_size": leaf, "exact_until": leaf}
    return Method(name, change(change(named_config(name), sizes, partly=True), changes or {}, partly=True))


# Fields of a configuration by name, nested ones by their path: `--set scorer.n_clusters=64`.

AnyConfig = TypeVar("AnyConfig", bound="Config | Local | Baseline")


def field_paths(config: Config | Local | Baseline) -> list[str]:
    """All fields of a configuration; those of its scorer, `Lsh` and `Coupling` by their paths."""

    def paths(values: Mapping[str, Any], owner: str) -> Iterator[str]:
        for name, value in values.items():
            if name not in ("type", "name"):
                yield owner + name
                if isinstance(value, Mapping):
                    yield from paths(value, f"{owner}{name}.")

    return list(paths(config.to_dict(), ""))


def change(config: AnyConfig, changes: Mapping[str, Any], *, partly: bool = False) -> AnyConfig:
    """A copy with some fields changed.

    A word for a nested field names its type (`inner=Exact`, `scorer=leverage`), with that type's defaults, but for
    `remainder`, which may be a word itself.

    Args:
        config: What to change; local attention and baselines have no such fields.
        changes: New values, such as `{"top_k": 64, "scorer.n_clusters": 32}`.
        partly: Leave out fields that the configuration lacks, instead of refusing them.
    """
    if isinstance(config, Local | Baseline):
        return config
    for is_nested in (False, True):  # a whole part comes before the fields inside it
        values, known = config.to_dict(), field_paths(config)
        for path, value in changes.items():
            if ("." in path) != is_nested or (partly and path not in known):
                continue
            checks.known_field(type(config).__name__, path, known)
            *parents, name = path.split(".")
            owner = reduce(operator.getitem, parents, values)
            if isinstance(owner[name], Mapping) and isinstance(value, str) and name != "remainder":
                owner[name] = {"name" if "name" in owner[name] else "type": value}
            else:
                owner[name] = value.to_dict() if hasattr(value, "to_dict") else value
        config = cast("AnyConfig", config_from_dict(values))
    return config


def check_changes(changes: Mapping[str, Any], methods: Sequence[Method]) -> None:
    """Refuse a change that no configuration of a run has a field for."""
    configs = [method.config for method in methods if isinstance(method.config, Routed | Selected | Hyper)]
    known = dict.fromkeys(path for config in configs for path in field_paths(change(config, changes, partly=True)))
    kinds = " or ".join(dict.fromkeys(type(config).__name__ for config in configs))
    for name in changes:
        checks.known_field(kinds or "a run without a configuration", name, list(known))


# A method in the layers of a model, measured.


class MeasuredAttention:
    """The attention function of all layers of a model: it runs a method, times it and counts what queries read.

    Layers that are local by design (sliding windows) and layers that are not replaced stay exact. Only plain
    causal forwards without a cache are run. On several ranks every rank holds one of these, for its shard of the
    sequence. Every layer draws from a seed made from `seed`.

    Attributes:
        seconds: Wall time inside the attention function, by layer.
        processor_seconds: The same as processor time over all threads, which other load does not stretch; empty on
            other devices than CPUs.
        reads: Keys and centroids read per query, by causal layer.
    """

    def __init__(
        self, method: Method, replaced: Sequence[int] = (), *, seed: int = 0, group: Group | None = None
    ) -> None:
        self.config, self.replaced, self.seed, self.group = method.config, frozenset(replaced), seed, group
        self.seconds: dict[int, float] = defaultdict(float)
        self.processor_seconds: dict[int, float] = defaultdict(float)
        self.reads: dict[int, float] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Attend; see `prescore.integrations.attention.Attend`."""
        self._refuse(query, key, context)
        layer, group, device = context.layer, self.group, key.device
        form = context.form(query, key)
        is_causal = group is not None or (form.kind == "causal" and form.valid is None and not context.is_local)
        config = self.config if is_causal and layer in self.replaced else Exact()
        length = query.shape[2] * (1 if group is None else group.size)
        seed = layer_seed(self.seed, layer)
        result: Result | None = None
        _wait(device)
        begin, processor = time.perf_counter(), time.process_time()
        if isinstance(config, Local | Baseline):
            run = partial(config.attend, scale=context.scale, seed=seed)
            if group is None:
                output = run(query, key, value)
            else:
                (output,) = attend_by_heads(group, query, key, value, lambda *tensors: [run(*tensors)])
        elif isinstance(config, Exact) and group is None:
            output = attend_exactly(query, key, value, context)
        else:
            options = Options(is_causal=True, scale=context.scale, generator=seed)
            result = attend(query, key, value, config, options, group=group)
            output = result.output
        _wait(device)
        self.seconds[layer] += time.perf_counter() - begin
        if device.type == "cpu":
            self.processor_seconds[layer] += time.process_time() - processor
        if not is_causal:
            return output
        if result is not None:
            # a rank runs its positions, or all positions of its heads
            own_heads, n_ranks = result.stats.get(OWN_HEADS), 1 if group is None else group.size
            share = 1.0 if own_heads is None else own_heads * n_ranks / query.shape[1]
            self.reads[layer] = share * sum(result.count_reads())
        else:
            self.reads[layer] = config.reads(length) if isinstance(config, Local | Baseline) else (length + 1) / 2
        return output

    def _refuse(self, query: Tensor, key: Tensor, context: AttentionContext) -> None:
        reasons = list(context.obstacles) if context.layer in self.replaced else []
        if query.shape[2] != key.shape[2]:
            reasons.append(f"it has {query.shape[2]} queries for {key.shape[2]} keys; measure without a cache")
        if context.dropout > 0:
            reasons.append(
                f"it drops attention weights with probability {context.dropout}; call model.eval() first"
            )
        if context.is_local and self.group is not None:
            reasons.append("it has a sliding window, which no shard can see on its own")
        if reasons:
            raise Unsupported(f"measuring attention in layer {context.layer} ({context.owner})", reasons)

    def results(self) -> Values:
        """What a record says about the cost of one forward."""
        replaced = [spent for layer, spent in self.seconds.items() if layer in self.replaced]
        processor = self.processor_seconds.values()
        reads = [count for layer, count in self.reads.items() if layer in self.replaced]
        return {
            "attention_seconds": round(sum(self.seconds.values()), 4),
            "attention_processor_seconds": round(sum(processor), 4) if processor else None,
            "replaced_seconds": round(sum(replaced), 4),
            "layers_replaced": len(replaced),
            "reads_per_query": round(fmean(self.reads.values()), 2) if reads else None,
            "replaced_reads_per_query": round(fmean(reads), 2) if reads else None,
        }


@contextmanager
def measured_attention(
    model: nn.Module, method: Method, *, layers: Layers | None = None, seed: int = 0, group: Group | None = None
) -> Iterator[Callable[[], Values]]:
    """Let a model attend by a method inside the block; yields a function that gives the cost so far.

    On several ranks it must be called by all of them: reads are means over the ranks; seconds, bytes and memory
    those of the rank with most of them. Layers are named as in `prescore.apply`.
    """
    numbers = list(find_adapter(model).layers(model))
    attention = MeasuredAttention(method, pick_layers(layers, numbers), seed=seed, group=group)
    functions = dict.fromkeys(numbers, attention)
    if group is None:
        undo, results = replace_attention(model, functions), attention.results
    else:
        _, undo = replace_context_parallel(model, functions, group)
        reset_peak()
        results = partial(_results_of_ranks, attention, group, group.sent, len(numbers), resident_megabytes())
    try:
        yield results
    finally:
        undo()


def _results_of_ranks(
    attention: MeasuredAttention, group: Group, sent: int, n_layers: int, start_megabytes: float
) -> Values:
    results = attention.results() | {
        "bytes_sent_per_layer": (group.sent - sent) / n_layers,
        "peak_megabytes": peak_megabytes(),
        "start_megabytes": start_megabytes,
    }
    digits = {"bytes_sent_per_layer": None, "peak_megabytes": 1, "start_megabytes": 1, "layers_replaced": None}
    names = [name for name, value in results.items() if value is not None]
    own = torch.tensor([results[name] for name in names], dtype=torch.float64, device=group.device)
    for name, column in zip(names, group.gather(own).cpu().unbind(1), strict=True):
        is_mean = name.endswith("reads_per_query")
        value = float(column.mean() if is_mean else column.amax())
        results[name] = round(value, digits.get(name, 2 if is_mean else 4))
    return {**results, "ranks": group.size}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
