"""Coarser stand-ins for the far past, so that what a query scores does not grow with the sequence.

Leaves of large pieces lie in tree order, so `FAN` neighbours are a node of their tree, `FAN` nodes a larger one,
and so on: *levels*, leaves being level 0. A causal query sees the newest `layout.width` leaves themselves, as many
nodes of level 1 behind them, as many of level 2 behind those: the number of columns grows with the logarithm of
the length. A node is chosen like a leaf; the query then goes down to its best child until it stands at a leaf,
reads that, and leaves the node's stand-in in place with as many keys fewer.

All levels of stand-ins are one *table*: leaves of large pieces, leaves of chunks, then nodes of level 1, 2, ...
Single keys likewise: in level 0 a piece has all of them, in level 1 its most unlike ones (`kept`); the others are
part of the nodes' means there, and from level 2 on all are. Without a causal mask no place is nearer than
another, and sequences of one batch differ in length: there every leaf is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.ops.backend import accumulation_dtype
from prescore.routed.layout import FAN, JOINED, Layout, node_cuts


@dataclass(frozen=True)
class Seen:
    """What a query sees of the pieces behind it.

    Attributes:
        cuts: For each level, leaves first, the run of large pieces' nodes that is shown.
        nodes_from: First large piece that is shown as nodes of level 1.
        leaves_from: First large piece that is shown as leaves.
        large: Large pieces, all before this number.
        first_chunk: First chunk that is shown by itself.
    """

    cuts: list[tuple[int, int]]
    nodes_from: int
    leaves_from: int
    large: int
    first_chunk: int


def seen_behind(layout: Layout, pieces: int) -> Seen:
    """What a query behind `pieces` chunks sees; without a causal mask, all of them."""
    large, first_chunk = pieces // JOINED, pieces // JOINED * JOINED
    if not layout.causal:
        large = layout.n_joined if layout.padded else (layout.n_key - layout.sinks) // (layout.chunk * JOINED)
        # which of them a sequence of a padded batch has, its counts say
        first_chunk = 0 if layout.padded else large * JOINED
    leaves = large * layout.large_leaves
    cuts = node_cuts(layout.width, layout.large_leaves, leaves) if layout.causal else [(0, leaves)]
    leaves_from = cuts[0][0] // layout.large_leaves
    nodes_from = cuts[1][0] * FAN // layout.large_leaves if len(cuts) > 1 else leaves_from
    return Seen(cuts, nodes_from, leaves_from, large, first_chunk)


def stand_in_ranges(layout: Layout, pieces: int) -> tuple[slice, ...]:
    """Places in the table of the stand-ins that a query behind `pieces` chunks sees, coarsest first."""
    seen, offsets = seen_behind(layout, pieces), layout.level_offsets
    nodes = [slice(offsets[level] + start, offsets[level] + stop) for level, (start, stop) in enumerate(seen.cuts)]
    chunks = layout.n_joined * layout.large_leaves
    own = slice(chunks + seen.first_chunk * layout.leaves, chunks + pieces * layout.leaves)
    return (*reversed(nodes), own)


def single_ranges(layout: Layout, pieces: int) -> tuple[slice, ...]:
    """Where lie the single keys that go with them: sinks, kept ones of nodes' pieces, all of the other pieces."""
    seen, joined = seen_behind(layout, pieces), layout.sinks
    chunks = joined + layout.n_joined * layout.large_singles
    kept = chunks + layout.n_pieces * layout.singles
    return (
        slice(0, layout.sinks),
        slice(kept + seen.nodes_from * layout.kept, kept + seen.leaves_from * layout.kept),
        slice(joined + seen.leaves_from * layout.large_singles, joined + seen.large * layout.large_singles),
        slice(chunks + seen.first_chunk * layout.singles, chunks + pieces * layout.singles),
    )


def columns_in(ranges: tuple[slice, ...]) -> int:
    """How many columns some ranges hold."""
    return sum(part.stop - part.start for part in ranges)


def level_counts(layout: Layout) -> list[int]:
    """Keys behind one stand-in of each level."""
    counts = [layout.leaf]
    for level in range(1, layout.n_levels + 1):
        counts.append(counts[-1] * FAN + new_singles(layout, level))
    return counts


def new_singles(layout: Layout, level: int) -> int:
    """Singles that a node of this level stands for beside its children."""
    of_piece = {1: layout.large_singles - layout.kept, 2: layout.kept}.get(level, 0)
    return of_piece * int(FAN**level) // layout.large_leaves


def singles_of_nodes(layout: Layout, level: int, singles: Tensor, n_nodes: int) -> Tensor:
    """`[T, pieces * singles, D] -> [T, nodes, new, D]`: the singles that `new_singles` counts, node by node."""
    by_piece = singles.unflatten(1, (-1, layout.large_singles))
    some = by_piece[:, :, layout.kept :] if level == 1 else by_piece[:, :, : layout.kept]
    new = new_singles(layout, level)
    grouped: Tensor = some.flatten(1, 2)[:, : n_nodes * new].unflatten(1, (n_nodes, new))
    return grouped


def read_shares(layout: Layout) -> list[float]:
    """For each level, what the logit of a chosen stand-in gains: log of the share that is left to stand for."""
    return [-math.inf, *(math.log1p(-layout.leaf / count) for count in level_counts(layout)[1:])]


def coarser(layout: Layout, leaves: Tensor, singles: Tensor) -> list[Tensor]:
    """Means of the nodes of level 1, 2, ..., `[T, nodes, D]` each; gradients reach leaves and singles.

    Args:
        layout: The geometry.
        leaves: `[T, M, D]` mean keys (or values) of the leaves of large pieces.
        singles: `[T, pieces * singles, D]` of the large pieces, most unlike first in each.
    """
    sums = leaves.to(accumulation_dtype(leaves.dtype)) * layout.leaf
    means = []
    for level, count in enumerate(level_counts(layout)[1:], start=1):
        n_nodes = sums.shape[1] // FAN
        sums = sums[:, : n_nodes * FAN].unflatten(1, (n_nodes, FAN)).sum(2)
        if new_singles(layout, level):
            sums = sums + singles_of_nodes(layout, level, singles.to(sums.dtype), n_nodes).sum(2)
        means.append((sums / count).to(leaves.dtype))
    return means


class Descent:
    """From chosen stand-ins to leaves.

    Args:
        levels: Mean keys `[T, nodes, D]` of the leaves, then of the nodes of level 1, 2, ...
    """

    def __init__(self, levels: Sequence[Tensor]) -> None:
        self._sizes = [means.shape[1] for means in levels]
        self._offsets = [sum(self._sizes[:level]) for level in range(len(levels))]
        self._children = [  # of the nodes of level 1, 2, ...: [T * nodes, FAN, D]
            below.detach()[:, : size * FAN].reshape(-1, FAN, below.shape[-1])
            for below, size in zip(levels, self._sizes[1:], strict=False)
        ]

    def to_leaves(self, query: Tensor, numbers: Tensor, shown: slice | None = None) -> Tensor:
        """The best leaf below every chosen stand-in.

        Args:
            query: `[T, t, D]`.
            numbers: `[T, t, J]` places in the table.
            shown: Places of the nodes among which `numbers` were chosen, where all are of level 1.
        """
        query, flat = query.detach(), numbers.reshape(-1)
        for level in range(len(self._offsets) - 1, 0, -1):
            first, size = self._offsets[level], self._sizes[level]
            place = ((flat >= first) & (flat < first + size)).nonzero().squeeze(1)
            node, row = flat.index_select(0, place) - first, place // numbers.shape[-1]
            if shown is not None and level == 1:
                scores = self._all_scores(query, slice(shown.start - first, shown.stop - first), row, node)
            else:
                children = self._children[level - 1].index_select(0, row // query.shape[1] * size + node)
                own = query.reshape(-1, query.shape[-1]).index_select(0, row)
                scores = torch.bmm(children, own[..., None]).squeeze(-1)
            # children stand for equally many keys, so their means decide
            below = self._offsets[level - 1] + node * FAN + scores.argmax(-1)
            flat = flat.index_copy(0, place, below)
        return flat.view(numbers.shape)

    def _all_scores(self, query: Tensor, nodes: slice, row: Tensor, node: Tensor) -> Tensor:
        """`[picks, FAN]`: one product of all queries with all children, far cheaper than gathering children."""
        children = self._children[0].unflatten(0, (query.shape[0], -1))[:, nodes].flatten(1, 2)
        scores: Tensor = (query @ children.transpose(1, 2)).view(-1, FAN)
        return scores.index_select(0, row * (nodes.stop - nodes.start) + node - nodes.start)


def shares_of(layout: Layout, ranges: tuple[slice, ...], like: Tensor) -> Tensor | None:
    """`[columns]`: what a chosen stand-in's logit gains, -inf for a leaf; None = all of them are leaves."""
    if ranges[0].start < layout.level_sizes[0]:  # coarsest first
        return None
    shares, offsets = read_shares(layout), layout.level_offsets
    levels = [sum(part.start >= offset for offset in offsets) - 1 for part in ranges]
    parts = zip(ranges, levels, strict=True)
    return torch.cat([like.new_full((part.stop - part.start,), shares[level]) for part, level in parts])
