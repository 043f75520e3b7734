import pytest
import torch
from baseline_reference import assert_same, inputs

from prescore import exact_attention
from prescore.baselines import performer as module
from prescore.baselines.performer import orthogonal_features, performer_attention
from prescore.rng import Streams


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_query", [23, 9])
def test_equals_the_kernel_of_its_features(monkeypatch, is_causal, n_query):
    monkeypatch.setattr(module, "_CHUNK", 4)
    query, key, value = inputs(n_query=n_query)
    got = performer_attention(query, key, value, n_features=20, is_causal=is_causal, scale=0.3, generator=7)
    directions = orthogonal_features(20, 8, Streams(7), like=query)

    def features(rows):
        rows = rows * 0.3**0.5
        return torch.exp(rows @ directions.t() - rows.square().sum(-1, keepdim=True) / 2) / 20**0.5

    weights = features(query) @ features(key).repeat_interleave(2, 1).transpose(-1, -2)
    if is_causal:
        weights = weights.tril(23 - n_query)
    total = weights.sum(-1, keepdim=True)
    assert_same(got, (weights @ value.repeat_interleave(2, 1) / total, total.log().squeeze(-1)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_approaches_exact_attention(is_causal):
    # short vectors, because the estimate's variance grows like exp(|q|^2 + |k|^2)
    query, key, value = (t * 0.2 for t in inputs(n_query=40, n_keys=40))
    exact = exact_attention(query, key, value, is_causal=is_causal)
    errors = []
    for n_features in (64, 1024, 16384):
        got = performer_attention(query, key, value, n_features=n_features, is_causal=is_causal)
        errors.append((got.output - exact.output).norm().item() / exact.output.norm().item())
    # 16 times the features should give a quarter of the error; half leaves room for chance
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2
    assert errors[2] < 0.01


def test_directions_are_normal_and_orthogonal():
    directions = orthogonal_features(20, 8, Streams(0), like=torch.empty(0))
    gram = directions[:8] @ directions[:8].t()
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-10, rtol=0)  # float64 rounding
    many = orthogonal_features(8 * 2000, 8, Streams(1), like=torch.empty(0))
    # standard errors are 1 / sqrt(16000) = 0.008 for the mean and 0.011 for the variance
    assert many.mean(0).abs().max() < 0.04
    torch.testing.assert_close(many.t() @ many / len(many), torch.eye(8, dtype=torch.float64), atol=0.06, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_long_keys_neither_overflow_nor_vanish(monkeypatch, is_causal):
    monkeypatch.setattr(module, "_CHUNK", 4)  # so that maxima change from chunk to chunk by hundreds
    query, key, value = (t.float() for t in inputs())
    got = performer_attention(query * 20, key * 20, value, n_features=64, is_causal=is_causal)
    assert got.output.isfinite().all()
    assert got.lse.isfinite().all()
    low, high = value.amin(2), value.amax(2)  # a weighted mean stays inside
    assert (got.output <= high.repeat_interleave(2, 1)[:, :, None] + 1e-4).all()
    assert (got.output >= low.repeat_interleave(2, 1)[:, :, None] - 1e-4).all()


def test_a_huge_later_key_does_not_make_earlier_chunks_vanish(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 4)
    query, key, value = (t.float() for t in inputs())
    before = performer_attention(query, key, value, n_features=16, is_causal=True)
    key[:, :, 14:] *= 1000
    after = performer_attention(query, key, value, n_features=16, is_causal=True)
    assert torch.equal(after.output[:, :, :14], before.output[:, :, :14])
    assert after.output.isfinite().all()
