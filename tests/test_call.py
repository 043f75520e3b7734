"""Calls as engines see them: padding queries after the end of a sequence, and the defaults of torch."""

import math

import pytest
import torch
from oracles.budgets import assert_within
from oracles.dense import dense_attention, full_weights
from oracles.inputs import attention_tensors

import prescore
from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Routed, Selected

READS_ALL = {
    "exact": Exact(),
    "routed, short": Routed(),
    "selected": Selected("key-norm", 1.0, min_seq_len=8),
    "hyper": Hyper(Lsh(64, 8), min_seq_len=8),
}
# the last real queries are routed, while as many padding queries as these would be exact
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


def tensors(mask):
    return attention_tensors(batch=len(mask), heads=4, kv_heads=2, n_keys=40, seed=5)


def exact_truth(inputs, mask):
    weights = full_weights(*inputs[:2], is_causal=True, key_padding_mask=mask)
    return dense_attention(*inputs, weights, scale=0.5)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", READS_ALL)
def test_padding_queries_follow_the_rule_of_exact_attention(name, ends):
    mask = masks(ENDS[ends])
    query, key, value = tensors(mask)
    truth = exact_truth((query, key, value), mask)
    broken = [t.masked_fill(~mask[:, None, :, None], math.nan) for t in (key, value)]
    inputs = [t.requires_grad_() for t in (query, *broken)]
    options = {"is_causal": True, "key_padding_mask": mask, "return_aux": True}
    output, aux = prescore.prescored_attention(*inputs, READS_ALL[name], **options)
    assert_within(output, truth.output, 1e-12, "output")
    assert_within(aux.lse, truth.lse, 1e-12, "lse")
    for grad in torch.autograd.grad(output.square().sum(), inputs):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("ends", ENDS)
def test_trailing_padding_queries_of_routed_attention_are_exact_there(ends):
    mask = masks(ENDS[ends])
    inputs = [t.requires_grad_() for t in tensors(mask)]
    truth = exact_truth(inputs, mask)
    options = {"is_causal": True, "key_padding_mask": mask, "return_aux": True}
    output, aux = prescore.prescored_attention(*inputs, ROUTED, **options)
    last = torch.tensor([end for _, end in ENDS[ends]])
    trailing = (torch.arange(40) >= last[:, None])[:, None].expand(aux.lse.shape)
    assert trailing.any()
    assert_within(output[trailing], truth.output[trailing], 1e-12, "output")
    assert_within(aux.lse[trailing], truth.lse[trailing], 1e-12, "lse")
    grads, wanted = (
        torch.autograd.grad((o * trailing[..., None]).square().sum(), inputs) for o in (output, truth.output)
    )
    for left, right in zip(grads, wanted, strict=True):
        assert_within(left, right, 1e-12, "gradient")


def test_leading_padding_needs_no_second_run(monkeypatch):
    n_queries, original = [], prescore.engines.routed.attend_routed

    def attend(call, config, *, explain=False):
        n_queries.append(call.n_query if call.query_valid is None else int(call.query_valid.sum()))
        return original(call, config, explain=explain)

    monkeypatch.setattr(prescore.engines.routed, "attend_routed", attend)
    for ends, expected in (([(7, 40), (0, 40)], [73]), ([(7, 38), (0, 40)], [71, 2])):
        n_queries.clear()
        mask = masks(ends)
        prescore.prescored_attention(*tensors(mask), ROUTED, is_causal=True, key_padding_mask=mask)
        assert n_queries == expected


def test_a_padding_query_moves_no_other():
    mask = masks(ENDS["several"])
    query, key, value = tensors(mask)
    config = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=4, sinks=1, exact_until=0)
    other = torch.where(mask[:, None, :, None], query, -3 * query)
    output, moved = (
        prescore.prescored_attention(q, key, value, config, is_causal=True, key_padding_mask=mask)
        for q in (query, other)
    )
    real = mask[:, None, :].expand(output.shape[:3])
    assert torch.equal(moved[real], output[real])
    assert not torch.equal(moved[~real], output[~real])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        Exact(),
        Selected(KMeans(n_clusters=3), 6, sinks=2, recent=1, min_seq_len=8),
        Selected.early("key-norm", 6, inner=Lsh(4, 4), min_seq_len=8),
        Selected.paper("key-norm", 6, inner=Lsh(4, 4), sinks=2, min_seq_len=8, coupling=Coupling(blocks="all")),
        Hyper(Lsh(4, 4), min_seq_len=8),
        Hyper.published(lsh=Lsh(4, 4, alignment="rank"), min_seq_len=8),
    ],
    ids=str,
)
def test_the_default_dtype_and_device_of_torch_change_nothing(config, is_causal):
    padding = masks([(3, 30), (0, 40)])
    inputs = [t.requires_grad_() for t in tensors(padding)]

    def results():
        for mask, dropout_p in ((None, 0.0), (padding, 0.0), (None, 0.3)):
            options = {"is_causal": is_causal, "key_padding_mask": mask, "dropout_p": dropout_p}
            output, aux = prescore.prescored_attention(*inputs, config, return_aux=True, **options)
            yield from (output, aux.lse, *torch.autograd.grad(output.sum(), inputs))
        yield from prescore.merge(prescore.exact_attention(*inputs), prescore.exact_attention(*inputs))

    expected = list(results())
    try:
        torch.set_default_dtype(torch.float16)
        with torch.device("meta"):
            found = list(results())
    finally:
        torch.set_default_dtype(torch.float32)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)
