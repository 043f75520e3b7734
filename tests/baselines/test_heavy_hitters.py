import pytest
import torch
from baseline_reference import assert_differ, assert_same, dense, inputs

from prescore.baselines.heavy_hitters import heavy_hitter_attention
from prescore.baselines.oracle import oracle_attention


def _visible(query, key, budget, recent, size):
    """The algorithm for one head, one query at a time, with sets."""
    n_query, n_keys = len(query), len(key)
    start = n_keys - n_query
    visible = torch.zeros(n_query, n_keys, dtype=torch.bool)
    cache = []
    totals = [0.0] * n_keys
    for first in range(0, n_keys, size):
        chunk = list(range(first, min(first + size, n_keys)))
        for position in chunk:
            if position >= start:
                seen = cache + [j for j in chunk if j <= position]
                visible[position - start, seen] = True
                weights = (key[seen] @ query[position - start] * query.shape[-1] ** -0.5).softmax(0)
                for j, weight in zip(seen, weights.tolist(), strict=True):
                    totals[j] += weight
        latest = [j for j in cache + chunk if j >= first + size - recent]
        others = sorted(set(cache + chunk) - set(latest), key=lambda j: (-totals[j], -j))
        cache = latest + others[: budget - len(latest)]
    return visible


@pytest.mark.parametrize(
    ("budget", "recent", "size"), [(0, 0, 5), (3, 0, 5), (4, 2, 3), (4, 4, 1), (6, 3, 1), (9, 0, 4)]
)
@pytest.mark.parametrize("n_query", [23, 9])
def test_equals_eviction_by_hand(budget, recent, size, n_query):
    query, key, value = inputs(batch=2, heads=2, kv_heads=2, n_query=n_query)
    visible = torch.stack(
        [torch.stack([_visible(query[b, h], key[b, h], budget, recent, size) for h in range(2)]) for b in range(2)]
    )
    got = heavy_hitter_attention(query, key, value, budget=budget, recent=recent, chunk_size=size, is_causal=True)
    assert_same(got, dense(query, key, value, visible))


def test_heads_of_a_group_vote_together():
    query, key, value = inputs(batch=1, heads=2, kv_heads=1)
    parallel_group = heavy_hitter_attention(query, key, value, budget=3, chunk_size=4, is_causal=True)
    alone = heavy_hitter_attention(query[:, :1], key, value, budget=3, chunk_size=4, is_causal=True)
    assert_differ([parallel_group.output[:, :1]], [alone.output])
    twice = query[:, :1].expand(-1, 2, -1, -1)
    same = heavy_hitter_attention(twice, key, value, budget=3, chunk_size=4, is_causal=True)
    assert_same([t[:, :1] for t in same], alone)


def test_evicted_keys_do_not_return():
    query, key, value = inputs(batch=1, heads=1, kv_heads=1, dim=2)
    key[:, :, 1] = torch.tensor([-9.0, 0.0])  # shunned at first, so that it falls out
    query[:, :, :12] = torch.tensor([3.0, 0.0])
    query[:, :, 12:] = torch.tensor([-3.0, 0.0])  # wanted by all later ones
    value.requires_grad_()
    got = heavy_hitter_attention(query, key, value, budget=4, chunk_size=4, is_causal=True)
    got.output[:, :, 12:].sum().backward()
    assert (value.grad[:, :, 1] == 0).all()
    assert (value.grad[:, :, 0] != 0).any()


def test_without_causality_it_is_the_oracle():
    tensors = inputs(n_query=9)
    assert_same(heavy_hitter_attention(*tensors, budget=4), oracle_attention(*tensors, budget=4))


def test_a_padded_neighbour_does_not_change_what_is_kept_before_the_first_query():
    # the padded row's queries begin chunks earlier, so the other row evicts keys that nobody has seen
    query, key, value = inputs(n_query=9)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[1, :12] = False
    options = {"budget": 3, "recent": 1, "chunk_size": 4, "is_causal": True}
    got = heavy_hitter_attention(query, key, value, **options, key_padding_mask=mask)
    assert_same([t[:1] for t in got], heavy_hitter_attention(query[:1], key[:1], value[:1], **options))
