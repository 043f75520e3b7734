"""Performer: softmax attention through positive random features (FAVOR+)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.baselines.tiles import Placed, baseline
from prescore.ops.operators import accumulation_dtype
from prescore.ops.parts import merge
from prescore.rng import Streams, as_streams
from prescore.types import Attended

_CHUNK = 128


@baseline
def performer_attention(placed: Placed, *, n_features: int = 256) -> Attended:
    """Attention with `exp(scale q.k)` replaced by its unbiased estimate `phi(q).phi(k)`.

    `phi_f(x) = exp(w_f.x' - |x'|^2 / 2) / sqrt(n_features)` with `x' = sqrt(scale) x`, and directions `w_f` with
    the lengths of Gaussian vectors, orthogonal in blocks of D. The lse is the log of the estimated normaliser.
    Features are kept as logarithms relative to maxima over the visible keys, so that nothing overflows and a
    later key cannot make an earlier one underflow. Linear in time and memory.

    Args:
        placed: The call; its generator seeds the features.
        n_features: Random features, the same for all heads.
    """
    checks.integer("n_features", n_features, minimum=1)
    call, streams = placed.call, as_streams(placed.generator)
    wide = accumulation_dtype(call.query.dtype)
    directions = orthogonal_features(n_features, call.query.shape[-1], streams, like=call.query).to(wide)
    queries = _log_features(call.query.to(wide), directions, call.scale)
    queries = queries.unflatten(1, (call.key.shape[1], call.heads_per_kv))  # [B, Hkv, G, Nq, F]
    keys = _log_features(call.key.to(wide), directions, call.scale)
    keys = keys.masked_fill(~placed.valid[:, None, :, None], -torch.inf)
    values = call.value.to(wide)
    result = _causal(queries, keys, values) if call.is_causal else _read(queries, _extend(None, keys, values))
    return Attended(result.output.flatten(1, 2).to(call.query.dtype), result.lse.flatten(1, 2))


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

    peak: Tensor  # [B, H, F], 0 without keys
    values: Tensor  # [B, H, F, Dv]
    weight: Tensor  # [B, H, F]


def _log_features(rows: Tensor, directions: Tensor, scale: float) -> Tensor:
    rows = rows * math.sqrt(scale)
    constant = rows.square().sum(-1, keepdim=True) / 2 + math.log(len(directions)) / 2
    return rows @ directions.t() - constant


def _peak(logs: Tensor, dim: int) -> Tensor:
    """The maximum, which only shifts exponents: without gradient, 0 where all are -inf."""
    peak = logs.detach().amax(dim, keepdim=True)
    return peak.masked_fill(torch.isneginf(peak), 0.0)


def _extend(sums: _FeatureSums | None, keys: Tensor, values: Tensor) -> _FeatureSums:
    """Add keys `[B, H, c, F]` (-inf = padding) and values `[B, H, c, Dv]`."""
    if keys.shape[2] == 0:
        keys = keys.new_full((*keys.shape[:2], 1, keys.shape[3]), -torch.inf)
        values = values.new_zeros(*values.shape[:2], 1, values.shape[3])
    if sums is None:
        peak = _peak(keys, 2)
        features = torch.exp(keys - peak)
        return _FeatureSums(peak.squeeze(2), features.transpose(-1, -2) @ values, features.sum(2))
    empty = sums.weight.detach() == 0
    old_peak = sums.peak.masked_fill(empty, -torch.inf)
    peak = _peak(torch.cat((keys, old_peak[:, :, None]), dim=2), 2)
    features = torch.exp(keys - peak)
    shrink = torch.exp(old_peak - peak.squeeze(2))
    return _FeatureSums(
        peak.squeeze(2),
        features.transpose(-1, -2) @ values + sums.values * shrink[..., None],
        features.sum(2) + sums.weight * shrink,
    )


def _read(queries: Tensor, sums: _FeatureSums) -> Attended:
    """Attention of queries `[B, H, G, t, F]` to the keys of the sums."""
    logs = queries + sums.peak[:, :, None, None]
    logs = logs.masked_fill((sums.weight == 0)[:, :, None, None], -torch.inf)
    peak = _peak(logs, -1)
    features = torch.exp(logs - peak)
    return _normalise(features @ sums.values[:, :, None], features @ sums.weight[:, :, None, :, None], peak)


def _normalise(outputs: Tensor, weight: Tensor, log_factor: Tensor) -> Attended:
    empty = weight == 0
    safe = weight.masked_fill(empty, 1.0)
    lse = (torch.log(safe) + log_factor).masked_fill(empty, -torch.inf)
    return Attended(outputs / safe, lse.squeeze(-1))


def _causal(queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
    """Chunk by chunk: the feature sums of all earlier chunks, and the chunk itself pair by pair."""
    offset, n_query = keys.shape[2] - queries.shape[3], queries.shape[3]
    sums = _extend(None, keys[:, :, :offset], values[:, :, :offset])
    chunks = []
    for start in range(0, max(n_query, 1), _CHUNK):
        local = slice(offset + start, offset + start + _CHUNK)
        chunk = queries[:, :, :, start : start + _CHUNK]
        chunks.append(merge(_read(chunk, sums), _read_chunk(chunk, keys[:, :, local], values[:, :, local])))
        sums = _extend(sums, keys[:, :, local], values[:, :, local])
    return Attended(*(torch.cat(parts, dim=3) for parts in zip(*chunks, strict=True)))


def _read_chunk(queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
    """Queries `[B, H, G, t, F]` over the keys at their positions, each relative to its own maximum."""
    if queries.shape[3] == 0:
        return Attended(queries.new_zeros(*queries.shape[:-1], values.shape[-1]), queries[..., 0])
    query_peak, key_peak = _peak(queries, -1), _peak(keys, -1)
    padding = torch.isneginf(keys.detach()).all(-1)[:, :, None, None]  # [B, H, 1, 1, t]
    agreement = torch.exp(queries - query_peak) @ torch.exp(keys - key_peak).transpose(-1, -2)[:, :, None]
    tiny = torch.finfo(agreement.dtype).tiny
    logits = torch.log(agreement.clamp_min(tiny)) + key_peak.transpose(-1, -2)[:, :, None]  # [B, H, G, t, t]
    logits = logits.masked_fill(padding | torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    peak = _peak(logits, -1)
    weights = torch.exp(logits - peak)
    return _normalise(weights @ values[:, :, None], weights.sum(-1, keepdim=True), peak + query_peak)
