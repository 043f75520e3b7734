import pytest
import torch

from prescore.bench.planted import model as planted


def draw(**changes):
    settings = {"n": 600, "d": 8, "epsilon": 0.1, "c_signal": 0.05, "c_noise": 0.1}
    drawing = {"generator": 0}
    for name, value in changes.items():
        (settings if name in settings else drawing)[name] = value
    return planted.PlantedSetting(**settings).draw(**drawing)


@pytest.mark.parametrize("reading", planted.READINGS)
@pytest.mark.parametrize("rotated", [False, True])
def test_groups_have_their_size_and_directions_are_orthonormal(reading, rotated):
    model = draw(reading=reading, rotated=rotated)
    assert model.keys.shape == (600, 8)
    assert torch.bincount(model.groups).tolist() == [520, *[10] * 8]
    eye = torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(model.directions @ model.directions.mT, eye, atol=1e-12, rtol=0)  # QR in float64
    assert torch.equal(model.directions, eye) != rotated
    # a signal row points along its own direction more than along any other
    nearest = (model.keys[model.signal] @ model.directions.mT).argmax(-1) + 1
    assert (nearest == model.groups[model.signal]).double().mean() > 0.95


def test_rows_are_shuffled_and_seeded_and_readings_differ_in_norms_alone():
    assert not draw().signal[:80].all()
    assert torch.equal(draw().keys, draw().keys)
    assert not torch.equal(draw().keys, draw(generator=1).keys)
    unit, raw = draw(reading="normalized"), draw(reading="small-noise")
    assert torch.equal(unit.groups, raw.groups)
    torch.testing.assert_close(unit.keys, torch.nn.functional.normalize(raw.keys, dim=-1))
    torch.testing.assert_close(unit.keys.norm(dim=-1), torch.ones(600, dtype=torch.float64))
    # mean squared norm of 520 noise rows of 8 coordinates: relative deviation about sqrt(2 / 4160) = 0.02
    squared = raw.keys[~raw.signal].square().sum(-1).mean()
    assert float(squared) == pytest.approx(8 * 0.1 / (600 * 0.1), rel=0.1)


@pytest.mark.parametrize(("epsilon", "size"), [(1.0, 1), (0.5, 2), (0.3, 4), (0.1, 10), (0.02, 50), (1 / 3, 3)])
def test_group_size(epsilon, size):
    model = draw(epsilon=epsilon)
    assert model.group_size == size
    assert torch.bincount(model.groups).tolist() == [600 - 8 * size, *[size] * 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 80}, r"n must be above d \* ceil\(1 / epsilon\) = 80, got 80"),
        ({"epsilon": 1.5}, "epsilon must be at most 1, got 1.5"),
        ({"epsilon": 0.0}, "epsilon must be finite and above 0.0, got 0.0"),
        ({"reading": "both"}, "reading must be one of 'normalized', 'small-noise', got 'both'"),
        ({"c_noise": 0.0}, "c_noise must be finite and above 0.0, got 0.0"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        draw(**changes)


def test_counterexample_is_orthogonal_and_long():
    model = planted.counterexample_keys(200, 8, 100.0)
    assert int(model.signal.sum()) == 4
    assert len(torch.unique(model.keys, dim=0)) == 5
    assert planted.correlations(model) == (0.0, 0.0)
    assert set(model.keys[~model.signal].norm(dim=-1).tolist()) == {100.0}
    spread = planted.counterexample_keys(200, 8, 100.0, spread=0.5)
    norms = spread.keys[~spread.signal].norm(dim=-1)
    assert planted.correlations(spread) == (0.0, 0.0)
    assert 50 <= float(norms.min()) < 60
    assert 140 < float(norms.max()) <= 150
    with pytest.raises(ValueError, match=r"norm must be finite and above 0\.0, got -1"):
        planted.counterexample_keys(200, 8, -1.0)


def test_leverage_is_the_diagonal_of_the_projection():
    keys = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (keys @ torch.linalg.pinv(keys)).diagonal()
    torch.testing.assert_close(planted.leverage_scores(keys), expected)
    deficient = torch.cat((keys, keys[:, :1]), dim=1)
    torch.testing.assert_close(planted.leverage_scores(deficient), expected)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 3.0])
def test_lewis_weights_bound_the_sensitivities(p):
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(60, 4, dtype=torch.float64, generator=generator)
    keys[0] *= 20
    keys[5] = 0
    weights = planted.lp_sensitivities(keys, p)
    assert float(weights.sum()) == pytest.approx(4, abs=1e-4)  # rank(K); the iteration stops short of the limit
    assert weights[5] == 0
    directions = torch.randn(4, 5000, dtype=torch.float64, generator=generator)
    powers = (keys @ directions).abs().pow(p)
    reached = (powers / powers.sum(0)).amax(-1)
    assert (reached <= weights * 4 ** max(0.0, p / 2 - 1) + 1e-6).all()
    assert int(weights.argmax()) == int(reached.argmax()) == 0


def test_sensitivities_at_two_are_leverage_and_batch():
    keys = torch.randn(3, 30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(planted.lp_sensitivities(keys, 2.0), planted.leverage_scores(keys))
    torch.testing.assert_close(planted.lp_sensitivities(keys, 1.0)[1], planted.lp_sensitivities(keys[1], 1.0))


def test_correlations_and_threshold_by_hand():
    keys = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 2.0]], dtype=torch.float64)
    groups = torch.tensor([1, 2, 0])
    model = planted.PlantedModel(keys, groups, torch.eye(2, dtype=torch.float64), 1.0, 0.1, 0.1)
    # inside S: 0.5 / min(1, 0.5); across: max(0, 1 / min(0.5, 4))
    assert planted.correlations(model) == (1.0, 2.0)
    assert planted.universal_threshold(model) == pytest.approx(1 / (1 + 1 * 2 + 4 * 3))


def test_polynomial_attention_and_heavy_recall_by_hand():
    query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 5.0], [-1.0, 3.0], [0.0, 1.0]])
    expected = torch.tensor([[0.8, 0.2, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(planted.polynomial_attention(query, key, 2), expected)
    assert planted.polynomial_attention(query, torch.zeros(3, 2), 2).sum() == 0
    attention = torch.tensor([[0.8, 0.2, 0.0], [0.1, 0.3, 0.6]])
    chosen = torch.tensor([True, False, False])
    assert planted.heavy_recall(attention, chosen, 0.25) == pytest.approx(1 / 3)
    assert planted.heavy_recall(attention, chosen, 0.9) is None


def test_queries_alternate_between_directions_and_anywhere():
    model = draw()
    query = planted.planted_queries(model, 100, generator=3)
    aligned = torch.nn.functional.normalize(query, dim=-1) @ model.directions.mT
    assert aligned[::2].amax(-1).min() > 0.8
    assert aligned[1::2].amax(-1).mean() < 0.8
