"""Nothing leaks from the future: keys and values for every configuration, queries for all but `rank`."""

import pytest
import torch
from attention_checks import aligned_by_rank, with_lsh
from oracles.inputs import attention_tensors

import prescore
from prescore import Coupling, Hyper, KMeans, Lsh, Routed, Selected

EXACTLY = 1e-10
RANK = Lsh(block_size=3, sample_size=3, n_projections=3, alignment="rank")
HASH = RANK.replace(alignment="hash")
PRESETS = {
    "paper": Selected.paper(top_k=5, min_seq_len=4, inner=RANK),
    "paper leaf inclusive": Selected.paper(top_k=5, min_seq_len=4, inner=RANK, leaf_inclusive=True),
    "paper hash": Selected.paper(top_k=5, min_seq_len=4, inner=HASH),
    "hyper": Hyper(RANK, min_seq_len=4),
    "hyper hash": Hyper(HASH, min_seq_len=4),
    "early": Selected.early(top_k=5, min_seq_len=4, inner=RANK),
    "early hash": Selected.early(top_k=5, min_seq_len=4, inner=HASH),
    "selected": Selected(top_k=5, min_seq_len=4),
    "selected recent": Selected(top_k=5, min_seq_len=4, recent=2),
    "routed": Routed(min_weight=1 / 8, cluster_size=2, chunk_size=4, sinks=2, exact_until=0),
    "routed behind an exact beginning": Routed(
        min_weight=1 / 4, cluster_size=1, chunk_size=2, sinks=1, exact_until=15
    ),
    "routed within a tolerance": Routed(
        min_weight=1 / 4, cluster_size=2, chunk_size=4, sinks=1, exact_until=0, tolerance=0.3
    ),
    "centroids hyper": Selected(top_k=9, min_seq_len=4, inner=HASH),
    "sampled": Selected(top_k=5, selector="sample", min_seq_len=4),
    "share and fallback": Selected(top_k=0.3, min_fraction=0.35, min_seq_len=4, inner=HASH),
    "noise": Selected(KMeans(noise=0.3), 5, min_seq_len=4),
    "no leaves": Selected(top_k=5, min_seq_len=0),
    "count": Selected.paper(top_k=5, min_seq_len=4, inner=HASH, coupling=Coupling(overlap="count")),
}
for scorer in prescore.list_scorers():
    PRESETS[f"{scorer} exact"] = Selected(scorer, 5, min_seq_len=4)
    PRESETS[f"{scorer} hyper"] = Selected.paper(scorer, 5, min_seq_len=4, inner=HASH)
for rule in ("farthest", "cluster-share", "sensitivity", "balanced"):
    PRESETS[f"kmeans {rule}"] = Selected(KMeans(rule=rule), 5, min_seq_len=4)
STRICT = [name for name, config in PRESETS.items() if not aligned_by_rank(config)]

N_KEYS = 37


def _tensors(seed, spread=1.5):
    return attention_tensors(batch=2, heads=2, kv_heads=1, n_keys=N_KEYS, dim=4, seed=seed, spread=spread)


def _moved(config, cut, names, *, seed=0):
    """How far rows up to `cut` move, `[B, H, cut + 1]`, when the named inputs change after it."""
    tensors, other = _tensors(seed), _tensors(seed + 1000, spread=4.0)
    changed = [
        torch.cat((t[:, :, : cut + 1], o[:, :, cut + 1 :]), dim=2) if name in names else t
        for name, t, o in zip("qkv", tensors, other, strict=True)
    ]
    before, after = (
        prescore.prescored_attention(*t, config=config, is_causal=True, generator=seed) for t in (tensors, changed)
    )
    difference = (after - before).abs().amax(-1)
    assert bool((difference[:, :, cut + 1 :] > 1e-3).any()), "later rows must feel the change"
    return difference[:, :, : cut + 1]


@pytest.mark.parametrize("cut", [0, 3, 19, 20, 35])
@pytest.mark.parametrize("name", PRESETS)
def test_future_keys_and_values_change_nothing(name, cut):
    assert float(_moved(PRESETS[name], cut, "kv").max()) <= EXACTLY


@pytest.mark.parametrize("cut", [3, 19, 20, 35])
@pytest.mark.parametrize("name", STRICT)
def test_future_queries_change_nothing(name, cut):
    assert float(_moved(PRESETS[name], cut, "q").max()) <= EXACTLY


def test_the_published_alignment_leaks_through_queries():
    # documented and measured, not fixed: sorting queries together lets a later one move an earlier one
    config = with_lsh(PRESETS["hyper"], block_size=2)
    moved = torch.cat([_moved(config, 27, "q", seed=seed).flatten() for seed in range(5)])
    share = float((moved > EXACTLY).double().mean())
    assert 0.0 < share < 0.9
    hashed = torch.cat([_moved(with_lsh(config, alignment="hash"), 27, "q", seed=s).flatten() for s in range(5)])
    assert float(hashed.max()) <= EXACTLY


@pytest.mark.parametrize("length", [1, 4, 17, 31, 36])
@pytest.mark.parametrize("name", STRICT)
def test_a_prefix_gives_the_prefix_of_the_result(name, length):
    tensors = _tensors(1)
    whole = prescore.prescored_attention(*tensors, config=PRESETS[name], is_causal=True)
    prefix = prescore.prescored_attention(
        *(t[:, :, :length] for t in tensors), config=PRESETS[name], is_causal=True
    )
    assert float((whole[:, :, :length] - prefix).abs().max()) <= EXACTLY


@pytest.mark.parametrize("n_query", [1, 5, 20])
@pytest.mark.parametrize("name", STRICT)
def test_queries_at_the_end_get_the_end_of_the_result(name, n_query):
    query, key, value = _tensors(1)
    whole = prescore.prescored_attention(query, key, value, config=PRESETS[name], is_causal=True)
    last = prescore.prescored_attention(query[:, :, -n_query:], key, value, config=PRESETS[name], is_causal=True)
    assert float((whole[:, :, -n_query:] - last).abs().max()) <= EXACTLY


def test_nothing_is_cached_across_calls():
    config = PRESETS["selected"]
    first = prescore.prescored_attention(*_tensors(1), config=config, is_causal=True)
    prescore.prescored_attention(*_tensors(2), config=config, is_causal=True)
    assert torch.equal(prescore.prescored_attention(*_tensors(1), config=config, is_causal=True), first)
