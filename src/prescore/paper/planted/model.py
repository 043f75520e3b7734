"""The planted model of the paper's section 4: keys whose important rows are known.

`d` groups of `m = ceil(1 / epsilon)` signal rows lie around the directions of an orthonormal basis; all other rows
are noise. The paper uses two models that differ:

- `"normalized"`: items 4, 5 and 7 of the model to the letter, every row scaled to norm 1.
- `"small-noise"`: rows as drawn, `v_j + delta` and `eta`, as the proofs and the l_p claim use them; noise then
  has squared norm about `d * c_noise / (n * epsilon)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.rng import Streams, as_streams

READINGS = ("normalized", "small-noise")

Generator = torch.Generator | int | None


@dataclass(frozen=True, eq=False)
class PlantedModel:
    """Keys with their truth.

    Attributes:
        keys: `[n, d]`, rows in random order.
        groups: `[n]` int64; 0 = noise, `j` = the group around `directions[j - 1]`.
        directions: `[groups, d]`, orthonormal rows.
        epsilon: Heaviness threshold; a group has `ceil(1 / epsilon)` rows.
        sigma_signal: Standard deviation around a direction, `sqrt(c_signal / d)`.
        sigma_noise: Standard deviation of a noise row before any normalisation.
    """

    keys: Tensor
    groups: Tensor
    directions: Tensor
    epsilon: float
    sigma_signal: float
    sigma_noise: float

    @property
    def signal(self) -> Tensor:
        """`[n]` bool, True on the planted rows."""
        return self.groups > 0


def group_size(epsilon: float) -> int:
    """`ceil(1 / epsilon)`, with 1 / 0.1 counted as 10."""
    checks.number("epsilon", epsilon, minimum=0.0, exclusive=True)
    if epsilon > 1:
        raise ValueError(f"epsilon must be at most 1, got {epsilon}")
    return math.ceil(1 / epsilon - 1e-9)


@dataclass(frozen=True)
class PlantedSetting:
    """The numbers of a planted model: `sigma_S^2 = c_signal / d`, `sigma_N^2 = c_noise / (n * epsilon)`.

    There are `n > d * ceil(1 / epsilon)` rows of `d` dimensions in `d` groups; `epsilon = 1` is the singleton
    case m = 1.
    """

    n: int
    d: int
    epsilon: float
    c_signal: float = 0.1
    c_noise: float = 0.1

    def __post_init__(self) -> None:
        checks.integer("n", self.n, minimum=1)
        checks.integer("d", self.d, minimum=1)
        checks.number("c_signal", self.c_signal, minimum=0.0)
        checks.number("c_noise", self.c_noise, minimum=0.0, exclusive=True)
        n_signal = self.d * group_size(self.epsilon)
        if self.n <= n_signal:
            raise ValueError(f"n must be above d * ceil(1 / epsilon) = {n_signal}, got {self.n}")

    def draw(
        self, reading: str = "normalized", *, rotated: bool = False, generator: Generator = None
    ) -> PlantedModel:
        """Draw keys.

        Args:
            reading: `"normalized"` or `"small-noise"`, see the module.
            rotated: Use a random orthonormal basis; otherwise the standard one, which the l_p claim needs for
                `|v_j - v_k|_p^p = 2`.
            generator: Randomness.
        """
        checks.one_of("reading", reading, READINGS)
        n, d, m = self.n, self.d, group_size(self.epsilon)
        n_signal = d * m
        streams = as_streams(generator)
        like = torch.empty(0, dtype=torch.float64)
        sigma_signal, sigma_noise = (self.c_signal / d) ** 0.5, (self.c_noise / (n * self.epsilon)) ** 0.5
        directions = torch.eye(d, dtype=torch.float64)
        if rotated:
            directions = torch.linalg.qr(streams.normal("basis", d, d, like=like))[0]
        around = directions.repeat_interleave(m, 0)
        signal = around + sigma_signal * streams.normal("signal", n_signal, d, like=like)
        noise = sigma_noise * streams.normal("noise", n - n_signal, d, like=like)
        keys = torch.cat((signal, noise))
        if reading == "normalized":
            keys = keys / keys.norm(dim=-1, keepdim=True)
        return _shuffled(keys, directions, streams, self.epsilon, (sigma_signal, sigma_noise))


def counterexample_keys(
    n: int, d: int, norm: float = 100.0, *, spread: float = 0.0, generator: Generator = None
) -> PlantedModel:
    """Appendix B: `d / 2` orthogonal unit signal rows, and noise rows of norm `M` in one further direction.

    As printed (`spread=0`) all noise rows are equal, so that the matrix has only `d / 2 + 1` different rows;
    `spread` in (0, 1) draws their norms from `M * [1 - spread, 1 + spread]`, which keeps every inner product of
    the construction zero and gives k-means something to split. `d` is even.
    """
    checks.number("norm", norm, minimum=0.0, exclusive=True)
    half = d // 2
    streams = as_streams(generator)
    like = torch.empty(0, dtype=torch.float64)
    keys = torch.zeros(n, d, dtype=torch.float64)
    keys[:half, :half] = torch.eye(half, dtype=torch.float64)
    keys[half:, half] = norm * (1 + spread * (2 * streams.uniform("norms", n - half, like=like) - 1))
    return _shuffled(keys, torch.eye(d, dtype=torch.float64)[:half], streams)


def latent_keys(n: int, d: int, small: float = 0.1, *, generator: Generator = None) -> PlantedModel:
    """Appendix D: a latent subspace V of dimension `d / 4`, with one signal row near each of its directions.

    Signal rows lie in V but for a component of norm `small` in its complement; all other rows lie in the
    complement but for a component of norm `small` in V. Every row has norm 1.
    """
    checks.number("small", small, minimum=0.0, maximum=1.0)
    latent = max(1, d // 4)
    streams = as_streams(generator)
    like = torch.empty(0, dtype=torch.float64)
    main = torch.nn.functional.normalize(streams.normal("main", n, d, like=like)[:, latent:], dim=-1)
    inside = torch.nn.functional.normalize(streams.normal("inside", n, d, like=like)[:, :latent], dim=-1)
    inside[:latent] = torch.eye(latent, dtype=torch.float64)
    is_signal = (torch.arange(n) < latent)[:, None]
    large = (1 - small**2) ** 0.5
    keys = torch.cat(
        (inside * torch.where(is_signal, large, small), main * torch.where(is_signal, small, large)), 1
    )
    return _shuffled(keys, torch.eye(d, dtype=torch.float64)[:latent], streams)


def variance_keys(n: int, d: int, ratio: float, *, generator: Generator = None) -> PlantedModel:
    """LevAttention's Gaussian model: rows of two covariance profiles whose variances differ by a fixed ratio.

    `d` signal rows have variance 1 on the first half of the coordinates and `ratio` on the others, noise rows the
    other way round. Every row has norm 1. The paper calls the ratio theta_1.
    """
    checks.number("ratio", ratio, minimum=0.0, maximum=1.0)
    half = max(1, d // 2)
    streams = as_streams(generator)
    keys = streams.normal("rows", n, d, like=torch.empty(0, dtype=torch.float64))
    keys[:d, half:] *= ratio**0.5
    keys[d:, :half] *= ratio**0.5
    keys = torch.nn.functional.normalize(keys, dim=-1)
    return _shuffled(keys, keys[:d].clone(), streams)


def _shuffled(
    keys: Tensor,
    directions: Tensor,
    streams: Streams,
    epsilon: float = 1.0,
    sigmas: tuple[float, float] = (0.0, 0.0),
) -> PlantedModel:
    """A model of keys whose groups come first, one for each direction; its rows in random order."""
    n_groups, size = len(directions), group_size(epsilon)
    groups = torch.zeros(len(keys), dtype=torch.int64)
    groups[: n_groups * size] = torch.arange(1, n_groups + 1).repeat_interleave(size)
    order = streams.uniform("order", len(keys), like=keys).argsort()
    return PlantedModel(keys[order], groups[order], directions, epsilon, *sigmas)


def lewis_weights(keys: Tensor, p: float) -> Tensor:
    """Lewis weights of the rows of `keys [..., n, d]`, `[..., n]`, in float64: at p = 2 the leverage.

    They bound the l_p sensitivity `sup_x |k_i^T x|^p / |K x|_p^p` from above: by `w_i` for p <= 2 and by
    `d^(p/2 - 1) w_i` for 2 < p < 4.

    The weights solve `w_i^(2/p) = k_i^T (K^T W^(1 - 2/p) K)^+ k_i` and sum to rank(K). The fixed-point iteration
    contracts by `|1 - p/2|` a step and runs until that is below 1e-6, at most 100 times.
    """
    rows = keys.to(torch.float64)
    if rows.numel() == 0:
        return rows.new_zeros(rows.shape[:-1])
    contraction = abs(1 - p / 2)
    n_steps = 1 if contraction == 0 else min(100, 1 + math.ceil(math.log(1e-6) / math.log(contraction)))
    # singular values that rounding made count as zero, as in `exact_leverage`; a Gram matrix has their squares
    cutoff = max((rows.shape[-1] * torch.finfo(keys.dtype).eps) ** 2, rows.shape[-1] * torch.finfo(rows.dtype).eps)
    weights = torch.ones(rows.shape[:-1], dtype=torch.float64, device=rows.device)
    tiny = torch.finfo(torch.float64).tiny
    for _ in range(n_steps):
        scale = weights.clamp_min(tiny).pow(1 - 2 / p)
        # a zero row has weight 0, whose negative power is infinite
        gram = rows.mT @ (rows * torch.where(weights > tiny, scale, 0).unsqueeze(-1))
        inverse = torch.linalg.pinv(gram, hermitian=True, rtol=cutoff)
        weights = ((rows @ inverse) * rows).sum(-1).clamp_min(0).pow(p / 2)
    return weights


_SAMPLED_PER_COLUMN, _STEPS, _AT_ONCE = 8, 8, 512


def lp_sensitivities(keys: Tensor, p: float, *, generator: Generator = None) -> Tensor:
    """l_p sensitivities `sup_x |k_i^T x|^p / |K x|_p^p` of `keys [n, d]`, found by search: `[n]`, from below.

    As in Padmanabhan et al. (2023) the search for x runs on `8 d` rows sampled by their Lewis weights, here by
    reweighted least squares; the ratio is then that of all keys, so no value exceeds the sensitivity. At p = 2 the
    first step finds it.
    """
    rows = keys.double()
    weights = lewis_weights(rows, p)
    size = min(len(rows), _SAMPLED_PER_COLUMN * rows.shape[1])
    share = weights.cumsum(0) / weights.sum()
    places = as_streams(generator).uniform("rows", size, like=rows)
    drawn = torch.searchsorted(share, places).clamp_max(len(rows) - 1)
    sample, scale = rows[drawn], weights.sum() / (size * weights[drawn])
    start = torch.linalg.pinv(rows.mT @ rows, hermitian=True)
    best = torch.zeros_like(weights)
    for begin in range(0, len(rows), _AT_ONCE):
        some = rows[begin : begin + _AT_ONCE]
        x = some @ start
        for _ in range(_STEPS):
            reach = (some * x).sum(-1, keepdim=True)
            x = x / torch.where(reach.abs() > 0, reach, 1)
            ratio = (some * x).sum(-1).abs().pow(p) / (x @ rows.mT).abs().pow(p).sum(-1).clamp_min(1e-300)
            best[begin : begin + _AT_ONCE] = torch.maximum(best[begin : begin + _AT_ONCE], ratio)
            if p == 2:
                break
            values = (x @ sample.mT).abs()
            pull = scale * values.clamp_min(1e-4 * values.amax(-1, keepdim=True) + 1e-30).pow(p - 2)
            grams = (sample.mT * pull[:, None]) @ sample
            x = (torch.linalg.pinv(grams, hermitian=True) @ some[..., None])[..., 0]
    return best


def correlations(model: PlantedModel) -> tuple[float, float]:
    """The smallest `(delta_1, delta_2)` for which (P1) and (P2) hold.

    `delta = max |k_j . k_l| / min(|k_j|^2, |k_l|^2)` over pairs inside S, and between S and its complement.
    """
    signal, noise = model.keys[model.signal].double(), model.keys[~model.signal].double()

    def largest(left: Tensor, right: Tensor, *, same: bool) -> float:
        if not left.numel() or not right.numel():
            return 0.0
        smaller = torch.minimum(left.square().sum(-1)[:, None], right.square().sum(-1)[None, :])
        ratio = (left @ right.mT).abs() / smaller
        return float((ratio.fill_diagonal_(0) if same else ratio).max())

    return largest(signal, signal, same=True), largest(signal, noise, same=False)


def polynomial_attention(query: Tensor, key: Tensor, degree: int) -> Tensor:
    """Attention with a polynomial kernel, `a_ij = |q_i . k_j|^r / sum_l |q_i . k_l|^r`.

    `[q, d], [n, d] -> [q, n]`. The kernel of the theorems (LevAttention); the absolute value keeps odd degrees
    positive.
    """
    powers = (query.double() @ key.double().mT).abs().pow(degree)
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total > 0, total, 1)


def planted_queries(model: PlantedModel, n_queries: int, *, generator: Generator = None) -> Tensor:
    """Queries `[n_queries, d]`: every second one near a planted direction, the others random."""
    streams = as_streams(generator)
    like = model.keys.double()
    d = like.shape[-1]
    spread = streams.normal("queries", n_queries, d, like=like) / d**0.5
    near = torch.arange(n_queries) % 2 == 0
    chosen = (streams.uniform("groups", n_queries, like=like) * len(model.directions)).long()
    return torch.where(near[:, None], model.directions[chosen] + 0.1 * spread, spread)


def heavy_recall(attention: Tensor, selected: Tensor, threshold: float) -> float | None:
    """Share of the entries of `attention [q, n]` above `threshold` in columns `selected [n]`; None without any."""
    heavy = attention > threshold
    total = int(heavy.sum())
    return int((heavy & selected).sum()) / total if total else None
