"""What queries of some lanes can see, and what is fixed about their call.

A lane is one key head of one sequence, with the query heads that share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.ops.backend import Backend
from prescore.routed.reference import Search


class Sources(NamedTuple):
    """Everything that queries can see; `T` lanes, `N` keys, `S` sinks, `M` nodes of `L` keys.

    Attributes:
        key, value: `[T, N, D]` all rows.
        sink_key, sink_value: `[T, S, D]`.
        node_key, node_value: `[T, M, D]` means, in the accumulation dtype.
        spread: `[T, C, D, D]` covariance of keys within nodes, pooled over the first chunks; over all if `C` is 1.
        drift: `[T, C, D, Dv]` that of keys and values.
        rows: `[T, M, L]` positions of the nodes' keys.
        packed, scales: Codes of the nodes' keys, `[T, M, L, D' / 2]` and `[T, M, L, 2]`.
    """

    key: Tensor
    value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    node_key: Tensor
    node_value: Tensor
    spread: Tensor
    drift: Tensor
    rows: Tensor
    packed: Tensor
    scales: Tensor


N_LEARNED = 8
"""The first fields of `Sources`: gradients reach them."""


@dataclass(frozen=True, eq=False)
class View:
    """What is fixed about a call on some lanes; positions are shared by the heads of a lane.

    Attributes:
        visible: `[T, n]` int32 on the CPU: nodes that each query sees, the first ones of its lane.
        first, stop: `[T, n]` likewise: rows that it reads in any case. Causal: the chunk before its own, and its
            own up to itself; else those behind the last full chunk. Where no node is seen: everything.
        causal: Which of both it is.
        chunk: Keys of a chunk.
        nodes_per_pool: How many nodes more there are behind each covariance than behind the one before.
        search: What is looked for.
        scale: Factor of the logits.
        backend: The operator for what lies near, where compiled code cannot run.
    """

    visible: Tensor
    first: Tensor
    stop: Tensor
    causal: bool
    chunk: int
    nodes_per_pool: int
    search: Search
    scale: float
    backend: Backend

    def blocks(self) -> Iterator[tuple[int, slice, int]]:
        """Queries side by side that see the same nodes: their lane, their places, and how many nodes there are."""
        for lane, visible in enumerate(self.visible):
            runs, last = torch.unique_consecutive(visible, return_counts=True), 0
            for nodes, count in zip(*(t.tolist() for t in runs), strict=True):
                first, last = last, last + count
                yield lane, slice(first, last), nodes


class Draws(NamedTuple):
    """What queries with a sampled rest are asked.

    Attributes:
        places: `[M]` which key of every sixteen is drawn in each node.
        active: `[T, G, Q]` queries that take part.
        aim: `[T, G, Q]` from which logit on keys are read; inf = the samples choose it.
        allowed: Square of the relative error that they aim at.
    """

    places: Tensor
    active: Tensor
    aim: Tensor
    allowed: float


class Estimate(NamedTuple):
    """Results of queries that took part, `[T, G, Q]` all but the first.

    Attributes:
        output, lse: Of all that was read and sampled.
        variance: Sum of the squares of the terms' lengths; inf where reading everything is the faster way.
        fourth: Sum of the squares of those.
        overlap: Sum of the squares of the products of all pairs of terms, estimated.
        limit: From which logit on keys were read.
        further: Whether that is less than what is looked for in any case.
    """

    output: Tensor
    lse: Tensor
    variance: Tensor
    fourth: Tensor
    overlap: Tensor
    limit: Tensor
    further: Tensor
