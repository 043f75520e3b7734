import pytest
import torch
from baseline_reference import assert_differ, assert_same, dense, inputs

from prescore.baselines.streaming import streaming_attention


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_query", [23, 8, 1])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 3), (2, 1), (4, 2), (5, 9), (7, 0), (22, 1), (30, 40)])
def test_equals_a_dense_band(is_causal, n_query, window, sinks):
    query, key, value = inputs(n_query=n_query)
    got = streaming_attention(query, key, value, window=window, sinks=sinks, is_causal=is_causal)
    i = torch.arange(23 - n_query, 23)[:, None]
    j = torch.arange(23)
    visible = (j <= i) & ((i - j < window) | (j < sinks)) if is_causal else ((i - j).abs() <= window) | (j < sinks)
    assert_same(got, dense(query, key, value, visible))


@pytest.mark.parametrize("is_causal", [False, True])
def test_sinks_are_the_first_real_positions(is_causal):
    query, key, value = inputs(batch=1)
    mask = torch.ones(1, 23, dtype=torch.bool)
    mask[:, :5] = False
    got = streaming_attention(query, key, value, window=3, sinks=2, is_causal=is_causal, key_padding_mask=mask)
    i, j = torch.arange(23)[:, None], torch.arange(23)
    near = (j <= i) & (i - j < 3) if is_causal else (i - j).abs() <= 3
    sink = (j < 7) & (j <= i) if is_causal else j < 7
    visible = (near | sink) & (j >= 5) & (i >= 5)
    assert_same(got, dense(query, key, value, visible))
    assert_differ(got, streaming_attention(query, key, value, window=3, sinks=2, is_causal=is_causal))


def test_unseen_keys_get_no_gradient():
    query, key, value = (t.requires_grad_() for t in inputs(n_query=1))
    streaming_attention(query, key, value, window=4, sinks=2, is_causal=True).output.sum().backward()
    used = value.grad.abs().sum((0, 1, 3)) > 0
    assert used.nonzero().flatten().tolist() == [0, 1, 19, 20, 21, 22]


def test_more_queries_than_keys_have_no_window():
    query, key, value = inputs(n_query=23, n_keys=20)
    with pytest.raises(ValueError, match="query length must be at most the key length 20 for a window, got 23"):
        streaming_attention(query, key, value)
