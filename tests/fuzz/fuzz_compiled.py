"""Native code, in sizes that it can run: against the plain backend, and with another future."""

from dataclasses import replace

import torch
from fuzz_terms import FLIPPED, need
from oracles.budgets import assert_within

from prescore import Routed
from prescore.routed.native import TYPES, WIDTH


def _fitting(case):
    """A case like this one that native code can run, long enough for clusters to be visible."""
    need(isinstance(case.config, Routed) and case.dtype in TYPES and not case.dropout_p)
    sixteens = 1 + case.seed % 2
    config = case.config.replace(cluster_size=WIDTH * sixteens, chunk_size=WIDTH * (2 + case.seed % 3))
    longer = 80 + WIDTH * sixteens
    n_query = case.n_query + (longer if case.n_query == case.n_keys or not case.is_causal else 0)
    return replace(
        case,
        config=config,
        n_keys=case.n_keys + longer,
        n_query=n_query,
        dim=WIDTH * (1 + case.dim % 3),
        value_dim=WIDTH * (1 + case.value_dim % 2),
        scale=None if case.scale is None else case.scale / 8,  # float32 rounds logits of a hundred to 1e-5
        backend="auto",
    )


def compiled_agrees(case):
    """Native code equals the plain backend: results, and gradients where there are any."""
    case = _fitting(case)
    # keys of equal weight lie at the threshold all together, and rounding decides whether all or none are read
    need(case.scale != 0 and case.keys == "gaussian")
    differentiable = case.config.tolerance is None
    mask, results = case.padding(), []
    for backend in ("auto", "plain"):
        inputs = [t.requires_grad_(differentiable) for t in case.tensors()]
        results.append((inputs, *case.run(inputs, mask, lse=True, backend=backend)))
    (inputs, output, lse), (others, expected, expected_lse) = results
    # a sample counts the difference of two nearly equal weights for sixteen keys
    units = 64 if differentiable else 1024
    budget = units * torch.finfo(case.dtype).eps * max(1.0, float(expected.detach().abs().max()))
    differ = ~((output - expected).detach().abs().amax(-1) <= budget)
    differ |= ~(((lse - expected_lse).detach().abs() <= 1e-3) | (lse == expected_lse))
    _assert_few(differ, "differ between native code and the plain backend")
    need(differentiable)
    grads = [
        torch.autograd.grad(result[~differ].float().sin().sum(), own)
        for result, own in ((output, inputs), (expected, others))
    ]
    for name, got, wanted in zip(("query", "key", "value"), *grads, strict=True):
        size = max(1.0, float(wanted.abs().max()))
        assert_within(got, wanted, 256 * torch.finfo(case.dtype).eps * size, f"gradient of {name}")


def compiled_causality(case):
    """Later tokens change nothing up to a position, but by rounding."""
    need(case.is_causal)
    case = replace(_fitting(case), dtype=torch.float32, mask="none")
    # error bounds depend on all keys of a query, and decide which keys it reads
    config = case.config.replace(tolerance=0.3) if case.seed % 2 else case.config
    case = replace(case, n_query=case.n_keys, config=config)
    cut, tensors = case.n_keys // 2 + case.seed % (case.n_keys // 2), case.tensors()
    others = replace(case, seed=case.seed + 1, keys="gaussian").tensors()
    changed = [
        torch.cat((old[:, :, :cut], 30 * new[:, :, cut:]), dim=2) for old, new in zip(tensors, others, strict=True)
    ]
    before, after = (case.run(inputs)[:, :, :cut] for inputs in (tensors, changed))
    differ = ~((after - before).abs().amax(-1) <= 1e-4 * max(1.0, float(before.abs().max())))
    _assert_few(differ, f"change with tokens after position {cut - 1}")


def _assert_few(differ, what):
    """Rounding may move a key across the threshold of a few queries."""
    message = f"{int(differ.sum())} of {differ.numel()} queries {what}"
    assert int(differ.sum()) <= max(1, FLIPPED * differ.numel()), message
