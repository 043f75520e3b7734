"""Identities 1, 2, 3, 5, 6, 7 and 10 of the contract (7 of leverage: tests/scoring), over shapes and masks."""

import itertools
import math

import pytest
import torch
from attention_checks import FLOAT64, attend, check_exact, check_merge_of_split, hidden, with_lsh
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.budgets import assert_within
from oracles.inputs import MASKS, attention_tensors, random_mask

import prescore
from prescore import Coupling, Exact, Hyper, KMeans, KMedian, Lsh, Minkowski, Routed, Selected

LENGTHS = (1, 2, 3, 31, 61, 127, 255, 257)
FAST = settings(derandomize=True, deadline=None, max_examples=25)
SINGLE = 1e-4
"""float32: lse and outputs of size up to 30, a few hundred roundings of 6e-8 each."""


@st.composite
def cases(draw, lengths=LENGTHS, masks=MASKS, dtypes=(torch.float64, torch.float32), causal=None):
    n_keys, kv_heads = draw(st.sampled_from(lengths)), draw(st.sampled_from((1, 2)))
    batch, group = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 3)))
    is_causal = draw(st.booleans()) if causal is None else causal
    n_query = draw(st.sampled_from((n_keys, 1, max(1, n_keys // 2), n_keys if is_causal else n_keys + 3)))
    seed = draw(st.integers(0, 1000))
    sizes = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads, "n_query": n_query, "n_keys": n_keys}
    dims = {"dim": draw(st.sampled_from((1, 4, 7))), "value_dim": draw(st.sampled_from((1, 4, 9)))}
    tensors = attention_tensors(dtype=draw(st.sampled_from(dtypes)), seed=seed, **sizes, **dims)
    return tensors, random_mask(draw(st.sampled_from(masks)), batch, n_keys, seed=seed), is_causal, seed


def _poisoned(tensors, mask):
    query, key, value = tensors
    return query, hidden(key, mask, math.nan), hidden(value, mask, math.inf)


def _same(result, truth, what=""):
    """Output and lse agree, as far as their dtype allows."""
    budget = FLOAT64 if truth.output.dtype == torch.float64 else SINGLE
    assert_within(result.output, truth.output, budget, f"output{what}")
    assert_within(result.lse, truth.lse, budget, f"lse{what}")


@given(cases(dtypes=(torch.float64,)))
@FAST
def test_exact_attention_is_the_dense_softmax(case):
    tensors, mask, is_causal, _ = case
    check_exact(tensors, is_causal=is_causal, mask=mask)
    check_exact(tensors, is_causal=is_causal, mask=mask, backend="plain")


@given(cases(), st.sampled_from(("all selected", "one block")), st.sampled_from(("rank", "hash")))
@FAST
def test_identity_1_everything_selected_or_one_block_is_exact(case, way, alignment):
    tensors, mask, is_causal, seed = case
    config = Selected(top_k=1.0, inner=Exact(), min_seq_len=2)
    if way == "one block":
        config = Hyper(Lsh(block_size=512, sample_size=0, alignment=alignment), min_seq_len=0)
    tensors = _poisoned(tensors, mask)
    truth = prescore.exact_attention(*tensors, is_causal=is_causal, key_padding_mask=mask)
    _same(attend(tensors, config, mask, is_causal=is_causal, generator=seed)[0], truth)


@given(cases(causal=False), st.sampled_from(prescore.list_scorers()), st.sampled_from((1, 7, 0.4)))
@FAST
def test_identity_2_exact_inner_is_attention_over_the_selected_rows(case, scorer, top_k):
    tensors, mask, _, seed = case
    config = Selected(scorer, top_k, inner=Exact(), remainder="none", sinks=2)
    query, key, value = tensors
    result, aux = attend(tensors, config, mask, generator=seed)
    chosen = prescore.select(key, scorer, top_k=top_k, sinks=2, key_padding_mask=mask, generator=seed)
    assert torch.equal(chosen.indices, aux.selection.indices)
    assert torch.equal(chosen.valid, aux.selection.valid)
    group = query.shape[1] // key.shape[1]
    for row, head in itertools.product(range(query.shape[0]), range(key.shape[1])):
        selected = chosen.indices[row, head][chosen.valid[row, head]]
        queries = slice(row, row + 1), slice(head * group, (head + 1) * group)
        rows = [t[row : row + 1, head : head + 1, selected] for t in (key, value)]
        found = prescore.Attended(result.output[queries], result.lse[queries])
        _same(found, prescore.exact_attention(query[queries], *rows))


@pytest.mark.parametrize("n_keys", [3, 31, 64, 61])
@pytest.mark.parametrize("leaf", [4, 8])
def test_identity_2_causal_is_the_merge_of_leaves_and_blocks(n_keys, leaf):
    query, key, value = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=n_keys, seed=n_keys)
    config = Selected("key-norm", 3, inner=Exact(), remainder="none", sinks=1, min_seq_len=leaf)
    result, aux = attend((query, key, value), config, is_causal=True)
    parts = []
    for start in range(0, n_keys, leaf):
        rows = slice(start, min(start + leaf, n_keys))
        part = prescore.exact_attention(query[:, :, rows], key[:, :, rows], value[:, :, rows], is_causal=True)
        parts.append(_placed(part, rows, n_keys))
    selections = iter(aux.selection)
    width = leaf
    while width < n_keys:
        for start in range(width, n_keys, 2 * width):
            queries = slice(start, min(start + width, n_keys))
            chosen = next(selections)
            assert chosen.valid.all()
            assert ((chosen.indices >= start - width) & (chosen.indices < start)).all()
            rows = chosen.indices[..., None].expand(-1, -1, -1, key.shape[-1])
            part = prescore.exact_attention(query[:, :, queries], key.gather(2, rows), value.gather(2, rows))
            parts.append(_placed(part, queries, n_keys))
        width *= 2
    assert next(selections, None) is None
    _same(result, prescore.merge(*parts))


def _placed(part, rows, n_query):
    output = part.output.new_zeros(*part.output.shape[:2], n_query, part.output.shape[-1])
    lse = part.lse.new_full((*part.lse.shape[:2], n_query), -torch.inf)
    output[:, :, rows], lse[:, :, rows] = part.output, part.lse
    return prescore.Attended(output, lse)


@pytest.mark.parametrize("seed", range(3))
def test_identity_3_merging_a_split_is_the_union_forward_and_backward(seed):
    check_merge_of_split(seed)


def test_identity_3_a_part_that_saw_nothing_changes_nothing():
    query, key, value = attention_tensors(n_query=3, n_keys=5)
    part = prescore.exact_attention(query, key, value)
    nothing = prescore.exact_attention(query, key[:, :, :0], value[:, :, :0])
    assert torch.isneginf(nothing.lse).all()
    assert not nothing.output.any()
    for merged in (prescore.merge(part, nothing), prescore.merge(nothing, part)):
        assert_within(merged.output, part.output, 1e-15)
        assert_within(merged.lse, part.lse, 1e-15)
    both = prescore.merge(nothing, nothing)
    assert torch.isneginf(both.lse).all()
    assert not both.output.any()


@pytest.mark.parametrize("top_k", [1, 5, 11])
def test_identity_5_zeroing_adds_one_per_unselected_key_to_the_denominator(top_k):
    query, key, value = attention_tensors(heads=4, kv_heads=2, n_query=6, n_keys=17, seed=top_k)
    config = Selected.paper("key-norm", top_k, inner=Exact())
    excluded, _ = attend((query, key, value), config)
    zeroed, _ = attend((query, key, value), config.replace(coupling=Coupling(mask="zero")))
    denominator = excluded.lse.exp() + (17 - top_k)
    assert_within(zeroed.lse, denominator.log(), FLOAT64, "lse")
    assert_within(zeroed.output, excluded.output * (excluded.lse.exp() / denominator)[..., None], FLOAT64)


def test_identity_5_residual_weight_scales_the_residual_by_all_keys():
    tensors = attention_tensors(heads=4, kv_heads=2, n_query=6, n_keys=17)
    config = Selected.paper("key-norm", 7, min_seq_len=0, inner=Lsh(block_size=0, sample_size=9))
    for mask in ("exclude", "zero"):
        couplings = [Coupling(mask, weight) for weight in ("selected", "all")]
        by_selected, by_all = (attend(tensors, config.replace(coupling=coupling))[0] for coupling in couplings)
        _same(by_all, prescore.Attended(by_selected.output, by_selected.lse + math.log(17 / 7)), f" under {mask}")


@pytest.mark.parametrize("alignment", ["rank", "hash"])
def test_identity_5_overlap_counts_a_key_in_block_and_sample_twice(alignment):
    query, key, value = attention_tensors(heads=2, kv_heads=1, n_query=6, n_keys=17)
    lsh = Lsh(block_size=16, sample_size=9, alignment=alignment)
    config = Selected.paper("key-norm", 7, min_seq_len=0, inner=lsh)
    once, aux = attend((query, key, value), config)
    twice, _ = attend((query, key, value), config.replace(coupling=Coupling(overlap="count")))
    residual, _ = attend((query, key, value), with_lsh(config, block_size=0))
    # one block holds all seven keys: with exclusion the residual vanishes, without it is added in full
    selected = aux.selection.indices[..., None].expand(-1, -1, -1, 4)
    exact = prescore.exact_attention(query, key.gather(2, selected), value.gather(2, selected))
    _same(once, exact, " with exclusion")
    _same(twice, prescore.merge(exact, residual), " with double counting")


def test_identity_5_the_early_integration_is_all_three_artefacts():
    assert Selected.early().coupling == Coupling(mask="zero", residual_weight="all", overlap="count")
    assert Selected.early().replace(coupling=Coupling()) == Selected.paper()
    assert Selected.paper().coupling == Coupling("exclude", "selected", "exclude", "selected") == Coupling()


@given(
    cases(causal=True),
    st.sampled_from(("paper", "hyper", "early", "routed", "selected")),
    st.sampled_from((257, 300)),
)
@FAST
def test_identity_6_causal_with_large_leaves_is_exact(case, preset, leaf):
    tensors, mask, _, seed = case
    config = PRESETS[preset].replace(**{"exact_until" if preset == "routed" else "min_seq_len": leaf})
    tensors = _poisoned(tensors, mask)
    truth = prescore.exact_attention(*tensors, is_causal=True, key_padding_mask=mask)
    result, aux = attend(tensors, config, mask, is_causal=True, generator=seed)
    assert preset == "routed" or aux.selection == []  # routed attention lists its chunks
    _same(result, truth)


PRESETS = {
    "paper": Selected.paper(top_k=8),
    "hyper": Hyper.published(),
    "early": Selected.early(top_k=8),
    "routed": Routed(),
    "selected": Selected(top_k=8),
}


@pytest.mark.parametrize("scorer", prescore.list_scorers())
@pytest.mark.parametrize("remainder", ["none", "centroids"])
def test_identity_10_a_step_with_a_fresh_selection_is_the_call_that_selects(scorer, remainder):
    query, key, value = attention_tensors(batch=2, heads=4, kv_heads=2, n_query=1, n_keys=61, seed=1)
    lsh = Lsh(block_size=4, sample_size=4, alignment="rank")
    for config, budget in (
        (Selected(scorer, 9, remainder=remainder, sinks=2, recent=3), {"top_k": 9, "sinks": 2, "recent": 3}),
        (Selected.paper(scorer, 20, remainder=remainder, inner=lsh, min_seq_len=0), {"top_k": 20, "sinks": 0}),
    ):
        fresh = prescore.select(key, scorer, **budget, generator=5)
        made, _ = attend((query, key, value), config, generator=5)
        with_given, aux = attend((query, key, value), config, generator=5, selection=fresh)
        assert torch.equal(aux.selection.indices, fresh.indices)
        _same(with_given, made, f" of {scorer}")


@pytest.mark.parametrize(("p", "kind"), [(2.0, KMeans), (1.0, KMedian)])
@pytest.mark.parametrize("rule", ["nearest", "farthest", "sensitivity"])
def test_identity_7_minkowski_at_two_and_one(p, kind, rule):
    key = attention_tensors(batch=2, kv_heads=2, n_keys=127, dim=5, seed=3)[1]
    special = prescore.score(key, kind(rule=rule), generator=1)
    assert torch.equal(prescore.score(key, Minkowski(p=p, rule=rule), generator=1), special)
    other = prescore.score(key, Minkowski(p=1.5, rule=rule), generator=1)
    assert float((other - special).abs().max()) > 1e-3
