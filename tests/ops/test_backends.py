"""The fused operator against the plain one: same parts, same numbers, forward and backward."""

import pytest
import torch
from attention_checks import FLOAT64
from oracles.budgets import assert_within
from oracles.inputs import MASKS, attention_tensors, random_mask

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected
from prescore.errors import Unsupported
from prescore.ops.backend import Needs, pick_backend

LSH = Lsh(block_size=4, sample_size=5, n_projections=3, alignment="rank")
CONFIGS = {
    "paper": Selected.paper("kmeans", 9, sinks=2, min_seq_len=6, inner=LSH),
    "hyper hash": Hyper(LSH.replace(alignment="hash"), min_seq_len=6),
    "early": Selected.early("key-norm", 9, min_seq_len=6, inner=LSH),
    "selected": Selected(top_k=9, min_seq_len=6),
    "routed": Routed(min_weight=1 / 8, cluster_size=2, chunk_size=4, sinks=2, exact_until=0),
    "exact": Exact(),
}


def _run(config, tensors, mask, is_causal, backend):
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
    fused, plain = (_run(CONFIGS[name], tensors, mask, is_causal, backend) for backend in ("cpu-flash", "plain"))
    for what, left, right in zip(("output", "lse", "dq", "dk", "dv"), fused, plain, strict=True):
        assert_within(left, right, FLOAT64, what)
        assert not torch.isnan(left).any()


@pytest.mark.parametrize("spread", [1e-3, 30.0, 300.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_and_huge_logits(name, spread):
    # logits up to 1e5: exp overflows unless every sum is shifted by its maximum
    tensors = attention_tensors(batch=1, heads=2, n_keys=37, seed=4, spread=spread)
    fused, plain = (_run(CONFIGS[name], tensors, None, True, backend) for backend in ("cpu-flash", "plain"))
    for what, left, right in zip(("output", "lse", "dq", "dk", "dv"), fused, plain, strict=True):
        assert torch.isfinite(left).all(), what
        # the exponents are differences of numbers as large as lse, and carry its rounding
        rounding = 32 * torch.finfo(torch.float64).eps * max(1.0, float(plain[1].detach().abs().max()))
        assert_within(left, right, rounding * max(1.0, float(right.detach().abs().max())), what)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_gradients_are_finite_and_close(dtype):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=37, seed=4, spread=1.0)
    config = Selected(top_k=1.0, min_seq_len=6)
    low = _run(config, [t.to(dtype) for t in tensors], None, True, "auto")
    high = _run(config, [t.to(dtype).double() for t in tensors], None, True, "plain")
    for what, left, right in zip(("output", "lse", "dq", "dk", "dv"), low, high, strict=True):
        # products of up to 37 rounded terms: 37 roundings of numbers up to the largest one
        assert_within(left, right, 37 * torch.finfo(dtype).eps * max(1.0, float(right.detach().abs().max())), what)


def test_a_backend_that_cannot_run_says_why():
    with pytest.raises(Unsupported, match="cuda-efficient"):
        pick_backend(Needs("cpu", torch.float32, 64), "cuda-efficient")
    assert pick_backend(Needs("cpu", torch.float32, 64)).name == "cpu-flash"
    assert pick_backend(Needs("meta", torch.float32, 64)).name == "plain"


def test_parts_in_pieces_are_the_same_parts(monkeypatch):
    tensors = [
        tensor.requires_grad_() for tensor in attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=90, seed=5)
    ]
    lsh = Lsh(block_size=4, sample_size=6, alignment="rank")
    config = Selected.paper("key-norm", 20, min_seq_len=16, inner=lsh, remainder="centroids")
    whole = prescore.prescored_attention(*tensors, config=config, is_causal=True)
    grads = torch.autograd.grad(whole.sum(), tensors)
    monkeypatch.setattr("prescore.ops.parts.ROWS_AT_ONCE", 8)
    pieces = prescore.prescored_attention(*tensors, config=config, is_causal=True)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)  # float64, another order of merging
    for got, wanted in zip(torch.autograd.grad(pieces.sum(), tensors), grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
