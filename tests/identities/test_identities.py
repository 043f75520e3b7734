"""Identities 1, 2, 3, 5, 6, 7 and 9, and the plan against its definition in loops.

4 and 8 are in tests/selected, 7 of leverage in tests/scoring; `decode_step` is 10, `last_queries` 11 (tests/fuzz).
"""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_checks import FLOAT64, assert_equal, attend, check_merge_of_split, check_oracle
from fuzz_cases import random_case
from fuzz_oracles import compare, compare_exact
from oracles.budgets import assert_within
from oracles.dense import full_weights, subset_weights
from oracles.inputs import attention_tensors

import prescore
from fuzz import check
from prescore import Coupling, Exact, Hyper, KMeans, KMedian, Lsh, Minkowski, Routed, Selected
from prescore.scoring.select import membership

PLAIN = {"given": False, "dropout_p": 0.0, "backend": "auto"}
CASES = [replace(random_case(random.Random(f"identity/{number}")), **PLAIN) for number in range(40)]
READS_ALL = {
    "exact": Exact(),
    "all selected": Selected(top_k=1.0, min_seq_len=2),
    "one block, rank": Hyper(Lsh(block_size=512, sample_size=0, alignment="rank"), min_seq_len=0),
    "one block, hash": Hyper(Lsh(block_size=512, sample_size=3, alignment="hash"), min_seq_len=0),
}
ONE_LEAF = {
    "paper": Selected.paper(top_k=8, min_seq_len=300),
    "hyper": Hyper.published(min_seq_len=260),
    "early": Selected.early(top_k=8, min_seq_len=300),
    "routed": Routed(exact_until=260),
    "selected": Selected(top_k=8, min_seq_len=300),
}


@pytest.mark.parametrize("part", range(10))
def test_the_plan_and_its_gradients_are_those_of_the_definition(part):
    numbers = range(part * 40, (part + 1) * 40)
    assert sum(check("definition", random_case(random.Random(f"oracle/{number}"))) for number in numbers) > 10


@pytest.mark.parametrize("name", READS_ALL)
def test_identity_1_everything_selected_or_one_block_is_exact(name):
    for any_case in CASES:
        case = replace(any_case, config=READS_ALL[name])
        compare_exact(case)
        options = {"is_causal": case.is_causal, "key_padding_mask": case.padding(), "scale": case.scale}
        exact = prescore.exact_attention(*case.tensors(), **options)
        assert name != "exact" or all(map(torch.equal, exact, case.run(lse=True)))


@pytest.mark.parametrize("name", ONE_LEAF)
def test_identity_6_causal_with_large_leaves_is_exact(name):
    for case in CASES:
        n_query = min(case.n_query, case.n_keys)
        compare_exact(replace(case, config=ONE_LEAF[name], is_causal=True, n_query=n_query))


def test_identity_9_gradients_are_slopes_of_finite_differences():
    assert sum(check("slopes", case) for case in CASES) > 20


@pytest.mark.parametrize("is_causal", [False, True])
def test_identity_9_unused_keys_get_exact_zeros(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=29, seed=3)
    config = Selected("key-norm", 3, sinks=0, remainder="none", min_seq_len=4)
    n_unused = partial(check_oracle, is_causal=is_causal, gradients=True)
    for budget in ({"top_k": 3}, {"top_k": None, "min_score": 3.0}):
        unused = n_unused(config.replace(**budget), tensors)
        assert unused > 0 or is_causal  # in the last leaf of a causal call every key is used
    # a key that a centroid represents is used
    assert n_unused(config.replace(remainder="centroids"), tensors) == 0


@pytest.mark.parametrize("scorer", prescore.list_scorers())
def test_identity_2_exact_inner_is_attention_over_the_selected_keys(scorer):
    for any_case, top_k in zip(CASES[:12], (1, 7, 0.4) * 4, strict=True):
        config = Selected(scorer, top_k, inner=Exact(), remainder="none", sinks=2)
        case = replace(any_case, config=config, is_causal=False, dtype=torch.float64)
        (query, key, value), mask = case.tensors(), case.padding()
        shared = {"key_padding_mask": mask, "generator": case.seed}
        _, aux = prescore.prescored_attention(query, key, value, config, return_aux=True, **shared)
        chosen = prescore.select(key, scorer, top_k=top_k, sinks=2, **shared)
        assert torch.equal(chosen.indices, aux.selection.indices)
        assert torch.equal(chosen.valid, aux.selection.valid)
        weights = full_weights(query, key, key_padding_mask=mask)
        compare(case, subset_weights(weights, membership(chosen, case.n_keys)))


@pytest.mark.parametrize("seed", range(3))
def test_identity_3_merging_a_split_is_the_union_forward_and_backward(seed):
    check_merge_of_split(seed)


def test_identity_3_a_part_that_saw_nothing_changes_nothing():
    query, key, value = attention_tensors(n_query=3, n_keys=5)
    part = prescore.exact_attention(query, key, value)
    nothing = prescore.exact_attention(query, key[:, :, :0], value[:, :, :0])
    for merged in (prescore.merge(part, nothing), prescore.merge(nothing, part)):
        assert_within(merged.output, part.output, 1e-15)
        assert_within(merged.lse, part.lse, 1e-15)
    for blind in (nothing, prescore.merge(nothing, nothing)):
        assert torch.isneginf(blind.lse).all()
        assert not blind.output.any()


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
        assert_equal(by_all, by_selected._replace(lse=by_selected.lse + math.log(17 / 7)), f", {mask}")


@pytest.mark.parametrize("alignment", ["rank", "hash"])
def test_identity_5_overlap_counts_a_key_in_block_and_sample_twice(alignment):
    query, key, value = attention_tensors(heads=2, kv_heads=1, n_query=6, n_keys=17)
    lsh = Lsh(block_size=16, sample_size=9, alignment=alignment)
    config = Selected.paper("key-norm", 7, min_seq_len=0, inner=lsh)
    once, aux = attend((query, key, value), config)
    twice, _ = attend((query, key, value), config.replace(coupling=Coupling(overlap="count")))
    residual, _ = attend((query, key, value), config.replace(inner=lsh.replace(block_size=0)))
    # one block holds all seven keys: with exclusion the residual vanishes, without it is added in full
    selected = aux.selection.indices[..., None].expand(-1, -1, -1, 4)
    exact = prescore.exact_attention(query, key.gather(2, selected), value.gather(2, selected))
    assert_equal(once, exact, ", with exclusion")
    assert_equal(twice, prescore.merge(exact, residual), ", with double counting")


def test_identity_5_the_early_integration_is_all_three_artefacts():
    assert Selected.early().coupling == Coupling(mask="zero", residual_weight="all", overlap="count")
    assert Selected.early().replace(coupling=Coupling()) == Selected.paper()
    assert Selected.paper().coupling == Coupling("exclude", "selected", "exclude", "selected") == Coupling()


@pytest.mark.parametrize(("p", "kind"), [(2.0, KMeans), (1.0, KMedian)])
@pytest.mark.parametrize("rule", ["nearest", "farthest", "sensitivity"])
def test_identity_7_minkowski_at_two_and_one(p, kind, rule):
    key = attention_tensors(batch=2, kv_heads=2, n_keys=127, dim=5, seed=3)[1]
    special = prescore.score(key, kind(rule=rule), generator=1)
    assert torch.equal(prescore.score(key, Minkowski(p=p, rule=rule), generator=1), special)
    other = prescore.score(key, Minkowski(p=1.5, rule=rule), generator=1)
    assert float((other - special).abs().max()) > 1e-3
