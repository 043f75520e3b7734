import pytest
import torch

from prescore import GaussianKMeans, KeyNorm, KMeans, KMedian, Leverage, Selected
from prescore.rng import Streams
from prescore.scoring.base import as_scorer
from prescore.scoring.select import score_keys, select_keys


def _keys(n=100, dim=8):
    return torch.randn(2, 3, n, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _select(keys, valid=None, protect=None, **fields):
    config = Selected(**{"scorer": "key-norm", "top_k": 10, **fields})
    return select_keys(keys, config, valid=valid, streams=Streams(0), protect=protect)


def _scores(keys, scorer, valid=None):
    return score_keys(keys, as_scorer(scorer), valid=valid, streams=Streams(0)).scores


def test_selection_is_the_top_of_the_scores():
    keys = _keys()
    chosen = _select(keys)
    expected = keys.norm(dim=-1).topk(10).indices.sort().values
    assert torch.equal(chosen.selection.indices, expected)
    assert chosen.selection.valid.all()
    assert not chosen.everything
    torch.testing.assert_close(chosen.scored.scores, keys.norm(dim=-1))


@pytest.mark.parametrize("top_k", [100, 1000, 1.0])
def test_nothing_is_scored_when_everything_is_kept(top_k):
    chosen = _select(_keys(), top_k=top_k)
    assert chosen.everything
    assert chosen.scored is None
    assert torch.equal(chosen.selection.indices, torch.arange(100).expand(2, 3, 100))


def test_rows_of_different_length():
    valid = torch.arange(100) < torch.tensor([[100], [6]])
    keys = _keys() * valid[:, None, :, None]
    chosen = _select(keys, valid=valid)
    assert chosen.selection.valid.sum(-1).tolist() == [[10] * 3, [6] * 3]
    assert chosen.selection.indices[1].max() == 5
    assert _select(keys, valid=valid, top_k=0.25).selection.valid.sum(-1).tolist() == [[25] * 3, [2] * 3]


def test_protected_positions_are_inside_the_budget():
    protect = torch.zeros(2, 100, dtype=torch.bool)
    protect[:, [0, 1, 99]] = True
    chosen = _select(_keys(), protect=protect).selection
    assert chosen.indices.shape[-1] == 10
    for position in (0, 1, 99):
        assert (chosen.indices == position).any(-1).all()


def test_the_delta_test_falls_back_row_by_row():
    valid = torch.arange(100) < torch.tensor([[100], [30]])
    keys = _keys() * valid[:, None, :, None]
    selection = _select(keys, valid=valid, min_fraction=0.2).selection
    assert selection.fallback.tolist() == [True, False]
    assert selection.valid.sum(-1).tolist() == [[100] * 3, [10] * 3]
    assert _select(keys, valid=valid).selection.fallback is None
    both = _select(keys, valid=valid, min_fraction=0.5)
    assert both.everything
    assert both.selection.fallback.tolist() == [True, True]


@pytest.mark.parametrize(
    "scorer", [KMeans(n_clusters=1, rule="farthest", normalize=False, noise=0.5), Leverage(noise=0.5)]
)
def test_noise_moves_scores_alike_in_all_heads(scorer):
    keys = torch.zeros(2, 3, 50, 8, dtype=torch.float64)
    scores = _scores(keys, scorer)
    assert (scores == scores[:1, :1]).all()
    assert scores.std() > 0
    if isinstance(scorer, KMeans):  # the mean length of a normal vector in 8 dimensions is about sqrt(7.5)
        assert scores.mean() == pytest.approx(0.5 * 7.5**0.5, rel=0.1)
    valid = (torch.arange(50) < 20).expand(2, -1)
    padded = _scores(keys, scorer, valid=valid)
    torch.testing.assert_close(padded[..., :20], _scores(keys[:, :, :20], scorer))  # padding gets no noise
    assert (padded[..., 20:] == -torch.inf).all()


def test_normalisation_is_the_scorers_choice_unless_said():
    keys = _keys()
    keys[0, 0, 0] = 0
    unit = torch.nn.functional.normalize(keys, dim=-1)
    assert torch.equal(_scores(keys, KeyNorm()), keys.norm(dim=-1))
    torch.testing.assert_close(_scores(keys, "kmeans"), _scores(unit, "kmeans"))
    assert not torch.allclose(_scores(keys, KMeans(normalize=False)), _scores(keys, "kmeans"))
    torch.testing.assert_close(_scores(keys, Leverage(normalize=True)), _scores(unit, "leverage"))
    assert not torch.allclose(_scores(keys, Leverage(normalize=True)), _scores(keys, "leverage"))


def test_low_precision_keys_are_scored_in_float32():
    assert _scores(_keys().to(torch.bfloat16), "leverage").dtype == torch.float32


def test_sampling_selector_differs_from_top_and_repeats_with_the_seed():
    keys = _keys()
    sampled = _select(keys, selector="sample").selection.indices
    assert torch.equal(sampled, _select(keys, selector="sample").selection.indices)
    assert not torch.equal(sampled, _select(keys).selection.indices)
    assert (sampled.diff(dim=-1) > 0).all()


def test_keys_of_any_grad_state_give_plain_scores():
    keys = _keys().requires_grad_()
    chosen = _select(keys, scorer="kmeans")
    assert not chosen.scored.scores.requires_grad


@pytest.mark.parametrize("kind", [KMeans, KMedian, GaussianKMeans])
def test_clustering_scorers_normalise_on_the_way(kind):
    keys = torch.randn(2, 2, 300, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys[:, :, 7] = 0.0
    unit = torch.nn.functional.normalize(keys, dim=-1)
    valid = torch.arange(300) < torch.tensor([[300], [60]])
    there = valid[:, None, :, None]
    got = _scores(keys * 4 * there, kind(fit_size=100), valid=valid)
    raw = _scores(unit * there, kind(fit_size=100, normalize=False), valid=valid)
    torch.testing.assert_close(got, raw)  # a power of two changes no digit of the unit keys
