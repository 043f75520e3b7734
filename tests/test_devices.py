"""Attention on the device of `pytest --device`: `make test-gpu` runs these tests on a GPU.

Every result must be that of plain torch on the CPU. On the CPU itself this compares the backend that `auto` picks.
"""

import pytest
import torch
from attention_checks import CONFIGS
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected
from prescore.routed.decode import StepAttention

FLOAT64 = 1e-10
"""Far above the rounding of float64, far below any wrong weight."""
HALF = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""A few roundings of numbers of size 1."""
SMALL = Routed(min_weight=1 / 64, cluster_size=16, chunk_size=32, sinks=4, exact_until=0)
LONG = {
    "exact": Exact(),
    "hyper": Hyper(Lsh(block_size=32, sample_size=16), min_seq_len=64, sinks=2),
    "selected": Selected(top_k=48, min_seq_len=64),
    "routed": SMALL,
}


def run(tensors, config, device="cpu", **options):
    """Output and gradients, on the CPU again."""
    inputs = [t.detach().to(device).requires_grad_() for t in tensors]
    if options.get("key_padding_mask") is not None:
        options["key_padding_mask"] = options["key_padding_mask"].to(device)
    output = prescore.prescored_attention(*inputs, config, generator=3, **options)
    grads = torch.autograd.grad(output.double().square().sum(), inputs)
    return [t.detach().cpu() for t in (output, *grads)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_output_and_gradients_are_those_of_the_cpu(name, padded, is_causal, device):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_query=41, n_keys=41, dim=8, value_dim=8, seed=4)
    mask = torch.arange(41) >= torch.tensor([[0], [9]]) if padded else None
    options = {"is_causal": is_causal, "key_padding_mask": mask}
    found, wanted = (
        run(tensors, CONFIGS[name], d, **options, backend=b) for d, b in ((device, "auto"), ("cpu", "plain"))
    )
    for what, got, expected in zip(("output", "query", "key", "value"), found, wanted, strict=True):
        assert_within(got, expected, FLOAT64, f"{what} of {name} on {device}")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_operators_keep_the_precision_of_the_dtype(dtype, is_causal, device):
    tensors = attention_tensors(
        batch=2, heads=4, kv_heads=2, n_query=300, n_keys=300, dim=16, value_dim=16, seed=1
    )
    rounded = [t.to(dtype) for t in tensors]
    found = run(rounded, Exact(), device, is_causal=is_causal)[0]
    wanted = run([t.double() for t in rounded], Exact(), is_causal=is_causal, backend="plain")[0]
    assert_within(found.double(), wanted, HALF[dtype], f"{dtype} on {device}")


@pytest.mark.parametrize("name", LONG)
def test_chunks_of_a_prompt_are_rows_of_the_full_call(name, device):
    query, key, value = (t.to(device) for t in attention_tensors(heads=4, kv_heads=2, n_keys=300, dim=8, seed=2))
    options = {"is_causal": True, "generator": 3}
    full = prescore.prescored_attention(query, key, value, LONG[name], **options)
    chunk = prescore.prescored_attention(query[:, :, 120:], key, value, LONG[name], **options)
    assert_within(chunk.cpu(), full[:, :, 120:].cpu(), FLOAT64, f"a chunk of {name} on {device}")


def test_decode_steps_are_rows_of_the_full_call(device):
    query, key, value = (t.to(device) for t in attention_tensors(heads=4, kv_heads=2, n_keys=200, dim=8, seed=2))
    full = prescore.prescored_attention(query, key, value, SMALL, is_causal=True, scale=0.5)
    index = StepAttention(SMALL, scale=0.5)
    for stop in (150, 151, 200):
        step = index.attend(query[:, :, stop - 1 : stop], key[:, :, :stop], value[:, :, :stop])
        assert_within(step.output.cpu(), full[:, :, stop - 1 : stop].cpu(), FLOAT64, f"a step on {device}")


@pytest.mark.parametrize("name", LONG)
def test_torch_sees_no_synchronisation(name, device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("only CUDA devices are waited for")
    monkeypatch.setattr(prescore.checks, "_finite", lambda *_, **__: None)  # the one listed read
    inputs = [t.to(device).requires_grad_() for t in attention_tensors(heads=4, kv_heads=2, n_keys=300, dim=8)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = prescore.prescored_attention(*inputs, LONG[name], is_causal=True, backend="plain")
        output.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
