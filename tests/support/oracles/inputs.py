"""Random attention inputs and padding masks, from a seed."""

from __future__ import annotations

import torch
from torch import Tensor

MASKS = ("none", "left", "right", "holes")


def attention_tensors(
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    n_query: int | None = None,
    n_keys: int = 16,
    dim: int = 4,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    spread: float = 1.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian query `[B, Hq, Nq, D]`, key `[B, Hkv, Nk, D]` and value `[B, Hkv, Nk, Dv]`.

    `spread` widens queries and keys, so that the softmax is far from flat and a wrong weight shows.
    """
    generator = torch.Generator().manual_seed(seed)
    n_query = n_keys if n_query is None else n_query
    value_dim = dim if value_dim is None else value_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    query = normal(batch, heads, n_query, dim) * spread
    key = normal(batch, kv_heads, n_keys, dim) * spread
    value = normal(batch, kv_heads, n_keys, value_dim)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def random_mask(kind: str, batch: int, n_keys: int, *, seed: int = 0) -> Tensor | None:
    """`[B, Nk]` bool, True = a real key: real keys at the end (`left`), at the start (`right`), or anywhere.

    Every row keeps at least one real key; None for `none`.
    """
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, n_keys + 1, (batch, 1), generator=generator)
    position = torch.arange(n_keys)
    if kind == "right":
        return position < length
    if kind == "left":
        return position >= n_keys - length
    mask = torch.rand(batch, n_keys, generator=generator) < 0.7
    mask[:, int(torch.randint(n_keys, (), generator=generator))] = True
    return mask
