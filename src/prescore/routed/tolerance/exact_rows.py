"""Everything that some queries see, on top of what they have read near them: those that an error bar asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.ops.backend import Tile
from prescore.routed.sources import Sources, View
from prescore.types import Attended


def read_everything(
    query: Tensor, sources: Sources, view: View, near: Attended, wanted: Tensor, into: Attended, start: int = 0
) -> None:
    """Exact attention of the `wanted [T, G, Q]` queries, who have read `near`, written to `into`.

    Queries of a block see the same keys beyond it, from `start` on, and none of these is hidden from any: no mask
    is needed, and heads that share keys go together.
    """
    leaf, n_sinks = sources.rows.shape[2], sources.sink_key.shape[1]
    backend = view.backend.at("read on")
    for lane, rows, n_nodes in view.blocks():
        head, place = wanted[lane, :, rows].nonzero(as_tuple=True)
        if not len(head):
            continue
        own = (lane, head, place + rows.start)
        beyond = slice(start, start + n_sinks + n_nodes * leaf)
        key, value = (t[lane, beyond][None, None] for t in (sources.key, sources.value))
        tile = Tile(query[own][None, None], key, value, view.scale)
        found = backend.at(f"block {lane} {rows.start}").forward(tile)
        far = Attended(found.output[0, 0], found.lse[0, 0])
        lse = torch.logaddexp(near.lse[own], far.lse)
        anchor = lse.masked_fill(torch.isneginf(lse), 0.0)
        before, behind = (torch.exp(part - anchor)[:, None] for part in (near.lse[own], far.lse))
        into.output[own] = near.output[own] * before + far.output * behind
        into.lse[own] = lse
