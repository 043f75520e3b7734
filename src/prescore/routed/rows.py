"""How many rows a query of routed attention reads: at most, and on average over queries and heads."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.routed.heads import HeadLayout
from prescore.routed.layout import Layout
from prescore.routed.levels import columns_in, single_ranges, stand_in_ranges

KINDS = ("far_rows", "single_rows", "stand_in_rows")
"""Keys of chosen leaves, single keys with the sinks, stand-ins."""


def most_rows(layouts: list[HeadLayout], n_sequences: int) -> dict[str, float]:
    """Rows of each kind that the last query reads at most, on average over the `n_sequences` key heads."""
    sums = dict.fromkeys(KINDS, 0)
    for own in layouts:
        singles, stand_ins = (columns_in(read(own.layout, own.layout.n_pieces)) for read in _RANGES)
        rows = (own.layout.n_chosen * own.layout.leaf, singles, stand_ins)
        for kind, count in zip(KINDS, rows, strict=True):
            sums[kind] += own.count(n_sequences) * count
    return {
        kind: total // n_sequences if len(layouts) == 1 else total / n_sequences for kind, total in sums.items()
    }


def mean_rows(layouts: list[HeadLayout], n_sequences: int) -> float:
    """Keys and stand-ins that a query meets, on average over queries and over the `n_sequences` key heads."""
    total = sum(own.count(n_sequences) * float(rows_of_queries(own.layout).mean()) for own in layouts)
    return total / n_sequences


def rows_of_queries(layout: Layout) -> Tensor:
    """`[Nq]` in float64: the rows that each query meets, of a head that reads by this geometry.

    The first causal queries meet every key up to themselves. Behind them a query meets the chunk before, its own
    chunk up to itself, the sinks and single keys, the chosen leaves, and the stand-ins, chosen ones included.
    Without a causal mask the last chunk counts as full.
    """
    position = torch.arange(layout.n_query, dtype=torch.float64) + layout.first
    visible = visible_rows(layout)
    pieces = layout.pieces_seen(position.long())
    singles, stand_ins = (
        torch.tensor([columns_in(read(layout, seen)) for seen in range(layout.n_pieces + 1)]).double()[pieces]
        for read in _RANGES
    )
    far = stand_ins.clamp_max(layout.n_chosen) * layout.leaf
    local = position - layout.sinks - pieces * layout.chunk + 1 if layout.causal else torch.zeros_like(position)
    met = torch.minimum(local + singles + far, visible) + stand_ins
    return torch.where(pieces > 0, met, visible)


def visible_rows(layout: Layout) -> Tensor:
    """`[Nq]` in float64: the keys that each query may see."""
    n_keys = torch.full((layout.n_query,), float(layout.n_key), dtype=torch.float64)
    return n_keys - torch.arange(layout.n_query).flip(0) if layout.causal else n_keys


_RANGES = (single_ranges, stand_in_ranges)
