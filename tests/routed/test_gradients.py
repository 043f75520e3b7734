"""Finite differences, with what is found held fixed: gradients are those of the softmax over what is read."""

import itertools

import pytest
import torch
from attention_checks import lanes

from prescore import Routed
from prescore.routed import plain

CONFIG = Routed(rows=4, leaf_size=4, chunk_size=8, sinks=2, exact_until=0)


class Held:
    """Replays what the first pass found, block by block, whatever the inputs have become since."""

    def __init__(self):
        self.found, self.calls = [], None

    def __call__(self, query, seen, search, *, near, limit=None):
        if self.calls is None:
            self.found.append(plain_find_rows(query, seen, search, near=near, limit=limit))
            return self.found[-1]
        return self.found[next(self.calls)]

    def hold(self):
        self.calls = itertools.cycle(range(len(self.found)))


plain_find_rows = plain.find_rows


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rows", [0, 4, 10**15])
@pytest.mark.parametrize("padded", [False, True])
def test_gradcheck(is_causal, rows, padded, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 2, 43, 8), (2, 1, 43, 8), (2, 1, 43, 5))
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]
    valid = torch.arange(43) < torch.tensor([[43], [31]]) if padded else None
    held = Held()
    monkeypatch.setattr(plain, "find_rows", held)

    def run(*values):
        return tuple(lanes(*values, CONFIG.replace(rows=rows), is_causal=is_causal, valid=valid).attended)

    run(*tensors)
    assert held.found
    read = sum(len(found.row) for found in held.found)
    left = sum(int((found.hits < 4).sum()) for found in held.found)
    assert (read > 0) == (rows > 0)
    assert (left > 0) == (rows < 10**15)
    held.hold()
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_gradients_of_the_output_alone_and_of_the_lse_alone():
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(1, 1, 70, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)
    ]
    output, lse = lanes(*tensors, CONFIG).attended
    both = torch.autograd.grad(output.sin().sum() + lse.cos().sum(), tensors, retain_graph=True)
    first = torch.autograd.grad(output.sin().sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(lse.cos().sum(), tensors[:2], retain_graph=True)
    for whole, one, other in zip(both[:2], first[:2], second, strict=True):
        torch.testing.assert_close(whole, one + other, rtol=0, atol=1e-12)
    torch.testing.assert_close(both[2], first[2], rtol=0, atol=1e-12)
