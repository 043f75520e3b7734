"""Rows per query against what the dense reference does not mask."""

import pytest
import torch
from test_routed_heads import CONFIG as COPY_CONFIG
from test_routed_heads import copying, options

from prescore import PrescoreConfig, prescored_attention
from prescore.attention import routed_reference as reference
from prescore.attention.routed import routed_attention
from prescore.attention.routed_heads import HeadLayout
from prescore.attention.routed_layout import make_layout
from prescore.attention.routed_rows import mean_rows, rows_of_queries
from prescore.pipeline import attend_counting


def unmasked(monkeypatch, run):
    """Columns of each query that the reference lets into the softmax, one tensor for each of its passes."""
    counts, real = [], torch.logsumexp

    def spy(logits, dim):
        counts.append((~torch.isneginf(logits)).sum(dim).double())
        return real(logits, dim=dim)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "logsumexp", spy)
        run()
    return counts


@pytest.mark.parametrize(("n_query", "n_key", "causal"), [(400, 400, True), (150, 400, True), (50, 388, False)])
@pytest.mark.parametrize("rows", [0, 32, 128, 4096])
def test_every_query_is_counted_as_the_reference_reads(monkeypatch, n_query, n_key, causal, rows):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, n_query, 16, generator=generator, dtype=torch.float64)
    key = torch.randn(1, 1, n_key, 16, generator=generator, dtype=torch.float64)
    config = PrescoreConfig(chunk_size=32, leaf_size=8, rows=rows, min_seq_len=100 if causal else 0)
    call = options(config) | {"is_causal": causal}
    (met,) = unmasked(monkeypatch, lambda: reference.routed_reference(query, key, key, **call))
    layout = make_layout(n_query, n_key, causal=causal, config=config)
    assert layout.n_levels == 0
    # the stand-in of a leaf that is read is met too, when it is chosen, and then left out
    pieces = layout.pieces_seen(torch.arange(n_query) + layout.first)
    left_out = (pieces * layout.leaves).clamp_max(layout.n_chosen)
    counted = rows_of_queries(layout).expand(met.shape)
    torch.testing.assert_close(met + left_out, counted)


def test_heads_that_copy_are_counted_by_their_own_geometry(monkeypatch):
    tensors = copying()
    _, stats = routed_attention(*tensors, **options())
    coarse = make_layout(700, 700, causal=True, config=COPY_CONFIG)
    first, *passes = unmasked(monkeypatch, lambda: reference.routed_reference(*tensors, **options()))
    assert stats["fine_heads"] == 1
    assert len(passes) == 2  # one head each
    assert first.shape[1] == 2
    mean = sum(float(met.mean()) for met in passes) / 2
    # beside what is unmasked: stand-ins of leaves that were read, at most as many as leaves are chosen
    assert mean < stats["rows_per_query"] < mean + (2 + 24) / 2
    assert stats["rows_per_query"] > mean_rows([HeadLayout(coarse)], 2) + 5  # more stand-ins, equal far rows


def test_a_call_tells_what_its_queries_meet():
    query, key = torch.randn(2, 1, 1, 400, 16, generator=torch.Generator().manual_seed(0))
    config = PrescoreConfig(chunk_size=32, leaf_size=8, rows=32, min_seq_len=64)
    stats = prescored_attention(query, key, key, config=config, is_causal=True, return_aux=True)[1].stats
    layout = make_layout(400, 400, causal=True, config=config)
    assert stats["rows_per_query"] == float(rows_of_queries(layout).mean())
    most = sum(stats[kind] for kind in ("far_rows", "single_rows", "stand_in_rows", "local_rows"))
    assert float(rows_of_queries(layout)[-1]) <= most


def test_calls_that_read_everything():
    query, key = torch.randn(2, 1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    for causal, rows in ((True, 20.5), (False, 40.0)):
        stats = prescored_attention(query, key, key, is_causal=causal, return_aux=True)[1].stats
        assert stats["rows_per_query"] == rows
    late = prescored_attention(query[:, :, -4:], key, key, is_causal=True, return_aux=True)[1].stats
    assert late["rows_per_query"] == (37 + 38 + 39 + 40) / 4


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", ["uniform", "kmeans"])
def test_selections_count_keys_that_are_seen(name, sinks):
    # every key has a value of its own, so a weight that is not 0 is a key that was read
    n, leaf, budget = 256, 32, 16
    query, key = torch.randn(2, 1, 1, n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = PrescoreConfig.paper(name, budget, min_seq_len=leaf, inner="exact", sinks=sinks)
    value = torch.eye(n, dtype=torch.float64)[None, None]
    output, aux = prescored_attention(query, key, value, config=config, is_causal=True, return_aux=True)
    assert aux.stats["rows_per_query"] == float((output > 0).sum(-1).double().mean())


def test_recomputed_queries_meet_every_key_too():
    query, key = torch.randn(2, 1, 1, 400, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = PrescoreConfig(chunk_size=32, leaf_size=8, rows=8, min_seq_len=64)
    rows = []
    for tolerance in (None, 0.0):
        call = {"config": config.replace(tolerance=tolerance), "is_causal": True, "return_aux": True}
        rows.append(prescored_attention(query, key, key, **call)[1].stats)
    first = rows[1]["exact_queries"]
    assert rows[1]["recomputed_queries"] == 400 - first
    again = sum(range(first + 1, 401)) / 400
    assert rows[1]["rows_per_query"] == pytest.approx(rows[0]["rows_per_query"] + again)


def test_counting_changes_neither_the_result_nor_what_is_exact():
    query, key = torch.randn(2, 1, 1, 400, 16, generator=torch.Generator().manual_seed(0))
    for config, counted in (
        (PrescoreConfig(chunk_size=32, leaf_size=8, rows=32, min_seq_len=64), True),
        (PrescoreConfig(), False),  # exact at this length, by the operator itself
        (PrescoreConfig.paper("kmeans", 16, min_seq_len=64), False),
    ):
        output, rows = attend_counting(query, key, key, config, is_causal=True, generator=0)
        assert (rows is not None) == counted
        wanted = prescored_attention(query, key, key, config=config, is_causal=True, generator=0)
        assert torch.equal(output, wanted)
    with pytest.raises(ValueError, match="query"):
        attend_counting(query[0, 0], key, key, PrescoreConfig(chunk_size=32, min_seq_len=0), is_causal=True)
