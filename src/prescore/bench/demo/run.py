"""What the demo measures: the default as it is, and other methods that read as many keys per query."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from prescore.bench.language.held_out import REPORTED, TokenizedText
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import Window, describe_window, loss_row
from prescore.bench.methods import EXACT, Method, local_only, sliding_window
from prescore.bench.records import Record, Row, Values
from prescore.bench.tables import number
from prescore.config import Routed, Selected, config_from_dict
from prescore.integrations.apply import find_adapter, replace_attention
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.routed.layout import make_layout
from prescore.routed.reference import reference_attention

if TYPE_CHECKING:
    from prescore.bench.cli.options import Session


STARTS = REPORTED[8192]
"""Where windows begin, as shares of the text: nothing was tuned on these."""
SEGMENTS = 16
"""Parts of a window whose losses are recorded apart, for intervals."""
_SHORT_SINKS = 4
N_MATCHED = 2
"""Methods that read as much as the default."""


@dataclass(frozen=True, eq=False)
class Demo:
    """One run of the demo on the windows of a text."""

    session: Session
    model: LanguageModel
    text: TokenizedText
    length: int
    seed: int

    def run(self, n_windows: int = 1) -> list[Record]:
        """Measure that many windows, where the text has them; returns all records of the run."""
        windows = demo_windows(self.text, self.length)[:n_windows]
        methods = first_methods(self.length)
        n_rows = 1 + (len(methods) + N_MATCHED) * len(windows)
        unfinished = max(1, n_rows - len(self.session.file))
        with self.session.whole(unfinished * self.length) as session:
            records = session.run(self._losses(windows[0], methods))
            methods += matched_methods(next(r for r in records if is_default(r)))
            reads = reads_row(
                self.model, windows[0], shown_config(self.length), layers=self._layers(), seed=self.seed
            )
            more = [row for window in windows for row in self._losses(window, methods)]
            session.run([*more, reads])
        return list(self.session.file)

    def _losses(self, window: Window, methods: Sequence[Method]) -> list[Row]:
        options: Values = {"experiment": "demo", "seed": self.seed, "segments": SEGMENTS}
        return [loss_row(self.model, window, method, **options) for method in methods]

    def _layers(self) -> list[int]:
        """An early, a middle and a late layer."""
        n_layers = self.model.model.config.get_text_config(decoder=True).num_hidden_layers
        return sorted({n_layers // 6, n_layers // 2, n_layers - 1 - n_layers // 6})


def is_default(record: Record) -> bool:
    """Whether a record is a loss under the default."""
    config = record.config
    return bool(config["part"] == "loss" and config["method"]["axes"]["series"] == "default")


# Windows and methods.


def demo_windows(text: TokenizedText, length: int) -> list[Window]:
    """Windows of a text that share no token; the second half of each counts in the loss."""
    total = len(text.tokens)
    if total < length:
        raise ValueError(f"document {text.name} must have at least {length} tokens, got {total}")
    starts = [round(share * (total - length)) for share in STARTS]
    apart = [start for number, start in enumerate(starts) if number == 0 or start >= starts[number - 1] + length]
    return [text.window(start, length, f"window {number}") for number, start in enumerate(apart, start=1)]


def shown_config(length: int) -> Routed:
    """The default as it is; where it would read every key, one that routes."""
    default = Routed()
    if length > default.exact_until:
        return default
    weight, chunk = 1 / (2 * max(1, length // 16)), max(1, min(default.chunk_size, length // 8))
    return Routed(min_weight=weight, chunk_size=chunk, sinks=_SHORT_SINKS, exact_until=0)


def _method(label: str, config: Any, series: str | None = None) -> Method:
    return Method(label, config, {"series": series or label})


def first_methods(length: int) -> list[Method]:
    """Exact attention, the default, and the default without its far keys."""
    config = shown_config(length)
    local = local_only(config.chunk_size, previous_chunk=True, sinks=config.sinks)
    return [_method("exact", EXACT.config), _method("default", config), _method(local.label, local.config)]


def matched_methods(default: Record) -> list[Method]:
    """A sliding window and a selection, with the same sinks, that read no less than this record's default."""
    name = "replaced_reads_per_query"
    config, reads = config_from_dict(default.config["method"]["config"]), default.results.get(name)
    if not isinstance(config, Routed):
        raise ValueError(f"record {default.key} must be one of the default, got {type(config).__name__}")
    length, leaf, sinks = int(default.config["n_tokens"]), 2 * config.chunk_size, config.sinks
    reads = number(default, reads, name)
    window: Any = sliding_window(length, reads, sinks).config
    top_k = smallest_selection(length, leaf, reads, sinks)
    selected = Selected("key-diff", top_k, sinks=sinks, remainder="none", min_seq_len=leaf)
    return [
        _method(f"sliding window, {window.to_dict()['window']}", window, "sliding window + sinks"),
        _method(f"selection, top {top_k}", selected, "selection + sinks"),
    ]


def smallest_selection(length: int, leaf: int, reads: float, sinks: int) -> int:
    """The smallest selection that reads no less and has room for the sinks."""
    counts = range(sinks + 1, max(sinks + 2, length))
    number = bisect.bisect_left(counts, reads, key=lambda count: selected_reads(length, leaf, count))
    return counts[min(number, len(counts) - 1)]


def selected_reads(length: int, leaf: int, top_k: int) -> float:
    """Keys that a causal query of a selection reads: its exact leaf, and the selected keys of each block."""
    position = torch.arange(length)
    reads, block = position % leaf + 1, leaf
    while block < length:
        reads += (position // block % 2) * min(top_k, block)
        block *= 2
    return float(reads.double().mean())


# What single queries of the default read, head by head, from the reference implementation. The model itself runs
# on the default while the inputs of its layers are recorded.

N_QUERIES = 96
"""Last tokens of a window that can be picked on the page."""
MOST_LISTED = 24
"""Heaviest far keys of a query that are listed."""
_MOST_HEADS = 12
_ONE = 10_000
"""Weights are whole parts of this."""


class QueryReads(NamedTuple):
    """What one query of one head reads; weights in parts of 10000.

    Attributes:
        sinks, local, far, centroids: Weights of the first keys, of the local keys, of far keys that are read and
            of centroids; they sum to 1.
        error: Relative error of the output against exact attention, in parts of 10000 too.
        counts: How many local keys, and how many far keys.
        chunks: Weight of the centroids of each far chunk.
        heaviest: Position and weight of the heaviest far keys, in turn.
    """

    sinks: int
    local: int
    far: int
    centroids: int
    error: int
    counts: list[int]
    chunks: list[int]
    heaviest: list[int]


class LayerInputs(NamedTuple):
    """Inputs of a layer: its last queries `[Hq, Nq, D]`, and all keys and values `[Hkv, N, D]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None


def reads_row(
    language_model: LanguageModel, window: Window, config: Routed, *, layers: Sequence[int], seed: int = 0
) -> Row:
    """What the last queries of a window read in some layers, as a row; sliding-window layers are left out.

    Results: `tokens` (all tokens as text), `first` (position of the first query), `sinks` and `chunk` (sizes),
    `heads` (pairs of layer and query head), `searching` and `smooth` (the head with most weight on far keys, and
    on centroids), and `reads[head][query]`, the fields of `QueryReads` in turn.
    """
    described = {**describe_window(language_model, window), "layers": list(layers)}
    method = {"label": "default", "config": config.to_dict(), "axes": {}}

    def measure() -> Values:
        n_query = min(N_QUERIES, len(window.tokens) // 4)
        heads: list[list[int]] = []
        reads: list[list[QueryReads]] = []
        layout = make_layout(n_query, len(window.tokens), causal=True, config=config)
        for layer, inputs in layer_inputs(language_model, window, config, layers, n_query, seed).items():
            by_head = layer_reads(inputs, config)
            heads += [[layer, head] for head in by_head]
            reads += by_head.values()
        numbers = range(len(reads))
        return {
            "tokens": [language_model.tokenizer.decode([token]) for token in window.tokens.tolist()],
            "first": len(window.tokens) - n_query,
            "sinks": layout.sinks,
            "chunk": layout.chunk_size,
            "heads": heads,
            "searching": max(numbers, key=lambda number: sum(query.far for query in reads[number]), default=None),
            "smooth": max(
                numbers, key=lambda number: sum(query.centroids for query in reads[number]), default=None
            ),
            "reads": [[list(query) for query in head] for head in reads],
        }

    return Row({"part": "reads", **described, "method": method}, seed, measure, cost=float(len(window.tokens)))


def layer_inputs(
    language_model: LanguageModel, window: Window, config: Routed, layers: Sequence[int], n_query: int, seed: int
) -> dict[int, LayerInputs]:
    """Run the model on the default over the window, and record the inputs of some layers."""
    model = language_model.model
    numbers = find_adapter(model).layers(model)
    attention = {number: PrescoredAttention(config, seed=seed) for number in numbers}
    inputs: dict[int, LayerInputs] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        if context.layer in layers and not context.is_local:
            last = query[0, :, query.shape[2] - n_query :]
            inputs[context.layer] = LayerInputs(last.clone(), key[0].clone(), value[0].clone(), context.scale)
        return attention[context.layer](query, key, value, context)

    undo = replace_attention(model, dict.fromkeys(numbers, attend))
    try:
        with language_model.extended(len(window.tokens)):
            language_model.hidden(window.tokens)
    finally:
        undo()
    return dict(sorted(inputs.items()))


@torch.no_grad()
def layer_reads(inputs: LayerInputs, config: Routed) -> dict[int, list[QueryReads]]:
    """What the queries of each head read; of many heads, some."""
    n_heads, n_query = inputs.query.shape[:2]
    n_keys, heads_per_kv = inputs.key.shape[1], n_heads // inputs.key.shape[0]
    layout = make_layout(n_query, n_keys, causal=True, config=config)
    scale = inputs.query.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale
    position = torch.arange(n_keys, dtype=torch.int64, device=inputs.key.device)
    future = position > position[n_keys - n_query :, None]
    reads: dict[int, list[QueryReads]] = {}
    for head in range(0, n_heads, -(-n_heads // _MOST_HEADS)):
        query = inputs.query[head].float()
        key, value = inputs.key[head // heads_per_kv].float(), inputs.value[head // heads_per_kv].float()
        result = reference_attention(query, key, value, config, is_causal=True, scale=inputs.scale)
        logits = query @ key.T * scale
        read = result.local | result.hits
        weights = torch.exp(result.logits - result.lse[:, None]).masked_fill(~read, 0.0)
        centroids = torch.exp(result.centroid_logits - result.lse[:, None])
        if layout.n_chunks:
            centroids = centroids.unflatten(1, (-1, layout.clusters_per_chunk)).sum(2)
        exact = logits.masked_fill(future, -torch.inf).softmax(1) @ value
        error = (result.output - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-12)
        by_query = zip(weights, result.local, read, centroids, error, strict=True)
        reads[head] = [query_reads(*parts, sinks=layout.sinks) for parts in by_query]
    return reads


def query_reads(
    weights: Tensor, always: Tensor, read: Tensor, centroids: Tensor, error: Tensor, *, sinks: int
) -> QueryReads:
    """What one query of one head reads.

    Args:
        weights: `[N]` attention weights of keys.
        always: `[N]` sinks and local keys.
        read: `[N]` all keys that are read.
        centroids: `[C]` weights of the centroids of each chunk.
        error: Relative error of the output.
        sinks: Number of first keys that every query reads.
    """
    first = torch.arange(len(weights)) < sinks
    far = (read & ~always).nonzero().squeeze(1)
    heaviest = far[weights[far].topk(min(MOST_LISTED, len(far))).indices].tolist()

    def parts(share: Tensor) -> int:
        return round(_ONE * float(share))

    return QueryReads(
        sinks=parts(weights[always & first].sum()),
        local=parts(weights[always & ~first].sum()),
        far=parts(weights[far].sum()),
        centroids=parts(centroids.sum()),
        error=parts(error),
        counts=[int((always & ~first).sum()), len(far)],
        chunks=[parts(weight) for weight in centroids],
        heaviest=[part for key in heaviest for part in (key, parts(weights[key]))],
    )
