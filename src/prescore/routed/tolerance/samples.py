"""The samples of a block of queries: which keys they are, and what is known about them before any search."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from prescore.routed.far import Seen
from prescore.routed.tolerance.draws import sample_rows


class DrawnKeys(NamedTuple):
    """What `t` queries know of the `m` samples of each of `M` nodes.

    Attributes:
        value: `[M, m, Dv]`.
        logits: `[t, M, m]` true ones; -inf where there is none.
        place: `[M, m]` in their nodes.
        exists: `[M, m]`.
        apart: `[M, m]` squares of the values' distances from their node's mean; 0 where there is none.
    """

    value: Tensor
    logits: Tensor
    place: Tensor
    exists: Tensor
    apart: Tensor

    @property
    def usual(self) -> Tensor:
        """The mean of all distances."""
        return self.apart.sum() / self.exists.sum()


def samples_of(query: Tensor, seen: Seen, places: Tensor) -> DrawnKeys:
    """The samples of the nodes that queries `[t, D]`, already scaled, see."""
    place, exists = sample_rows(places, seen.rows.shape[1])
    row = seen.rows.gather(1, place).flatten()
    keys, values = (t.index_select(0, row).to(query.dtype) for t in (seen.key, seen.value))
    logits = (query @ keys.t()).view(-1, *exists.shape).masked_fill(~exists, -math.inf)
    values = values.view(*exists.shape, -1)
    apart = (values - seen.node_value.to(query.dtype)[:, None]).square().sum(-1).masked_fill(~exists, 0.0)
    return DrawnKeys(values, logits, place, exists, apart)
