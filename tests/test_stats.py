"""`aux.stats`: documented fields, readable as a mapping."""

import pytest
import torch
from oracles.inputs import attention_tensors

import prescore
from prescore import Coupling, Exact, Hyper, Lsh, Routed, Selected

CONFIGS = (
    Routed(min_weight=1 / 8, cluster_size=4, chunk_size=8, sinks=2, exact_until=8),
    Routed(min_weight=1 / 8, cluster_size=4, chunk_size=8, sinks=2, exact_until=8, tolerance=0.3),
    Selected(top_k=6, min_seq_len=8),
    Hyper(Lsh(4, 4), min_seq_len=8),
    Exact(),
)


def stats_of(config, tensors, **options):
    return prescore.prescored_attention(*tensors, config=config, return_aux=True, **options)[1].stats


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_stats_are_fields_and_a_mapping(config):
    tensors = attention_tensors(batch=1, heads=2, kv_heads=1, n_keys=45, seed=1)
    stats = stats_of(config, tensors, is_causal=True)
    assert isinstance(stats, prescore.Stats)
    assert stats.backend == stats["backend"] == ("plain" if isinstance(config, Routed) else "cpu-flash")
    assert stats.keys_per_query == stats["keys_per_query"] > 0
    assert sum(stats.seconds.values()) > 0
    assert (stats.mass_read is None) == isinstance(config, Routed)
    assert (stats.keys_compared is None) == (not isinstance(config, Routed))
    assert (stats.error_bound_max is None) == (getattr(config, "tolerance", None) is None)
    assert len(stats) == len(list(stats))
    assert f"keys_per_query={stats.keys_per_query!r}" in repr(stats)
    # numbers without a field describe the layout of routed attention
    assert not stats.details or isinstance(config, Routed)
    with pytest.raises(KeyError, match="nothing"):
        stats["nothing"]


def test_a_number_without_a_field_is_a_detail():
    known = {"backend": "b", "seconds": {}, "keys_per_query": 1.0, "keys_selected": 2.0}
    stats = prescore.Stats.of({**known, "new": 3})
    assert (stats.details, stats["new"]) == ({"new": 3}, 3)


def test_keys_and_centroids_are_counted_apart_and_masked_keys_not_at_all():
    tensors = attention_tensors(batch=1, heads=2, kv_heads=1, n_keys=32, seed=1)
    centroids = Selected("key-norm", 6, sinks=2, remainder=prescore.KMeans(n_clusters=3), min_seq_len=0)
    stats = stats_of(centroids, tensors)
    assert (stats.keys_per_query, stats.centroids_per_query, stats.keys_selected) == (6, 3, 6)
    # one block of all keys, of which the selected ones are read; no residual
    blocks = centroids.replace(remainder="none", inner=Lsh(64, 0), coupling=Coupling(blocks="all"))
    stats = stats_of(blocks, tensors)
    assert (stats.keys_per_query, stats.centroids_per_query, stats.mass_read) == (6, 0, 1)
    assert 0 < stats_of(Hyper(Lsh(4, 4), min_seq_len=0), tensors).mass_read < 1


def test_padding_is_never_counted():
    tensors = [torch.randn(2, 1, 8, 4) for _ in range(3)]
    mask = torch.arange(8) < torch.tensor([[8], [4]])
    # eight queries see 8 keys, four see 4; causal: 1 to 8, and 1 to 4
    for config, is_causal, keys in ((Exact(), False, 20 / 3), (Exact(), True, 46 / 12), (Routed(), False, None)):
        stats = stats_of(config, tensors, is_causal=is_causal, key_padding_mask=mask)
        assert stats.keys_selected == 6
        assert keys is None or stats.keys_per_query == pytest.approx(keys)
