import pytest
import torch
from baseline_reference import assert_same, dense, inputs

from prescore.baselines.lev_attention import lev_attention


def _leverage(keys):
    return torch.einsum("...nd,...de,...ne->...n", keys, torch.linalg.pinv(keys.mT @ keys), keys)


@pytest.mark.parametrize("n_query", [23, 40, 4])
@pytest.mark.parametrize("epsilon", [0.2, 0.5, 2.0])
def test_universal_set(n_query, epsilon):
    query, key, value = inputs(n_query=n_query)
    visible = (_leverage(key) >= epsilon).repeat_interleave(2, 1)[:, :, None].expand(2, 4, n_query, 23)
    got = lev_attention(query, key, value, epsilon=epsilon)
    assert_same(got, dense(query, key, value, visible))
    assert visible.any() == (epsilon < 1)


def test_budget_keeps_the_highest():
    query, key, value = inputs()
    best = _leverage(key).topk(5, dim=-1).indices
    kept = torch.zeros(2, 2, 23, dtype=torch.bool).scatter(-1, best, True).repeat_interleave(2, 1)
    expected = dense(query, key, value, kept[:, :, None].expand(2, 4, 23, 23))
    assert_same(lev_attention(query, key, value, budget=5), expected)
    assert_same(lev_attention(query, key, value, budget=5, epsilon=1e-6), expected)


def test_padded_keys_have_no_leverage():
    query, key, value = inputs(batch=1)
    mask = torch.ones(1, 23, dtype=torch.bool)
    mask[:, [2, 9]] = False
    real = key[:, :, mask[0]]
    visible = torch.zeros(1, 2, 23, dtype=torch.bool)
    visible[:, :, mask[0]] = _leverage(real) >= 0.4
    got = lev_attention(query, key, value, epsilon=0.4, key_padding_mask=mask)
    assert_same(got, dense(query, key, value, visible.repeat_interleave(2, 1)[:, :, None].expand(1, 4, 23, 23)))


@pytest.mark.parametrize("options", [{"epsilon": 0.6}, {"budget": 4}])
def test_causal_chunks_use_the_leverage_of_their_past(options):
    query, key, value = inputs(n_query=20)
    visible = torch.zeros(2, 4, 23, 23, dtype=torch.bool)
    for first in range(0, 23, 10):
        stop = min(first + 10, 23)
        visible[:, :, first:stop, first:stop] = torch.ones(stop - first, stop - first, dtype=torch.bool).tril()
        if first:
            scores = _leverage(key[:, :, :first])
            kept = scores >= options.get("epsilon", 0.0)
            if "budget" in options:
                best = scores.topk(4, dim=-1).indices
                kept = torch.zeros_like(kept).scatter(-1, best, True)
            visible[:, :, first:stop, :first] = kept.repeat_interleave(2, 1)[:, :, None]
    got = lev_attention(query, key, value, **options, chunk_size=10, is_causal=True)
    assert_same(got, dense(query, key, value, visible[:, :, 3:]))
