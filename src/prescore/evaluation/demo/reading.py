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
from prescore.evaluation.language.perplexity import Window
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


class LayerInputs(NamedTuple):
    """What a layer was given: its last queries `[Hq, Nq, D]`, and all keys and values `[Hkv, N, D]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None


def reading_row(
    language_model: LanguageModel, window: Window, config: Routed, *, layers: Sequence[int], seed: int = 0
) -> Row:
    """What the last queries of a window read in some layers, as a row.

    Figures: `pieces` (all tokens as text), `first` (position of the first query), the sizes `sinks` and `chunk`,
    `heads` (pairs of layer and query head), `searching` and `smooth` (which of them give most weight to rows found,
    and to stand-ins), and `looks[head][query]`: see `look_of`.
    """
    return Row(
        config={
            "part": "reading",
            "model": language_model.name,
            "dtype": language_model.dtype,
            "document": window.document,
            "digest": window.digest,
            "n_tokens": len(window.tokens),
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
    heads, looks = [], []
    for layer, given in inputs.items():
        for head, found in layer_looks(given, config).items():
            heads.append([layer, head])
            looks.append(found)
    shares = [[sum(look[place] for look in found) for found in looks] for place in (2, 3)]
    searching, smooth = (max(range(len(own)), key=own.__getitem__) for own in shares)
    sizes = Positions.of(torch.ones(1, dtype=torch.bool), 1, True, config).sizes
    return {
        "pieces": [language_model.tokenizer.decode([number]) for number in window.tokens.tolist()],
        "first": len(window.tokens) - n_query,
        "sinks": sizes.sinks,
        "chunk": sizes.chunk,
        "heads": heads,
        "searching": searching,
        "smooth": smooth,
        "looks": looks,
    }


def watched(
    language_model: LanguageModel, window: Window, config: Routed, layers: Sequence[int], n_query: int, seed: int
) -> dict[int, LayerInputs]:
    """Let the model read the window by the default, and keep what some layers were given."""
    kept: dict[int, LayerInputs] = {}

    class Watched:
        """A layer's attention, which remembers its last input."""

        def __init__(self) -> None:
            self.attention = PrescoredAttention(config, seed=seed)

        def __call__(self, query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
            if situation.layer in layers:
                last = query[0, :, query.shape[2] - n_query :]
                kept[situation.layer] = LayerInputs(
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
def layer_looks(given: LayerInputs, config: Routed) -> dict[int, list[list[object]]]:
    """What the queries of each head read; of many heads some, evenly spread."""
    n_heads, n_query = given.query.shape[:2]
    n_keys, group = given.key.shape[1], n_heads // given.key.shape[0]
    positions = Positions.of(torch.ones(n_keys, dtype=torch.bool), n_query, True, config)
    anyway = torch.stack([positions.read_anyway(number) for number in range(n_query)])
    scale = given.query.shape[-1] ** -0.5 if given.scale is None else given.scale
    found: dict[int, list[list[object]]] = {}
    for head in range(0, n_heads, -(-n_heads // _MOST_HEADS)):
        query = given.query[head]
        key, value = given.key[head // group], given.value[head // group]
        (table,) = routed_tables(
            query[None, None].float(),
            key[None, None].float(),
            value[None, None].float(),
            config,
            is_causal=True,
            scale=scale,
        ).values()
        found[head] = _head_looks(table, query.double() * scale, key.double(), value.double(), anyway, positions)
    return found


def _head_looks(
    table: HeadTable, query: Tensor, key: Tensor, value: Tensor, anyway: Tensor, positions: Positions
) -> list[list[object]]:
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
) -> list[object]:
    """One query of one head, in parts of 10000: `[sinks, near, found, stand-ins, error, rows, chunks, heaviest]`.

    The first four are weights and add up to all of it. `error` is that of the output, relative to exact attention's.
    `rows` counts near keys and rows found; `chunks` has the weight of each far chunk's stand-ins; `heaviest` has
    position and weight of the heaviest rows found, in turn.
    """
    position = torch.arange(len(weights))
    first = position < sinks
    found = read & ~anyway
    parts = [weights[anyway & first].sum(), weights[anyway & ~first].sum(), weights[found].sum(), stand_ins.sum()]
    places = found.nonzero().squeeze(1)
    best = weights[places].topk(min(MOST_FOUND, len(places))).indices
    heaviest = [part for place in places[best].tolist() for part in (place, round(_ONE * float(weights[place])))]
    return [
        *(round(_ONE * float(part)) for part in parts),
        round(_ONE * float(error)),
        [int((anyway & ~first).sum()), len(places)],
        [round(_ONE * float(weight)) for weight in stand_ins],
        heaviest,
    ]
