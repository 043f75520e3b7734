"""A decode step on keys that lie on several ranks: each rank attends to its own, results merge by log-sum-exp.

New tokens are the same on all ranks, so their queries need not be sent: what travels is one output and one lse for
each query and head, whatever the length of the past.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.call import make_call
from prescore.ops.backend import Needs, pick_backend
from prescore.ops.merge import merge
from prescore.parallel.group import Group
from prescore.types import Attended


@torch.no_grad()
def attend_step(
    group: Group, query: Tensor, key: Tensor, value: Tensor, *, valid: Tensor | None, scale: float | None
) -> Attended:
    """Exact attention of the newest queries, which every rank has, to the keys of all ranks.

    Args:
        group: The ranks; the last one holds the new tokens' keys.
        query: `[B, Hq, Nq, D]`, the same on every rank.
        key: `[B, Hkv, n, D]`, this rank's keys.
        value: `[B, Hkv, n, Dv]`, likewise.
        valid: `[B, n]`, True = a real key; None = all.
        scale: Factor of the logits.
    """
    newest = group.rank == group.size - 1
    call = make_call(
        query,
        key,
        value,
        valid,
        is_causal=newest,
        scale=scale,
        backend=pick_backend(Needs.of(query)),
        aligned=False,
    )
    own = call.exactly()
    told = torch.cat((own.output.to(own.lse.dtype), own.lse[..., None]), dim=-1)
    parts = group.gather(told)
    merged = merge(*(Attended(part[..., :-1], part[..., -1]) for part in parts))
    return Attended(merged.output.to(query.dtype), merged.lse)
