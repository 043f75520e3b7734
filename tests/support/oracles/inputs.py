"""Random attention inputs and padding masks, from a seed."""

import torch

MASKS = ("none", "left", "right", "holes")
WIDE = torch.float64


def attention_tensors(
    *, batch=1, heads=2, kv_heads=1, n_query=None, n_keys=16, dim=4, value_dim=None, dtype=WIDE, seed=0, spread=1.5
):
    """Gaussian query `[B, Hq, Nq, D]`, key `[B, Hkv, Nk, D]` and value `[B, Hkv, Nk, Dv]`.

    `spread` widens queries and keys, so that the softmax is far from flat and a wrong weight shows.
    """
    generator = torch.Generator().manual_seed(seed)
    n_query, value_dim = n_keys if n_query is None else n_query, dim if value_dim is None else value_dim
    sizes = (heads, n_query, dim), (kv_heads, n_keys, dim), (kv_heads, n_keys, value_dim)
    query, key, value = (torch.randn(batch, *size, generator=generator, dtype=WIDE) for size in sizes)
    return (query * spread).to(dtype), (key * spread).to(dtype), value.to(dtype)


def random_mask(kind, batch, n_keys, *, seed=0):
    """`[B, Nk]` bool, True = a real key: real keys at the end (`left`), at the start (`right`), or anywhere.

    Every row keeps at least one real key; None for `none`.
    """
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, n_keys + 1, (batch, 1), generator=generator)
    position = torch.arange(n_keys)
    if kind != "holes":
        return position < length if kind == "right" else position >= n_keys - length
    mask = torch.rand(batch, n_keys, generator=generator) < 0.7
    mask[:, int(torch.randint(n_keys, (), generator=generator))] = True
    return mask
