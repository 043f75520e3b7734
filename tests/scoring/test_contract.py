"""Every registered scorer keeps the contract, the contract can be broken, and bad results are refused."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import prescore
from prescore import GaussianKMeans, KeyNorm, KMeans, KMedian, Leverage, Minkowski, Selected
from prescore import testing as contract
from prescore.rng import Streams
from prescore.scoring.base import KeyShard, Scored, Scorer, as_scorer
from prescore.testing import check_scorer


@pytest.mark.parametrize(
    "scorer",
    [
        *map(as_scorer, prescore.list_scorers()),
        *(KMeans(rule=rule) for rule in ("farthest", "cluster-share", "sensitivity", "balanced")),
        *(Minkowski(p=p) for p in (0.5, 1.5, 3.0)),
        KMeans(seeding="random"),
        KMeans(fit_size=40, n_clusters=4),
        KMedian(fit_size=40, n_clusters=4, normalize=False),
        GaussianKMeans(fit_size=50, noise=0.1),
        Leverage(sketch_size=20),
        Leverage(sketch_size=20, noise=0.1, normalize=True),
        Leverage(noise=0.1),
        Leverage(normalize=True),
        KMeans(noise=0.1, max_iter=0),
    ],
    ids=str,
)
def test_scorers_and_their_options_keep_the_contract(scorer):
    check_scorer(scorer)


def test_scores_do_not_follow_the_strides_of_the_keys():
    keys = torch.randn(8, 2, 39, 16, generator=torch.Generator().manual_seed(0)).half()
    columns = keys.mT.contiguous().mT
    scores = [prescore.score(stored, KMeans(n_clusters=17), generator=1) for stored in (keys, columns)]
    assert torch.equal(*scores)


def scorer_of(function, **attributes):
    """A scorer whose scores are a function of the keys."""
    attributes = {"score": lambda self, keys, *, valid, streams: function(keys), **attributes}
    return dataclass(frozen=True)(type("Broken", (Scorer,), attributes))()


def overwritten(keys):
    scores = keys.sum(-1)
    keys.zero_()
    return scores


SHARDED = {
    "stats": lambda self, shard: shard.keys.norm(dim=-1).mean(dim=2, keepdim=True),
    "score_from": lambda self, stats, shard: shard.keys.norm(dim=-1) / shard.keys.shape[2],
}
GROWING = {**SHARDED, "stats": lambda self, shard: shard.keys[..., 0, : max(1, shard.keys.shape[0])]}


@pytest.mark.parametrize(
    ("function", "attributes", "check", "message"),
    [
        (lambda k: k, {}, contract.shapes_and_dtypes, r"shape \(2, 3, 40\), got \(2, 3, 40, 8\)"),
        (lambda k: k[..., 0].float(), {}, contract.shapes_and_dtypes, "float64, got torch.float32"),
        (lambda k: k.sum(-1) / k.norm(dim=-1), {}, contract.finite_on_degenerate_keys, "zero keys: scores of"),
        (lambda k: torch.rand(k.shape[:3]).to(k.dtype), {}, contract.same_seed_same_scores, "generator"),
        (overwritten, {}, contract.inputs_untouched, "write to the keys"),
        (lambda k: k.sum(-1) - k.mean(), {}, contract.heads_and_rows_are_independent, "row 0, head 0"),
        (lambda k: k.sum(-1) / k.shape[2], {}, contract.padding_changes_nothing, "alone and padded"),
        (lambda k: k.sum(-1) + torch.arange(k.shape[2]), {}, contract.permuting_keys_permutes_scores, "permuted"),
        (lambda k: k.norm(dim=-1), SHARDED, contract.shards_score_as_the_full_sequence, "slice.0, 3.*alone"),
        (lambda k: k.norm(dim=-1), GROWING, contract.shards_score_as_the_full_sequence, "stats of an empty batch"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_check_can_fail(function, attributes, check, message):
    with pytest.raises(AssertionError, match=message):
        check(scorer_of(function, **attributes))


def spoilt(value):
    place = (torch.arange(80) == 45).view(1, 2, 40)  # of (0, 1, 5)
    return lambda keys: keys.norm(dim=-1).masked_fill(place, value)


def labelled(labels, n_clusters=3):
    return lambda keys: Scored(keys.norm(dim=-1), labels, n_clusters)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda k: k.tolist(), TypeError, "scores of Broken must be a torch.Tensor, got list"),
        (lambda k: k[..., 0].long(), TypeError, "scores of Broken must be torch.float32, got torch.int64"),
        (lambda k: k[..., 0].double(), TypeError, "scores of Broken must be torch.float32, got torch.float64"),
        (lambda k: k[:, 0, :, 0], ValueError, r"scores of Broken must have shape \(1, 2, 40\), got \(1, 40\)"),
        (lambda k: k[:, :, :9, 0], ValueError, r"scores of Broken must have shape .* got \(1, 2, 9\)"),
        (lambda k: k[..., 0].to_sparse(), ValueError, "scores of Broken must be a dense tensor, got torch.sparse"),
        (lambda k: k[..., 0].to("meta"), ValueError, "scores of Broken must be on a device that .* got meta"),
        (spoilt(torch.nan), ValueError, r"scores of Broken must be finite, got nan at \(0, 1, 5\)"),
        (spoilt(torch.inf), ValueError, r"scores of Broken must be finite, got inf at \(0, 1, 5\)"),
        (spoilt(-torch.inf), ValueError, r"scores of Broken must be finite, got -inf at \(0, 1, 5\)"),
        (labelled(torch.zeros(1, 2, 40)), TypeError, "labels of Broken must be torch.int64, got torch.float32"),
        (labelled(torch.zeros(1, 2, 3).long()), ValueError, r"labels of Broken must have shape \(1, 2, 40\)"),
        (labelled(torch.full((1, 2, 40), 3)), ValueError, r"labels of Broken must be in 0\.\.2, got 3"),
        (labelled(torch.full((1, 2, 40), -1)), ValueError, r"labels of Broken must be in 0\.\.2, got -1"),
    ],
)
def test_bad_results_are_refused_everywhere(function, error, message):
    scorer, key = scorer_of(function, name="broken"), torch.randn(1, 2, 40, 4)
    config = Selected(scorer, 8, min_seq_len=8)
    for call in (
        lambda: prescore.score(key, scorer),
        lambda: prescore.select(key, scorer, top_k=3),
        lambda: prescore.prescored_attention(key, key, key, config),
        lambda: prescore.prescored_attention(key, key, key, Selected(scorer, min_score=0.5, min_seq_len=8)),
    ):
        with pytest.raises(error, match=message):
            call()


def test_padding_may_score_anything():
    mask = torch.arange(40)[None] < 30
    scorer = scorer_of(lambda keys: 1 / keys.norm(dim=-1), name="inverse")
    scores = prescore.score(torch.randn(1, 2, 40, 4), scorer, key_padding_mask=mask)
    assert torch.isfinite(scores[..., :30]).all()
    assert (scores[..., 30:] == -torch.inf).all()


def test_statistics_belong_to_the_score_of_their_class():
    @dataclass(frozen=True)
    class Shortest(KeyNorm):
        name: ClassVar[str] = "shortest"

        def score(self, keys, *, valid, streams):
            return -super().score(keys, valid=valid, streams=streams)

    shard = KeyShard(torch.ones(1, 1, 4, 2), 0, 4, torch.float32, Streams(0))
    assert KeyNorm().stats(shard).shape == (1, 1, 0)
    assert Shortest().stats(shard) is None
    with pytest.raises(NotImplementedError, match="Shortest has no statistics"):
        Scorer.score_from(Shortest(), [], shard)
