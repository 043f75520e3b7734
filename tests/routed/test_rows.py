"""Rows per query against what the oracle counts."""

import pytest
import torch
from oracles.inputs import attention_tensors

from prescore import Exact, Routed, Selected, prescored_attention
from prescore.attention import Options, attend_counting
from oracles.routed import routed_tables

CONFIG = Routed(chunk_size=32, cluster_size=8, min_weight=1 / 32, exact_until=64)


@pytest.mark.parametrize(("n_query", "n_key", "causal"), [(300, 300, True), (50, 300, True), (70, 290, False)])
@pytest.mark.parametrize("rows", [0, 8, 16])
def test_figures_are_what_the_oracle_reads(n_query, n_key, causal, rows):
    config = CONFIG.replace(rows=rows)
    tensors = attention_tensors(batch=2, heads=2, n_query=n_query, n_keys=n_key, dim=16, seed=2)
    stats = prescored_attention(*tensors, config, is_causal=causal, return_aux=True)[1].stats
    tables = routed_tables(*tensors, config, is_causal=causal).values()
    keys, nodes, found, compared = (
        torch.stack(part).double()
        for part in zip(*((t.keys.sum(1), t.nodes, t.found, t.compared) for t in tables), strict=True)
    )
    routed = nodes > 0
    assert bool(routed.any())
    assert stats["exact_queries"] == int((~routed[0]).sum())
    assert stats["keys_per_query"] == pytest.approx(float((keys + nodes).mean()))
    assert stats["far_keys_read"] == pytest.approx(float(found[routed].mean()))
    assert stats["centroids_per_query"] == pytest.approx(float(nodes[routed].mean()))
    assert stats["keys_compared"] == pytest.approx(float(compared[routed].mean()))


def test_calls_that_read_everything():
    query, key = torch.randn(2, 1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    for config in (Routed(), Exact()):
        for causal, rows in ((True, 20.5), (False, 40.0)):
            stats = prescored_attention(query, key, key, config, is_causal=causal, return_aux=True)[1].stats
            assert stats["keys_per_query"] == rows
        late = prescored_attention(query[:, :, -4:], key, key, config, is_causal=True, return_aux=True)[1].stats
        assert late["keys_per_query"] == (37 + 38 + 39 + 40) / 4


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", ["uniform", "kmeans"])
def test_selections_count_keys_that_are_seen(name, sinks):
    # every key has a value of its own, so a weight that is not 0 is a key that was read
    n, leaf, budget = 256, 32, 16
    query, key = torch.randn(2, 1, 1, n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = Selected(name, budget, min_seq_len=leaf, remainder="none", sinks=sinks)
    value = torch.eye(n, dtype=torch.float64)[None, None]
    output, aux = prescored_attention(query, key, value, config=config, is_causal=True, return_aux=True)
    assert aux.stats["keys_per_query"] == float((output > 0).sum(-1).double().mean())


@pytest.mark.parametrize(
    "config",
    [
        CONFIG.replace(rows=32),
        Routed(),  # exact at this length, by the operator itself
        Exact(),
        Selected.paper("kmeans", 16, min_seq_len=64),
    ],
    ids=["routed", "short", "exact", "paper"],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_counting_changes_neither_the_result_nor_what_is_exact(config, is_causal):
    query, key = torch.randn(2, 1, 1, 400, 16, generator=torch.Generator().manual_seed(0))
    output, count_keys, stats = attend_counting(query, key, key, config, Options(is_causal=is_causal, generator=0))
    options = {"is_causal": is_causal, "generator": 0}
    assert torch.equal(output, prescored_attention(query, key, key, config, **options))
    told = prescored_attention(query, key, key, config, **options, return_aux=True)[1].stats
    assert count_keys() == told["keys_per_query"]
    assert {name: told[name] for name in stats} == dict(stats)
    with pytest.raises(ValueError, match="query"):
        attend_counting(query[0, 0], key, key, config, Options(is_causal=True))
