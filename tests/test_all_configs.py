"""Rules of a public call that hold for every configuration, or for selections alone."""

import math

import pytest
import torch
from oracles.inputs import attention_tensors

import prescore
from prescore import (
    Attended,
    Coupling,
    Exact,
    Hyper,
    Lsh,
    Routed,
    Selected,
    exact_attention,
    merge,
    prescored_attention,
)
from prescore.attention import Options, attend

SMALL = Routed(exact_until=0, chunk_size=16, cluster_size=4, min_weight=1 / 16, sinks=2)
CONFIGS = [Exact(), SMALL, Selected("key-norm", top_k=4, min_seq_len=8), Hyper(Lsh(8, 8), min_seq_len=8)]


def tensors(n, **sizes):
    return attention_tensors(**{"batch": 2, "heads": 4, "kv_heads": 2, "n_keys": n, "seed": n, **sizes})


def assert_same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)  # float64 against float64


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_padding_query_of_nan_reaches_no_other_query(config, side, wrong):
    query, key, value = tensors(60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, :20] = side != "left"
    mask[0, 40:] = side != "right"
    real, results = mask[:, None].expand(query.shape[:3]), []
    for fill in (0.0, wrong):
        inputs = [query.masked_fill(~mask[:, None, :, None], fill), key.clone(), value.clone()]
        inputs = [t.requires_grad_() for t in inputs]
        output = prescored_attention(*inputs, config, is_causal=True, key_padding_mask=mask)
        results.append((output, *torch.autograd.grad(output[real].sin().sum(), inputs)))
    for clean, beside in zip(*results, strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, beside)
    if side == "left":
        assert (results[1][0][0, :, :20] == 0).all()


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_call_without_heads(config, is_causal):
    query, key, value = tensors(96)
    output, aux = prescored_attention(query[:, :0], key, value, config, is_causal=is_causal, return_aux=True)
    assert output.shape == (2, 0, 96, 4)
    assert aux.lse.shape == (2, 0, 96)


@pytest.mark.parametrize(
    "config", [SMALL, Routed(), Exact(), Selected.paper("kmeans", 16, min_seq_len=64)], ids=repr
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_counting_reads_changes_no_result(config, is_causal):
    query, key = torch.randn(2, 1, 1, 400, 16, generator=torch.Generator().manual_seed(0))
    options = {"is_causal": is_causal, "generator": 0}
    result = attend(query, key, key, config, Options(**options))
    assert torch.equal(result.output, prescored_attention(query, key, key, config, **options))
    stats = prescored_attention(query, key, key, config, **options, return_aux=True)[1].stats
    assert result.count_reads().keys == stats.keys_per_query
    assert {name: stats[name] for name in result.stats} == dict(result.stats)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", ["uniform", "kmeans"])
def test_a_selection_counts_the_keys_that_are_read(name, sinks):
    # every key has a value of its own, so a weight that is not 0 is a key that was read
    query, key = torch.randn(2, 1, 1, 256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = Selected(name, 16, min_seq_len=32, remainder="none", sinks=sinks)
    value = torch.eye(256, dtype=torch.float64)[None, None]
    output, aux = prescored_attention(query, key, value, config=config, is_causal=True, return_aux=True)
    assert aux.stats.keys_per_query == float((output > 0).sum(-1).double().mean())


def test_a_selection_of_one_key():
    query, key, value = tensors(80)
    config = Selected("key-norm", 1, sinks=0, remainder="none")
    output, aux = prescored_attention(query, key, value, config=config, return_aux=True)
    assert aux.selection.indices.shape[-1] == 1
    places = aux.selection.indices[..., None]
    kept = [t.gather(2, places.expand(-1, -1, -1, t.shape[-1])) for t in (key, value)]
    assert_same(output, exact_attention(query, *kept).output)
    full = prescored_attention(query, key, value, config=config.replace(top_k=1.0))
    assert_same(full, exact_attention(query, key, value).output)


def test_a_given_selection_is_zeroed_without_a_budget_too():
    query, key, value = tensors(64)
    kept = prescore.select(key, "key-norm", top_k=16)
    config = Selected(remainder="none", sinks=0, coupling=Coupling(mask="zero"))
    got = prescored_attention(query, key, value, config=config, selection=kept)
    member = torch.zeros(key.shape[:3], dtype=torch.bool).scatter(2, kept.indices, True)[..., None]
    assert_same(got, exact_attention(query, key * member, value * member).output)


def test_parts_that_cannot_be_merged():
    full = exact_attention(*tensors(20))
    with pytest.raises(TypeError, match="got Tensor and NoneType at 1"):
        merge(full, Attended(full.output, None))
    with pytest.raises(ValueError, match="one device, cpu, got meta and meta at 1"):
        merge(full, Attended(full.output.to("meta"), full.lse.to("meta")))
