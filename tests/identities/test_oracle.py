"""The batched plan against the definition in loops; its gradients (identity 9), also by finite differences."""

import random

import pytest
import torch
from attention_checks import attend, check_gradients
from fuzz_cases import random_case
from oracles.inputs import attention_tensors

import prescore
from fuzz import check
from prescore import Coupling, Hyper, KMeans, Lsh, Selected


@pytest.mark.parametrize("part", range(10))
def test_the_plan_and_its_gradients_are_those_of_the_definition(part):
    numbers = range(part * 40, (part + 1) * 40)
    assert sum(check("definition", random_case(random.Random(f"oracle/{number}"))) for number in numbers) > 10


@pytest.mark.parametrize("is_causal", [False, True])
def test_identity_9_unused_keys_get_exact_zeros(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=29, seed=3)
    config = Selected("key-norm", 3, sinks=0, remainder="none", min_seq_len=4)
    for budget in ({"top_k": 3}, {"top_k": None, "min_score": 3.0}):
        unused = check_gradients(config.replace(**budget), tensors, is_causal=is_causal)
        assert unused > 0 or is_causal  # in the last leaf of a causal call every key is used
    # a key that a centroid represents is used
    assert check_gradients(config.replace(remainder="centroids"), tensors, is_causal=is_causal) == 0


# Finite differences in float64, nothing tolerated from run to run.

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


def inputs_of_gradcheck(kv_heads=1):
    # keys of distinct norms: a finite difference must not move a selection
    sizes = {"heads": 2, "kv_heads": kv_heads, "n_query": 5, "n_keys": 7, "dim": 3, "value_dim": 2}
    query, key, value = attention_tensors(seed=8, spread=1.0, **sizes)
    key = torch.nn.functional.normalize(key, dim=-1) * torch.linspace(0.5, 2.0, 7, dtype=key.dtype)[:, None]
    return tuple(t.contiguous().requires_grad_() for t in (query, key, value))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradcheck_of_exact_attention(is_causal, backend, kv_heads):
    mask = torch.tensor([[True, False, True, True, True, True, False]])
    options = {"is_causal": is_causal, "key_padding_mask": mask, "backend": backend}
    run = lambda *tensors: tuple(prescore.exact_attention(*tensors, **options))  # noqa: E731
    assert torch.autograd.gradcheck(run, inputs_of_gradcheck(kv_heads), nondet_tol=0.0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradcheck(name, is_causal):
    def run(*tensors):
        return tuple(attend(tensors, CONFIGS[name], is_causal=is_causal, generator=3)[0])

    tensors = inputs_of_gradcheck()
    for _ in range(3):  # random projections of the Jacobian
        assert torch.autograd.gradcheck(run, tensors, nondet_tol=0.0, fast_mode=True)
    if not is_causal:
        exact = prescore.exact_attention(*tensors).output
        assert float((run(*tensors)[0] - exact).detach().abs().max()) > 1e-3  # not exact attention in disguise
