"""Dense attention under an explicit visibility mask, in plain float64 loops and broadcasts."""

import torch


def inputs(batch=2, heads=4, kv_heads=2, n_query=23, n_keys=23, dim=8, value_dim=5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    return (
        draw(batch, heads, n_query, dim) * 1.5,
        draw(batch, kv_heads, n_keys, dim) * 1.5,
        draw(batch, kv_heads, n_keys, value_dim),
    )


def dense(query, key, value, visible, scale=None):
    """Softmax over `visible [B, Hq, Nq, Nk]` (broadcastable); (output, lse)."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    return weights @ value, lse


def past(n_query, n_keys):
    """`[Nq, Nk]`: keys not after the query, queries being the last positions."""
    return torch.ones(n_query, n_keys, dtype=torch.bool).tril(n_keys - n_query)


def assert_same(attended, expected, tolerance=1e-10):
    """float64 throughout: 1e-10 is far above rounding (1e-14) and far below any wrong key."""
    output, lse = expected
    torch.testing.assert_close(attended[1], lse.to(attended[1].dtype), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(attended[0], output.to(attended[0].dtype), rtol=tolerance, atol=tolerance)


def assert_differ(left, right):
    assert not torch.allclose(left[0], right[0], atol=1e-6)
