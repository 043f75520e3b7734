"""What surrounds a call in torch: autocast, function transforms, second derivatives, and any scale."""

import math

import pytest
import torch
from oracles.budgets import assert_within
from oracles.dense import dense_attention, full_weights
from oracles.inputs import attention_tensors
from torch.autograd import forward_ad

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected
from prescore.errors import Unsupported

CONFIGS = {
    "exact": Exact(),
    "routed, short": Routed(),
    "routed": Routed(min_weight=1 / 16, cluster_size=4, chunk_size=4, sinks=1, exact_until=0),
    "selected": Selected("kmeans", 6, min_seq_len=8),
    "hyper": Hyper(Lsh(8, 8), min_seq_len=8),
}
READS_ALL = {
    "exact": Exact(),
    "routed, short": Routed(),
    "selected": Selected("kmeans", 1.0, min_seq_len=8),
    "hyper": Hyper(Lsh(64, 8), min_seq_len=8),
}
by_name = pytest.mark.parametrize("name", CONFIGS)


def tensors(dtype=torch.float32, n_keys=40):
    return attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=n_keys, dim=8, dtype=dtype)


@by_name
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_autocast_casts_the_inputs_and_nothing_inside(name, dtype, lower):
    query, key, value = (t.requires_grad_() for t in tensors(dtype))
    kept = dtype if dtype == torch.float64 else lower
    autocast_inputs = [t.detach().to(kept).requires_grad_() for t in (query, key, value)]
    expected = prescore.prescored_attention(*autocast_inputs, CONFIGS[name], is_causal=True)
    with torch.autocast("cpu", dtype=lower):
        output = prescore.prescored_attention(query, key, value, CONFIGS[name], is_causal=True)
        like_torch = torch.nn.functional.scaled_dot_product_attention(query, key.repeat(1, 2, 1, 1), query)
    assert output.dtype == expected.dtype == like_torch.dtype == kept
    assert torch.equal(output, expected)
    expected.float().sum().backward()
    output.float().sum().backward()
    for ours, theirs in zip((query, key, value), autocast_inputs, strict=True):
        assert ours.grad.dtype == dtype
        assert torch.equal(ours.grad, theirs.grad.to(dtype))


def test_autocast_brings_mixed_inputs_to_one_dtype():
    query, key, value = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = prescore.prescored_attention(query, key.bfloat16(), value.half(), Routed())
        attended = prescore.exact_attention(query, key.bfloat16(), value.half())
    assert output.dtype == attended.output.dtype == torch.bfloat16


@pytest.mark.parametrize("scorer", prescore.list_scorers())
def test_autocast_changes_no_choice(scorer):
    key = tensors()[1]
    scores, chosen = prescore.score(key, scorer), prescore.select(key, scorer, top_k=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(prescore.score(key, scorer), scores)
        assert torch.equal(prescore.select(key, scorer, top_k=5).indices, chosen.indices)


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(lambda query: f(query).sum())(q),
    "vmap": lambda f, q: torch.func.vmap(lambda query: f(query[None]))(q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
}


@by_name
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_are_refused(name, transform):
    query, key, value = tensors(n_keys=16)

    def attend(query):
        n = query.shape[0]
        return prescore.prescored_attention(query, key[:n], value[:n], CONFIGS[name])

    with pytest.raises(Unsupported, match=r"attention cannot run: torch\.func transforms"):
        TRANSFORMS[transform](attend, query)


@by_name
def test_forward_mode_is_refused_where_there_is_a_tangent(name):
    query, key, value = tensors(n_keys=16)
    plain = prescore.prescored_attention(query, key, value, CONFIGS[name])
    with forward_ad.dual_level():
        assert torch.equal(prescore.prescored_attention(query, key, value, CONFIGS[name]), plain)
        dual = forward_ad.make_dual(key, torch.ones_like(key))
        with pytest.raises(Unsupported, match="forward-mode derivatives are not defined"):
            prescore.prescored_attention(query, dual, value, CONFIGS[name])


@by_name
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_a_second_derivative_is_refused_and_a_first_one_in_its_graph_is_right(name, place):
    inputs = list(tensors(torch.float64))
    asked = inputs[place].requires_grad_()
    output = prescore.prescored_attention(*inputs, CONFIGS[name], is_causal=True)
    (expected,) = torch.autograd.grad(output.square().sum(), asked, retain_graph=True)
    (first,) = torch.autograd.grad(output.square().sum(), asked, create_graph=True)
    assert_within(first, expected, 1e-12, "first derivative")
    with pytest.raises(Unsupported, match="second derivatives are not defined"):
        torch.autograd.grad(first.square().sum(), asked)


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.4, -3, 1e-30])
@pytest.mark.parametrize("name", READS_ALL)
def test_any_finite_scale_gives_the_softmax_of_its_logits(name, scale, is_causal, backend):
    inputs = [t.requires_grad_() for t in attention_tensors(heads=2, n_keys=24, dim=4, seed=3)]
    weights = full_weights(*inputs[:2], is_causal=is_causal)
    truth = dense_attention(*inputs, weights, scale=scale)
    expected = torch.autograd.grad(truth.output.square().sum(), inputs)
    output, aux = prescore.prescored_attention(
        *inputs, READS_ALL[name], is_causal=is_causal, scale=scale, backend=backend, return_aux=True
    )
    assert_within(output, truth.output, 1e-12, "output")
    assert_within(aux.lse, truth.lse, 1e-12, "lse")
    for grad, wanted in zip(torch.autograd.grad(output.square().sum(), inputs), expected, strict=True):
        assert_within(grad, wanted, 1e-11, "gradient")


@by_name
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_negative_scale_is_that_of_negated_queries(name, is_causal):
    query, key, value = tensors(torch.float64)
    options = {"is_causal": is_causal}
    turned = prescore.prescored_attention(-query, key, value, CONFIGS[name], scale=0.4, **options)
    assert torch.equal(
        prescore.prescored_attention(query, key, value, CONFIGS[name], scale=-0.4, **options), turned
    )
    flat = prescore.prescored_attention(query * 0, key, value, CONFIGS[name], scale=1.0, **options)
    assert torch.equal(prescore.prescored_attention(query, key, value, CONFIGS[name], scale=0, **options), flat)


@by_name
def test_a_query_that_is_no_number_spoils_its_own_row_alone(name):
    query, key, value = tensors()
    clean = prescore.prescored_attention(query, key, value, CONFIGS[name], is_causal=True)
    query = query.clone()
    query[1, 2, 17] = math.nan
    output = prescore.prescored_attention(query, key, value, CONFIGS[name], is_causal=True)
    spoilt = torch.isnan(output).any(-1)
    assert spoilt.nonzero().tolist() == [[1, 2, 17]]
    assert torch.equal(output[~spoilt], clean[~spoilt])
