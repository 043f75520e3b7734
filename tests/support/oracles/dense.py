"""The dense oracle: every weight of every key written out, one softmax, float64.

`Weights` say for each query how often (in logs) each key counts, and which averages of keys are centroids. They
come from the definition in loops (`oracles.naive`), which shares no layout with the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.types import Attended


@dataclass(frozen=True, eq=False)
class Weights:
    """What the queries of a call read.

    Attributes:
        keys: `[B, Hq, Nq, Nk]` log of how often each key counts, -inf = not at all.
        means: `[B, Hq, E, Nk]` rows that average keys and values into centroids.
        centroids: `[B, Hq, Nq, E]` log of how often each centroid counts.
    """

    keys: Tensor
    means: Tensor
    centroids: Tensor


def dense_attention(query: Tensor, key: Tensor, value: Tensor, weights: Weights, *, scale: float) -> Attended:
    """Softmax over all keys and centroids; differentiable by autograd."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (t.to(torch.float64) for t in (query, key, value))
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    keys = torch.cat((key, weights.means @ key), dim=2)
    values = torch.cat((value, weights.means @ value), dim=2)
    logits = query @ keys.transpose(-1, -2) * scale + torch.cat((weights.keys, weights.centroids), dim=-1)
    if logits.shape[-1] == 0:
        return Attended(
            query.new_zeros(*query.shape[:3], value.shape[-1]), query.new_full(query.shape[:3], -torch.inf)
        )
    # rows that read nothing are computed as if flat and then cleared: autograd through -inf - -inf is NaN
    empty = torch.isneginf(logits).all(dim=-1)
    logits = logits.masked_fill(empty[..., None], 0.0)
    output = (logits.softmax(dim=-1) @ values).masked_fill(empty[..., None], 0.0)
    return Attended(output, torch.logsumexp(logits, dim=-1).masked_fill(empty, -torch.inf))


def full_weights(
    query: Tensor, key: Tensor, *, is_causal: bool = False, key_padding_mask: Tensor | None = None
) -> Weights:
    """Weights of exact attention: 0 on every visible key."""
    batch, heads, n_query = query.shape[:3]
    n_keys = key.shape[2]
    weights = torch.zeros(batch, heads, n_query, n_keys, dtype=torch.float64)
    if key_padding_mask is not None:
        weights = weights.masked_fill(~key_padding_mask[:, None, None, :], -torch.inf)
    if is_causal:
        position = torch.arange(n_keys - n_query, n_keys)
        weights = weights.masked_fill(torch.arange(n_keys) > position[:, None], -torch.inf)
    return without_centroids(weights)


def without_centroids(keys: Tensor) -> Weights:
    """Log weights of keys alone."""
    batch, heads, n_query, n_keys = keys.shape
    return Weights(keys, keys.new_zeros(batch, heads, 0, n_keys), keys.new_zeros(batch, heads, n_query, 0))


def subset_weights(full: Weights, member: Tensor) -> Weights:
    """Weights with only the keys of `member [B, Hkv, Nk]` left."""
    group = full.keys.shape[1] // member.shape[1]
    visible = member.repeat_interleave(group, dim=1)[:, :, None, :]
    return without_centroids(full.keys.masked_fill(~visible, -torch.inf))
