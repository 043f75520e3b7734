"""Decode steps of routed attention against the rows of the whole call, for tests/routed and its mutation table."""

import pytest
import torch
from oracles.inputs import attention_tensors
from routed_checks import attend

from prescore import Routed
from prescore.routed.decode import StepAttention

SMALL = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)
NATIVE = Routed(min_weight=1 / 16, cluster_size=16, chunk_size=32, sinks=3, exact_until=0)
SCALE = 0.3


def tensors(length=150, *, config=SMALL, batch=2, seed=0):
    sizes = (
        {"dim": 8, "value_dim": 5} if config != NATIVE else {"dim": 16, "value_dim": 32, "dtype": torch.float32}
    )
    return attention_tensors(batch=batch, heads=4, kv_heads=2, n_keys=length, seed=seed, spread=1.0, **sizes)


def index_of(config=SMALL, **options):
    return StepAttention(config, scale=SCALE, **options)


def step(index, inputs, length=None, **options):
    """The newest query of the first `length` positions."""
    query, key, value = (t[:, :, :length] for t in inputs)
    return index.attend(query[:, :, -1:], key, value, **options)


def rows_of_whole_call(inputs, places, config=SMALL):
    attended, _ = attend(inputs, config, scale=SCALE)
    return type(attended)(attended.output[:, :, places], attended.lse[:, :, places])


def assert_steps(got, wanted, budget=1e-12):
    torch.testing.assert_close(got.output, wanted.output, rtol=0, atol=budget)
    torch.testing.assert_close(got.lse, wanted.lse, rtol=0, atol=budget)


def check_steps(config, backend="auto"):
    """Every step, what it reads, and one step taken back."""
    inputs = tensors(110)
    full, stats = attend(inputs, config, scale=SCALE)
    index, n_read = index_of(config), 0.0
    for length in range(1, 111):
        got = step(index, inputs, length, backend=backend)
        assert_steps(got, type(full)(*(t[:, :, length - 1 : length] for t in full)))
        n_read += index.reads.keys / 110
    assert n_read == pytest.approx(stats.keys_per_query)
    assert index.reads.centroids == 4 * stats["n_chunks"]
    assert_steps(step(index, inputs, 95, backend=backend), type(full)(*(t[:, :, 94:95] for t in full)))


def check_reorder(config, rows, start=None):
    """Sequences in another order, or several times."""
    inputs, rows = tensors(config=config, batch=3), torch.tensor(rows)
    index = index_of(config, start=None if start is None else torch.tensor(start))
    before = step(index, inputs)
    index.reorder(rows)
    after = step(index, [t[rows] for t in inputs])
    assert_steps(after, type(before)(*(t[rows] for t in before)))


def check_crop(config, length):
    """A cropped sequence grows in another way, step by step or at once."""
    first, other = tensors(config=config), tensors(config=config, seed=1)
    changed = [torch.cat((a[:, :, :length], b[:, :, length:]), dim=2) for a, b in zip(first, other, strict=True)]
    for stops in ((length, length + 1, 150), (150,)):
        index = index_of(config)
        step(index, first)
        index.crop(length)
        for n in stops:
            wanted = rows_of_whole_call([t[:, :, :n] for t in changed], slice(n - 1, n), config)
            assert_steps(step(index, changed, n), wanted, 1e-12 if config == SMALL else 1e-5)
