"""Routed attention through the public door: padding behind queries, given selections, figures of batches."""

import math

import pytest
import torch
from oracles.inputs import attention_tensors

import prescore
from prescore import Coupling, Exact, Routed, Selected, exact_attention, prescored_attention
from prescore.routed.attention import ERROR_FIGURES

SMALL = Routed(exact_until=0, chunk_size=16, cluster_size=4, min_weight=1 / 16, sinks=2)


def tensors(n, **sizes):
    return attention_tensors(**{"batch": 2, "heads": 4, "kv_heads": 2, "n_keys": n, "seed": n, **sizes})


def assert_same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)  # float64 against float64


@pytest.mark.parametrize("n_query", [140, 5, 1])
def test_padding_behind_a_query_is_never_attended(n_query):
    query, key, value = tensors(140)
    query = query[:, :, -n_query:]
    mask = torch.ones(2, 140, dtype=torch.bool)
    mask[0, 90:110] = False
    if n_query < 140:
        mask[1, 120:] = False
    output, aux = prescored_attention(
        query, key, value, config=SMALL, is_causal=True, key_padding_mask=mask, return_aux=True
    )
    wanted = exact_attention(query, key, value, is_causal=True, key_padding_mask=mask)
    assert_same(output[0], wanted.output[0])
    assert_same(aux.lse[0], wanted.lse[0])
    if n_query < 140:
        assert_same(output[1], wanted.output[1])
    else:
        assert_same(output[1], prescored_attention(query[1:], key[1:], value[1:], config=SMALL, is_causal=True)[0])


def test_a_sequence_of_padding_sees_nothing():
    query, key, value = tensors(60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1] = False
    output, aux = prescored_attention(
        query, key, value, config=SMALL, is_causal=True, key_padding_mask=mask, return_aux=True
    )
    assert torch.isneginf(aux.lse[1]).all()
    assert (output[1] == 0).all()


def test_one_key_is_one_key():
    query, key, value = tensors(80)
    config = Selected("key-norm", 1, sinks=0, remainder="none")
    output, aux = prescored_attention(query, key, value, config=config, return_aux=True)
    assert aux.selection.indices.shape[-1] == 1
    rows = aux.selection.indices[..., None]
    kept = [t.gather(2, rows.expand(-1, -1, -1, t.shape[-1])) for t in (key, value)]
    assert_same(output, exact_attention(query, *kept).output)
    whole = prescored_attention(query, key, value, config=config.replace(top_k=1.0))
    assert_same(whole, exact_attention(query, key, value).output)


def test_a_given_selection_is_zeroed_without_a_budget_too():
    query, key, value = tensors(64)
    kept = prescore.select(key, "key-norm", top_k=16)
    config = Selected(remainder="none", sinks=0, coupling=Coupling(mask="zero"))
    got = prescored_attention(query, key, value, config=config, selection=kept)
    member = torch.zeros(key.shape[:3], dtype=torch.bool).scatter(2, kept.indices, True)[..., None]
    assert_same(got, exact_attention(query, key * member, value * member).output)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", [Exact(), SMALL, Selected("key-norm", top_k=4, min_seq_len=8)], ids=repr)
def test_a_padded_query_that_is_no_number_is_felt_by_nobody(config, side, poison):
    query, key, value = tensors(60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, :20] = side != "left"
    mask[0, 40:] = side != "right"
    real = mask[:, None].expand(query.shape[:3])
    found = []
    for content in (0.0, poison):
        own = query.masked_fill(~mask[:, None, :, None], content)
        inputs = [t.clone().requires_grad_() for t in (own, key, value)]
        output = prescored_attention(*inputs, config, is_causal=True, key_padding_mask=mask)
        found.append((output, *torch.autograd.grad(output[real].sin().sum(), inputs)))
    for clean, beside in zip(*found, strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, beside)
    if side == "left":
        assert (found[1][0][0, :, :20] == 0).all()


def error_figures(config, *arguments, **options):
    _, aux = prescored_attention(*arguments, config=config, return_aux=True, **options)
    return {name: aux.stats[name] for name in ERROR_FIGURES}


@pytest.mark.parametrize("easy", [0, 1])
def test_queries_that_begin_apart_are_all_in_the_figures(easy):
    """One sequence of equal keys and values, whose samples agree, and one with wide bars: both count."""
    query, key, value = tensors(140)
    query = query[:, :, -20:]
    key[easy], value[easy] = key[easy, :, :1], value[easy, :, :1]
    mask = torch.ones(2, 140, dtype=torch.bool)
    mask[0, :30] = False
    config = SMALL.replace(tolerance=1.0)
    parallel_group = error_figures(config, query, key, value, is_causal=True, key_padding_mask=mask)
    other = 1 - easy
    cut = 30 if other == 0 else 0
    alone = error_figures(
        config, *(t[other:][:1] for t in (query, key[:, :, cut:], value[:, :, cut:])), is_causal=True
    )
    assert alone["error_bound_max"] > 0
    assert alone["refined"] > 0
    assert parallel_group["error_bound_max"] == pytest.approx(alone["error_bound_max"])
    for name in ("error_bound_mean", "refined", "read_all"):
        assert parallel_group[name] == pytest.approx(alone[name] / 2, rel=1e-6, abs=1e-9)
    strict = error_figures(SMALL.replace(tolerance=1e-9), query, key, value, is_causal=True, key_padding_mask=mask)
    assert strict["read_all"] >= 0.5
    assert strict["error_bound_max"] <= 1e-9


@pytest.mark.parametrize("is_causal", [True, False])
def test_padded_queries_are_in_no_figure(is_causal):
    query, key, value = tensors(140)
    mask = torch.arange(140) < torch.tensor([[140], [70]])
    rows = [[t[i : i + 1, :, : 140 - 70 * i] for t in (query, key, value)] for i in (0, 1)]
    config = SMALL.replace(tolerance=0.3)
    alone = [error_figures(config, *own, is_causal=is_causal) for own in rows]
    query[1, :, 70:] = torch.nan
    parallel_group = error_figures(config, query, key, value, is_causal=is_causal, key_padding_mask=mask)
    for name in ("error_bound_mean", "refined", "read_all"):
        assert parallel_group[name] == pytest.approx((2 * alone[0][name] + alone[1][name]) / 3, rel=1e-6)
    assert parallel_group["error_bound_max"] == pytest.approx(max(own["error_bound_max"] for own in alone))


def test_sequences_read_exactly_have_no_error():
    query, key, value = tensors(140)
    config = SMALL.replace(tolerance=0.1)
    assert all(error_figures(config, query, key, value).values())
    assert not any(error_figures(config.replace(exact_until=200), query, key, value).values())
    mask = torch.ones(2, 140, dtype=torch.bool)
    mask[:, 50] = False  # a gap, which is read exactly
    gaps = error_figures(config, query, key, value, is_causal=True, key_padding_mask=mask)
    assert not any(gaps.values())
