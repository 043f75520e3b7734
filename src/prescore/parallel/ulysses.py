"""Ulysses: every rank gets all positions of some heads, runs the one-process engine, and sends the outputs back.

Random streams go by the number of a KV head in the whole call, so a head has the same result wherever it is
computed. A KV head goes to one rank with all its query heads; where ranks outnumber KV heads, several ranks get
a copy of a KV head and share its query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.ops.operators import accumulation_dtype
from prescore.parallel.comm import Group, done_by_all, tied


class Share(NamedTuple):
    """The heads of one rank: KV heads and the query heads that read them."""

    kv_heads: range
    heads: range


def share_heads(n_heads: int, n_kv_heads: int, n_ranks: int) -> list[Share]:
    """Which heads each rank gets; a rank without any has an empty share."""
    heads_per_kv = n_heads // n_kv_heads
    if n_ranks <= n_kv_heads:
        cuts = [rank * n_kv_heads // n_ranks for rank in range(n_ranks + 1)]
        return [Share(range(a, b), range(a * heads_per_kv, b * heads_per_kv)) for a, b in pairwise(cuts)]
    shares = []
    cuts = [head * n_ranks // n_kv_heads for head in range(n_kv_heads + 1)]
    for head in range(n_kv_heads):
        n_sharing = cuts[head + 1] - cuts[head]
        inner = [head * heads_per_kv + number * heads_per_kv // n_sharing for number in range(n_sharing + 1)]
        shares += [Share(range(head, head + (b > a)), range(a, b)) for a, b in pairwise(inner)]
    return shares


def attend_by_heads(
    group: Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]],
    *,
    with_lse: bool = False,
) -> list[Tensor]:
    """This rank's shard of any attention of full sequences that lets no head influence another.

    `attend` gets all positions of the heads of this rank, if it has any, and returns `[B, heads, positions, d]`:
    the output, and `with_lse` the lse with `d = 1`. All ranks must agree on the shapes of their shards.
    """
    shares = share_heads(query.shape[1], key.shape[1], group.size)
    heads, kv_heads = [share.heads for share in shares], [share.kv_heads for share in shares]
    messages = []
    for table, ranges in ((query, heads), (key, kv_heads), (value, kv_heads)):
        outgoing = [[table[:, heads_of_rank.start : heads_of_rank.stop]] for heads_of_rank in ranges]
        shape = (table.shape[0], len(ranges[group.rank]), *table.shape[2:])
        messages.append((outgoing, [[shape]] * group.size))
    received, anchor = group.all_to_all_with_grad(*messages, like=(query, key, value))
    full = [torch.cat([tensor for (tensor,) in tables], dim=2) for tables in received]

    def attend_own() -> Sequence[Tensor]:
        if heads[group.rank]:
            return attend(*full)
        output = full[0].new_empty(*full[0].shape[:3], value.shape[-1])
        lse = full[0].new_empty(*full[0].shape[:3], 1, dtype=accumulation_dtype(query.dtype))
        return [output, lse] if with_lse else [output]

    output, *others = done_by_all(group, attend_own)
    results = [tied(output, anchor), *others]  # a rank without heads must still take part in the backward pass
    messages = []
    for result in results:
        batch, _, _, dim = result.shape
        length = query.shape[2]
        outgoing = [[result[:, :, rank * length : (rank + 1) * length]] for rank in range(group.size)]
        messages.append((outgoing, [[(batch, len(heads_of_rank), length, dim)] for heads_of_rank in heads]))
    received, _ = group.all_to_all_with_grad(*messages, like=results)
    return [torch.cat([tensor for (tensor,) in tables], dim=1) for tables in received]
