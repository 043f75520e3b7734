"""What every scorer must do, as checks that anyone can run on their own.

    pass  # dropped import
    check_scorer("my-scorer")
    check_scorer(MyScorer(window=3))

Each check raises AssertionError with one sentence. They run in float64, so that rounding does not decide, and up
to 0.5 % of the keys may differ where a method has ties.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prescore.rng import Streams
from prescore.scoring.base import Scored, Scorer, as_scorer
from prescore.scoring.select import score_keys

Check = Callable[[Scorer], None]

_SHARE_OF_FLIPS = 0.005
_TOLERANCE = 1e-6


def check_scorer(scorer: str | Scorer) -> None:
    """Run every check on a scorer, or on the one registered under a name with its defaults."""
    for check in CONTRACT:
        check(as_scorer(scorer))


def shapes_and_dtypes(scorer: Scorer) -> None:
    """Scores are `[B, H, N]`, at least float32; labels are integers below `n_clusters`."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        keys = _keys(2, 3, 40, 8).to(dtype)
        scored = _score(keys, scorer)
        expected = torch.promote_types(dtype, torch.float32)
        _require(scored.scores.shape == (2, 3, 40), f"scores must be [B, H, N], got {scored.scores.shape}")
        _require(
            scored.scores.dtype == expected, f"scores must be {expected} for {dtype}, got {scored.scores.dtype}"
        )
        if scored.labels is not None:
            _require(scored.labels.shape == (2, 3, 40), f"labels must be [B, H, N], got {scored.labels.shape}")
            inside = (scored.labels >= 0) & (scored.labels < scored.n_clusters)
            _require(bool(inside.all()), f"labels must be below n_clusters = {scored.n_clusters}")


def finite_on_degenerate_keys(scorer: Scorer) -> None:
    """Equal keys, zero keys, one key, fewer keys than clusters, no keys, no batch: finite scores."""
    one = _keys(1, 2, 1, 8)
    cases = {
        "equal keys": one.expand(1, 2, 50, 8).contiguous(),
        "zero keys": torch.zeros(1, 2, 50, 8),
        "a single key": one,
        "fewer keys than clusters": _keys(1, 2, 3, 8),
        "huge and tiny keys": _keys(1, 2, 50, 8) * torch.logspace(-12, 12, 50)[:, None],
        "no keys": torch.zeros(1, 2, 0, 8),
        "an empty batch": torch.zeros(0, 2, 5, 8),
    }
    for name, keys in cases.items():
        scores = _score(keys, scorer).scores
        _require(scores.shape == keys.shape[:3], f"{name}: scores must be [B, H, N], got {scores.shape}")
        _require(bool(torch.isfinite(scores).all()), f"{name}: scores must be finite, got {scores}")
    padded = torch.arange(50) < torch.tensor([[50], [0]])
    keys = _keys(2, 2, 50, 8) * padded[:, None, :, None]
    scores = _score(keys, scorer, valid=padded).scores
    _require(bool(torch.isfinite(scores[0]).all()), "a row beside an all-padding row must have finite scores")


def same_seed_same_scores(scorer: Scorer) -> None:
    """Two calls give the same bits, and the global generator is neither read nor moved."""
    keys = _keys(2, 2, 60, 8)
    state = torch.random.get_rng_state()
    first = _score(keys, scorer).scores
    _require(torch.equal(torch.random.get_rng_state(), state), "scoring must leave the global generator alone")
    torch.rand(3)
    second = _score(keys, scorer).scores
    torch.random.set_rng_state(state)
    _require(torch.equal(first, second), "the same seed must give the same scores")


def inputs_untouched(scorer: Scorer) -> None:
    """Keys and mask are not written to, and no gradient flows through scoring."""
    for own in (scorer, *(_changed(scorer, normalize=choice) for choice in (False, True))):
        keys = _keys(2, 2, 60, 8).requires_grad_()
        valid = torch.arange(60) < torch.tensor([[60], [40]])
        before, mask = keys.detach().clone(), valid.clone()
        scores = _score(keys, own, valid=valid).scores
        _require(torch.equal(keys.detach(), before), "scoring must not write to the keys")
        _require(torch.equal(valid, mask), "scoring must not write to the mask")
        _require(not scores.requires_grad, "scores must not require a gradient")


def heads_and_rows_are_independent(scorer: Scorer) -> None:
    """A head alone has the scores it has among others."""
    keys = _keys(3, 2, 200, 8)
    parallel_group = _score(keys, scorer).scores
    for row, head in ((0, 0), (2, 1)):
        alone = _score(keys[row : row + 1, head : head + 1], scorer).scores
        _require_equal(alone[0, 0], parallel_group[row, head], f"row {row}, head {head} alone and in a batch")


def padding_changes_nothing(scorer: Scorer) -> None:
    """A sequence padded inside a batch has the scores it has alone, and -inf on the padding."""
    keys = _keys(2, 2, 200, 8)
    valid = torch.arange(200) < torch.tensor([[120], [200]])
    keys = keys * valid[:, None, :, None]
    padded = _score(keys, scorer, valid=valid).scores
    alone = _score(keys[:1, :, :120], scorer).scores
    _require_equal(padded[0, :, :120], alone[0], "a sequence alone and padded")
    _require(bool((padded[0, :, 120:] == -torch.inf).all()), "padding must score -inf")


def permuting_keys_permutes_scores(scorer: Scorer) -> None:
    """For scorers that declare it: the score of a key does not depend on its position."""
    if not scorer.permutation_equivariant:
        return
    keys = _keys(1, 2, 200, 8)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(5))
    scorer = _changed(scorer, noise=0.0)
    moved = _score(keys[:, :, order], scorer).scores
    _require_equal(moved, _score(keys, scorer).scores[:, :, order], "permuted keys")


CONTRACT: tuple[Check, ...] = (
    shapes_and_dtypes,
    finite_on_degenerate_keys,
    same_seed_same_scores,
    inputs_untouched,
    heads_and_rows_are_independent,
    padding_changes_nothing,
    permuting_keys_permutes_scores,
)


def _keys(*size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def _score(keys: Tensor, scorer: Scorer, valid: Tensor | None = None) -> Scored:
    return score_keys(keys, scorer, valid=valid, streams=Streams(7))


def _changed(scorer: Any, **changes: object) -> Scorer:
    """The scorer with those of the hyper-parameters changed that it has."""
    known = {field.name for field in dataclasses.fields(scorer)}
    changed: Scorer = dataclasses.replace(scorer, **{name: changes[name] for name in known & set(changes)})
    return changed


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _require_equal(left: Tensor, right: Tensor, what: str) -> None:
    scale = right.abs().amax().clamp(min=1.0)
    flips = ((left - right).abs() > _TOLERANCE * scale).double().mean().item()
    _require(flips <= _SHARE_OF_FLIPS, f"{what} must score alike, got {flips:.1%} of the keys that differ")
