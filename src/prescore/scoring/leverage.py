"""Leverage scores: how much a key matters for the span of all keys.

`h_i = k_i^T (K^T K)^+ k_i`, between 0 and 1, summing to the rank of K. With `K^T K = V S^2 V^T` it is the squared
length of `k_i V S^-1` over the singular values that are not zero. Singular values below `D * eps * s_max` count
as zero: rounding in the entries of K gives rise to values of that size whatever the number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.registry import register_scorer
from prescore.rng import Streams
from prescore.scoring.base import Scorer, with_noise

_BLOCK = 2048
# Squaring K squares its condition number. Above this ratio of eigenvalues, the float64 Gram matrix still gives
# leverages to 1e-7; below it, K itself is factorised.
_GRAM_RATIO = 1e-8
_SKETCH_ROWS_PER_COLUMN = 16
_FEWEST_COLUMNS = 8


@register_scorer("leverage")
@dataclass(frozen=True)
class Leverage(Scorer):
    """Exact leverage, or sketched when `sketch_size` is given; of noisy or l2-normalised keys where asked for.

    The sketch adds the keys, with random signs, into `m = max(sketch_size, 2 D)` rows and factorises those; the
    scores are then measured in `c = min(D, max(8, m / 16))` random directions. The relative error of a score has
    a root mean square below `2 sqrt(D / m) + sqrt(2 / c)`, the second term only while `c < D`; with
    `m >= max(N, 16 D)` the result is exact.
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
        keys = with_noise(keys, self.noise, valid, streams)
        if self.normalize:
            keys = torch.nn.functional.normalize(keys, dim=-1, eps=torch.finfo(keys.dtype).tiny)
        flat = keys.flatten(0, 1)
        if flat.numel() == 0:
            return keys.new_zeros(keys.shape[:3])
        if self.sketch_size is None:
            scores = exact_leverage(flat)
        else:
            scores = sketched_leverage(flat, self.sketch_size, streams)
        return scores.reshape(keys.shape[:3])


def exact_leverage(rows: Tensor) -> Tensor:
    """Leverage of each row of `rows [P, n, d]` (zero rows count for nothing), `[P, n]`, computed in float64."""
    whitening = whitening_of(rows, rows.shape[2] * torch.finfo(rows.dtype).eps)
    return lengths_after(rows, whitening).to(rows.dtype)


def whitening_of(rows: Tensor, cutoff: float) -> Tensor:
    """`[P, d, d]` in float64 that turns rows into vectors whose squared lengths are their leverages.

    Rows with the same Gram matrix have the same, such as the triangular factors of pieces below one another.
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


def lengths_after(rows: Tensor, whitening: Tensor) -> Tensor:
    """Squared lengths `[P, n]` of rows in the whitening's dtype, block by block."""
    parts = [
        torch.bmm(block.to(whitening.dtype), whitening).square_().sum(dim=2)
        for block in torch.split(rows, _BLOCK, dim=1)
    ]
    return torch.cat(parts, dim=1)


def sketched_leverage(rows: Tensor, sketch_size: int, streams: Streams) -> Tensor:
    """Approximate leverage of `rows [P, n, d]`, `[P, n]`, in time `O(n d c + m d^2)`; see `Leverage`."""
    signs = sketch_signs(rows.shape[1], streams, like=rows)
    sketch = sketch_of(rows, signs, sketch_rows(sketch_size, rows.shape[2]))
    whitening = sketched_whitening(sketch, torch.finfo(rows.dtype).eps, streams)
    return torch.bmm(rows, whitening.to(rows.dtype)).square_().sum(dim=2)


def sketch_rows(sketch_size: int, dim: int) -> int:
    """Rows of a sketch."""
    return max(sketch_size, 2 * dim)


def sketch_signs(n_rows: int, streams: Streams, *, like: Tensor) -> Tensor:
    """A random sign for each row."""
    return (streams.uniform("sketch signs", n_rows, like=like) < 0.5).to(like.dtype) * 2 - 1


def sketch_of(rows: Tensor, signs: Tensor, size: int, first: int = 0) -> Tensor:
    """Rows `[P, n, d]`, which stand at `first` and behind, with `signs [n]` added into `[P, size, d]`."""
    n_problems, n_rows, dim = rows.shape
    before = first % size
    n_layers = math.ceil((before + n_rows) / size)
    after = n_layers * size - before - n_rows
    signed = torch.nn.functional.pad(rows * signs.unsqueeze(1), (0, 0, before, after))
    # row i goes into bucket i mod m: a reshape and a sum, where a hash would need a scatter
    return signed.reshape(n_problems, n_layers, size, dim).sum(dim=1)


def sketched_whitening(sketch: Tensor, eps: float, streams: Streams) -> Tensor:
    """`[P, d, c]` in float64: what makes of a row a vector whose squared length is about its leverage."""
    size, dim = sketch.shape[1:]
    whitening = _whitening_by_qr(sketch.to(torch.float64), dim * eps)
    n_columns = min(dim, max(_FEWEST_COLUMNS, size // _SKETCH_ROWS_PER_COLUMN))
    if n_columns < dim:
        directions = streams.normal("sketch directions", n_columns, dim, like=whitening).t()
        whitening = torch.matmul(whitening, directions / math.sqrt(n_columns))
    return whitening


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
