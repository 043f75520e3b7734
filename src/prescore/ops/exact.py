"""Exact softmax attention as parts, or straight from the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.ops.backend import Backend, readable
from prescore.ops.parts import Part, attend_parts


def exact_output(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, backend: Backend
) -> Tensor:
    """Output of exact attention without padding, where nobody asks for lse.

    Straight from the operator, with its own backward, where it can run as it is: short inputs feel every copy.
    """
    aligned = not is_causal or query.shape[2] == key.shape[2]
    same_width = value.shape[3] == query.shape[3]
    if backend.name == "cpu-flash" and aligned and same_width and query.numel() and key.numel():
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            readable(query), readable(key), readable(value), 0.0, is_causal, scale=scale
        )[0]
        return output
    parts = exact_parts(query, key, is_causal=is_causal, valid=None)
    return attend_parts(query, key, value, parts, scale=scale, backend=backend).output


def exact_parts(query: Tensor, key: Tensor, *, is_causal: bool, valid: Tensor | None) -> list[Part]:
    """Parts of exact attention: everything at once, or past keys plus a causal square."""
    batch, n_heads, n_query, _ = query.shape
    n_kv_heads, n_keys = key.shape[1:3]
    tiles = batch * n_kv_heads
    shape = (tiles, n_heads // n_kv_heads, n_query)
    bias = None if valid is None else padding_bias(valid, n_kv_heads, query.dtype)
    if 0 in (tiles, n_heads, n_query, n_keys):
        return []
    if not is_causal or n_query == n_keys:
        return [Part(shape, bias=bias, causal=is_causal)]
    # the operator aligns a causal triangle to the first key: split off the keys all queries see
    rows = torch.arange(tiles * n_keys, device=query.device).view(tiles, n_keys)
    cut = n_keys - n_query
    past_bias, own_bias = (None, None) if bias is None else bias.split([cut, n_query], dim=1)
    past = Part(shape, key_rows=rows[:, :cut], bias=past_bias)
    return [past, Part(shape, key_rows=rows[:, cut:], bias=own_bias, causal=True)]


def padding_bias(valid: Tensor, n_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """`[B, N]` bool -> `[B * Hkv, N]` of 0 and -inf."""
    bias = torch.zeros(valid.shape, dtype=dtype, device=valid.device).masked_fill_(~valid, -torch.inf)
    return bias.repeat_interleave(n_kv_heads, dim=0)
