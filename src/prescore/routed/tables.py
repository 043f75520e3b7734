"""What is made of the keys once, before any query is seen: nodes, their codes, how keys spread within nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.clustering.tree import bisection_tree
from prescore.ops.backend import accumulation_dtype
from prescore.routed.codes import Codes, encode_keys
from prescore.routed.layout import ODD, Layout


@dataclass(frozen=True, eq=False)
class Nodes:
    """Nodes of consecutive chunks; `T` lanes, `C` chunks, `M` nodes of `L` keys.

    Gradients of means and covariances reach keys and values; rows and codes are choices.

    Attributes:
        rows: `[T, M, L]` positions of the nodes' keys, the odd ones first.
        key: `[T, M, D]` means.
        value: `[T, M, Dv]` means.
        codes: Of what the keys differ from their means, `[T, M, L]` of them.
        spread: `[T, C, D, D]` covariance of keys within nodes, chunk by chunk.
        drift: `[T, C, D, Dv]` covariance of keys and values within nodes.
    """

    rows: Tensor
    key: Tensor
    value: Tensor
    codes: Codes
    spread: Tensor
    drift: Tensor


def build_nodes(key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int) -> Nodes:
    """Nodes of `n_chunks` chunks from position `begin` on.

    Args:
        key: `[T, N, D]` of lanes.
        value: `[T, N, Dv]`.
        layout: The geometry.
        begin: Where the first chunk begins.
        n_chunks: How many there are.
    """
    wide, n_lanes, dim = accumulation_dtype(key.dtype), key.shape[0], key.shape[-1]
    span, stop = (n_lanes, n_chunks, layout.chunk), begin + n_chunks * layout.chunk
    with torch.no_grad():
        points = key[:, begin:stop].reshape(*span, dim)
        order = bisection_tree(points, layout.levels) if points.numel() else _in_order(span, key)
        start = torch.arange(n_chunks, device=key.device)[:, None] * layout.chunk + begin
        rows = (order + start).view(n_lanes, -1, layout.leaf)
        rows = _odd_first(rows, take_rows(key, rows).to(wide))
    keys, values = (take_rows(t, rows).to(wide) for t in (key, value))
    mean_key, mean_value = keys.mean(2), values.mean(2)
    away, beside = (
        (members - means[:, :, None]).view(*span, -1)
        for members, means in ((keys, mean_key), (values, mean_value))
    )
    turned = away.transpose(2, 3)
    return Nodes(
        rows,
        mean_key,
        mean_value,
        encode_keys(away.detach().view(keys.shape)),
        turned @ away / layout.chunk,
        turned @ beside / layout.chunk,
    )


def _odd_first(rows: Tensor, keys: Tensor) -> Tensor:
    """Rows `[T, M, L]` of nodes, those first whose keys lie farthest from the mean; the others keep their order.

    Lengths are compared by their leading bits, and of equal ones the earliest key is taken: so the choice is
    hardly ever one of rounding.
    """
    square = (keys - keys.mean(2, keepdim=True)).square().sum(-1).to(torch.float32)
    leading = (square.contiguous().view(torch.int32) >> 16 & 0x7FFF).to(torch.int64)
    farthest = (leading * 2**40 - rows).topk(min(ODD, rows.shape[2]), dim=2).indices
    odd = torch.zeros_like(rows).scatter_(2, farthest, 1)
    return rows.gather(2, odd.argsort(dim=2, descending=True, stable=True))


def pooled(parts: Tensor) -> Tensor:
    """`[T, C, ...]` of chunks -> means over the first 1, 2, ... chunks."""
    count = torch.arange(1, parts.shape[1] + 1, device=parts.device, dtype=parts.dtype)
    return parts.cumsum(1) / count[:, None, None]


def mean_of_first(parts: Tensor, counts: Tensor) -> Tensor:
    """`[T, C, ...]` of chunks -> `[T, 1, ...]`, means over as many of the first ones as `counts [T]` says."""
    inside = torch.arange(parts.shape[1], device=parts.device) < counts[:, None]
    if not bool(inside.all()):
        parts = parts.masked_fill(~inside[:, :, None, None], 0.0)
    return parts.sum(1, keepdim=True) / counts[:, None, None, None]


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """`[T, N, D]` and positions `[T, ...]` -> `[T, ..., D]`."""
    if tensor.shape[0] == 1:
        return tensor[0].index_select(0, rows.reshape(-1)).view(*rows.shape, -1)
    start = torch.arange(0, rows.shape[0] * tensor.shape[1], tensor.shape[1], device=rows.device)
    flat = rows + start.view(-1, *[1] * (rows.ndim - 1))
    return tensor.reshape(-1, tensor.shape[-1]).index_select(0, flat.reshape(-1)).view(*rows.shape, -1)


def _in_order(span: tuple[int, int, int], like: Tensor) -> Tensor:
    return torch.arange(span[2], device=like.device).expand(span)
