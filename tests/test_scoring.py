import pytest
import torch

from prescore.config import PrescoreConfig
from prescore.rng import Streams
from prescore.scoring import cluster_labels, score_keys, select_keys


def _keys(n=100, dim=8):
    return torch.randn(2, 3, n, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _select(keys, valid=None, protect=None, **fields):
    config = PrescoreConfig(**{"method": "key-norm", "top_k": 10, **fields})
    return select_keys(keys, valid=valid, config=config, streams=Streams(0), protect=protect)


def test_selection_is_the_top_of_the_scores():
    keys = _keys()
    chosen = _select(keys)
    expected = keys.norm(dim=-1).topk(10).indices.sort().values
    assert torch.equal(chosen.selection.indices, expected)
    assert chosen.selection.valid.all()
    assert not chosen.everything
    torch.testing.assert_close(chosen.scored.scores, keys.norm(dim=-1))


@pytest.mark.parametrize("top_k", [None, 0, 100, 1000, 1.0])
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


def test_noise_moves_scores_alike_in_all_heads():
    keys = torch.zeros(2, 3, 50, 8)
    config = PrescoreConfig(method="key-norm", noise=0.5)
    scores = score_keys(keys, valid=None, config=config, streams=Streams(0)).scores
    assert (scores == scores[:1, :1]).all()
    # the mean length of a normal vector in 8 dimensions is about sqrt(7.5)
    assert scores.mean() == pytest.approx(0.5 * 7.5**0.5, rel=0.1)
    valid = (torch.arange(50) < 20).expand(2, -1)
    padded = score_keys(keys, valid=valid, config=config, streams=Streams(0)).scores
    assert torch.equal(padded[..., :20], scores[..., :20])
    assert (padded[..., 20:] == -torch.inf).all()


def test_normalisation_is_the_scorers_choice_unless_said():
    keys = _keys()
    keys[0, 0, 0] = 0
    unit = torch.nn.functional.normalize(keys, dim=-1)

    def scores(points, **fields):
        return score_keys(points, valid=None, config=PrescoreConfig(**fields), streams=Streams(0)).scores

    normed = scores(keys, method="key-norm", normalize=True)
    assert normed[0, 0, 0] == 0
    torch.testing.assert_close(normed[1], torch.ones_like(normed[1]))
    torch.testing.assert_close(scores(keys, method="kmeans"), scores(unit, method="kmeans"))
    raw = scores(keys, method="kmeans", normalize=False)
    assert not torch.allclose(raw, scores(keys, method="kmeans"))


def test_low_precision_keys_are_scored_in_float32():
    scored = score_keys(
        _keys().to(torch.bfloat16), valid=None, config=PrescoreConfig(method="leverage"), streams=Streams(0)
    )
    assert scored.scores.dtype == torch.float32


def test_sampling_selector_differs_from_top_and_repeats_with_the_seed():
    keys = _keys()
    sampled = _select(keys, selector="sample").selection.indices
    assert torch.equal(sampled, _select(keys, selector="sample").selection.indices)
    assert not torch.equal(sampled, _select(keys).selection.indices)
    assert (sampled.diff(dim=-1) > 0).all()


def test_labels_for_stand_ins_are_those_of_kmeans():
    keys = _keys()
    labels, n_clusters = cluster_labels(
        keys, valid=None, config=PrescoreConfig(method="key-diff", noise=0.3), streams=Streams(0)
    )
    scored = score_keys(keys, valid=None, config=PrescoreConfig(method="kmeans"), streams=Streams(0))
    assert n_clusters == 9
    assert torch.equal(labels, scored.labels)


def test_keys_of_any_grad_state_give_plain_scores():
    keys = _keys().requires_grad_()
    chosen = _select(keys, method="kmeans")
    assert not chosen.scored.scores.requires_grad


@pytest.mark.parametrize("method", ["kmeans", "kmedian", "gaussian-kmeans"])
def test_clustering_scorers_normalise_on_the_way(method):
    keys = torch.randn(2, 2, 300, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys[:, :, 7] = 0.0
    unit = torch.nn.functional.normalize(keys, dim=-1)
    valid = torch.arange(300) < torch.tensor([[300], [60]])
    config = PrescoreConfig.paper(method, 32, fit_size=100)
    got = score_keys(keys * 4 * valid[:, None, :, None], valid=valid, config=config, streams=Streams(0))
    raw = score_keys(
        unit * valid[:, None, :, None], valid=valid, config=config.replace(normalize=False), streams=Streams(0)
    )
    torch.testing.assert_close(got.scores, raw.scores)  # a power of two changes no digit of the unit keys
