"""Nothing leaks from the future: keys and values for every configuration, queries for all but `rank`."""

import pytest
import torch
from attention_checks import FLOAT64, aligned_by_rank, check_future, with_lsh
from oracles.inputs import attention_tensors

import prescore
from prescore import Coupling, Hyper, KMeans, Lsh, Routed, Selected

RANK = Lsh(block_size=3, sample_size=3, n_projections=3, alignment="rank")
HASH = RANK.replace(alignment="hash")
ROUTED = Routed(min_weight=1 / 4, cluster_size=2, chunk_size=4, sinks=1, exact_until=0)
CONFIGS = {
    "paper": Selected.paper(top_k=5, min_seq_len=4, inner=RANK),
    "paper leaf inclusive": Selected.paper(top_k=5, min_seq_len=4, inner=RANK, leaf_inclusive=True),
    "paper hash": Selected.paper(top_k=5, min_seq_len=4, inner=HASH),
    "hyper": Hyper(RANK, min_seq_len=4),
    "hyper hash": Hyper(HASH, min_seq_len=4),
    "early": Selected.early(top_k=5, min_seq_len=4, inner=RANK),
    "early hash": Selected.early(top_k=5, min_seq_len=4, inner=HASH),
    "selected": Selected(top_k=5, min_seq_len=4),
    "selected recent": Selected(top_k=5, min_seq_len=4, recent=2),
    "selected by score": Selected("key-diff", min_score=0.0, min_seq_len=4),
    "routed": ROUTED.replace(min_weight=1 / 8, sinks=2),
    "routed after exact queries": ROUTED.replace(cluster_size=1, chunk_size=2, exact_until=15),
    "centroids hyper": Selected(top_k=9, min_seq_len=4, inner=HASH),
    "sampled": Selected(top_k=5, selector="sample", min_seq_len=4),
    "share and fallback": Selected(top_k=0.3, min_fraction=0.35, min_seq_len=4, inner=HASH),
    "noise": Selected(KMeans(noise=0.3), 5, min_seq_len=4),
    "no leaves": Selected(top_k=5, min_seq_len=0),
    "count": Selected.paper(top_k=5, min_seq_len=4, inner=HASH, coupling=Coupling(overlap="count")),
    "all blocks": Selected.paper(top_k=5, min_seq_len=4, inner=HASH, coupling=Coupling(blocks="all")),
}
for scorer in prescore.list_scorers():
    CONFIGS[f"{scorer} exact"] = Selected(scorer, 5, min_seq_len=4)
    CONFIGS[f"{scorer} hyper"] = Selected.paper(scorer, 5, min_seq_len=4, inner=HASH)
for rule in ("farthest", "cluster-share", "sensitivity", "balanced"):
    CONFIGS[f"kmeans {rule}"] = Selected(KMeans(rule=rule), 5, min_seq_len=4)
STRICT = [name for name, config in CONFIGS.items() if not aligned_by_rank(config)]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_future_changes_nothing(name):
    for cut in (0, 3, 19, 20, 35):
        check_future(CONFIGS[name], cut=cut, queries=name in STRICT)


def test_the_published_alignment_leaks_through_queries():
    # documented and measured, not fixed: sorting queries together lets a later one move an earlier one
    config = with_lsh(CONFIGS["hyper"], block_size=2)
    share = [check_future(config, cut=27, queries=False, seed=seed) for seed in range(5)]
    assert 0.0 < sum(share) / 5 < 0.9
    for seed in range(5):
        check_future(with_lsh(config, alignment="hash"), cut=27, seed=seed)


@pytest.mark.parametrize("name", STRICT)
def test_a_prefix_and_the_last_queries_give_their_part_of_the_result(name):
    query, key, value = attention_tensors(batch=2, heads=2, kv_heads=1, n_keys=37, seed=1)

    def run(*tensors):
        return prescore.prescored_attention(*tensors, config=CONFIGS[name], is_causal=True)

    full = run(query, key, value)
    for length in (1, 4, 17, 31, 36):
        prefix = run(*(t[:, :, :length] for t in (query, key, value)))
        assert float((full[:, :, :length] - prefix).abs().max()) <= FLOAT64, f"the first {length}"
    for n_query in (1, 5, 20):
        last = run(query[:, :, -n_query:], key, value)
        assert float((full[:, :, -n_query:] - last).abs().max()) <= FLOAT64, f"the last {n_query}"
    prescore.prescored_attention(query + 1, value, key, config=CONFIGS[name], is_causal=True)
    assert torch.equal(run(query, key, value), full)  # nothing is cached across calls
