"""What queries of some lanes can see, and what is fixed about their call.

A lane is one key head of one sequence, with the query heads that share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from prescore.ops.backend import Backend
from prescore.routed.far import Search


class Sources(NamedTuple):
    """Everything that queries can see; `T` lanes, `N` keys, `S` sinks, `M` nodes of `L` keys.

    Attributes:
        key, value: `[T, N, D]` all rows.
        sink_key, sink_value: `[T, S, D]`.
        node_key, node_value: `[T, M, D]` means, in the accumulation dtype.
        spread: `[T, C, D, D]` covariance of keys within nodes, pooled over the first chunks.
        drift: `[T, C, D, Dv]` that of keys and values.
        near_key, near_value: Causal: `[T, n + 1, t, D]`, the chunk before each block and its own. Else
            `[T, c, D]`, the keys behind the last full chunk.
        near_bias: `[T, c]` of 0, or -inf on padding; None = no padding.
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
    near_key: Tensor
    near_value: Tensor
    near_bias: Tensor | None
    rows: Tensor
    packed: Tensor
    scales: Tensor


N_LEARNED = 10
"""The first fields of `Sources`: gradients reach them."""


@dataclass(frozen=True, eq=False)
class View:
    """What is fixed about a call on some lanes.

    Attributes:
        causal: Whether queries read chunks near them, or the keys behind the last full chunk.
        size: Queries of a block, which see the same nodes.
        visible: `[T, n]` int32 on the CPU: nodes that each block sees.
        nodes_per_chunk: Of every chunk.
        real: The queries that are none of a block's filler.
        search: What is looked for.
        scale: Factor of the logits.
        backend: The operator for what lies near.
    """

    causal: bool
    size: int
    visible: Tensor
    nodes_per_chunk: int
    real: slice
    search: Search
    scale: float
    backend: Backend

    def visible_to_each(self, group: int) -> Tensor:
        """`[T, G * Q]`: nodes that each query sees; filler sees none."""
        each = self.visible.repeat_interleave(self.size, dim=1)
        each[:, : self.real.start] = 0
        each[:, self.real.stop :] = 0
        return each.repeat(1, group).contiguous()

    @property
    def n_blocks(self) -> int:
        """Blocks of queries."""
        return self.visible.shape[1]


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


class Spread(NamedTuple):
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
