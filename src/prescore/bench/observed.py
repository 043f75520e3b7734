"""A method in the layers of a model, measured: what its attention costs, reads and runs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import Tensor, nn

from prescore.attention import exact_attention
from prescore.bench.memory import peak_megabytes, reset_peak, resident_megabytes
from prescore.bench.methods import Baseline, Local
from prescore.config import Config, Exact
from prescore.errors import Unsupported
from prescore.integrations.apply import (
    Layers,
    find_adapter,
    pick_layers,
    replace_attention,
    replace_context_parallel,
)
from prescore.integrations.attention import (
    Attend,
    AttentionContext,
    PrescoredAttention,
    layer_seed,
    original_attention,
)
from prescore.integrations.report import CallTrace
from prescore.parallel.comm import Group
from prescore.parallel.entry import OWN_HEADS
from prescore.parallel.ulysses import attend_by_heads
from prescore.types import Reads, Values


class WithoutState:
    """Local attention or a baseline in one layer, with any cache: steps read what the last query would.

    A baseline other than the sliding window reads every key in steps. Layers that are local by design stay exact.

    Attributes:
        last: What the last call did; None before the first.
    """

    def __init__(self, config: Local | Baseline, *, seed: int = 0, group: Group | None = None) -> None:
        self.config, self.seed, self.group = config, seed, group
        self.last: CallTrace | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Attend; see `prescore.integrations.attention.Attend`."""
        begin, (n_query, n_keys) = time.perf_counter(), (query.shape[2], key.shape[2])
        kind, length = context.form(query, key).kind, n_keys * (1 if self.group is None else self.group.size)
        is_step = n_query < n_keys
        if context.is_local or not (is_step or kind == "causal"):
            output, reads = original_attention(query, key, value, context), None
        elif is_step:
            parts = self.config.last_keys(n_keys)
            keys, values = (torch.cat([tensor[:, :, part] for part in parts], dim=2) for tensor in (key, value))
            output, reads = exact_attention(query, keys, values, scale=context.scale).output, None
        else:
            self._refuse(context)
            output, reads = self._prompt(query, key, value, context), Reads(self.config.reads(length))
        name, seconds = type(self.config).__name__.lower(), time.perf_counter() - begin
        self.last = CallTrace(name, name, kind, n_query, n_keys, seconds, lambda: (reads, None))
        return output

    def _prompt(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        seed, config, scale = layer_seed(self.seed, context.layer), self.config, context.scale
        if self.group is None:
            return config.attend(query, key, value, scale=scale, seed=seed)

        def attend(*tensors: Tensor) -> list[Tensor]:
            return [config.attend(*tensors, scale=scale, seed=seed)]

        return attend_by_heads(self.group, query, key, value, attend)[0]

    def _refuse(self, context: AttentionContext) -> None:
        dropout = [f"it drops attention weights with probability {context.dropout}"] if context.dropout else []
        reasons = [*context.obstacles, *dropout]
        if reasons:
            what = f"{type(self.config).__name__.lower()} attention in layer {context.layer} ({context.owner})"
            raise Unsupported(what, reasons)


class Observed:
    """The attention of every layer of a model: each call runs the function of its layer, and is timed and counted.

    Attributes:
        functions: What each layer runs.
        replaced: The layers that run the method; the others are exact.
        n_ranks: Processes that share the sequence.
        seconds: Time inside attention since `restart`, by layer.
        processor_seconds: The same over all threads, which other load does not stretch; empty on GPUs.
        paths: How calls of replaced layers were answered, and how often.
        ran: What they ran, and how often.
    """

    def __init__(self, functions: Mapping[int, Attend], replaced: Collection[int] = (), n_ranks: int = 1) -> None:
        self.functions, self.replaced, self.n_ranks = functions, replaced, n_ranks
        self._local_layers: set[int] = set()
        self._n_heads: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what was measured."""
        self.seconds: dict[int, float] = defaultdict(float)
        self.processor_seconds: dict[int, float] = defaultdict(float)
        self.paths, self.ran = Counter[str](), Counter[str]()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Attend; see `prescore.integrations.attention.Attend`."""
        layer, is_cuda = context.layer, key.device.type == "cuda"
        self._n_heads[layer] = query.shape[1]
        if context.is_local:
            self._local_layers.add(layer)
        if is_cuda:
            torch.cuda.synchronize(key.device)
        begin, processor = time.perf_counter(), time.process_time()
        output = self.functions[layer](query, key, value, context)
        if is_cuda:
            torch.cuda.synchronize(key.device)
        else:
            self.processor_seconds[layer] += time.process_time() - processor
        self.seconds[layer] += time.perf_counter() - begin
        trace = self._trace(layer)
        if trace is not None and layer in self.replaced:
            self.paths[trace.path] += 1
            self.ran[trace.ran] += 1
        return output

    def reads(self) -> dict[int, float]:
        """Keys and centroids that a query read in the last call of each causal layer, on all ranks."""
        reads = {}
        for layer in self.functions:
            trace = self._trace(layer)
            if trace is None or trace.mask != "causal" or trace.reads is None or layer in self._local_layers:
                continue
            # a rank runs its positions, or all positions of its heads
            n_heads = self._n_heads[layer] / self.n_ranks
            reads[layer] = sum(trace.reads) * trace.stats.get(OWN_HEADS, n_heads) / n_heads
        return reads

    def sum(self) -> float:
        """Time inside attention since `restart`, of all layers."""
        return sum(self.seconds.values())

    def results(self) -> Values:
        """What a record says about the cost of one forward."""
        reads, processor = self.reads(), self.processor_seconds.values()
        seconds_replaced = [spent for layer, spent in self.seconds.items() if layer in self.replaced]
        reads_replaced = [count for layer, count in reads.items() if layer in self.replaced]
        return {
            "attention_seconds": round(self.sum(), 4),
            "attention_processor_seconds": round(sum(processor), 4) if processor else None,
            "replaced_seconds": round(sum(seconds_replaced), 4),
            "layers_replaced": len(seconds_replaced),
            "reads_per_query": round(fmean(reads.values()), 2) if reads else None,
            "replaced_reads_per_query": round(fmean(reads_replaced), 2) if reads_replaced else None,
        }

    def _trace(self, layer: int) -> CallTrace | None:
        return getattr(self.functions[layer], "last", None)


@contextmanager
def observed(
    model: nn.Module,
    config: Config | Local | Baseline | None,
    *,
    layers: Layers | None = "all",
    seed: int = 0,
    group: Group | None = None,
) -> Iterator[Observed]:
    """Let the chosen layers of a model attend by a method inside the block, all others exactly, and observe them.

    Args:
        model: A model that `prescore.apply` supports.
        config: The method; None = exact attention, and no layer counts as replaced.
        layers: Which layers, as in `prescore.apply`.
        seed: Every layer draws from its stream of this seed.
        group: The ranks of which every one runs the model on its shard of the sequence.
    """
    numbers = list(find_adapter(model).layers(model))
    replaced = [] if config is None else pick_layers(layers, numbers)

    def attention(method: Config | Local | Baseline) -> Attend:
        if isinstance(method, Local | Baseline):
            return WithoutState(method, seed=seed, group=group)
        if group is None:
            return PrescoredAttention(method, seed=seed)
        from prescore.integrations.transformers.parallel import ContextParallel, ContextParallelAttention

        return ContextParallelAttention(method, ContextParallel(group), seed=seed)

    functions = {n: attention(config if config is not None and n in replaced else Exact()) for n in numbers}
    observer = Observed(functions, replaced, 1 if group is None else group.size)
    by_layer = dict.fromkeys(numbers, observer)
    if group is None:
        undo = replace_attention(model, by_layer)
    else:
        undo = replace_context_parallel(model, by_layer, group)[1]
    try:
        yield observer
    finally:
        undo()


def costs_of_ranks(observer: Observed, group: Group) -> Callable[[], Values]:
    """The results of all ranks from now on: reads are means, all else is of the rank with most of it."""
    reset_peak()
    sent, start_megabytes = group.sent, resident_megabytes()

    def results() -> Values:
        results = observer.results() | {
            "bytes_sent_per_layer": (group.sent - sent) / len(observer.functions),
            "peak_megabytes": peak_megabytes(),
            "start_megabytes": start_megabytes,
        }
        digits = {"bytes_sent_per_layer": None, "peak_megabytes": 1, "start_megabytes": 1, "layers_replaced": None}
        names = [name for name, value in results.items() if value is not None]
        of_rank = torch.tensor([results[name] for name in names], dtype=torch.float64, device=group.device)
        for name, by_rank in zip(names, group.gather(of_rank).cpu().unbind(1), strict=True):
            is_mean = name.endswith("reads_per_query")
            value = float(by_rank.mean() if is_mean else by_rank.amax())
            results[name] = round(value, digits.get(name, 2 if is_mean else 4))
        return {**results, "ranks": group.size}

    return results
