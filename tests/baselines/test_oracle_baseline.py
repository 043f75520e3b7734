import pytest
import torch
from baseline_reference import assert_same, dense, inputs

from prescore.baselines.oracle import oracle_attention


def _weights(query, key):
    """Softmax weights with the query heads of a KV head side by side, `[B, Hkv, G * Nq, Nk]`."""
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    return (grouped @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)


def _keep_best(sums, budget):
    kept = torch.zeros_like(sums, dtype=torch.bool)
    return kept.scatter(-1, sums.topk(min(budget, sums.shape[-1]), dim=-1).indices, True)


@pytest.mark.parametrize("budget", [0, 1, 6])
@pytest.mark.parametrize("n_query", [23, 31, 4])
def test_keeps_the_largest_column_sums(budget, n_query):
    query, key, value = inputs(n_query=n_query)
    kept = _keep_best(_weights(query, key).sum(2), budget).repeat_interleave(2, 1)
    got = oracle_attention(query, key, value, budget=budget)
    assert_same(got, dense(query, key, value, kept[:, :, None].expand(2, 4, n_query, 23)))


@pytest.mark.parametrize("n_query", [23, 11])
def test_causal_chunks_choose_among_their_past(n_query):
    query, key, value = inputs(n_query=n_query)
    start = 23 - n_query
    visible = torch.zeros(2, 4, n_query, 23, dtype=torch.bool)
    for first in range(0, 23, 5):
        rows = range(max(first, start), min(first + 5, 23))
        for position in rows:
            visible[:, :, position - start, first : position + 1] = True
        if first and len(rows):
            own = slice(rows.start - start, rows.stop - start)
            sums = _weights(query[:, :, own], key[:, :, :first]).sum(2)
            visible[:, :, own, :first] = _keep_best(sums, 3).repeat_interleave(2, 1)[:, :, None]
    got = oracle_attention(query, key, value, budget=3, chunk_size=5, is_causal=True)
    assert_same(got, dense(query, key, value, visible))
