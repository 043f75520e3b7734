"""The batched plan against the definition in loops; its gradients (identity 9), also by finite differences."""

import pytest
import torch
from attention_checks import aligned_by_rank, attend, check_gradients, check_oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.inputs import MASKS, attention_tensors, random_mask

import prescore
from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Selected

# scorers without ties: the oracle runs them unbatched, where rounding may break a tie the other way
SCORERS = ("key-norm", "key-diff", "uniform")
COUPLINGS = [
    Coupling(mask, weight, overlap, blocks)
    for mask, blocks in (("exclude", "selected"), ("exclude", "all"), ("zero", "selected"))
    for weight in ("selected", "all")
    for overlap in ("exclude", "count")
]


@st.composite
def configs(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    sizes = st.tuples(st.sampled_from((0, 1, 3, 4, 8)), st.sampled_from((0, 1, 3, 8))).filter(any)
    lsh = Lsh(*draw(sizes), pick(1, 3, 5), pick("rank", "hash"))
    shared = {"sinks": pick(0, 1, 3), "min_seq_len": pick(0, 1, 2, 4, 8)}
    kind = pick("hyper", "exact", "lsh", "lsh")
    if kind == "hyper":
        return Hyper(lsh, leaf_inclusive=draw(st.booleans()), **shared)
    coupling = pick(Coupling(), Coupling(mask="zero"))
    if kind == "lsh":
        coupling = pick(*COUPLINGS)
        shared["leaf_inclusive"] = draw(st.booleans())
    budget = {"top_k": pick(1, 3, 7, 0.3, 0.5, 1.0, 100), "selector": pick("top", "sample")}
    return Selected(
        scorer=pick(*SCORERS),
        **pick(budget, budget, {"min_score": pick(0.0, 0.5, 3.0)}),
        recent=pick(0, 2),
        min_fraction=pick(0.0, 0.4),
        remainder="none" if coupling.mask == "zero" else pick("none", "centroids", KMeans(n_clusters=2)),
        inner=lsh if kind == "lsh" else Exact(),
        coupling=coupling,
        **shared,
    )


@st.composite
def inputs(draw, lengths=(1, 2, 3, 13, 31, 40)):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    n_keys, kv_heads, batch, is_causal = pick(*lengths), pick(1, 2), pick(1, 2, 3), draw(st.booleans())
    n_query = pick(n_keys, n_keys, 1, max(1, n_keys // 3), n_keys if is_causal else n_keys + 4)
    seed = draw(st.integers(0, 10_000))
    tensors = attention_tensors(
        batch=batch,
        heads=kv_heads * pick(1, 2, 3),
        kv_heads=kv_heads,
        n_query=n_query,
        n_keys=n_keys,
        dim=pick(2, 5),
        value_dim=pick(1, 5, 7),
        seed=seed,
    )
    return tensors, random_mask(pick(*MASKS), batch, n_keys, seed=seed), is_causal, seed


@given(inputs(), configs(), st.sampled_from((None, None, 0.3)))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_the_plan_is_the_definition(case, config, given_share):
    tensors, mask, is_causal, seed = case
    selection = None
    if given_share and isinstance(config, Selected):
        selection = prescore.select(tensors[1], "uniform", top_k=given_share, sinks=0, key_padding_mask=mask)
    check_oracle(config, tensors, is_causal=is_causal, mask=mask, seed=seed, selection=selection)


@given(inputs(lengths=(1, 3, 13, 23)), configs())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_identity_9_gradients_are_those_of_autograd_on_the_oracle(case, config):
    tensors, mask, is_causal, seed = case
    if aligned_by_rank(config):
        mask = None  # the oracle leaves padding queries open there, and they have gradients too
    check_gradients(config, tensors, is_causal=is_causal, mask=mask, seed=seed)


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
