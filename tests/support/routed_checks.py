"""Calls of routed attention and checks of their results, shared by tests/routed and its mutation table."""

import math
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from attention_checks import FLOAT64, hidden, loss_of
from oracles.budgets import assert_within
from oracles.dense import after_last_key
from oracles.routed import oracle_reads, routed_oracle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prescore import prescored_attention
from prescore.errors import Unsupported
from prescore.routed.native import library
from prescore.routed.reference import reference_attention
from prescore.types import Attended


@contextmanager
def native_level(level):
    """Run native code of one level; skips the test where it cannot run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.VARIABLE, level)
        try:
            library.load()
        except Unsupported as refusal:
            pytest.skip(str(refusal))
        yield level


def levels_here():
    """Levels that are built and run on this processor."""
    folder = library._FOLDER
    levels = library.levels_of_processor()
    return [level for level in levels if (folder / library.library_name(level)).is_file()]


needs_native = pytest.mark.skipif(
    library.loaded_level() == library.NO_LEVEL, reason="no native library is built, or PRESCORE_NATIVE=0"
)


def attend(tensors, config, **options):
    """Result and stats of a public call, causal unless said otherwise."""
    output, aux = prescored_attention(*tensors, config, **{"is_causal": True, **options}, return_aux=True)
    return Attended(output, aux.lse), aux.stats


def specified_queries(query, mask, is_causal):
    """`[B, Hq, Nq]`: the oracle says nothing about causal padding queries between real keys."""
    if mask is None or not is_causal or query.shape[2] != mask.shape[1]:
        return torch.ones(query.shape[:3], dtype=torch.bool)
    return (mask | after_last_key(mask, query.shape[2]))[:, None].expand(query.shape[:3])


class LargestTensor(TorchDispatchMode):
    """The size of the largest tensor that any operation makes, views not counted."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.size = max(self.size, made.numel())
        return result


class Truth(NamedTuple):
    """What the oracle says: result, queries that it specifies, and gradients of `loss_of` them."""

    attended: Attended
    counted: Tensor
    grads: tuple[Tensor, ...]


def oracle_truth(config, tensors, *, is_causal=True, mask=None, scale=None):
    """Result and gradients of a call by the oracle."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    result = routed_oracle(*inputs, config, is_causal=is_causal, key_padding_mask=mask, scale=scale)
    counted = specified_queries(inputs[0], mask, is_causal)
    grads = torch.autograd.grad(loss_of(result, counted), inputs)
    return Truth(Attended(*(t.detach() for t in result)), counted, grads)


def assert_true(got, inputs, truth):
    """Output, lse and gradients of a float64 result equal those of the oracle."""
    counted = truth.counted
    assert_within(got.output[counted], truth.attended.output[counted], FLOAT64, "output")
    assert_within(got.lse[counted], truth.attended.lse[counted], FLOAT64, "lse")
    grads = torch.autograd.grad(loss_of(got, counted), inputs)
    for name, grad, wanted in zip(("query", "key", "value"), grads, truth.grads, strict=True):
        assert_within(grad, wanted, FLOAT64, f"gradient of {name}")


def check_routed(config, tensors, *, is_causal=True, mask=None, scale=None, backend="auto", truth=None):
    """A float64 call equals the oracle, forward and backward, with NaN in the padding; returns its stats.

    Without gradients a padded batch has the same bits.
    """
    options = {"is_causal": is_causal, "scale": scale}
    truth = truth or oracle_truth(config, tensors, mask=mask, **options)
    inputs = query, key, value = [t.detach().clone().requires_grad_() for t in tensors]
    padded = (query, *(hidden(t, mask, math.nan) for t in (key, value)))
    got, stats = attend(padded, config, **options, key_padding_mask=mask, backend=backend)
    assert_true(got, inputs, truth)
    if mask is not None:
        with torch.no_grad():
            again, _ = attend(padded, config, **options, key_padding_mask=mask, backend=backend)
        assert torch.equal(got.output, again.output)
        assert torch.equal(got.lse, again.lse)
    return stats


def check_stats(config, tensors, *, is_causal=True, backend="auto"):
    """The keys, centroids and int8 keys of the stats are those that the oracle counts."""
    _, stats = attend(tensors, config, is_causal=is_causal, backend=backend)
    reads = [read for head in oracle_reads(*tensors, config, is_causal=is_causal).values() for read in head]
    counts = [(int(r.always.sum()), int(r.hits.sum()), r.n_compared, len(r.centroid_logits)) for r in reads]
    always, hits, compared, centroids = torch.tensor(counts, dtype=torch.float64).T
    routed = centroids > 0
    assert stats.exact_queries == int((~routed).sum()) / tensors[0].shape[1]
    assert stats.keys_per_query == pytest.approx(float((always + hits).mean()), rel=1e-4)
    assert stats.centroids_per_query == pytest.approx(float(centroids.mean()))
    assert stats.far_keys_read == pytest.approx(float(hits[routed].mean()), rel=1e-3)
    assert stats.keys_compared == pytest.approx(float(compared[routed].mean()), rel=1e-3)


def check_reference(config, tensors, *, is_causal=True, scale=None, truth=None):
    """`reference_attention` of every head equals the oracle, forward and backward; returns it by head."""
    truth = truth or oracle_truth(config, tensors, is_causal=is_causal, scale=scale)
    inputs = query, key, value = [t.detach().clone().requires_grad_() for t in tensors]
    heads_per_kv = query.shape[1] // key.shape[1]
    heads = {
        (row, head): reference_attention(
            *(query[row, head], key[row, head // heads_per_kv], value[row, head // heads_per_kv], config),
            is_causal=is_causal,
            scale=scale,
        )
        for row in range(query.shape[0])
        for head in range(query.shape[1])
    }
    output, lse = (torch.stack([getattr(h, name) for h in heads.values()]) for name in ("output", "lse"))
    shape = query.shape[:3]
    assert_true(Attended(output.view(*shape, -1), lse.view(shape)), inputs, truth)
    return heads


def differing_queries(got, wanted, budget):
    """`[B, Hq, Nq]` queries that differ by more than `budget`; NaN equals NaN, and infinities themselves."""

    def off(one, other):
        one, other = one.detach().double(), other.detach().double()
        same = (one == other) | (one.isnan() & other.isnan())
        return (one - other).abs().masked_fill(same, 0.0)

    return ~(off(got.output, wanted.output).amax(-1) <= budget) | ~(off(got.lse, wanted.lse) <= budget)


def assert_alike(got, wanted, budget, n_flips=2, what="native code"):
    """Equal but for a few queries, where rounding moves a key across the threshold; returns the equal ones."""
    differ = differing_queries(got, wanted, budget)
    message = f"{int(differ.sum())} of {differ.numel()} queries of {what} differ"
    assert int(differ.sum()) <= n_flips, message
    return ~differ


def check_native(config, tensors, *, is_causal=True, mask=None, budget=None, gradients=True):
    """Native code equals the plain backend, forward and backward; returns its stats.

    `budget` is that of each number of output and lse: sums of float32 in another order by default.
    """
    dtype, options = tensors[0].dtype, {"is_causal": is_causal, "key_padding_mask": mask}
    inputs = [t.detach().requires_grad_(gradients) for t in tensors]
    (got, stats), (plain, plain_stats) = (
        attend(inputs, config, **options, backend=b) for b in ("native", "plain")
    )
    assert stats.backend == "native", "nothing was far: native code did not run"
    budget = budget or (2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps)
    alike = assert_alike(got, plain, budget) & specified_queries(inputs[0], mask, is_causal)
    for name in ("keys_compared", "far_keys_read", "keys_per_query"):
        assert stats[name] == pytest.approx(plain_stats[name], rel=1e-3, abs=1e-9), name
    if not gradients:
        return stats
    with torch.no_grad():  # native code builds the index and reads the exact queries too
        assert_alike(attend(inputs, config, **options, backend="native")[0], plain, budget)
    grads = [torch.autograd.grad(loss_of(result, alike), inputs) for result in (got, plain)]
    budget = 5e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for name, grad, wanted in zip(("query", "key", "value"), *grads, strict=True):
        size = float(wanted.abs().max())
        assert_within(grad.double() / size, wanted.double() / size, budget, f"gradient of {name}")
    return stats
