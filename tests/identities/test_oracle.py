"""The batched plan against the definition in loops, and its gradients (identity 9)."""

import pytest
import torch
from attention_checks import aligned_by_rank, check_centroids_of_equal_keys, check_gradients, check_oracle
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
    return Selected(
        scorer=pick(*SCORERS),
        top_k=pick(1, 3, 7, 0.3, 0.5, 1.0, 100),
        selector=pick("top", "sample"),
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


@given(inputs(), configs())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_the_plan_is_the_definition(case, config):
    tensors, mask, is_causal, seed = case
    check_oracle(config, tensors, is_causal=is_causal, mask=mask, seed=seed)


@given(inputs(lengths=(1, 3, 13, 23)), configs())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_identity_9_gradients_are_those_of_autograd_on_the_oracle(case, config):
    tensors, mask, is_causal, seed = case
    if aligned_by_rank(config):
        mask = None  # the oracle leaves padding queries open there, and they have gradients too
    check_gradients(config, tensors, is_causal=is_causal, mask=mask, seed=seed)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("alignment", ["hash", "rank"])
@pytest.mark.parametrize("coupling", [c for c in COUPLINGS if c.blocks == "all"], ids=str)
def test_blocks_cut_over_all_keys_mask_the_unselected_ones(coupling, alignment, is_causal, kind):
    """Every coupling of the published GLM3 file, with sinks, recent keys and blocks of only unselected keys."""
    config = Selected(
        "key-norm", 9, sinks=2, recent=2, remainder="none", inner=Lsh(3, 6, 3, alignment), min_seq_len=8,
        coupling=coupling,
    )  # fmt: skip
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=8)
    mask = random_mask(kind, 2, 45, seed=3)
    check_oracle(config, tensors, is_causal=is_causal, mask=mask, seed=5)
    if kind == "none":
        unused = check_gradients(config, tensors, is_causal=is_causal, seed=5)
        assert unused > 0 or is_causal  # an unselected key has exactly zero weight
        other = config.replace(coupling=coupling.replace(blocks="selected"))
        options = {"is_causal": is_causal, "generator": 5}
        cut = [prescore.prescored_attention(*tensors, each, **options) for each in (config, other)]
        assert not torch.allclose(*cut)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("alignment", ["hash", "rank"])
def test_with_every_key_selected_both_ways_to_cut_blocks_agree(alignment, is_causal):
    lsh = Lsh(block_size=4, sample_size=6, n_projections=3, alignment=alignment)
    config = Selected("key-norm", 1.0, sinks=3, recent=1, remainder="none", inner=lsh, min_seq_len=8)
    for mask in (None, random_mask("left", 2, 45, seed=3)):
        tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=45, seed=8)
        results = []
        for blocks in ("selected", "all"):
            results.append(
                prescore.prescored_attention(
                    *tensors, config.replace(coupling=Coupling(blocks=blocks)), is_causal=is_causal, generator=2,
                    key_padding_mask=mask,
                )
            )  # fmt: skip
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_identity_9_unused_keys_get_exact_zeros(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=29, seed=3)
    config = Selected("key-norm", 3, sinks=0, remainder="none", min_seq_len=4)
    unused = check_gradients(config, tensors, is_causal=is_causal)
    assert unused > 0 or is_causal  # in the last leaf of a causal call every key is used
    # a key that a centroid represents is used
    assert check_gradients(config.replace(remainder="centroids"), tensors, is_causal=is_causal) == 0


def test_no_gradient_flows_through_scoring():
    key = attention_tensors(n_keys=12, seed=1)[1].requires_grad_()
    for scorer in prescore.list_scorers():
        assert not prescore.score(key, scorer).requires_grad


def test_centroids_are_exact_for_equal_keys():
    check_centroids_of_equal_keys()


def test_padding_of_the_keys_says_nothing_about_the_queries_of_cross_attention():
    tensors = attention_tensors(batch=2, heads=2, kv_heads=1, n_keys=17, seed=4)
    mask = torch.arange(17) >= torch.tensor([[6], [0]])
    exact = prescore.exact_attention(*tensors, key_padding_mask=mask)
    one_block = Hyper(Lsh(block_size=64, sample_size=0, alignment="rank"), min_seq_len=0)
    for config in (Selected(top_k=1.0), one_block):
        output = prescore.prescored_attention(*tensors, config=config, key_padding_mask=mask)
        torch.testing.assert_close(output, exact.output, rtol=0, atol=1e-12)
    for alignment in ("rank", "hash"):
        config = Hyper(Lsh(block_size=4, sample_size=4, alignment=alignment), min_seq_len=0)
        assert torch.isfinite(prescore.hyper_attention(*tensors, config, key_padding_mask=mask).lse).all()
