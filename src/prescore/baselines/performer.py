"""Performer: softmax attention through positive random features (FAVOR+)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from prescore import checks
from prescore.baselines.tiles import place
from prescore.ops.backend import accumulation_dtype
from prescore.ops.parts import merge
from prescore.rng import Streams, as_streams
from prescore.types import Attended

_CHUNK = 128


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    n_features: int = 256,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: torch.Generator | int | None = None,
) -> Attended:
    """Attention with `exp(scale q.k)` replaced by its unbiased estimate `phi(q).phi(k)`.

    `phi_f(x) = exp(w_f.x' - |x'|^2 / 2) / sqrt(n_features)` with `x' = sqrt(scale) x`, and directions `w_f` with
    the lengths of Gaussian vectors, orthogonal in blocks of D. The lse is the log of the estimated normaliser.
    Features stay logarithms relative to maxima over what the query may see, so that nothing overflows and a
    later key cannot make an earlier one underflow. Linear in time and memory.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        n_features: Random features, the same for all heads.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        generator: Seed of the features.
    """
    checks.integer("n_features", n_features, minimum=1)
    streams = as_streams(generator)
    placed = place(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    wide = accumulation_dtype(query.dtype)
    directions = orthogonal_features(n_features, query.shape[-1], streams, like=query).to(wide)
    queries = _log_features(placed.call.query.to(wide), directions, placed.call.scale)
    queries = queries.unflatten(1, (key.shape[1], placed.call.group))  # [B, Hkv, G, Nq, F]
    keys = _log_features(placed.call.key.to(wide), directions, placed.call.scale)
    keys = keys.masked_fill(~placed.valid[:, None, :, None], -torch.inf)
    values = placed.call.value.to(wide)
    result = _causal(queries, keys, values) if is_causal else _read(queries, _extend(None, keys, values))
    return Attended(result.output.flatten(1, 2).to(query.dtype), result.lse.flatten(1, 2))


def orthogonal_features(n_features: int, dim: int, streams: Streams, *, like: Tensor) -> Tensor:
    """Directions `[n_features, dim]`, float64: each standard normal, and orthogonal in blocks of `dim`."""
    n_blocks = math.ceil(n_features / dim)
    precise = torch.empty(0, dtype=torch.float64, device=like.device)
    normals = streams.normal("performer directions", n_blocks, dim, dim, like=precise)
    bases, triangular = torch.linalg.qr(normals)
    # signs of the diagonal make the basis uniform among all bases
    bases = bases * torch.sign(torch.diagonal(triangular, dim1=-2, dim2=-1))[:, None, :]
    lengths = streams.normal("performer lengths", n_blocks * dim, dim, like=precise).square().sum(1).sqrt()
    rows = bases.transpose(1, 2).reshape(n_blocks * dim, dim)
    directions: Tensor = rows * lengths[:, None]
    return directions[:n_features]


class _FeatureSums(NamedTuple):
    """Keys and values so far: feature f holds `exp(peak_f) * (values_f, weight_f)`."""

    peak: Tensor  # [B, H, F], 0 where no key was seen
    values: Tensor  # [B, H, F, Dv]
    weight: Tensor  # [B, H, F]


def _log_features(rows: Tensor, directions: Tensor, scale: float) -> Tensor:
    rows = rows * math.sqrt(scale)
    constant = rows.square().sum(-1, keepdim=True) / 2 + math.log(len(directions)) / 2
    return rows @ directions.t() - constant


def _extend(memory: _FeatureSums | None, keys: Tensor, values: Tensor) -> _FeatureSums:
    """Add keys `[B, H, c, F]` (-inf = padding) and values `[B, H, c, Dv]`."""
    if keys.shape[2] == 0:
        keys = keys.new_full((*keys.shape[:2], 1, keys.shape[3]), -torch.inf)
        values = values.new_zeros(*values.shape[:2], 1, values.shape[3])
    peak = keys.detach().amax(dim=2)
    if memory is not None:
        empty = memory.weight.detach() == 0
        peak = torch.maximum(peak, memory.peak.masked_fill(empty, -torch.inf))
    peak = peak.masked_fill(torch.isneginf(peak), 0.0)
    features = torch.exp(keys - peak[:, :, None])
    held, weight = features.transpose(-1, -2) @ values, features.sum(2)
    if memory is None:
        return _FeatureSums(peak, held, weight)
    shrink = torch.exp(torch.where(empty, 0.0, memory.peak - peak))
    return _FeatureSums(peak, held + memory.values * shrink[..., None], weight + memory.weight * shrink)


def _read(queries: Tensor, memory: _FeatureSums) -> Attended:
    """What queries `[B, H, G, t, F]` get from the memory."""
    logs = queries + memory.peak[:, :, None, None]
    logs = logs.masked_fill((memory.weight == 0)[:, :, None, None], -torch.inf)
    top = logs.detach().amax(-1, keepdim=True)
    top = top.masked_fill(torch.isneginf(top), 0.0)
    features = torch.exp(logs - top)
    return _normalise(features @ memory.values[:, :, None], features @ memory.weight[:, :, None, :, None], top)


def _normalise(sums: Tensor, weight: Tensor, log_factor: Tensor) -> Attended:
    nothing = weight == 0
    safe = weight.masked_fill(nothing, 1.0)
    lse = (torch.log(safe) + log_factor).masked_fill(nothing, -torch.inf)
    return Attended(sums / safe, lse.squeeze(-1))


def _causal(queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
    """Chunk by chunk: the memory of all earlier chunks, and the own chunk pair by pair."""
    offset, n_query = keys.shape[2] - queries.shape[3], queries.shape[3]
    memory = _extend(None, keys[:, :, :offset], values[:, :, :offset])
    outputs, lses = [], []
    for start in range(0, max(n_query, 1), _CHUNK):
        own = slice(offset + start, offset + start + _CHUNK)
        chunk = queries[:, :, :, start : start + _CHUNK]
        seen = merge(_read(chunk, memory), _read_own(chunk, keys[:, :, own], values[:, :, own]))
        outputs.append(seen.output)
        lses.append(seen.lse)
        memory = _extend(memory, keys[:, :, own], values[:, :, own])
    return Attended(torch.cat(outputs, dim=3), torch.cat(lses, dim=3))


def _read_own(queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
    """Queries `[B, H, G, t, F]` and the keys at their own positions, each relative to its own maximum."""
    if queries.shape[3] == 0:
        return Attended(queries.new_zeros(*queries.shape[:-1], values.shape[-1]), queries[..., 0])
    query_top = queries.detach().amax(-1, keepdim=True)
    key_top = keys.detach().amax(-1, keepdim=True)
    absent = torch.isneginf(key_top)
    key_top = key_top.masked_fill(absent, 0.0)
    agreement = torch.exp(queries - query_top) @ torch.exp(keys - key_top).transpose(-1, -2)[:, :, None]
    tiny = torch.finfo(agreement.dtype).tiny
    logits = torch.log(agreement.clamp_min(tiny)) + key_top.transpose(-1, -2)[:, :, None]  # [B, H, G, t, t]
    hidden = absent.transpose(-1, -2)[:, :, None] | torch.ones_like(logits, dtype=torch.bool).triu(1)
    logits = logits.masked_fill(hidden, -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(torch.isneginf(top), 0.0)
    weights = torch.exp(logits - top)
    return _normalise(weights @ values[:, :, None], weights.sum(-1, keepdim=True), top + query_top)
