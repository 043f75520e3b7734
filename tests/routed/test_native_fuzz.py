"""Thousands of small random calls of compiled code against plain torch: sizes, strides, alignment, types, NaN."""

import random

import pytest
import torch
from native_cases import compiled_answer, levels_here, plain_answer, rows_apart, setting

from prescore import Routed
from prescore.types import Attended

CASES = 700
"""Each runs at every level: 2,100 compiled calls where there are three."""
TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


class Case:
    """One random call, from a seed."""

    def __init__(self, seed):
        self.pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        pick = self.pick
        leaf, nodes = pick.choice(((16, 1), (16, 2), (16, 4), (32, 1), (32, 2)))
        self.config = Routed(
            rows=pick.choice((0, 1, 4, 30, 10**6)),
            leaf_size=leaf,
            chunk_size=leaf * nodes,
            sinks=pick.choice((0, 1, 5, 16, 19)),
            exact_until=pick.choice((0, 0, 90)),
        )
        self.is_causal = pick.random() < 0.6
        chunk, sinks = leaf * nodes, self.config.sinks
        least = max(sinks + 2 * chunk, self.config.exact_until if self.is_causal else 0)
        self.n_keys = least + pick.randint(1, chunk + 20)
        self.n_query = pick.choice((self.n_keys, pick.randint(1, self.n_keys)))
        if not self.is_causal:
            self.config = self.config.replace(exact_until=0)
        self.dtype = pick.choice(TYPES)
        self.batch, self.kv_heads, self.group = pick.choice(
            ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1))
        )
        self.dim, self.value_dim = (16 * pick.choice((1, 1, 2, 4)) for _ in range(2))

    def tensors(self):
        """Query, key and value, each laid out in memory in its own way."""
        width = self.pick.choice((0.3, 1.0, 1.0, 3.0))
        heads = self.kv_heads * self.group
        return [
            self._strided(heads, self.n_query, self.dim, width),
            self._strided(self.kv_heads, self.n_keys, self.dim, width),
            self._strided(self.kv_heads, self.n_keys, self.value_dim, 1.0),
        ]

    def _strided(self, heads, length, dim, width):
        pick, batch = self.pick, self.batch
        values = torch.randn(batch, heads, length, dim, generator=self.generator).to(self.dtype) * width
        kind = pick.choice(
            ("whole", "whole", "between heads", "in a wider row", "in a longer buffer", "odd start")
        )
        if kind == "between heads":  # as models have them: [B, N, H, D]
            return values.transpose(1, 2).contiguous().transpose(1, 2)
        if kind == "in a wider row":
            before = pick.randint(0, 5)
            room = torch.full((batch, heads, length, before + dim + 3), torch.nan, dtype=self.dtype)
            return room[..., before : before + dim].copy_(values)
        if kind == "in a longer buffer":
            before = pick.randint(0, 3)
            room = torch.full((batch, heads, before + length + 7, dim), torch.nan, dtype=self.dtype)
            return room[:, :, before : before + length].copy_(values)
        if kind == "odd start":  # not where vectors like to begin
            room = torch.full((values.numel() + 9,), torch.nan, dtype=self.dtype)
            before = pick.randint(1, 9)
            return room[before : before + values.numel()].view(values.shape).copy_(values)
        return values

    def budget(self):
        return 1e-4 if self.dtype == torch.float32 else 8 * torch.finfo(self.dtype).eps


@pytest.fixture(scope="module", name="levels")
def levels_that_run():
    found = levels_here()
    if not found:
        pytest.skip("no compiled code is built")
    return found


def test_random_calls(levels):
    """A key at the very limit may be read by one and not by the other: hardly ever, and in one query then."""
    n_apart = n_queries = 0
    for seed in range(CASES):
        case = Case(seed)
        options, backward = {"is_causal": case.is_causal}, seed % 5 == 0
        tensors = [t.requires_grad_(backward) for t in case.tensors()]
        plain = plain_answer(tensors, case.config, **options)
        wanted = gradients(plain, tensors) if backward else None
        for level in levels:
            with setting(level):
                compiled = compiled_answer(tensors, case.config, **options)
                apart = rows_apart(compiled.attended, plain.attended, case.budget())
                many = f"seed {seed}, {level}: {int(apart.sum())} of {apart.numel()} queries differ"
                assert int(apart.sum()) <= 1, many
                n_apart, n_queries = n_apart + int(apart.sum()), n_queries + apart.numel()
                if wanted is not None and not bool(apart.any()):
                    compare_gradients(f"seed {seed}, {level}", case, gradients(compiled, tensors), wanted)
    assert n_apart <= 1e-4 * n_queries


def gradients(answer, tensors):
    return torch.autograd.grad(answer.attended.output.float().square().sum(), tensors)


def compare_gradients(what, case, found, wanted):
    for name, one, other in zip("qkv", found, wanted, strict=True):
        off = float((one.double() - other.double()).abs().max()) / max(1.0, float(other.abs().max()))
        assert off <= 5 * case.budget(), f"{what}: gradient of {name} is {off} off"


def test_nan_and_infinities(levels):
    """They crash nothing, and in a causal call no query before them feels them.

    Values are finite, if huge: public calls refuse others, and near weights of 0 meet later values.
    """
    for seed in range(60):
        case = Case(10_000 + seed)
        case.is_causal, case.n_query = True, case.n_keys
        tensors = case.tensors()
        place = case.pick.randint(0, case.n_keys - 1)
        for tensor in case.pick.sample(tensors, case.pick.randint(1, 3)):
            huge = torch.finfo(case.dtype).max
            poison = huge if tensor is tensors[2] else case.pick.choice((torch.nan, torch.inf, -torch.inf, huge))
            tensor[:, :, place, :: case.pick.choice((1, 7, 100))] = poison
        plain = plain_answer(tensors, case.config, is_causal=True)
        for level in levels:
            with setting(level):
                compiled = compiled_answer(tensors, case.config, is_causal=True)
            cut = [Attended(*(t[:, :, :place] for t in answer.attended)) for answer in (compiled, plain)]
            assert int(rows_apart(*cut, case.budget()).sum()) <= 1, f"seed {seed}, {level}"
