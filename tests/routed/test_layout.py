"""The geometry of routed attention, counted key by key."""

import pytest
import torch

from prescore import Routed
from oracles.routed import Sequence
from prescore.routed.layout import make_layout

CONFIGS = [
    Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0),
    Routed(min_weight=1 / 16, cluster_size=5, chunk_size=13, sinks=0, exact_until=0),
    Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=70),
    Routed(min_weight=1 / 16, cluster_size=1, chunk_size=1, sinks=1, exact_until=0),
    Routed(min_weight=1 / 16, cluster_size=8, chunk_size=8, sinks=200, exact_until=0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_query", "n_key"), [(130, 130), (40, 130), (1, 130), (36, 36), (1, 1), (34, 34)])
def test_chunks_and_keys_met_are_those_of_the_definition(config, causal, n_query, n_key):
    layout = make_layout(n_query, n_key, causal=causal, config=config)
    sequence = Sequence.of(torch.ones(n_key, dtype=torch.bool), n_query, causal, config)
    if not causal and sequence.reads_all:
        return  # decided before there is a layout
    wanted = [sequence.chunks_seen(i) for i in range(n_query)]
    assert layout.chunks_seen(torch.arange(n_query) + layout.first).tolist() == wanted
    assert layout.n_chunks == max(wanted) or n_query < n_key
    assert layout.n_exact == sum(seen == 0 for seen in wanted)
    read = [int(sequence.read_anyway(i).sum()) for i in range(n_query)]
    nodes = [seen * layout.nodes_per_chunk for seen in wanted]
    assert layout.rows_in_any_case().tolist() == [a + b for a, b in zip(read, nodes, strict=True)]


@pytest.mark.parametrize(
    ("chunk_size", "leaf_size", "levels", "leaf"),
    [(512, 128, 2, 128), (512, 512, 0, 512), (512, 100, 3, 64), (500, 128, 2, 125), (3, 1, 2, 1), (13, 5, 2, 3)],
)
def test_sizes_are_rounded_to_full_trees(chunk_size, leaf_size, levels, leaf):
    layout = make_layout(9, 9, causal=True, config=Routed(chunk_size=chunk_size, cluster_size=leaf_size))
    assert (layout.levels, layout.leaf, layout.nodes_per_chunk) == (levels, leaf, 2**levels)
    assert layout.chunk == leaf * 2**levels
    assert layout.leaf <= leaf_size


def test_the_sizes_of_a_query_do_not_depend_on_later_keys():
    config = CONFIGS[0]
    for length in range(1, 140):
        short = make_layout(length, length, causal=True, config=config)
        step = make_layout(1, length, causal=True, config=config)
        long = make_layout(139, 139, causal=True, config=config)
        position = torch.tensor([length - 1])
        seen = long.chunks_seen(position)
        assert torch.equal(short.chunks_seen(position), seen)
        assert torch.equal(step.chunks_seen(position), seen)
        assert int(seen) == step.n_chunks == short.n_chunks
