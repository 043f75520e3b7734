"""The helpers the other tests lean on: each must refuse what it is there to refuse."""

import math

import pytest
import torch
from attention_checks import check_oracle
from oracles.budgets import assert_within, error_budget
from oracles.dense import dense_attention, full_weights, subset_weights, without_centroids
from oracles.inputs import attention_tensors, random_mask
from torch.nn.functional import scaled_dot_product_attention

import prescore
from prescore import Selected


def test_assert_within_fails_on_errors_nan_and_shapes():
    truth = torch.tensor([1.0, -math.inf, 3.0])
    assert_within(truth.clone(), truth, 0.0)
    for wrong in ([1.1, -math.inf, 3.0], [math.nan, -math.inf, 3.0], [1.0, 0.0, 3.0], [1.0, math.inf, 3.0]):
        with pytest.raises(AssertionError, match=r"must be within 0\.01"):
            assert_within(torch.tensor(wrong), truth, 0.01)
    with pytest.raises(AssertionError, match=r"must be within 0\.01"):
        assert_within(truth, torch.tensor([1.0, -math.inf, math.nan]), 0.01)
    with pytest.raises(AssertionError, match=r"shape \(3,\), got \(2,\)"):
        assert_within(truth[:2], truth, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_budget_passes_rounding_and_refuses_a_wrong_weight(dtype):
    inputs = attention_tensors(heads=2, kv_heads=1, n_keys=31, dim=8, seed=1, spread=1.0)

    def reference(query, key, value):
        return dense_attention(query, key, value, full_weights(query, key), scale=8**-0.5).output

    budget = error_budget(reference, inputs, dtype)
    honest = reference(*(t.to(dtype).double() for t in inputs)).to(dtype)
    assert_within(honest, reference(*inputs), budget)
    query, key, value = inputs
    seen = torch.ones(1, 1, 31, dtype=torch.bool)
    seen[..., 0] = False  # one key of 31 dropped
    wrong = dense_attention(query, key, value, subset_weights(full_weights(query, key), seen), scale=8**-0.5)
    with pytest.raises(AssertionError, match="must be within"):
        assert_within(wrong.output, reference(*inputs), budget)


def test_the_dense_oracle_is_torch_attention():
    inputs = query, key, value = attention_tensors(batch=2, heads=4, kv_heads=2, n_query=7, n_keys=13, value_dim=3)
    mask = random_mask("holes", 2, 13)
    for weights, visible in (
        (full_weights(query, key, key_padding_mask=mask), mask[:, None, None]),
        (full_weights(query, key, is_causal=True), torch.ones(7, 13, dtype=torch.bool).tril(6)),
    ):
        result = dense_attention(query, key, value, weights, scale=0.5)
        expected = scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
        assert_within(result.output, expected, 1e-12)
    nothing = without_centroids(torch.full((2, 4, 7, 13), -torch.inf, dtype=torch.float64))
    output, lse = dense_attention(*(t.requires_grad_() for t in inputs), nothing, scale=1.0)
    assert torch.isneginf(lse).all()
    assert not any(found.any() for found in (output, *torch.autograd.grad(output.sum(), inputs)))


def test_oracle_checks_refuse_another_configuration(monkeypatch):
    tensors = attention_tensors(heads=2, n_keys=23)
    config = Selected("key-norm", 5, sinks=0, remainder="none")
    other = config.replace(top_k=6)
    original = prescore.prescored_attention
    monkeypatch.setattr(
        prescore, "prescored_attention", lambda *t, config, **k: original(*t, config=other, **k), raising=False
    )
    with pytest.raises(AssertionError, match="output must be within"):
        check_oracle(config, tensors)
