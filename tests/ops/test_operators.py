"""The fused operator against the plain one: same parts, same numbers, forward and backward, for any logits."""

import pytest
import torch
from attention_checks import FLOAT64
from oracles.budgets import assert_within
from oracles.inputs import MASKS, attention_tensors, random_mask

import prescore
from prescore import Attended, Exact, Hyper, Lsh, Routed, Selected
from prescore.errors import Unsupported
from prescore.ops.operators import pick_operator

LSH = Lsh(block_size=4, sample_size=5, n_projections=3, alignment="rank")
CONFIGS = {
    "paper": Selected.paper("kmeans", 9, sinks=2, min_seq_len=6, inner=LSH),
    "hyper hash": Hyper(LSH.replace(alignment="hash"), min_seq_len=6),
    "early": Selected.early("key-norm", 9, min_seq_len=6, inner=LSH),
    "selected": Selected(top_k=9, min_seq_len=6),
    "routed": Routed(min_weight=1 / 8, cluster_size=2, chunk_size=4, sinks=2, exact_until=0),
    "exact": Exact(),
}
RESULTS = ("output", "lse", "dq", "dk", "dv")


def run(config, tensors, mask, is_causal, backend):
    leaves = [t.clone().requires_grad_() for t in tensors]
    output, aux = prescore.prescored_attention(
        *leaves, config=config, is_causal=is_causal, key_padding_mask=mask, return_aux=True, backend=backend
    )
    lse = aux.lse.masked_fill(torch.isneginf(aux.lse), 0.0)
    (output.square().sum() + lse.sin().sum()).backward()
    return [output, aux.lse, *(t.grad for t in leaves)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_operators_agree(name, is_causal, kind):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=37, value_dim=7, seed=4)
    mask = random_mask(kind, 2, 37, seed=4)
    fused, plain = (run(CONFIGS[name], tensors, mask, is_causal, backend) for backend in ("cpu-flash", "plain"))
    for what, left, right in zip(RESULTS, fused, plain, strict=True):
        assert_within(left, right, FLOAT64, what)
        assert not torch.isnan(left).any()


@pytest.mark.parametrize("spread", [1e-3, 30.0, 300.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_and_huge_logits(name, spread):
    # logits up to 1e5: exp overflows unless every sum is shifted by its maximum
    tensors = attention_tensors(batch=1, heads=2, n_keys=37, seed=4, spread=spread)
    fused, plain = (run(CONFIGS[name], tensors, None, True, backend) for backend in ("cpu-flash", "plain"))
    for what, left, right in zip(RESULTS, fused, plain, strict=True):
        assert torch.isfinite(left).all(), what
        # the exponents are differences of numbers as large as lse, and carry its rounding
        rounding = 32 * torch.finfo(torch.float64).eps * max(1.0, float(plain[1].detach().abs().max()))
        assert_within(left, right, rounding * max(1.0, float(right.detach().abs().max())), what)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("n_query", [64, 50], ids=["all queries", "the last queries"])
@pytest.mark.parametrize("logit", [4e4, 4e6, 1e8])
def test_weights_of_tied_keys_sum_to_one_however_large_the_logits(name, n_query, logit):
    """In float32 lse is rounded by 0.004 at 4e4 and by 8 at 1e8, so `exp(logit - lse)` must not be used."""
    key = torch.full((1, 2, 64, 1), logit**0.5)
    for backend in ("plain", "cpu-flash", "auto"):
        value = torch.ones(1, 2, 64, 3).requires_grad_()
        options = {"is_causal": True, "scale": 1.0, "backend": backend}
        output = prescore.prescored_attention(key[:, :, -n_query:], key, value, CONFIGS[name], **options)
        without = prescore.prescored_attention(key[:, :, -n_query:], key, value.detach(), CONFIGS[name], **options)
        for each in (output, without):
            assert_within(each, torch.ones_like(output), 1e-6, backend)
        (grad,) = torch.autograd.grad(output.sum(), value)
        assert float(grad.sum()) == pytest.approx(output.numel(), rel=1e-5)


@pytest.mark.parametrize("name", ["exact", "selected", "hyper hash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_large_logits_merge_as_in_float64(name, dtype):
    """Parts of different sizes hold tied keys: a rounded lse would weigh the parts by powers of e^0.5."""
    key = torch.full((1, 1, 64, 1), 2048.0, dtype=dtype)  # its square and all multiples of 1 / 64 are exact
    value = torch.arange(64, dtype=dtype)[None, None, :, None]
    for n_query in (64, 40):
        tensors = [t.requires_grad_() for t in (key[:, :, -n_query:].clone(), key.clone(), value.clone())]
        wide = [t.detach().double().requires_grad_() for t in tensors]
        found, wanted = (
            (output, *torch.autograd.grad(output.sum(), inputs))
            for inputs in (tensors, wide)
            for output in [prescore.prescored_attention(*inputs, CONFIGS[name], is_causal=True)]
        )
        for left, right in zip(found, wanted, strict=True):
            # the gradients of query and key are 2048 times differences of outputs, which cancel
            largest = 2048 * 64 if right is not wanted[0] and right is not wanted[3] else 64
            assert_within(left, right, 2 * torch.finfo(dtype).eps * largest)


@pytest.mark.parametrize("backend", ["plain", "cpu-flash"])
def test_exact_attention_and_merge_of_tied_keys_with_large_logits(backend):
    query, value = torch.full((1, 1, 8, 8), 1e4), torch.ones(1, 1, 8, 2)
    whole = prescore.exact_attention(query, query, value, backend=backend)
    halves = [prescore.exact_attention(query, query[:, :, h], value[:, :, h]) for h in (slice(4), slice(4, 8))]
    nothing = Attended(torch.zeros_like(whole.output), torch.full_like(whole.lse, -torch.inf))
    for attended in (whole, prescore.merge(*halves), prescore.merge(*halves, nothing)):
        assert_within(attended.output, torch.ones_like(value), 1e-6)
        torch.testing.assert_close(attended.lse, whole.lse)
    empty = prescore.merge(nothing, nothing)
    assert (empty.output == 0).all()
    assert torch.isneginf(empty.lse).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_gradients_are_finite_and_close(dtype):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=37, seed=4, spread=1.0)
    config = Selected(top_k=1.0, min_seq_len=6)
    low = run(config, [t.to(dtype) for t in tensors], None, True, "auto")
    high = run(config, [t.to(dtype).double() for t in tensors], None, True, "plain")
    for what, left, right in zip(RESULTS, low, high, strict=True):
        # products of up to 37 rounded terms: 37 roundings of numbers up to the largest one
        assert_within(left, right, 37 * torch.finfo(dtype).eps * max(1.0, float(right.detach().abs().max())), what)


def test_a_backend_that_cannot_run_says_why():
    with pytest.raises(Unsupported, match="cuda-efficient"):
        pick_operator(torch.empty(1, 1, 1, 64, device="cpu"), "cuda-efficient")
    assert pick_operator(torch.empty(1, 1, 1, 64, device="cpu")).name == "cpu-flash"
    assert pick_operator(torch.empty(1, 1, 1, 64, device="meta")).name == "plain"


def test_split_parts_are_the_same_parts(monkeypatch):
    tensors = [t.requires_grad_() for t in attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=90, seed=5)]
    lsh = Lsh(block_size=4, sample_size=6, alignment="rank")
    config = Selected.paper("key-norm", 20, min_seq_len=16, inner=lsh, remainder="centroids")
    results = []
    for rows_at_once in (32768, 8):
        monkeypatch.setattr("prescore.ops.parts.ROWS_AT_ONCE", rows_at_once)
        output = prescore.prescored_attention(*tensors, config=config, is_causal=True)
        results.append([output, *torch.autograd.grad(output.sum(), tensors)])
    for one, split in zip(*results, strict=True):
        torch.testing.assert_close(split, one, rtol=1e-10, atol=1e-12)  # float64, another order of merging
