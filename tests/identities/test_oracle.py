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


@st.composite
def configs(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    sizes = st.tuples(st.sampled_from((0, 1, 3, 4, 8)), st.sampled_from((0, 1, 3, 8))).filter(any)
    lsh = Lsh(*draw(sizes), pick(1, 3, 5), pick("rank", "hash"))
    shared = {"sinks": pick(0, 1, 3), "min_seq_len": pick(0, 1, 2, 4, 8)}
    kind = pick("hyper", "exact", "lsh", "lsh")
    if kind == "hyper":
        return Hyper(lsh, leaf_inclusive=draw(st.booleans()), **shared)
    mask = pick("exclude", "exclude", "zero")
    lsh_only = {"coupling": Coupling(mask)}
    if kind == "lsh":
        coupling = Coupling(mask, pick("selected", "all"), pick("exclude", "count"))
        lsh_only = {"coupling": coupling, "leaf_inclusive": draw(st.booleans())}
    return Selected(
        scorer=pick(*SCORERS),
        top_k=pick(1, 3, 7, 0.3, 0.5, 1.0, 100),
        selector=pick("top", "sample"),
        recent=pick(0, 2),
        min_fraction=pick(0.0, 0.4),
        remainder="none" if mask == "zero" else pick("none", "centroids", KMeans(n_clusters=2)),
        inner=lsh if kind == "lsh" else Exact(),
        **lsh_only,
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
        mask = None  # the oracle leaves padded queries open there, and they have gradients too
    check_gradients(config, tensors, is_causal=is_causal, mask=mask, seed=seed)


@pytest.mark.parametrize("is_causal", [False, True])
def test_identity_9_unused_keys_get_exact_zeros(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=29, seed=3)
    config = Selected("key-norm", 3, sinks=0, remainder="none", min_seq_len=4)
    unused = check_gradients(config, tensors, is_causal=is_causal)
    assert unused > 0 or is_causal  # in the last leaf of a causal call every key is used
    behind = check_gradients(config.replace(remainder="centroids"), tensors, is_causal=is_causal)
    assert behind == 0  # a key behind a centroid is used


def test_no_gradient_flows_through_scoring():
    key = attention_tensors(n_keys=12, seed=1)[1].requires_grad_()
    for scorer in prescore.list_scorers():
        assert not prescore.score(key, scorer).requires_grad


def test_centroids_are_exact_for_equal_keys():
    check_centroids_of_equal_keys()


def test_as_many_padded_queries_as_keys_may_be_real_queries():
    # cross attention whose lengths happen to agree: padding of the keys says nothing about the queries
    tensors = attention_tensors(batch=2, heads=2, kv_heads=1, n_keys=17, seed=4)
    mask = torch.arange(17) >= torch.tensor([[6], [0]])
    exact = prescore.exact_attention(*tensors, key_padding_mask=mask)
    for config in (
        Selected(top_k=1.0),
        Hyper(Lsh(block_size=64, sample_size=0, alignment="rank"), min_seq_len=0),
    ):
        result, aux = prescore.prescored_attention(*tensors, config=config, key_padding_mask=mask, return_aux=True)
        assert float((result - exact.output).abs().max()) < 1e-12
    for alignment in ("rank", "hash"):
        config = Hyper(Lsh(block_size=4, sample_size=4, alignment=alignment), min_seq_len=0)
        aux = prescore.hyper_attention(*tensors, config, key_padding_mask=mask)
        assert torch.isfinite(aux.lse).all()
