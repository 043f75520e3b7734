"""Autograd and autocast guards: autocast, function transforms, second derivatives, the scale, NaN queries."""

import math

import pytest
import torch
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors
from torch.autograd import forward_ad

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected, prescored_attention
from prescore.errors import Unsupported

CONFIGS = {
    "exact": Exact(),
    "routed, short": Routed(),
    "routed": Routed(min_weight=1 / 16, cluster_size=4, chunk_size=4, sinks=1, exact_until=0),
    "selected": Selected("kmeans", 6, min_seq_len=8),
    "hyper": Hyper(Lsh(8, 8), min_seq_len=8),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def tensors(dtype=torch.float32, n_keys=40):
    return attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=n_keys, dim=8, dtype=dtype)


@every_config
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_autocast_casts_the_inputs_and_nothing_inside(config, dtype, lower):
    inputs = [t.requires_grad_() for t in tensors(dtype)]
    kept = dtype if dtype == torch.float64 else lower
    cast = [t.detach().to(kept).requires_grad_() for t in inputs]
    expected = prescored_attention(*cast, config, is_causal=True)
    with torch.autocast("cpu", dtype=lower):
        output = prescored_attention(*inputs, config, is_causal=True)
        query, key, _ = inputs
        like_torch = torch.nn.functional.scaled_dot_product_attention(query, key.repeat(1, 2, 1, 1), query)
    assert output.dtype == expected.dtype == like_torch.dtype == kept
    assert torch.equal(output, expected)
    grads, wanted = (torch.autograd.grad(o.float().sum(), t) for o, t in ((output, inputs), (expected, cast)))
    for ours, theirs in zip(grads, wanted, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs.to(dtype))


def test_autocast_brings_mixed_inputs_to_one_dtype():
    query, key, value = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = prescored_attention(query, key.bfloat16(), value.half(), Routed())
        attended = prescore.exact_attention(query, key.bfloat16(), value.half())
    assert output.dtype == attended.output.dtype == torch.bfloat16


@pytest.mark.parametrize("scorer", prescore.list_scorers())
def test_autocast_changes_no_choice(scorer):
    key = tensors()[1]
    scores, chosen = prescore.score(key, scorer), prescore.select(key, scorer, top_k=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(prescore.score(key, scorer), scores)
        assert torch.equal(prescore.select(key, scorer, top_k=5).indices, chosen.indices)


@every_config
def test_function_transforms_and_tangents_are_refused(config):
    query, key, value = tensors(n_keys=16)

    def attend(query):
        return prescored_attention(query, key[: len(query)], value[: len(query)], config)

    for transform in (
        lambda: torch.func.grad(lambda q: attend(q).sum())(query),
        lambda: torch.func.vmap(lambda q: attend(q[None]))(query),
        lambda: torch.func.jvp(attend, (query,), (query,)),
        lambda: torch.func.jacrev(attend)(query),
    ):
        with pytest.raises(Unsupported, match=r"attention cannot run: torch\.func transforms"):
            transform()
    plain = attend(query)
    with forward_ad.dual_level():
        assert torch.equal(attend(query), plain)  # no input has a tangent
        dual = forward_ad.make_dual(key, torch.ones_like(key))
        with pytest.raises(Unsupported, match="forward-mode derivatives are not defined"):
            prescored_attention(query, dual, value, config)


@every_config
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_a_second_derivative_is_refused_and_a_first_one_in_its_graph_is_right(config, place):
    inputs = list(tensors(torch.float64))
    leaf = inputs[place].requires_grad_()
    output = prescored_attention(*inputs, config, is_causal=True)
    (expected,) = torch.autograd.grad(output.square().sum(), leaf, retain_graph=True)
    (first,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
    assert_within(first, expected, 1e-12, "first derivative")
    with pytest.raises(Unsupported, match="second derivatives are not defined"):
        torch.autograd.grad(first.square().sum(), leaf)


@every_config
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_scale_is_a_factor_of_the_queries(config, is_causal):
    query, key, value = tensors(torch.float64)
    run = lambda q, scale: prescored_attention(q, key, value, config, scale=scale, is_causal=is_causal)  # noqa: E731
    for scale, other, positive in ((-0.4, -query, 0.4), (0, query * 0, 1.0), (0.25, query / 2, 0.5)):
        assert torch.equal(run(query, scale), run(other, positive))


@every_config
def test_a_nan_query_spoils_its_row_alone(config):
    query, key, value = tensors()
    clean = prescored_attention(query, key, value, config, is_causal=True)
    query[1, 2, 17] = math.nan
    output = prescored_attention(query, key, value, config, is_causal=True)
    spoilt = torch.isnan(output).any(-1)
    assert spoilt.nonzero().tolist() == [[1, 2, 17]]
    assert torch.equal(output[~spoilt], clean[~spoilt])
