"""What single queries of the default read, head by head: near keys, rows found, stand-ins, and their weights.

Told by the oracle of `prescore.testing.routed`, which follows the definition of the engine key by key; the model
itself runs on the default while its queries, keys and values are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.evaluation.language.model import LanguageModel
from prescore.evaluation.language.perplexity import Window, described
from prescore.integrations.apply import find_adapter, replace_attention
from prescore.integrations.attend import PrescoredAttention, Situation
from prescore.records import Row
from prescore.testing.routed import HeadTable, routed_tables
from prescore.testing.routed import Sequence as Positions
from prescore.values import Values

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
        sinks, near, found, stand_ins: Weights of the first keys, of the local part, of rows found far away and of
            stand-ins; together all of it.
        error: Of the output, relative to that of exact attention, in parts of 10000 too.
        rows: How many near keys, and how many rows found.
        chunks: Weight of the stand-ins of each far chunk.
        heaviest: Position and weight of the heaviest rows found, in turn.
    """

    sinks: int
    near: int
    found: int
    stand_ins: int
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
    found, and to stand-ins), and `looks[head][query]`, the fields of `QueryReading` in turn.
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
    smooth = max(places, key=lambda place: sum(look.stand_ins for look in looks[place]), default=None)
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

        def __call__(self, query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
            if situation.layer in layers and not situation.is_local:
                last = query[0, :, query.shape[2] - n_query :]
                kept[situation.layer] = WatchedLayer(
                    last.clone(), key[0].clone(), value[0].clone(), situation.scale
                )
            return self.attention(query, key, value, situation)

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
    nodes = query @ key[table.rows].mean(1).T + table.stand_ins
    lse = torch.cat((logits.masked_fill(~table.keys, -torch.inf), nodes), dim=1).logsumexp(1)
    weights = torch.exp(logits - lse[:, None]).masked_fill(~table.keys, 0.0)
    stand_ins = torch.exp(nodes - lse[:, None])
    position = torch.arange(n_keys)
    future = position > position[n_keys - len(query) :, None]
    exact = logits.masked_fill(future, -torch.inf).softmax(1)
    wanted = exact @ value
    error = (table.attend(query, key, value).output - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-12)
    per_chunk = stand_ins.unflatten(1, (-1, 2**positions.sizes.levels)).sum(2) if len(table.rows) else stand_ins
    return [
        look_of(weights[i], anyway[i] & ~future[i], table.keys[i], per_chunk[i], positions.sizes.sinks, error[i])
        for i in range(len(query))
    ]


def look_of(
    weights: Tensor, anyway: Tensor, read: Tensor, stand_ins: Tensor, sinks: int, error: Tensor
) -> QueryReading:
    """What one query of one head reads.

    Args:
        weights: `[N]` of single keys.
        anyway: `[N]` which keys are read in any case.
        read: `[N]` which are read at all.
        stand_ins: `[C]` weights of the stand-ins of each chunk.
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
        stand_ins=_parts(stand_ins.sum()),
        error=_parts(error),
        rows=[int((anyway & ~first).sum()), len(places)],
        chunks=[_parts(weight) for weight in stand_ins],
        heaviest=[part for place in best for part in (place, _parts(weights[place]))],
    )


def _parts(share: Tensor) -> int:
    return round(_ONE * float(share))
