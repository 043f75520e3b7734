"""Leverage scores: how much a key matters for the span of all keys.

`h_i = k_i^T (K^T K)^+ k_i`, between 0 and 1, summing to the rank of K. With `K^T K = V S^2 V^T` it is the squared
length of `k_i V S^-1` over the singular values that are not zero. Singular values below `D * eps * s_max` count
as zero: rounding in the entries of K makes values of that size, whatever the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.registry import register_scorer
from prescore.rng import Streams, as_normal
from prescore.scoring.base import KeyShard, Scorer, with_noise
from prescore.scoring.metrics import sum_clusters

_BLOCK = 2048
# Squaring K squares its condition number. Above this ratio of eigenvalues, the float64 Gram matrix still gives
# leverages to 1e-7; below it, K itself is factorised.
_GRAM_RATIO = 1e-8
_COLUMNS_PER_RATIO = 4
_MIN_COLUMNS = 8


@register_scorer("leverage")
@dataclass(frozen=True)
class Leverage(Scorer):
    """Exact leverage, or sketched when `sketch_size` is given; of noisy or l2-normalised keys where asked for.

    The sketch hashes the keys, with random signs, into `m = max(sketch_size, 2 D)` rows and factorises those; the
    scores are then measured in `c = min(D, max(8, 4 m / D))` random directions, in time `O(N D c + m D^2)`: with
    `m = O(D log D)` that is `O(N D log D)` for many keys, as in the paper. The relative error of a score has a
    root mean square below `2 sqrt(D / m) + sqrt(2 / c)`, the second term only while `c < D`; with
    `m >= max(N, D^2 / 4)` the result is exact.
    """

    sketch_size: int | None = None
    normalize: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        checks.boolean("normalize", self.normalize)
        checks.number("noise", self.noise, minimum=0.0)
        if self.sketch_size is not None:
            checks.integer("sketch_size", self.sketch_size, minimum=1)
            # signs and buckets go by position
            object.__setattr__(self, "permutation_equivariant", False)

    def score(self, keys: Tensor, *, valid: Tensor | None, streams: Streams) -> Tensor:
        """Score keys, see `Scorer.score`."""
        rows = self._rows(with_noise(keys, self.noise, streams, valid=valid))
        if rows.numel() == 0:
            return keys.new_zeros(keys.shape[:3])
        if self.sketch_size is None:
            scores = exact_leverage(rows)
        else:
            shard = KeyShard(keys, 0, keys.shape[2], keys.dtype, streams)
            scores = _sketched_leverage(rows, self._sketch(rows, shard, valid), shard)
        return scores.reshape(keys.shape[:3])

    def stats(self, shard: KeyShard) -> Tensor:
        """The triangular factor of the keys in float64 (Gram matrices of shards add up), or their sketch."""
        rows = self._rows(with_noise(shard.keys, self.noise, shard.streams, shard=shard))
        if self.sketch_size is None:
            table = torch.linalg.qr(rows.to(torch.float64), mode="r").R
        else:
            table = self._sketch(rows, shard)
        stats: Tensor = table.unflatten(0, shard.keys.shape[:2]).flatten(2)
        return stats

    def score_from(self, stats: Sequence[Tensor], shard: KeyShard) -> Tensor:
        """Score the keys of a shard, see `Scorer.score_from`."""
        rows = self._rows(with_noise(shard.keys, self.noise, shard.streams, shard=shard))
        tables = [part.flatten(0, 1).unflatten(1, (-1, rows.shape[2])) for part in stats]
        if self.sketch_size is None:
            factors = torch.cat(tables, dim=1)
            scores = _squared_lengths(rows, _whitening_of(factors, _cutoff(rows))).to(rows.dtype)
        else:
            # added in order of position, so that all ranks get the same bits
            scores = _sketched_leverage(rows, sum(tables[1:], start=tables[0]), shard)
        return scores.reshape(shard.keys.shape[:3])

    def _rows(self, keys: Tensor) -> Tensor:
        """`[P, n, d]`: the matrix of each sequence and head."""
        if self.normalize:
            keys = torch.nn.functional.normalize(keys, dim=-1, eps=torch.finfo(keys.dtype).tiny)
        return keys.flatten(0, 1)

    def _sketch(self, rows: Tensor, shard: KeyShard, valid: Tensor | None = None) -> Tensor:
        """The rows `[P, n, d]` of a shard, added with random signs into random buckets: `[P, m, d]`."""
        size = max(self.sketch_size or 0, 2 * rows.shape[2])
        draws = shard.streams.head_uniform("sketch", shard.n_keys, 2, like=shard.keys)[:, :, shard.positions]
        signs, buckets = draws[..., 0].lt(0.5).flatten(0, 1) * 2 - 1, (draws[..., 1] * size).long()
        if valid is None:
            n_valid = torch.full((len(shard.keys), 1, 1), shard.n_keys, dtype=torch.int64, device=rows.device)
        else:
            n_valid = valid.sum(1)[:, None, None]
        # a sketch with room for every key keeps the keys apart
        positions = torch.arange(shard.n_keys, dtype=torch.int64, device=rows.device)[shard.positions]
        buckets = torch.where(n_valid <= size, positions.clamp(max=size - 1), buckets).flatten(0, 1)
        return sum_clusters(rows * signs.unsqueeze(2).to(rows.dtype), buckets, None, size)


def exact_leverage(rows: Tensor) -> Tensor:
    """Leverage of each row of `rows [P, n, d]` (zero rows count for nothing), `[P, n]`, computed in float64."""
    return _squared_lengths(rows, _whitening_of(rows, _cutoff(rows))).to(rows.dtype)


def _cutoff(rows: Tensor) -> float:
    return rows.shape[2] * torch.finfo(rows.dtype).eps


def _whitening_of(rows: Tensor, cutoff: float) -> Tensor:
    """`[P, d, d]` in float64 that turns rows into vectors whose squared lengths are their leverages.

    It depends on the Gram matrix of the rows only, which the triangular factors of shards below one another share.
    """
    gram = rows.new_zeros(len(rows), rows.shape[2], rows.shape[2], dtype=torch.float64)
    for block in torch.split(rows, _BLOCK, dim=1):
        wide = block.to(torch.float64)
        gram.baddbmm_(wide.transpose(1, 2), wide)
    eigenvalues, vectors = torch.linalg.eigh(gram)
    whitening = _whitening(eigenvalues.clamp(min=0.0).sqrt(), vectors, cutoff)
    poor = eigenvalues[:, 0] < _GRAM_RATIO * eigenvalues[:, -1]
    if bool(poor.any()):
        whitening[poor] = _whitening_by_qr(rows[poor].to(torch.float64), cutoff)
    return whitening


def _squared_lengths(rows: Tensor, whitening: Tensor) -> Tensor:
    """`[P, n]`, in the whitening's dtype, block by block."""
    parts = [
        torch.bmm(block.to(whitening.dtype), whitening).square_().sum(dim=2)
        for block in torch.split(rows, _BLOCK, dim=1)
    ]
    return torch.cat(parts, dim=1)


def _sketched_leverage(rows: Tensor, sketch: Tensor, shard: KeyShard) -> Tensor:
    """Approximate leverage of the `rows [P, n, d]` of a shard from the sketch `[P, m, d]` of all keys."""
    size, dim = sketch.shape[1:]
    whitening = _whitening_by_qr(sketch.to(torch.float64), _cutoff(rows))
    n_columns = min(dim, max(_MIN_COLUMNS, _COLUMNS_PER_RATIO * size // dim))
    if n_columns < dim:
        uniform = shard.streams.head_uniform("sketch directions", n_columns, dim, like=shard.keys).flatten(0, 1)
        whitening = torch.matmul(whitening, as_normal(uniform, whitening).mT / math.sqrt(n_columns))
    return torch.bmm(rows, whitening.to(rows.dtype)).square_().sum(dim=2)


def _whitening_by_qr(rows: Tensor, cutoff: float) -> Tensor:
    triangular = torch.linalg.qr(rows, mode="r").R
    _, values, transposed = torch.linalg.svd(triangular, full_matrices=False)
    whitening = _whitening(values, transposed.transpose(1, 2), cutoff)
    missing = rows.shape[2] - whitening.shape[2]
    return torch.nn.functional.pad(whitening, (0, missing))


def _whitening(values: Tensor, vectors: Tensor, cutoff: float) -> Tensor:
    """`V S^+`, `[P, d, r]`, from singular values `[P, r]` in any order and right singular vectors."""
    largest = values.amax(dim=1, keepdim=True)
    kept = (values > cutoff * largest) & (values > 0)
    inverse = torch.where(kept, values, 1.0).reciprocal() * kept
    return vectors * inverse.unsqueeze(1)
