"""Finite differences in float64, nothing tolerated from run to run."""

import pytest
import torch
from attention_checks import attend
from oracles.inputs import attention_tensors

import prescore
from prescore import Coupling, Hyper, KMeans, Lsh, Selected

RANK = Lsh(block_size=3, sample_size=3, n_projections=3, alignment="rank")
PAPER = Selected.paper("key-norm", 4, min_seq_len=2, inner=RANK)
CONFIGS = {
    "hyper rank": Hyper(RANK, min_seq_len=2),
    "hyper hash": Hyper(RANK.replace(alignment="hash"), min_seq_len=2),
    "paper": PAPER,
    "paper sinks": PAPER.replace(sinks=1, recent=1),
    "early": Selected.early("key-norm", 4, min_seq_len=2, inner=RANK),
    "centroids exact": Selected(top_k=3, sinks=1, min_seq_len=2),
    "centroids of two clusters": Selected(KMeans(n_clusters=2), 3, sinks=1, min_seq_len=2),
    "centroids hyper": PAPER.replace(remainder="centroids"),
    "count": PAPER.replace(coupling=Coupling(overlap="count")),
}
"""All but `Routed`, whose int4 keys may round either way: `slopes` of the fuzzer and tests/routed."""


def _tensors(n_query=5, n_keys=7, kv_heads=1):
    # keys of distinct norms: a finite difference must not move a selection
    sizes = {"heads": 2, "kv_heads": kv_heads, "n_query": n_query, "n_keys": n_keys, "dim": 3, "value_dim": 2}
    query, key, value = attention_tensors(seed=8, spread=1.0, **sizes)
    key = torch.nn.functional.normalize(key, dim=-1) * torch.linspace(0.5, 2.0, n_keys, dtype=key.dtype)[:, None]
    return tuple(t.contiguous().requires_grad_() for t in (query, key, value))


def _check(function, tensors, fast=False):
    assert torch.autograd.gradcheck(function, tensors, nondet_tol=0.0, fast_mode=fast)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_exact(is_causal, backend, kv_heads):
    mask = torch.tensor([[True, False, True, True, True, True, False]])
    options = {"is_causal": is_causal, "key_padding_mask": mask, "backend": backend}
    _check(lambda *t: tuple(prescore.exact_attention(*t, **options)), _tensors(kv_heads=kv_heads))


def test_merged():
    def merged(query, key, value):
        parts = [prescore.exact_attention(query, key[:, :, s], value[:, :, s]) for s in (slice(0, 2), slice(2, 7))]
        return tuple(prescore.merge(*parts))

    _check(merged, _tensors())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_prescored(name, is_causal):
    def run(*tensors):
        return tuple(attend(tensors, CONFIGS[name], is_causal=is_causal, generator=3)[0])

    tensors = _tensors()
    for _ in range(3):  # random projections of the Jacobian
        _check(run, tensors, fast=True)
    if not is_causal:
        exact = prescore.exact_attention(*tensors).output
        assert float((run(*tensors)[0] - exact).detach().abs().max()) > 1e-3  # not exact attention in disguise


def test_gradients_through_lse_alone():
    _check(lambda *t: prescore.exact_attention(*t).lse, _tensors())
    _check(lambda *t: prescore.hyper_attention(*t, config=CONFIGS["hyper hash"]).lse, _tensors())
