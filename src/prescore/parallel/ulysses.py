"""Heads change hands: every rank gets all positions of some heads, runs the one-process engine, and gives back.

Nothing that the engines draw depends on the number of a head, so a head's result is the same wherever it is
computed. A key head goes to one rank with all its query heads; where ranks outnumber key heads, several ranks get
a copy of a key head and share its query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from prescore.parallel.comm import Group, Message, done_by_all, tied


@dataclass(frozen=True)
class Share:
    """The heads of one rank: key heads `first_key .. end_key`, query heads `first .. end`."""

    first_key: int
    end_key: int
    first: int
    end: int

    @property
    def n_query_heads(self) -> int:
        """Query heads."""
        return self.end - self.first


def share_heads(n_heads: int, n_kv_heads: int, n_ranks: int) -> list[Share]:
    """Which heads each rank gets; a rank without any has an empty share."""
    group = n_heads // n_kv_heads
    if n_ranks <= n_kv_heads:
        cuts = [rank * n_kv_heads // n_ranks for rank in range(n_ranks + 1)]
        return [Share(a, b, a * group, b * group) for a, b in pairwise(cuts)]
    shares = []
    cuts = [head * n_ranks // n_kv_heads for head in range(n_kv_heads + 1)]
    for head in range(n_kv_heads):
        n_sharing = cuts[head + 1] - cuts[head]
        inner = [head * group + place * group // n_sharing for place in range(n_sharing + 1)]
        for first, end in pairwise(inner):
            shares.append(Share(head, head + (end > first), first, end))
    return shares


class Change:
    """The way of query, key and value to their heads' ranks, and of the outputs back.

    Args:
        group: The ranks.
        n_heads: Query heads.
        n_kv_heads: Key heads.
    """

    def __init__(self, group: Group, n_heads: int, n_kv_heads: int) -> None:
        self.group = group
        self.shares = share_heads(n_heads, n_kv_heads, group.size)
        self.own = self.shares[group.rank]
        self._tie: tuple[Tensor, ...] = ()

    def there(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From this rank's positions of all heads to all positions of this rank's heads."""
        mails = [self._mail(query, [(s.first, s.end) for s in self.shares])]
        mails += [self._mail(table, [(s.first_key, s.end_key) for s in self.shares]) for table in (key, value)]
        received = self.group.exchange(mails)
        self._tie = tuple(part for parts in received for part in parts)
        n_key_heads = self.own.end_key - self.own.first_key
        heads = (self.own.n_query_heads, n_key_heads, n_key_heads)
        found = [
            torch.cat([part.view(table.shape[0], n, *table.shape[2:]) for part in parts], dim=2)
            for parts, table, n in zip(received, (query, key, value), heads, strict=True)
        ]
        return found[0], found[1], found[2]

    def back(self, *results: Tensor) -> list[Tensor]:
        """Results `[B, own query heads, all positions, d]` as `[B, all query heads, own positions, d]`."""
        # a rank without heads must still answer in the backward pass
        results = (tied(results[0], *self._tie), *results[1:])
        received = self.group.exchange([self._mail_back(result) for result in results])
        whole = []
        for result, parts in zip(results, received, strict=True):
            length, dim = result.shape[2] // self.group.size, result.shape[3]
            heads = [
                part.view(result.shape[0], share.n_query_heads, length, dim)
                for part, share in zip(parts, self.shares, strict=True)
            ]
            whole.append(torch.cat(heads, dim=1))
        return whole

    def _mail_back(self, result: Tensor) -> Message:
        batch, _, positions, dim = result.shape
        length = positions // self.group.size
        pieces = [result[:, :, rank * length : (rank + 1) * length] for rank in range(self.group.size)]
        sizes = [batch * share.n_query_heads * length * dim for share in self.shares]
        return Message([piece.reshape(-1) for piece in pieces], sizes)

    def _mail(self, table: Tensor, ranges: list[tuple[int, int]]) -> Message:
        first, end = ranges[self.group.rank]
        size = table.shape[0] * (end - first) * table.shape[2] * table.shape[3]
        return Message([table[:, a:b].reshape(-1) for a, b in ranges], [size] * self.group.size)


def attend_by_heads(
    group: Group, query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """This rank's piece of any attention that lets no head influence another.

    Args:
        group: The ranks.
        query: This rank's piece, like key and value; all ranks must agree on their shapes.
        key: Likewise.
        value: Likewise.
        attend: Attention of whole sequences.
    """
    change = Change(group, query.shape[1], key.shape[1])
    whole = change.there(query, key, value)
    nothing = query.new_empty(*whole[0].shape[:3], value.shape[-1])
    output = done_by_all(group, lambda: attend(*whole) if change.own.n_query_heads else nothing)
    return change.back(output)[0]
