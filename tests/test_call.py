"""Queries behind the end of a right-padded sequence: they see every real key before them, and no padding."""

import math

import pytest
import torch
from oracles.budgets import assert_within
from oracles.dense import dense_attention, full_weights
from oracles.inputs import attention_tensors

import prescore
import prescore.attention
from prescore import Exact, Hyper, Lsh, Routed, Selected

READS_ALL = {
    "exact": Exact(),
    "routed, short": Routed(),
    "selected": Selected("key-norm", 1.0, min_seq_len=8),
    "hyper": Hyper(Lsh(64, 8), min_seq_len=8),
}
# as many padded queries as are read exactly, while the last real ones are routed
ROUTED = Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=25)
ENDS = {
    "one sequence": [(0, 21)],
    "several": [(0, 21), (0, 40), (0, 39)],
    "one of one key": [(0, 1), (0, 33)],
    "one of no key": [(0, 0), (0, 33)],
    "padded on both sides": [(3, 21), (0, 37), (11, 40)],
}


def masks(ends, n_keys=40):
    position = torch.arange(n_keys)
    return torch.stack([(position >= first) & (position < end) for first, end in ends])


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", READS_ALL)
def test_padded_queries_follow_the_rule_of_exact_attention(name, ends):
    mask = masks(ENDS[ends])
    query, key, value = attention_tensors(batch=len(mask), heads=4, kv_heads=2, n_keys=40, seed=5)
    truth = dense_attention(
        query, key, value, full_weights(query, key, is_causal=True, key_padding_mask=mask), scale=0.5
    )
    shown = [t.masked_fill(~mask[:, None, :, None], math.nan) for t in (key, value)]
    inputs = [t.requires_grad_() for t in (query, *shown)]
    output, aux = prescore.prescored_attention(
        *inputs, READS_ALL[name], is_causal=True, key_padding_mask=mask, return_aux=True
    )
    assert_within(output, truth.output, 1e-12, "output")
    assert_within(aux.lse, truth.lse, 1e-12, "lse")
    for grad in torch.autograd.grad(output.square().sum(), inputs):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("ends", ENDS)
def test_queries_behind_the_end_are_no_positions_of_routed_attention(ends):
    mask = masks(ENDS[ends])
    query, key, value = attention_tensors(batch=len(mask), heads=4, kv_heads=2, n_keys=40, seed=5)
    weights = full_weights(query, key, is_causal=True, key_padding_mask=mask)
    truth = dense_attention(query, key, value, weights, scale=0.5)
    options = {"is_causal": True, "key_padding_mask": mask, "return_aux": True}
    output, aux = prescore.prescored_attention(query, key, value, ROUTED, **options)
    last = torch.tensor([end for _, end in ENDS[ends]])
    behind = (torch.arange(40) >= last[:, None])[:, None].expand(aux.lse.shape)
    assert behind.any()
    assert_within(output[behind], truth.output[behind], 1e-12, "output")
    assert_within(aux.lse[behind], truth.lse[behind], 1e-12, "lse")


def test_a_padded_query_has_the_gradient_of_exact_attention():
    mask = masks(ENDS["several"])
    inputs = [t.requires_grad_() for t in attention_tensors(batch=3, heads=2, kv_heads=1, n_keys=40, seed=7)]
    weights = full_weights(*inputs[:2], is_causal=True, key_padding_mask=mask)
    truth = dense_attention(*inputs, weights, scale=0.5).output
    output = prescore.prescored_attention(*inputs, ROUTED, is_causal=True, key_padding_mask=mask)
    behind = ~mask[:, None, :, None]
    expected = torch.autograd.grad((truth * behind).square().sum(), inputs)
    actual = torch.autograd.grad((output * behind).square().sum(), inputs)
    for grad, wanted in zip(actual, expected, strict=True):
        assert_within(grad, wanted, 1e-12, "gradient")


def test_leading_padding_asks_for_nothing_more(monkeypatch):
    asked = []
    original = prescore.attention.routed.attend_routed

    def attend(call, config, *, explain=False):
        asked.append(call.n_query if call.query_valid is None else int(call.query_valid.sum()))
        return original(call, config, explain=explain)

    monkeypatch.setattr(prescore.attention.routed, "attend_routed", attend)
    for ends, expected in (([(7, 40), (0, 40)], [73]), ([(7, 38), (0, 40)], [71, 2])):
        asked.clear()
        query, key, value = attention_tensors(batch=2, n_keys=40)
        prescore.prescored_attention(query, key, value, ROUTED, is_causal=True, key_padding_mask=masks(ends))
        assert asked == expected


def test_a_padded_query_moves_no_other():
    mask = masks(ENDS["several"])
    query, key, value = attention_tensors(batch=3, heads=2, kv_heads=1, n_keys=40, seed=7)
    config = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=4, sinks=1, exact_until=0)
    output = prescore.prescored_attention(query, key, value, config, is_causal=True, key_padding_mask=mask)
    other = torch.where(mask[:, None, :, None], query, -3 * query)
    moved = prescore.prescored_attention(other, key, value, config, is_causal=True, key_padding_mask=mask)
    real = mask[:, None, :].expand(output.shape[:3])
    assert torch.equal(moved[real], output[real])
    assert not torch.equal(moved[~real], output[~real])
