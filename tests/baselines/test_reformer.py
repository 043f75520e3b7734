import pytest
import torch
from baseline_reference import assert_same, dense, inputs

from prescore.baselines.reformer import reformer_attention
from prescore.rng import Streams


def _visible(query, key, n_buckets, size, n_rounds, is_causal, seed):
    """Which keys each query of one head sees, in loops."""
    n_query, n_keys = len(query), len(key)
    visible = torch.zeros(n_query, n_keys, dtype=torch.bool)
    for number in range(n_rounds):
        rotation = Streams(seed).normal(f"reformer round {number}", key.shape[1], n_buckets // 2, like=key)
        query_hash, key_hash = (
            torch.cat((x @ rotation, -(x @ rotation)), 1).argmax(1).tolist() for x in (query, key)
        )
        for i in range(n_query):
            position = n_keys - n_query + i if is_causal or n_query == n_keys else i * n_keys // n_query
            bucket = [j for j in range(n_keys) if key_hash[j] == query_hash[i]]
            chunk = max(sum(j <= position for j in bucket) - 1, 0) // size
            for j in bucket[max(chunk - 1, 0) * size : (chunk + 1) * size]:
                visible[i, j] |= j <= position or not is_causal
    return visible


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_query", [23, 9])
@pytest.mark.parametrize(("n_buckets", "size", "n_rounds"), [(2, 3, 1), (4, 2, 3), (8, 1, 2), (2, 30, 4)])
def test_equals_the_union_of_rounds(is_causal, n_query, n_buckets, size, n_rounds):
    query, key, value = inputs(n_query=n_query)
    visible = torch.stack(
        [
            torch.stack(
                [
                    _visible(query[b, h], key[b, h // 2], n_buckets, size, n_rounds, is_causal, seed=5)
                    for h in range(4)
                ]
            )
            for b in range(2)
        ]
    )
    got = reformer_attention(
        query,
        key,
        value,
        n_buckets=n_buckets,
        chunk_size=size,
        n_rounds=n_rounds,
        is_causal=is_causal,
        generator=5,
    )
    assert_same(got, dense(query, key, value, visible))


def test_more_queries_than_keys():
    query, key, value = inputs(n_query=31, n_keys=12, heads=1, kv_heads=1)
    visible = torch.stack([_visible(query[b, 0], key[b, 0], 4, 2, 2, False, seed=0)[None] for b in range(2)])
    got = reformer_attention(query, key, value, n_buckets=4, chunk_size=2, n_rounds=2)
    assert_same(got, dense(query, key, value, visible))
