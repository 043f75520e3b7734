"""Rows per query against what the oracle counts."""

import pytest
import torch
from attention_checks import lanes
from copying_heads import CONFIG as COPY_CONFIG
from copying_heads import SCALE, copying

from prescore import Exact, Routed, Selected, prescored_attention
from prescore.api import Options, attend_counting
from prescore.routed.heads import HeadLayout
from prescore.routed.layout import make_layout
from prescore.routed.rows import mean_rows, rows_of_queries
from prescore.testing.routed import routed_weights


def counted(query, key, value, config, *, is_causal):
    """Keys and stand-ins of each query that the oracle lets into the softmax, `[B, Hq, Nq]`."""
    weights = routed_weights(query, key, value, config, is_causal=is_causal, key_padding_mask=None, scale=SCALE)
    both = torch.cat((weights.keys, weights.stand_ins), dim=-1)
    return (~torch.isneginf(both)).sum(-1).double()


@pytest.mark.parametrize(("n_query", "n_key", "causal"), [(400, 400, True), (150, 400, True), (50, 388, False)])
@pytest.mark.parametrize("rows", [0, 32, 128, 4096])
def test_every_query_is_counted_as_the_oracle_reads(n_query, n_key, causal, rows):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, n_query, 16, generator=generator, dtype=torch.float64)
    key = torch.randn(1, 1, n_key, 16, generator=generator, dtype=torch.float64)
    config = Routed(chunk_size=32, leaf_size=8, rows=rows, exact_until=100 if causal else 0)
    met = counted(query, key, key, config, is_causal=causal)
    layout = make_layout(n_query, n_key, causal=causal, config=config)
    assert layout.n_levels == 0
    # the stand-in of a leaf that is read is met too, when it is chosen, and then left out
    pieces = layout.pieces_seen(torch.arange(n_query) + layout.first)
    left_out = (pieces * layout.leaves).clamp_max(layout.n_chosen)
    torch.testing.assert_close(met + left_out, rows_of_queries(layout).expand(met.shape))


def test_heads_that_copy_are_counted_by_their_own_geometry():
    tensors = [tensor.detach() for tensor in copying()]
    _, stats = lanes(*tensors, COPY_CONFIG, scale=SCALE)
    coarse = make_layout(700, 700, causal=True, config=COPY_CONFIG)
    met = counted(*tensors, COPY_CONFIG, is_causal=True)
    assert stats["fine_heads"] == 1
    assert met.shape[1] == 4  # two query heads for each key head
    mean = float(met.mean())
    # beside what is unmasked: stand-ins of leaves that were read, at most as many as leaves are chosen
    assert mean < stats["rows_per_query"] < mean + (2 + 24) / 2
    assert stats["rows_per_query"] > mean_rows([HeadLayout(coarse)], 2) + 5  # more stand-ins, equal far rows


def test_a_call_tells_what_its_queries_meet():
    query, key = torch.randn(2, 1, 1, 400, 16, generator=torch.Generator().manual_seed(0))
    config = Routed(chunk_size=32, leaf_size=8, rows=32, exact_until=64)
    stats = prescored_attention(query, key, key, config=config, is_causal=True, return_aux=True)[1].stats
    layout = make_layout(400, 400, causal=True, config=config)
    assert stats["rows_per_query"] == float(rows_of_queries(layout).mean())
    most = sum(stats[kind] for kind in ("far_rows", "single_rows", "stand_in_rows", "local_rows"))
    assert float(rows_of_queries(layout)[-1]) <= most


def test_calls_that_read_everything():
    query, key = torch.randn(2, 1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    for config in (Routed(), Exact()):
        for causal, rows in ((True, 20.5), (False, 40.0)):
            stats = prescored_attention(query, key, key, config, is_causal=causal, return_aux=True)[1].stats
            assert stats["rows_per_query"] == rows
        late = prescored_attention(query[:, :, -4:], key, key, config, is_causal=True, return_aux=True)[1].stats
        assert late["rows_per_query"] == (37 + 38 + 39 + 40) / 4


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", ["uniform", "kmeans"])
def test_selections_count_keys_that_are_seen(name, sinks):
    # every key has a value of its own, so a weight that is not 0 is a key that was read
    n, leaf, budget = 256, 32, 16
    query, key = torch.randn(2, 1, 1, n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = Selected(name, budget, min_seq_len=leaf, remainder="none", sinks=sinks)
    value = torch.eye(n, dtype=torch.float64)[None, None]
    output, aux = prescored_attention(query, key, value, config=config, is_causal=True, return_aux=True)
    assert aux.stats["rows_per_query"] == float((output > 0).sum(-1).double().mean())


def test_recomputed_queries_meet_every_key_too():
    query, key = torch.randn(2, 1, 1, 400, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = Routed(chunk_size=32, leaf_size=8, rows=8, exact_until=64)
    rows = []
    for tolerance in (None, 0.0):
        call = {"config": config.replace(tolerance=tolerance), "is_causal": True, "return_aux": True}
        rows.append(prescored_attention(query, key, key, **call)[1].stats)
    first = rows[1]["exact_queries"]
    assert rows[1]["recomputed_queries"] == 400 - first
    again = sum(range(first + 1, 401)) / 400
    assert rows[1]["rows_per_query"] == pytest.approx(rows[0]["rows_per_query"] + again)


@pytest.mark.parametrize(
    "config",
    [
        Routed(chunk_size=32, leaf_size=8, rows=32, exact_until=64),
        Routed(),  # exact at this length, by the operator itself
        Exact(),
        Selected.paper("kmeans", 16, min_seq_len=64),
    ],
    ids=["routed", "short", "exact", "paper"],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_counting_changes_neither_the_result_nor_what_is_exact(config, is_causal):
    query, key = torch.randn(2, 1, 1, 400, 16, generator=torch.Generator().manual_seed(0))
    output, count_rows = attend_counting(query, key, key, config, Options(is_causal=is_causal, generator=0))
    options = {"is_causal": is_causal, "generator": 0}
    assert torch.equal(output, prescored_attention(query, key, key, config, **options))
    stats = prescored_attention(query, key, key, config, **options, return_aux=True)[1].stats
    assert count_rows() == stats["rows_per_query"]
    with pytest.raises(ValueError, match="query"):
        attend_counting(query[0, 0], key, key, config, Options(is_causal=True))
