"""No query depends on later positions, on other sequences, on padding, on other heads, or on earlier calls."""

import random
from dataclasses import replace
from functools import partial

import attention_checks
import pytest
import torch
from attention_checks import FLOAT64, aligned_by_rank, assert_equal, attend
from fuzz_cases import random_case
from fuzz_oracles import batch_and_padding, features_tie
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors

import prescore
from fuzz import check
from prescore import Coupling, Hyper, KMeans, Lsh, Routed, Selected
from prescore.scoring.rules import RULES

RANK = Lsh(block_size=3, sample_size=3, n_projections=3, alignment="rank")
HASH = RANK.replace(alignment="hash")
CONFIGS = {
    **attention_checks.CONFIGS,
    "leaf inclusive": Selected.paper(top_k=5, min_seq_len=4, inner=RANK, leaf_inclusive=True),
    "early hash": Selected.early(top_k=5, min_seq_len=4, inner=HASH),
    "recent": Selected(top_k=5, min_seq_len=4, recent=2),
    "by score": Selected("key-diff", min_score=0.0, min_seq_len=4),
    "routed after exact queries": Routed(1 / 4, cluster_size=1, chunk_size=2, sinks=1, exact_until=15),
    "share and fallback": Selected(top_k=0.3, min_fraction=0.35, min_seq_len=4, inner=HASH),
    "no leaves": Selected(top_k=5, min_seq_len=0),
    "all blocks": Selected.paper(top_k=5, min_seq_len=4, inner=HASH, coupling=Coupling(blocks="all")),
    **{f"{name} exact": Selected(name, 5, min_seq_len=4) for name in prescore.list_scorers()},
    **{f"{name} hyper": Selected.paper(name, 5, min_seq_len=4, inner=HASH) for name in prescore.list_scorers()},
    **{f"kmeans {rule}": Selected(KMeans(rule=rule), 5, min_seq_len=4) for rule in RULES},
}
STRICT = [name for name, config in CONFIGS.items() if not aligned_by_rank(config)]
SIZES = (1, 6, 23, 37, 40)
PLAIN = {"given": False, "dropout_p": 0.0, "keys": "gaussian", "backend": "auto"}
each_config = pytest.mark.parametrize("name", CONFIGS)


def cases(name, oracle):
    """Random calls of the fuzzer with a configuration of the table, and few keys."""
    for number in range(15):
        case = random_case(random.Random(f"{oracle}/{number}"))
        n_keys = SIZES[number % len(SIZES)]
        n_query = n_keys if case.n_query == case.n_keys else min(case.n_query, n_keys)
        yield replace(case, config=CONFIGS[name], n_keys=n_keys, n_query=n_query, **PLAIN)


@each_config
@pytest.mark.parametrize("oracle", ["causality", "last_queries"])
def test_the_future_changes_nothing_and_the_last_queries_are_the_end(name, oracle):
    applied = sum(check(oracle, case) for case in cases(name, oracle))
    assert applied or (oracle == "last_queries" and name not in STRICT)


@each_config
def test_a_sequence_alone_and_padded_in_a_batch(name):
    for case in cases(name, "batch"):
        if not features_tie(case) and (case.batch > 1 or case.mask != "none"):
            batch_and_padding(case, flipped=0)


@pytest.mark.parametrize("is_causal", [False, True])
@each_config
def test_a_head_alone_and_beside_another(name, is_causal):
    tensors = attention_tensors(batch=4, heads=4, kv_heads=2, n_keys=35, seed=9)
    both, _ = attend(tensors, CONFIGS[name], is_causal=is_causal)
    alone, _ = attend([tensors[0][:, :2], *(t[:, :1] for t in tensors[1:])], CONFIGS[name], is_causal=is_causal)
    assert_equal(alone, prescore.Attended(both.output[:, :2], both.lse[:, :2]), ", KV head 0")
    # a head draws by its number, so the second one stays second
    query, key, value = tensors
    others = (
        torch.cat((query[:, :2].flip(2), query[:, 2:]), dim=1),
        *(torch.cat((table[:, :1] * 2 + 1, table[:, 1:]), dim=1) for table in (key, value)),
    )
    beside, _ = attend(others, CONFIGS[name], is_causal=is_causal)
    second = [prescore.Attended(result.output[:, 2:], result.lse[:, 2:]) for result in (beside, both)]
    assert_equal(*second, ", KV head 1")


RANDOM = {
    "uniform": Selected("uniform", 5, min_seq_len=4, sinks=0),
    "sample": Selected("key-norm", 5, min_seq_len=4, selector="sample", sinks=0),
    "residual": Hyper(Lsh(0, 5), min_seq_len=4),
    "blocks and residual": Selected.paper(KMeans(n_clusters=3), 8, min_seq_len=4, inner=HASH),
    "noise": Selected(KMeans(n_clusters=3, noise=0.5), 5, min_seq_len=4),
    "sketch": Selected(prescore.Leverage(sketch_size=8), 5, min_seq_len=4),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_one_seed_for_each_sequence_gives_each_what_it_has_alone(name, is_causal):
    one = attention_tensors(batch=1, heads=2, kv_heads=2, n_keys=40, seed=9)
    tensors = [table.expand(3, -1, -1, -1) for table in one]
    config, options = RANDOM[name], {"is_causal": is_causal}
    both, _ = attend(tensors, config, generator=[3, 8, 3], **options)
    for row, seed in enumerate((3, 8, 3)):
        alone, _ = attend(one, config, generator=seed, **options)
        assert_equal(alone, prescore.Attended(both.output[row : row + 1], both.lse[row : row + 1]), f", row {row}")
    assert not torch.allclose(both.output[0], both.output[1])
    shared, _ = attend(tensors, config, generator=3, **options)
    assert_equal(shared, prescore.Attended(both.output[[0, 0, 0]], both.lse[[0, 0, 0]]))


@pytest.mark.parametrize("name", ["uniform", "sample"])
def test_heads_and_block_pairs_select_by_draws_of_their_own(name):
    # every head and every leaf holds the same keys: only the draws differ
    query, key, value = (t.repeat(1, 3, 4, 1) for t in attention_tensors(heads=1, kv_heads=1, n_keys=32, seed=9))
    config = RANDOM[name].replace(min_seq_len=32)
    _, aux = attend((query, key, value), config, is_causal=True)
    pairs = aux.selection[:2]  # of the leaf's size, before the larger one
    chosen = {tuple((head % 32).tolist()) for pair in pairs for head in pair.indices[0]}
    assert len(chosen) == 6


def test_heads_draw_their_own_residual_samples():
    query, key, value = (t.repeat(1, 3, 1, 1) for t in attention_tensors(heads=1, kv_heads=1, n_keys=32, seed=9))
    found, _ = attend((query, key, value), RANDOM["residual"].replace(min_seq_len=0))
    assert all(not torch.allclose(found.output[0, i], found.output[0, j]) for i in range(3) for j in range(i))


@pytest.mark.parametrize("name", STRICT)
def test_a_prefix_gives_its_part_of_the_result(name):
    query, key, value = attention_tensors(batch=2, heads=2, kv_heads=1, n_keys=37, seed=1)

    run = partial(prescore.prescored_attention, config=CONFIGS[name], is_causal=True)
    full = run(query, key, value)
    for length in (1, 4, 17, 31, 36):
        prefix = run(*(t[:, :, :length] for t in (query, key, value)))
        assert_within(prefix, full[:, :, :length], FLOAT64, f"the first {length}")
    run(query + 1, value, key)
    assert torch.equal(run(query, key, value), full)  # nothing is cached across calls


@pytest.mark.parametrize("alignment", ["rank", "hash"])
def test_the_published_alignment_leaks_through_queries(alignment):
    # documented and measured, not fixed: sorting queries together lets a later one move an earlier one
    query, key, value = attention_tensors(batch=8, heads=2, kv_heads=1, n_keys=37)
    other = torch.cat((query[:, :, :28], 3 * query[:, :, 28:].flip(0)), dim=2)
    config = Hyper(RANK.replace(block_size=2, alignment=alignment), min_seq_len=4)
    before, after = (prescore.prescored_attention(q, key, value, config, is_causal=True) for q in (query, other))
    share = ((after - before).abs().amax(-1)[:, :, :28] > FLOAT64).double().mean()
    assert 0 < share < 0.9 if alignment == "rank" else share == 0
