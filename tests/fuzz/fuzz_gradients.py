"""What must hold for derivatives, whatever engine answers."""

from dataclasses import replace

import torch
from fuzz_terms import need
from oracles.budgets import assert_within

STEP = 1e-6
"""Of finite differences."""
BEND = 1e-4
"""Of a step: the loss in the middle of two steps may lie so far from their mean; where it does not, one of them
flipped a choice, or the middle lies on one that rounding made, and the difference is a jump and no slope."""
DIRECTIONS = 4
"""Tries to find a slope; a wrong gradient is so in every direction."""


def gradients(case):
    """Finite, the same twice, none for padding, and those of a function that is linear in the values."""
    case = replace(case, dtype=torch.float64)
    mask = case.padding()
    inputs = list(case.tensors())
    if mask is not None and case.is_causal:  # a padded query may be anything too
        own = mask[:, case.n_keys - case.n_query :, None]
        inputs[0] = inputs[0].masked_fill(~own[:, None], torch.nan)
    inputs = [t.requires_grad_() for t in inputs]
    output = case.run(inputs, mask)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(case.seed), dtype=output.dtype)
    first = torch.autograd.grad(output, inputs, grad)
    second = torch.autograd.grad(case.run(inputs, mask), inputs, grad)
    for name, one, other in zip(("query", "key", "value"), first, second, strict=True):
        assert torch.isfinite(one).all(), f"the gradient of {name} must be finite"
        assert torch.equal(one, other), f"the gradient of {name} must be the same twice"
    if mask is not None:
        padded = ~mask[:, None, :, None]
        assert not (first[1] * padded).any(), "a padded key must have no gradient"
        assert not (first[2] * padded).any(), "a padded value must have no gradient"
    moved, expected = (first[2] * inputs[2]).sum(), (grad * output).sum()
    size = float((grad * output).detach().abs().sum()) + 1
    assert_within(moved[None], expected[None], 1e-9 * size, "the derivative along the values")


def slopes(case):
    """Gradients of output and lse are those of finite differences, all choices being held by small steps."""
    need(case.keys == "gaussian")  # where keys are equal, a step chooses among equal clusters
    case = replace(case, dtype=torch.float64)
    mask, tensors = case.padding(), case.tensors()
    generator = torch.Generator().manual_seed(case.seed)
    inputs = [t.clone().requires_grad_() for t in tensors]
    loss = _loss(*case.run(inputs, mask, lse=True))
    expected = torch.autograd.grad(loss, inputs, materialize_grads=True)
    off = []
    for _ in range(DIRECTIONS):
        ways = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]
        there, back = (
            float(_loss(*case.run([t + step * way for t, way in zip(tensors, ways, strict=True)], mask, lse=True)))
            for step in (STEP, -STEP)
        )
        found = (there - back) / (2 * STEP)
        slope = float(sum((grad * way).sum() for grad, way in zip(expected, ways, strict=True)))
        size = float(sum((grad * way).abs().sum() for grad, way in zip(expected, ways, strict=True)))
        if abs(found - slope) <= 1e-6 * (1 + size):
            return
        if abs(there + back - 2 * float(loss.detach())) <= BEND * STEP * (1 + size):
            off.append(f"{slope:.6g} instead of {found:.6g}")
    need(off)  # where scores are equal but for rounding, every step chooses anew
    raise AssertionError(f"slopes must be those of finite differences, got {', '.join(off)}")


def _loss(output, lse):
    """A number that feels every entry differently."""
    counted = torch.where(torch.isneginf(lse), 0.0, lse)
    weights = torch.arange(1.0, 1 + output.numel(), dtype=output.dtype).sin().view(output.shape)
    return (output * weights).sum() + (counted * weights[..., 0].cos()).sum()
