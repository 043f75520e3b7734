"""What every scorer must do, as checks to run on a scorer of your own.

    from prescore.testing import check_scorer

    check_scorer("my-scorer")
    check_scorer(MyScorer(window=3))

Each check raises AssertionError with one sentence. They run in float64, so that rounding does not decide, and up
to 0.5 % of the keys may differ where a method has ties.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prescore.rng import Streams
from prescore.scoring.base import KeyShard, Scored, Scorer, as_scorer, checked_scores
from prescore.scoring.select import score_keys

Check = Callable[[Scorer], None]

_SHARE_OF_FLIPS = 0.005
_TOLERANCE = 1e-6


def check_scorer(scorer: str | Scorer) -> None:
    """Run every check on a scorer, or on the one registered under a name with its defaults."""
    for check in CONTRACT:
        check(as_scorer(scorer))


def shapes_and_dtypes(scorer: Scorer) -> None:
    """Scores are `[B, H, N]`, finite, at least float32; labels are integers below `n_clusters`."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        _score(_keys(2, 3, 40, 8).to(dtype), scorer)


def finite_on_degenerate_keys(scorer: Scorer) -> None:
    """Equal keys, zero keys, one key, fewer keys than clusters, no keys, no batch: finite scores."""
    one, position = _keys(1, 2, 1, 8), torch.arange(50, dtype=torch.float64, device="cpu")
    cases = {
        "equal keys": one.expand(1, 2, 50, 8).contiguous(),
        "zero keys": _keys(1, 2, 50, 8) * 0,
        "a single key": one,
        "fewer keys than clusters": _keys(1, 2, 3, 8),
        "huge and tiny keys": _keys(1, 2, 50, 8) * 10.0 ** (position * 24 / 49 - 12)[:, None],
        "no keys": _keys(1, 2, 0, 8),
        "an empty batch": _keys(0, 2, 5, 8),
    }
    for name, keys in cases.items():
        _score(keys, scorer, what=f"{name}: ")
    padded = _first(50, 50, 0)
    keys = _keys(2, 2, 50, 8) * padded[:, None, :, None]
    _score(keys, scorer, valid=padded, what="a sequence batched with one of padding: ")


def same_seed_same_scores(scorer: Scorer) -> None:
    """Two calls give the same bits, and the global generator is neither read nor moved."""
    keys = _keys(2, 2, 60, 8)
    state = torch.random.get_rng_state()
    first = _score(keys, scorer).scores
    _require(torch.equal(torch.random.get_rng_state(), state), "scoring must leave the global generator alone")
    torch.rand(3, dtype=torch.float32, device="cpu")
    second = _score(keys, scorer).scores
    torch.random.set_rng_state(state)
    _require(torch.equal(first, second), "the same seed must give the same scores")


def inputs_untouched(scorer: Scorer) -> None:
    """Keys and mask are not written to, and no gradient flows through scoring."""
    for variant in (scorer, *(_changed(scorer, normalize=choice) for choice in (False, True))):
        keys = _keys(2, 2, 60, 8).requires_grad_()
        valid = _first(60, 60, 40)
        before, mask = keys.detach().clone(), valid.clone()
        scores = _score(keys, variant, valid=valid).scores
        _require(torch.equal(keys.detach(), before), "scoring must not write to the keys")
        _require(torch.equal(valid, mask), "scoring must not write to the mask")
        _require(not scores.requires_grad, "scores must not require a gradient")


def heads_and_rows_are_independent(scorer: Scorer) -> None:
    """A head alone has the scores it has among others, where it draws from its own streams."""
    keys = _keys(3, 2, 200, 8)
    batched = _score(keys, scorer).scores
    for row, head in ((0, 0), (2, 1)):
        alone = _score(keys[row : row + 1, head : head + 1], scorer, head=head).scores
        _require_equal(alone[0, 0], batched[row, head], f"row {row}, head {head} alone and in a batch")


def padding_changes_nothing(scorer: Scorer) -> None:
    """A sequence padded inside a batch has the scores it has alone, and -inf on the padding."""
    keys = _keys(2, 2, 200, 8)
    valid = _first(200, 120, 200)
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
    order = _keys(200).argsort()
    scorer = _changed(scorer, noise=0.0)
    moved = _score(keys[:, :, order], scorer).scores
    _require_equal(moved, _score(keys, scorer).scores[:, :, order], "permuted keys")


@torch.no_grad()
def shards_score_as_the_full_sequence(scorer: Scorer) -> None:
    """For scorers with statistics: keys that lie on several ranks have the scores they have on one."""
    keys, cuts = _keys(2, 2, 200, 8), (0, 3, 90, 200)
    full, streams = _score(keys, scorer), Streams(7)
    shards = [
        KeyShard(keys[:, :, begin:end], begin, 200, keys.dtype, streams) for begin, end in itertools.pairwise(cuts)
    ]
    sent = [scorer.stats(shard) for shard in shards]
    stats = [part for part in sent if part is not None]
    if not stats:
        return
    for shard, part in zip(shards, stats, strict=True):
        empty = scorer.stats(dataclasses.replace(shard, keys=shard.keys[:0]))
        _require(
            empty is not None and (empty.shape[1:], empty.dtype) == (part.shape[1:], part.dtype),
            f"stats of an empty batch must tell shape {tuple(part.shape)} and dtype {part.dtype}, got {empty}",
        )
        scored = checked_scores(scorer.score_from(stats, shard), scorer, shard.keys, None)
        _require_equal(scored.scores, full.scores[:, :, shard.positions], f"keys {shard.positions} alone")
        if scored.labels is not None and full.labels is not None:
            _require_equal(scored.labels, full.labels[:, :, shard.positions], "labels of shards")


CONTRACT: tuple[Check, ...] = (
    shapes_and_dtypes,
    finite_on_degenerate_keys,
    same_seed_same_scores,
    inputs_untouched,
    heads_and_rows_are_independent,
    padding_changes_nothing,
    permuting_keys_permutes_scores,
    shards_score_as_the_full_sequence,
)


def _keys(*size: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(size))
    return torch.randn(*size, generator=generator, dtype=torch.float64, device="cpu")


def _first(length: int, *counts: int) -> Tensor:
    """A mask `[B, length]`: the first `counts` keys of each sequence are real."""
    position = torch.arange(length, dtype=torch.int64, device="cpu")
    return position < torch.tensor(counts, dtype=torch.int64, device="cpu")[:, None]


def _score(keys: Tensor, scorer: Scorer, valid: Tensor | None = None, what: str = "", head: int = 0) -> Scored:
    try:
        return score_keys(keys, scorer, valid=valid, streams=Streams(7, first_head=head))
    except (ValueError, TypeError) as error:
        raise AssertionError(f"{what}{error}") from error


def _changed(scorer: Any, **changes: object) -> Scorer:
    """The scorer with other values for those of the hyper-parameters that it has."""
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
