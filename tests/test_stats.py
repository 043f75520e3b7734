"""`aux.stats`: documented fields, readable as a mapping."""

import pytest
from oracles.inputs import attention_tensors

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected

CONFIGS = (
    Routed(min_weight=1 / 8, cluster_size=4, chunk_size=8, sinks=2, exact_until=8),
    Routed(min_weight=1 / 8, cluster_size=4, chunk_size=8, sinks=2, exact_until=8, tolerance=0.3),
    Selected(top_k=6, min_seq_len=8),
    Hyper(Lsh(4, 4), min_seq_len=8),
    Exact(),
)


def test_stats_are_fields_and_a_mapping():
    tensors = attention_tensors(batch=1, heads=2, kv_heads=1, n_keys=45, seed=1)
    for config in CONFIGS:
        stats = prescore.prescored_attention(*tensors, config=config, is_causal=True, return_aux=True)[1].stats
        assert isinstance(stats, prescore.Stats)
        assert stats.backend == stats["backend"] == "cpu-flash"
        assert stats.keys_per_query == stats["keys_per_query"] > 0
        assert sum(stats.seconds.values()) > 0
        assert (stats.mass_read is None) == isinstance(config, Routed)
        assert (stats.keys_compared is None) == (not isinstance(config, Routed))
        assert (stats.error_bound_max is None) == (getattr(config, "tolerance", None) is None)
        assert len(stats) == len(list(stats))
        assert f"keys_per_query={stats.keys_per_query!r}" in repr(stats)
        # what has no field of its own is the geometry of routed attention
        assert not stats.details or isinstance(config, Routed)
    with pytest.raises(KeyError, match="nothing"):
        stats["nothing"]
    known = prescore.Stats.of(
        {"backend": "b", "seconds": {}, "keys_per_query": 1.0, "keys_selected": 2.0, "new": 3}
    )
    assert (known.details, known["new"]) == ({"new": 3}, 3)
