"""Attention over keys that the caller chose: a list of key positions per query, or per block of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore import checks
from prescore.ops.parts import Part, mask_bias

KEYS_AT_ONCE = 2**16
"""Key rows gathered at once: bounds the memory, whatever the number of queries."""


def check_key_lists(indices: Tensor, query: Tensor, key: Tensor) -> None:
    """Refuse lists that do not fit the inputs, or name keys that do not exist."""
    checks.dense("indices", indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices must be int64 or int32, got {indices.dtype}")
    if indices.device != query.device:
        raise ValueError(f"indices must be on the query's device {query.device}, got {indices.device}")
    (batch, n_heads, n_query, _), (n_kv_heads, n_keys) = query.shape, key.shape[1:3]
    shape = tuple(indices.shape)
    if indices.ndim != 4 or shape[0] != batch or shape[1] not in (n_heads, n_kv_heads):
        heads = f"{n_heads} or {n_kv_heads}" if n_heads != n_kv_heads else f"{n_heads}"
        raise ValueError(f"indices must have shape [{batch}, {heads}, lists, keys], got {shape}")
    n_lists = shape[2]
    if n_lists != n_query and (not n_lists or not n_query or n_lists != _ceil(n_query, _ceil(n_query, n_lists))):
        raise ValueError(
            f"indices must have a list for each of the {n_query} queries, or for each of n blocks of "
            f"ceil({n_query} / n) queries, got {n_lists} lists"
        )
    if indices.numel():
        least, most = (int(bound) for bound in torch.aminmax(indices))
        if least < -1 or most >= n_keys:
            got = least if least < -1 else most
            raise ValueError(f"indices must be positions of the {n_keys} keys, or -1 for none, got {got}")


def without_duplicates(indices: Tensor) -> Tensor:
    """The same lists in int64, each key at most once: later occurrences become -1."""
    indices = indices.to(torch.int64)
    earlier, later = indices[..., :-1], indices[..., 1:]
    if bool(((later < 0) | ((earlier >= 0) & (earlier < later))).all()):
        return indices
    ordered = indices.sort(-1).values
    repeats = torch.zeros_like(ordered, dtype=torch.bool)
    repeats[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ordered.masked_fill(repeats, -1)


def list_parts(indices: Tensor, query: Tensor, key: Tensor) -> list[Part]:
    """What each query reads, as parts for `attend_parts`: a tile is a list with the queries that share it."""
    (batch, n_heads, n_query, _), (n_kv_heads, n_keys) = query.shape, key.shape[1:3]
    if 0 in (*query.shape[:3], n_keys, *indices.shape):
        return []
    n_list_heads, n_lists = indices.shape[1:3]
    heads, size = n_heads // n_list_heads, _ceil(n_query, n_lists)

    def steps(*shape: int) -> Tensor:  # 0, 1, 2, ... in rows
        count = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=query.device)
        return count.view(shape)

    position = steps(n_lists, 1, size)
    head_rows = steps(batch, n_list_heads, 1, heads, 1) * n_query
    query_rows = (head_rows + position.clamp_max(n_query - 1)).flatten(0, 2)
    query_valid = None
    if n_lists * size > n_query:
        query_valid = (position < n_query).expand(batch, n_list_heads, n_lists, heads, size).flatten(0, 2)
    kv_rows = steps(batch, n_kv_heads, 1, 1) * n_keys
    kv_rows = kv_rows.repeat_interleave(n_list_heads // n_kv_heads, dim=1)
    key_rows = (kv_rows + indices.clamp_min(0)).flatten(0, 2)
    is_listed = (indices >= 0).flatten(0, 2)
    bias = None if bool(is_listed.all()) else mask_bias(is_listed, query.dtype)
    n_tiles, step = len(key_rows), max(1, KEYS_AT_ONCE // indices.shape[3])
    parts = []
    for first in range(0, n_tiles, step):
        some = slice(first, min(first + step, n_tiles))
        valid, some_bias = (None if table is None else table[some] for table in (query_valid, bias))
        shape = (some.stop - first, heads, size)
        parts.append(Part(shape, query_rows[some], valid, key_rows[some], some_bias))
    return parts


def _ceil(n: int, size: int) -> int:
    return -(-n // size)
