"""The dense oracle: every weight of every key written out, one softmax, float64.

`Weights` say for each query how often (in logs) each key counts, and which averages of keys are centroids. They
come from the definition in loops (`oracles.naive`), which shares no layout with the plan.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from prescore.types import Attended


class Weights(NamedTuple):
    """What the queries of a call read."""

    keys: Tensor
    """`[B, Hq, Nq, Nk]` log of how often each key counts, -inf = not at all."""
    means: Tensor
    """`[B, Hq, E, Nk]` rows that average keys and values into centroids."""
    centroids: Tensor
    """`[B, Hq, Nq, E]` log of how often each centroid counts."""


def dense_attention(query, key, value, weights, *, scale):
    """Softmax over all keys and centroids, as `Attended`; differentiable by autograd."""
    heads_per_kv = query.shape[1] // key.shape[1]
    query, key, value = (t.to(torch.float64) for t in (query, key, value))
    key, value = (t.repeat_interleave(heads_per_kv, dim=1) for t in (key, value))
    keys, values = (torch.cat((t, weights.means @ t), dim=2) for t in (key, value))
    logits = query @ keys.transpose(-1, -2) * scale + torch.cat((weights.keys, weights.centroids), dim=-1)
    if logits.shape[-1] == 0:
        shape = query.shape[:3]
        return Attended(query.new_zeros(*shape, value.shape[-1]), query.new_full(shape, -torch.inf))
    # rows that read nothing are computed as if flat and then cleared: autograd through -inf - -inf is NaN
    empty = torch.isneginf(logits).all(dim=-1)
    logits = logits.masked_fill(empty[..., None], 0.0)
    output = (logits.softmax(dim=-1) @ values).masked_fill(empty[..., None], 0.0)
    return Attended(output, torch.logsumexp(logits, dim=-1).masked_fill(empty, -torch.inf))


def full_weights(query, key, *, is_causal=False, key_padding_mask=None):
    """Weights of exact attention: 0 on every visible key."""
    n_query, n_keys = query.shape[2], key.shape[2]
    weights = torch.zeros(*query.shape[:3], n_keys, dtype=torch.float64)
    if key_padding_mask is not None:
        weights = weights.masked_fill(~key_padding_mask[:, None, None, :], -torch.inf)
    if is_causal:
        position = torch.arange(n_keys - n_query, n_keys)
        weights = weights.masked_fill(torch.arange(n_keys) > position[:, None], -torch.inf)
        if key_padding_mask is not None:
            after = after_last_key(key_padding_mask, n_query)
            weights = weights.masked_fill(after[:, None, :, None], -torch.inf)
    return without_centroids(weights)


def after_last_key(mask, n_query):
    """`[B, Nq]`: which of the last `n_query` positions come after the last real key; they see nothing."""
    ends = [max(row.nonzero().flatten().tolist(), default=-1) for row in mask]
    return torch.arange(mask.shape[1] - n_query, mask.shape[1]) > torch.tensor(ends, dtype=torch.int64)[:, None]


def without_centroids(keys):
    """Log weights of keys alone."""
    batch, heads, n_query, n_keys = keys.shape
    return Weights(keys, keys.new_zeros(batch, heads, 0, n_keys), keys.new_zeros(batch, heads, n_query, 0))


def subset_weights(full, member):
    """Weights with only the keys of `member [B, Hkv, Nk]` left."""
    visible = member.repeat_interleave(full.keys.shape[1] // member.shape[1], dim=1)[:, :, None, :]
    return without_centroids(full.keys.masked_fill(~visible, -torch.inf))
