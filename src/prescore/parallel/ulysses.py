"""Ulysses: every rank gets all positions of some heads, runs the one-process engine, and sends the outputs back.

Nothing that the engines draw depends on the number of a head, so a head has the same result wherever it is
computed. A KV head goes to one rank with all its query heads; where ranks outnumber KV heads, several ranks get
a copy of a KV head and share its query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.parallel.comm import Group, done_by_all, tied


class Share(NamedTuple):
    """The heads of one rank: KV heads and the query heads that read them."""

    kv_heads: range
    heads: range


def share_heads(n_heads: int, n_kv_heads: int, n_ranks: int) -> list[Share]:
    """Which heads each rank gets; a rank without any has an empty share."""
    group = n_heads // n_kv_heads
    if n_ranks <= n_kv_heads:
        cuts = [rank * n_kv_heads // n_ranks for rank in range(n_ranks + 1)]
        return [Share(range(a, b), range(a * group, b * group)) for a, b in pairwise(cuts)]
    shares = []
    cuts = [head * n_ranks // n_kv_heads for head in range(n_kv_heads + 1)]
    for head in range(n_kv_heads):
        n_sharing = cuts[head + 1] - cuts[head]
        inner = [head * group + place * group // n_sharing for place in range(n_sharing + 1)]
        shares += [Share(range(head, head + (b > a)), range(a, b)) for a, b in pairwise(inner)]
    return shares


class Ulysses:
    """One exchange of heads: `to_heads`, then `to_positions`; `heads` are the query heads of this rank."""

    def __init__(self, group: Group, n_heads: int, n_kv_heads: int) -> None:
        self.group = group
        self.shares = share_heads(n_heads, n_kv_heads, group.size)
        self.heads = self.shares[group.rank].heads
        self._received: Tensor | None = None

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From this rank's positions of all heads to all positions of this rank's heads."""
        heads, kv_heads = [share.heads for share in self.shares], [share.kv_heads for share in self.shares]
        messages = []
        for table, ranges in ((query, heads), (key, kv_heads), (value, kv_heads)):
            outgoing = [[table[:, each.start : each.stop]] for each in ranges]
            shape = (table.shape[0], len(ranges[self.group.rank]), *table.shape[2:])
            messages.append((outgoing, [[shape]] * self.group.size))
        received, self._received = self.group.all_to_all_with_grad(*messages, like=(query, key, value))
        tables = [torch.cat([tensor for (tensor,) in each], dim=2) for each in received]
        return tables[0], tables[1], tables[2]

    def to_positions(self, *results: Tensor) -> list[Tensor]:
        """Results `[B, own heads, all positions, d]` as `[B, all heads, own positions, d]`."""
        if self._received is not None:  # a rank without heads must still take part in the backward pass
            results = (tied(results[0], self._received), *results[1:])
        messages = []
        for result in results:
            batch, _, n_positions, dim = result.shape
            length = n_positions // self.group.size
            outgoing = [[result[:, :, r * length : (r + 1) * length]] for r in range(self.group.size)]
            messages.append((outgoing, [[(batch, len(share.heads), length, dim)] for share in self.shares]))
        received, _ = self.group.all_to_all_with_grad(*messages, like=results)
        return [torch.cat([tensor for (tensor,) in each], dim=1) for each in received]


def attend_by_heads(
    group: Group, query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """This rank's shard of any attention of full sequences that lets no head influence another.

    All ranks must agree on the shapes of their shards of query, key and value.
    """
    ulysses = Ulysses(group, query.shape[1], key.shape[1])
    full = ulysses.to_heads(query, key, value)
    empty = query.new_empty(*full[0].shape[:3], value.shape[-1])
    output = done_by_all(group, lambda: attend(*full) if ulysses.heads else empty)
    return ulysses.to_positions(output)[0]
