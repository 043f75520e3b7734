"""What the demo compares: the default as it is, and rivals that read as many rows per query."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prescore.attention import select_by
from prescore.bench.language.held_out import REPORTED, TokenizedText
from prescore.bench.language.methods import LanguageMethod, exact, nearby, prescored, sliding_window
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import Window, described
from prescore.bench.records import Record, Row
from prescore.bench.routed_oracle import HeadTable, routed_tables
from prescore.bench.routed_oracle import Sequence as Positions
from prescore.config import Hyper, Lsh, Routed, Selected, config_from_dict
from prescore.integrations.apply import find_adapter, observe, replace_attention
from prescore.integrations.attention import AttentionContext, PrescoredAttention
from prescore.types import Values

STARTS = REPORTED[8192]
"""Where windows begin, as shares of the text: nothing was tuned on these."""
EQUAL_ROWS, BUDGETS = "equal rows", "budgets"
"""The two comparisons: the default as it is beside rivals that read as much, and several budgets of all."""
BUDGET_ROWS = (512, 128, 32)
"""`rows` of the default in the second comparison."""
STRETCHES = 16
"""Parts of a window whose losses are kept apart, for intervals."""
_SHORTEST = 128
_SHORT_SINKS = 4


def demo_windows(text: TokenizedText, length: int) -> list[Window]:
    """Windows of a text that share no token; the second half of each counts in the loss."""
    total = len(text.tokens)
    if total < length:
        raise ValueError(f"document {text.name} must have at least {length} tokens, got {total}")
    starts = [round(share * (total - length)) for share in STARTS]
    apart = [start for place, start in enumerate(starts) if place == 0 or start >= starts[place - 1] + length]
    return [text.window(start, length, f"window {number}") for number, start in enumerate(apart, start=1)]


def short_window(text: TokenizedText, length: int) -> Window:
    """A quarter of the first window, for the comparison over budgets."""
    start = round(STARTS[0] * (len(text.tokens) - length))
    return text.window(start, short_length(length), "beginning of window 1")


def short_length(length: int) -> int:
    """Tokens of that quarter."""
    return min(length, max(_SHORTEST, length // 4))


def shown_config(length: int) -> Routed:
    """The default as it is; where it would read everything, one that is made to route."""
    alone = Routed()
    if length > alone.exact_until:
        return alone
    rows, chunk = max(1, length // 16), max(1, min(alone.chunk_size, length // 8))
    return Routed(min_weight=1 / (2 * rows), chunk_size=chunk, sinks=_SHORT_SINKS, exact_until=0)


def first_methods(length: int) -> list[LanguageMethod]:
    """Exact attention, the default, and the default without its far part."""
    config = shown_config(length)
    return [
        _named(exact(), "exact", EQUAL_ROWS),
        _named(prescored("default", config), "default", EQUAL_ROWS),
        _named(nearby(config.chunk_size, config.sinks), "local only", EQUAL_ROWS),
    ]


def rivals(default: Record) -> list[LanguageMethod]:
    """A sliding window and a selection, both with sinks, that read no fewer rows than this record's default."""
    read = _read(default)
    return [_window(*read, EQUAL_ROWS), _selection(*read, EQUAL_ROWS)]


def budget_methods(length: int) -> list[LanguageMethod]:
    """Exact attention, the default without its far part, and the default at several budgets."""
    config = replace(shown_config(length), exact_until=0)
    found = [
        _named(exact(), "exact", BUDGETS),
        _named(nearby(config.chunk_size, config.sinks), "local only", BUDGETS),
    ]
    for rows in BUDGET_ROWS:
        method = prescored(f"default, rows={rows}", replace(config, min_weight=1 / (2 * rows)))
        found.append(_named(method, "default", BUDGETS))
    return found


def budget_rivals(defaults: Sequence[Record]) -> list[LanguageMethod]:
    """Rivals that read as many rows as each of these records of the default, the most telling first."""
    read = [_read(record) for record in defaults]
    found = [_window(*one, BUDGETS) for one in read]
    found += [_selection(*one, BUDGETS) for one in read]
    for selects in (True, False):
        found += [_published(*one, selects=selects) for one in read]
    return found


def selected_rows(length: int, leaf: int, top_k: int) -> float:
    """Keys that a causal query meets in a selection: those of its exact leaf, and the kept ones of each block."""
    position = torch.arange(length)
    rows, block = position % leaf + 1, leaf
    while block < length:
        rows += (position // block % 2) * min(top_k, block)
        block *= 2
    return float(rows.double().mean())


def _window(length: int, config: Routed, rows: float, part: str) -> LanguageMethod:
    method = sliding_window(length, rows, config.sinks)
    return _named(method, f"sliding window, {method.settings['window']}", part, series="sliding window + sinks")


def _selection(length: int, config: Routed, rows: float, part: str) -> LanguageMethod:
    leaf = 2 * config.chunk_size  # the default reads two chunks too
    top_k = _budget(length, leaf, rows, config.sinks)
    selected = Selected("key-diff", top_k, sinks=config.sinks, remainder="none", min_seq_len=leaf)
    return _named(prescored("", selected), f"selection, top {top_k}", part, series="selection + sinks")


def _published(length: int, config: Routed, rows: float, *, selects: bool) -> LanguageMethod:
    """The paper's algorithm with k-means, or HyperAttention with the others' sinks, at about as many rows."""
    leaf = config.chunk_size
    budget = _budget(length, leaf, rows, config.sinks)
    half = max(1, budget // 2)
    lsh = Lsh(half, half, alignment="rank")
    if not selects:
        hyper = Hyper(lsh, config.sinks, leaf)
        return _named(
            prescored("", hyper), f"HyperAttention, {2 * half}", BUDGETS, series="HyperAttention + sinks"
        )
    paper = Selected.paper("kmeans", 2 * budget, inner=lsh, min_seq_len=leaf)
    return _named(prescored("", paper), f"paper: k-means, top {2 * budget}", BUDGETS, series="paper: k-means")


def _budget(length: int, leaf: int, rows: float, sinks: int) -> int:
    """The smallest selection that reads no fewer rows and has room for the sinks."""
    counts = range(sinks + 1, max(sinks + 2, length))
    place = bisect.bisect_left(counts, rows, key=lambda count: selected_rows(length, leaf, count))
    return counts[min(place, len(counts) - 1)]


def _read(default: Record) -> tuple[int, Routed, float]:
    """Length and configuration of a record of the default, and the rows that it read."""
    rows, config = (
        default.figures.get("replaced_rows_per_query"),
        config_from_dict(default.config["method"]["settings"]),
    )
    if not isinstance(rows, int | float) or not isinstance(config, Routed):
        raise ValueError(f"record {default.key} must have the rows that the default read, got {rows!r}")
    return int(default.config["n_tokens"]), config, float(rows)


def _named(method: LanguageMethod, label: str, part: str, **axes: Any) -> LanguageMethod:
    return replace(method, label=label, axes={"series": label, "comparison": part, **axes})


# What single queries of the default read, head by head: near keys, rows found, centroids, and their weights.
#
# ScoreStats by the oracle of `oracles.routed`, which follows the definition of the engine key by key; the model
# itself runs on the default while its queries, keys and values are looked at.

N_QUERIES = 96
"""Last tokens of a window that can be asked what they read."""
MOST_FOUND = 24
"""Heaviest rows found by a query that are told one by one."""
_MOST_HEADS = 12
_ONE = 10_000
"""Weights are told in whole parts of so many."""


class QueryReading(NamedTuple):
    """What one query of one head reads; weights in parts of 10000.

    Attributes:
        sinks, near, found, centroids: Weights of the first keys, of the local part, of rows found far away and of
            centroids; together all of it.
        error: Of the output, relative to that of exact attention, in parts of 10000 too.
        rows: How many near keys, and how many rows found.
        chunks: Weight of the centroids of each far chunk.
        heaviest: Position and weight of the heaviest rows found, in turn.
    """

    sinks: int
    near: int
    found: int
    centroids: int
    error: int
    rows: list[int]
    chunks: list[int]
    heaviest: list[int]


class WatchedLayer(NamedTuple):
    """What a layer was given: its last queries `[Hq, Nq, D]`, and all keys and values `[Hkv, N, D]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None


def reading_row(
    language_model: LanguageModel, window: Window, config: Routed, *, layers: Sequence[int], seed: int = 0
) -> Row:
    """What the last queries of a window read in some layers, as a row; those local by design are left out.

    Figures: `pieces` (all tokens as text), `first` (position of the first query), the sizes `sinks` and `chunk`,
    `heads` (pairs of layer and query head), `searching` and `smooth` (which of them give most weight to rows
    found, and to centroids), and `looks[head][query]`, the fields of `QueryReading` in turn.
    """
    return Row(
        config={
            "part": "reading",
            **described(language_model, window),
            "layers": list(layers),
            "method": {"label": "default", "kind": "prescored", "settings": config.to_dict()},
        },
        seed=seed,
        measure=lambda: _measure(language_model, window, config, layers, seed),
        cost=float(len(window.tokens)),
    )


def _measure(
    language_model: LanguageModel, window: Window, config: Routed, layers: Sequence[int], seed: int
) -> Values:
    n_query = min(N_QUERIES, len(window.tokens) // 4)
    inputs = watched(language_model, window, config, layers, n_query, seed)
    heads: list[list[int]] = []
    looks: list[list[QueryReading]] = []
    for layer, given in inputs.items():
        for head, found in layer_looks(given, config).items():
            heads.append([layer, head])
            looks.append(found)
    places = range(len(looks))
    searching = max(places, key=lambda place: sum(look.found for look in looks[place]), default=None)
    smooth = max(places, key=lambda place: sum(look.centroids for look in looks[place]), default=None)
    sizes = Positions.of(torch.ones(1, dtype=torch.bool), 1, True, config).sizes
    return {
        "pieces": [language_model.tokenizer.decode([number]) for number in window.tokens.tolist()],
        "first": len(window.tokens) - n_query,
        "sinks": sizes.sinks,
        "chunk": sizes.chunk,
        "heads": heads,
        "searching": searching,
        "smooth": smooth,
        "looks": [[list(look) for look in found] for found in looks],
    }


def watched(
    language_model: LanguageModel, window: Window, config: Routed, layers: Sequence[int], n_query: int, seed: int
) -> dict[int, WatchedLayer]:
    """Let the model read the window by the default, and keep what some layers were given."""
    kept: dict[int, WatchedLayer] = {}

    class Watched:
        """A layer's attention, which remembers its last input."""

        def __init__(self) -> None:
            self.attention = PrescoredAttention(config, seed=seed)

        def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
            if context.layer in layers and not context.is_local:
                last = query[0, :, query.shape[2] - n_query :]
                kept[context.layer] = WatchedLayer(last.clone(), key[0].clone(), value[0].clone(), context.scale)
            return self.attention(query, key, value, context)

    model = language_model.model
    undo = replace_attention(
        model, {number: Watched() for number in range(len(find_adapter(model).layers(model)))}
    )
    try:
        with language_model.extended(len(window.tokens)):
            language_model.hidden(window.tokens)
    finally:
        undo()
    return dict(sorted(kept.items()))


@torch.no_grad()
def layer_looks(given: WatchedLayer, config: Routed) -> dict[int, list[QueryReading]]:
    """What the queries of each head read; of many heads some, evenly spread."""
    n_heads, n_query = given.query.shape[:2]
    n_keys, group = given.key.shape[1], n_heads // given.key.shape[0]
    positions = Positions.of(torch.ones(n_keys, dtype=torch.bool), n_query, True, config)
    anyway = torch.stack([positions.read_anyway(number) for number in range(n_query)])
    scale = given.query.shape[-1] ** -0.5 if given.scale is None else given.scale
    shown = range(0, n_heads, -(-n_heads // _MOST_HEADS))
    found: dict[int, list[QueryReading]] = {}
    for kind, (key, value) in enumerate(zip(given.key.float(), given.value.float(), strict=True)):
        heads = [head for head in shown if head // group == kind]
        query = given.query[heads].float()
        inputs = (query[None], key[None, None], value[None, None])
        tables = routed_tables(*inputs, config, is_causal=True, scale=scale) if heads else {}
        for head, own, table in zip(heads, query.double() * scale, tables.values(), strict=True):
            found[head] = _head_looks(table, own, key.double(), value.double(), anyway, positions)
    return found


def _head_looks(
    table: HeadTable, query: Tensor, key: Tensor, value: Tensor, anyway: Tensor, positions: Positions
) -> list[QueryReading]:
    n_keys = len(key)
    logits = query @ key.T
    nodes = query @ key[table.rows].mean(1).T + table.centroids
    lse = torch.cat((logits.masked_fill(~table.keys, -torch.inf), nodes), dim=1).logsumexp(1)
    weights = torch.exp(logits - lse[:, None]).masked_fill(~table.keys, 0.0)
    centroids = torch.exp(nodes - lse[:, None])
    position = torch.arange(n_keys)
    future = position > position[n_keys - len(query) :, None]
    exact = logits.masked_fill(future, -torch.inf).softmax(1)
    wanted = exact @ value
    error = (table.attend(query, key, value).output - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-12)
    per_chunk = centroids.unflatten(1, (-1, 2**positions.sizes.levels)).sum(2) if len(table.rows) else centroids
    return [
        look_of(weights[i], anyway[i] & ~future[i], table.keys[i], per_chunk[i], positions.sizes.sinks, error[i])
        for i in range(len(query))
    ]


def look_of(
    weights: Tensor, anyway: Tensor, read: Tensor, centroids: Tensor, sinks: int, error: Tensor
) -> QueryReading:
    """What one query of one head reads.

    Args:
        weights: `[N]` of single keys.
        anyway: `[N]` which keys are read in any case.
        read: `[N]` which are read at all.
        centroids: `[C]` weights of the centroids of each chunk.
        sinks: First keys, read by every query.
        error: Of the output.
    """
    first = torch.arange(len(weights)) < sinks
    places = (read & ~anyway).nonzero().squeeze(1)
    best = places[weights[places].topk(min(MOST_FOUND, len(places))).indices].tolist()
    return QueryReading(
        sinks=_parts(weights[anyway & first].sum()),
        near=_parts(weights[anyway & ~first].sum()),
        found=_parts(weights[places].sum()),
        centroids=_parts(centroids.sum()),
        error=_parts(error),
        rows=[int((anyway & ~first).sum()), len(places)],
        chunks=[_parts(weight) for weight in centroids],
        heaviest=[part for place in best for part in (place, _parts(weights[place]))],
    )


def _parts(share: Tensor) -> int:
    return round(_ONE * float(share))


# Which tokens of a real text pre-scoring keeps, beside those that the model truly attends to.

ATTENDED = "most attended"


def token_row(
    language_model: LanguageModel,
    window: Window,
    configs: Mapping[str, Selected],
    *,
    layers: Sequence[int],
    budget: int,
    seed: int = 0,
) -> Row:
    """The keys of the first half that each configuration keeps, by layer and KV head, as a row.

    In the causal recursion these are the keys that the second half's queries may meet. `most attended` are the
    `budget` keys that receive most of those queries' exact attention.

    Figures: `pieces` (the first half's tokens as text), `kept[method][layer][head]` (positions), and
    `mass[method][layer]` (share of the second half's attention to the first half that falls on kept keys).
    """
    return Row(
        config={
            "part": "tokens",
            **described(language_model, window),
            "layers": list(layers),
            "budget": budget,
            "methods": {name: config.to_dict() for name, config in configs.items()},
        },
        seed=seed,
        measure=lambda: _measure_token_choice(language_model, window, configs, layers, budget, seed),
        cost=float(len(window.tokens)),
    )


def _measure_token_choice(
    language_model: LanguageModel,
    window: Window,
    configs: Mapping[str, Selected],
    layers: Sequence[int],
    budget: int,
    seed: int,
) -> Values:
    half = len(window.tokens) // 2
    kept: dict[str, dict[str, list[list[int]]]] = {name: {} for name in (*configs, ATTENDED)}
    mass: dict[str, dict[str, float]] = {name: {} for name in kept}

    def look(query: Tensor, key: Tensor, context: AttentionContext) -> None:
        if context.layer not in layers:
            return
        received = attention_received(query[:, :, half:], key, half)
        chosen = {
            name: select_by(key[:, :, :half], config, generator=seed).indices[0]
            for name, config in configs.items()
        }
        chosen[ATTENDED] = received.topk(min(budget, half), dim=-1).indices.sort().values
        for name, indices in chosen.items():
            kept[name][str(context.layer)] = indices.tolist()
            mass[name][str(context.layer)] = float(received.gather(1, indices).sum() / received.sum())

    with observe(language_model.model, look):
        language_model.hidden(window.tokens)
    pieces = [language_model.tokenizer.decode([number]) for number in window.tokens[:half].tolist()]
    return {"pieces": pieces, "kept": kept, "mass": mass}


@torch.no_grad()
def attention_received(query: Tensor, key: Tensor, n_counted: int) -> Tensor:
    """Attention mass `[Hkv, n_counted]` that the last positions' queries `[1, Hq, Nq, D]` give the first keys.

    Summed over the queries and over the query heads that share a KV head; one head at a time, to bound memory.
    """
    n_heads, n_query, dim = query.shape[1:]
    n_keys, group = key.shape[2], n_heads // key.shape[1]
    position = torch.arange(n_keys, device=key.device)
    hidden = position[None] > position[n_keys - n_query :, None]
    received = torch.zeros(key.shape[1], n_counted, device=key.device)
    for head in range(n_heads):
        logits = (query[0, head].float() @ key[0, head // group].float().t()) * dim**-0.5
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
        received[head // group] += weights[:, :n_counted].sum(0)
    return received.cpu()
