"""What is made of the keys once, before any query is seen: nodes, their codes, how keys spread within nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.ops.backend import accumulation_dtype
from prescore.routed.layout import ODD, Layout
from prescore.routed.tree import bisection_tree


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


# Keys in four bits, queries in six: logits that are good enough to say which keys to read.
#
# What is coded is how a key differs from the mean of its node, whose logit is known: that is a bit more than
# the key
# itself would give. It is cut into two halves of its dimensions, each with a scale of its own, and its numbers
# become whole numbers from -7 to 7; a query has one scale and numbers from -31 to 31. Sums of their products are
# exact in float32.

UNIT = 16
"""Dimensions are filled up with zeros to a multiple of this, so that both halves are whole bytes in any layout."""


LARGEST = 7.49
"""What the largest number of a half becomes: rounded to 7 or -7 on every machine, where 7.5 would be a tie."""


class Codes(NamedTuple):
    """Keys as whole numbers.

    Attributes:
        packed: `[..., D' / 2]` uint8, the number of dimension i plus 8 in the low half of byte i, that of
            dimension `i + D' / 2` in the high half.
        scales: `[..., 2]` what a unit of each half is worth.
    """

    packed: Tensor
    scales: Tensor


def encode_keys(keys: Tensor) -> Codes:
    """Codes of keys `[..., D]`."""
    halves = pad(keys, (0, -keys.shape[-1] % UNIT)).unflatten(-1, (2, -1))
    scales = halves.abs().amax(-1) / LARGEST
    numbers = (halves / scales.clamp_min(torch.finfo(keys.dtype).tiny)[..., None]).round().clamp(-8, 7)
    numbers = numbers.add_(8).to(torch.uint8)
    return Codes(numbers[..., 0, :] | (numbers[..., 1, :] << 4), scales)


def encode_queries(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers `[..., 2, D' / 2]`, in the queries' dtype, and what a unit is worth, `[..., 1]`."""
    halves = pad(queries, (0, -queries.shape[-1] % UNIT)).unflatten(-1, (2, -1))
    scale = halves.abs().amax((-1, -2)).clamp_min(1e-30)[..., None] / 31
    return (halves / scale[..., None]).round(), scale


def coded_logits(queries: Tensor, codes: Codes, margin: float = 0.0) -> Tensor:
    """`[t, D]` and codes of `[n]` keys -> approximate logits `[t, n]`.

    They are lifted by `margin` deviations of their own error: a key's number is off by a uniform part of a unit.
    """
    asked, scale = encode_queries(queries)
    low, high = (codes.packed & 15), (codes.packed >> 4)
    sums = [
        half @ (part.to(queries.dtype) - 8).t() for half, part in zip(asked.unbind(-2), (low, high), strict=True)
    ]
    first, second = codes.scales.to(queries.dtype).unbind(-1)
    if margin:
        halves = pad(queries, (0, -queries.shape[-1] % UNIT)).unflatten(-1, (2, -1))
        lift = torch.linalg.vector_norm(halves, dim=-1) * (margin / 12**0.5) / scale
        sums = [part + own[:, None] for part, own in zip(sums, lift.unbind(-1), strict=True)]
    return scale * (first * sums[0] + second * sums[1])
