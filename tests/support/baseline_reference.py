"""Calls of baselines, and dense attention under an explicit visibility mask."""

from functools import partial

import torch
from oracles.dense import dense_attention, without_centroids
from oracles.inputs import attention_tensors

inputs = partial(attention_tensors, batch=2, heads=4, kv_heads=2, n_query=23, n_keys=23, dim=8, value_dim=5)


def dense(query, key, value, visible, scale=None):
    """Softmax over `visible [B, Hq, Nq, Nk]` (broadcastable); (output, lse)."""
    weights = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.float64).masked_fill(~visible, -torch.inf)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return dense_attention(query, key, value, without_centroids(weights), scale=scale)


def assert_same(attended, expected, tolerance=1e-10):
    """float64 throughout: 1e-10 is far above rounding (1e-14) and far below any wrong key."""
    for got, wanted in zip(attended, expected, strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=tolerance, atol=tolerance)


def assert_differ(left, right):
    assert not torch.allclose(left[0], right[0], atol=1e-6)
