"""Compiled code, in sizes that it knows: beside plain torch, and with another future."""

from dataclasses import replace

import torch
from fuzz_terms import FLIPPED, need
from oracles.budgets import assert_within

from prescore import Routed
from prescore.routed.native import TYPES, WIDTH


def _fitting(case):
    """A case like this one that compiled code can run, long enough for nodes to be seen."""
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
    """Compiled code and plain torch, in sizes that the former knows: results and gradients."""
    case = _fitting(case)
    # where keys weigh the same, a query that sees as many as the limit says reads all or none, by rounding; and
    # samples are drawn from nodes that hold other values
    need(case.scale != 0 and case.keys == "gaussian")
    learns = case.config.tolerance is None
    mask, found = case.padding(), []
    for backend in ("auto", "plain"):
        inputs = [t.requires_grad_(learns) for t in case.tensors()]
        output, lse = case.run(inputs, mask, lse=True, backend=backend)
        found.append((inputs, output, lse))
    (own, output, lse), (others, expected, expected_lse) = found
    # a sample adds what two nearly equal weights differ, for sixteen keys
    units = 64 if learns else 1024
    budget = units * torch.finfo(case.dtype).eps * max(1.0, float(expected.detach().abs().max()))
    apart = ~((output - expected).detach().abs().amax(-1) <= budget)
    apart |= ~(((lse - expected_lse).detach().abs() <= 1e-3) | (lse == expected_lse))
    many = f"{int(apart.sum())} of {apart.numel()} rows of compiled code differ from plain torch"
    assert int(apart.sum()) <= max(1, FLIPPED * apart.numel()), many
    need(learns)
    for name, got, wanted in zip(
        ("query", "key", "value"),
        torch.autograd.grad(output[~apart].float().sin().sum(), own),
        torch.autograd.grad(expected[~apart].float().sin().sum(), others),
        strict=True,
    ):
        size = max(1.0, float(wanted.abs().max()))
        assert_within(got, wanted, 256 * torch.finfo(case.dtype).eps * size, f"gradient of {name}")


def compiled_causality(case):
    """What comes after a position changes nothing up to it, but by rounding."""
    need(case.is_causal)
    case = replace(_fitting(case), dtype=torch.float32, mask="none")
    # error bars depend on everything, and decide what is read
    config = case.config.replace(tolerance=0.3) if case.seed % 2 else case.config
    case = replace(case, n_query=case.n_keys, config=config)
    cut, tensors = case.n_keys // 2 + case.seed % (case.n_keys // 2), case.tensors()
    other = replace(case, seed=case.seed + 1, keys="gaussian").tensors()
    changed = [
        torch.cat((old[:, :, :cut], 30 * new[:, :, cut:]), 2) for old, new in zip(tensors, other, strict=True)
    ]
    before, after = (case.run(own)[:, :, :cut] for own in (tensors, changed))
    apart = ~((after - before).abs().amax(-1) <= 1e-4 * max(1.0, float(before.abs().max())))
    many = f"{int(apart.sum())} of {apart.numel()} rows feel what comes after position {cut - 1}"
    assert int(apart.sum()) <= max(1, FLIPPED * apart.numel()), many
