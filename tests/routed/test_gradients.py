"""Finite differences of everything but choices: the tree, codes, and which rows are read."""

import itertools

import pytest
import torch
from attention_checks import lanes

from prescore import Routed
from oracles.routed import routed_oracle
from prescore.routed import index as tables
from prescore.routed import plain
from prescore.routed import reference as far

CONFIG = Routed(min_weight=1 / 8, cluster_size=4, chunk_size=8, sinks=2, exact_until=0)
SIZES = ((2, 2, 43, 8), (2, 1, 43, 8), (2, 1, 43, 5))


class Held:
    """Replays what the first pass chose, whatever the inputs have become since."""

    def __init__(self, original):
        self.original, self.chosen, self.calls = original, [], None

    def __call__(self, *arguments, **options):
        if self.calls is None:
            self.chosen.append(self.original(*arguments, **options))
            return self.chosen[-1]
        return self.chosen[next(self.calls)]

    def hold(self):
        self.calls = itertools.cycle(range(len(self.chosen)))


@pytest.fixture(name="held")
def held_choices(monkeypatch):
    """The tree and the rows found; codes decide nothing else."""
    rows, trees = Held(plain.find_rows), Held(tables.bisection_tree)
    monkeypatch.setattr(plain, "find_rows", rows)
    monkeypatch.setattr(tables, "bisection_tree", trees)
    return rows, trees


def random_tensors(sizes=SIZES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rows", [0, 4, 2**31 - 1])
@pytest.mark.parametrize("padded", [False, True])
def test_gradcheck(is_causal, rows, padded, held):
    tensors = random_tensors()
    valid = torch.arange(43) < torch.tensor([[43], [31]]) if padded else None

    def run(*values):
        return tuple(lanes(*values, CONFIG.replace(rows=rows), is_causal=is_causal, valid=valid).attended)

    run(*tensors)
    found = held[0].chosen
    assert found
    read = sum(len(own.row) for own in found)
    left = sum(int((own.hits < 4).sum()) for own in found)
    assert (read > 0) == (rows > 0)
    assert (left > 0) == (rows < 2**31 - 1)
    for choice in held:
        choice.hold()
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("width", [0.02, 0.3, 3.0])
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradcheck_where_corrections_are_free_and_where_they_are_bounded(is_causal, width, held):
    """From keys that hardly differ to keys so far apart that gains, moves and spreads meet their bounds."""
    tensors = random_tensors(((1, 2, 51, 6), (1, 1, 51, 6), (1, 1, 51, 4)), seed=3)
    tensors[1] = (tensors[1].detach() * width).requires_grad_()

    def run(*values):
        return tuple(lanes(*values, CONFIG.replace(rows=2), is_causal=is_causal, scale=1.0).attended)

    run(*tensors)
    for choice in held:
        choice.hold()
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_gradcheck_of_every_number(held):
    tensors = random_tensors(((1, 1, 3, 3), (1, 1, 14, 3), (1, 1, 14, 2)), seed=2)
    config = Routed(min_weight=1 / 4, cluster_size=2, chunk_size=4, sinks=1, exact_until=0)

    def run(*values):
        return tuple(lanes(*values, config).attended)

    run(*tensors)
    assert sum(len(own.row) for own in held[0].chosen) > 0
    for choice in held:
        choice.hold()
    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradcheck_of_the_oracle(is_causal):
    tensors = random_tensors(((1, 2, 27, 4), (1, 1, 27, 4), (1, 1, 27, 3)), seed=1)

    def run(*values):
        return tuple(routed_oracle(*values, CONFIG, is_causal=is_causal))

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("rows", [0, 4])
def test_a_kept_limit_has_the_gradients_of_the_one_that_was_set(rows):
    generator = torch.Generator().manual_seed(0)
    sinks, nodes, near = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (2, 7, 1))
    spread = torch.tensor([0.001, 0.3, 1.0, 2.0, 4.0], dtype=torch.float64)[:, None]
    inputs = [t.requires_grad_() for t in (sinks, nodes, spread)]
    scores, search = far.Scores(*inputs), far.Search(float(2 * rows))
    seen = far.Seen(*[None] * 6, rows=torch.zeros(7, 4), codes=None, spread=None, drift=None)
    limit = far.limit_of(scores, seen, search, near[:, 0])
    kept = far.followed_limit(limit.detach().requires_grad_(), scores, seen, search)
    assert torch.equal(kept, limit)
    weight = torch.linspace(1, 2, 5, dtype=torch.float64)
    if rows:
        wanted = torch.autograd.grad((limit * weight).sum(), inputs)
        for got, own in zip(torch.autograd.grad((kept * weight).sum(), inputs), wanted, strict=True):
            torch.testing.assert_close(got, own, rtol=0, atol=1e-14)
    else:
        assert torch.isposinf(kept).all()


def test_gradients_of_the_output_alone_and_of_the_lse_alone():
    tensors = random_tensors([(1, 1, 70, 8)] * 3, seed=1)
    output, lse = lanes(*tensors, CONFIG).attended
    both = torch.autograd.grad(output.sin().sum() + lse.cos().sum(), tensors, retain_graph=True)
    first = torch.autograd.grad(output.sin().sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(lse.cos().sum(), tensors, retain_graph=True, materialize_grads=True)
    for whole, one, other in zip(both, first, second, strict=True):
        torch.testing.assert_close(whole, one + other, rtol=0, atol=1e-12)
