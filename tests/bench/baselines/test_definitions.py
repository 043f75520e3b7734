"""Each baseline against its definition: which keys a query sees, in loops, then dense attention over them."""

import pytest
import torch
from baseline_reference import assert_differ, assert_same, dense, inputs

from prescore.bench import baselines
from prescore.bench.baselines import performer, tiles
from prescore.rng import Streams

causal_or_not = pytest.mark.parametrize("is_causal", [False, True])


def per_head(visible, batch=2, heads=2):
    """`visible(b, h) -> [Nq, Nk]` as one tensor."""
    return torch.stack([torch.stack([visible(b, h) for h in range(heads)]) for b in range(batch)])


def for_all_queries(member, n_query):
    """`member [B, Hkv, Nk]` as what each of two query heads per KV head sees."""
    return member.repeat_interleave(2, 1)[:, :, None].expand(-1, -1, n_query, -1)


def top(scores, budget):
    best = scores.topk(min(budget, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


def in_chunks(n_query, size, choose, n_keys=23):
    """Own chunk exactly; of the keys before it those of `choose(first, rows) -> [2, 2, first]`."""
    start = n_keys - n_query
    visible = torch.zeros(2, 4, n_query, n_keys, dtype=torch.bool)
    for first in range(0, n_keys, size):
        rows = range(max(first, start), min(first + size, n_keys))
        for position in rows:
            visible[:, :, position - start, first : position + 1] = True
        if first and len(rows):
            own = slice(rows.start - start, rows.stop - start)
            visible[:, :, own, :first] = choose(first, own).repeat_interleave(2, 1)[:, :, None]
    return visible


def leverage(keys):
    return torch.einsum("...nd,...de,...ne->...n", keys, torch.linalg.pinv(keys.mT @ keys), keys)


@pytest.mark.parametrize("n_query", [23, 40, 4])
@pytest.mark.parametrize("options", [{"epsilon": 0.2}, {"epsilon": 2.0}, {"budget": 5, "epsilon": 1e-6}], ids=str)
def test_lev_attention_reads_the_keys_of_high_leverage(n_query, options):
    query, key, value = inputs(n_query=n_query)
    member = top(leverage(key), 5) if "budget" in options else leverage(key) >= options["epsilon"]
    got = baselines.lev_attention(query, key, value, **options)
    assert_same(got, dense(query, key, value, for_all_queries(member, n_query)))
    assert member.any() == (options["epsilon"] < 1)


def test_padded_keys_have_no_leverage():
    query, key, value = inputs(batch=1)
    mask = torch.ones(1, 23, dtype=torch.bool)
    mask[:, [2, 9]] = False
    member = torch.zeros(1, 2, 23, dtype=torch.bool)
    member[:, :, mask[0]] = leverage(key[:, :, mask[0]]) >= 0.4
    got = baselines.lev_attention(query, key, value, epsilon=0.4, key_padding_mask=mask)
    assert_same(got, dense(query, key, value, for_all_queries(member, 23)))


@pytest.mark.parametrize("options", [{"epsilon": 0.6}, {"budget": 4}])
def test_causal_lev_attention_uses_the_leverage_of_the_past(options):
    query, key, value = inputs(n_query=20)

    def choose(first, _):
        scores = leverage(key[:, :, :first])
        return top(scores, 4) if "budget" in options else scores >= options["epsilon"]

    got = baselines.lev_attention(query, key, value, **options, chunk_size=10, is_causal=True)
    assert_same(got, dense(query, key, value, in_chunks(20, 10, choose)))


def weights(query, key):
    """Softmax weights with the query heads of a KV head side by side, `[B, Hkv, G * Nq, Nk]`."""
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    return (grouped @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)


@pytest.mark.parametrize("block", [50, 2**21])
@pytest.mark.parametrize("budget", [0, 1, 6])
@pytest.mark.parametrize("n_query", [23, 31, 4])
def test_the_oracle_reads_the_largest_column_sums(monkeypatch, budget, n_query, block):
    monkeypatch.setattr(tiles, "_LARGEST_BLOCK", block)
    query, key, value = inputs(n_query=n_query)
    member = top(weights(query, key).sum(2), budget)
    got = baselines.oracle_attention(query, key, value, budget=budget)
    assert_same(got, dense(query, key, value, for_all_queries(member, n_query)))


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("n_query", [23, 11])
def test_the_causal_oracle_chooses_among_the_past_of_a_chunk(n_query, budget):
    query, key, value = inputs(n_query=n_query)

    def choose(first, own):
        return top(weights(query[:, :, own], key[:, :, :first]).sum(2), budget)

    got = baselines.oracle_attention(query, key, value, budget=budget, chunk_size=5, is_causal=True)
    assert_same(got, dense(query, key, value, in_chunks(n_query, 5, choose)))


def test_equal_scores_are_ordered_by_place():
    scores = torch.tensor([[2.0, 1.0, 2.0, -torch.inf, 2.0]])
    assert tiles.best_places(scores, 2)[0].tolist() == [[0, 2]]
    assert tiles.best_places(scores, 2, latest=True)[0].tolist() == [[2, 4]]
    places, there = tiles.best_places(scores, 9)
    assert (places.tolist(), there.tolist()) == ([[0, 1, 2, 3, 4]], [[True, True, True, False, True]])


def cached_keys(query, key, budget, recent, size):
    """The algorithm for one head, one query at a time, with sets."""
    n_query, n_keys = len(query), len(key)
    start = n_keys - n_query
    visible = torch.zeros(n_query, n_keys, dtype=torch.bool)
    cache, totals = [], [0.0] * n_keys
    for first in range(0, n_keys, size):
        chunk = list(range(first, min(first + size, n_keys)))
        for position in chunk:
            if position >= start:
                keys = cache + [j for j in chunk if j <= position]
                visible[position - start, keys] = True
                received = (key[keys] @ query[position - start] * query.shape[-1] ** -0.5).softmax(0)
                for j, weight in zip(keys, received.tolist(), strict=True):
                    totals[j] += weight
        latest = [j for j in cache + chunk if j >= first + size - recent]
        others = sorted(set(cache + chunk) - set(latest), key=lambda j: (-totals[j], -j))
        cache = latest + others[: budget - len(latest)]
    return visible


@pytest.mark.parametrize(
    ("budget", "recent", "size"), [(0, 0, 5), (3, 0, 5), (4, 2, 3), (4, 4, 1), (6, 3, 1), (9, 0, 4)]
)
@pytest.mark.parametrize("n_query", [23, 9])
@pytest.mark.parametrize("block", [1, 50, 2**21])
def test_heavy_hitters_are_evicted_as_by_hand(monkeypatch, budget, recent, size, n_query, block):
    monkeypatch.setattr(tiles, "_LARGEST_BLOCK", block)
    query, key, value = inputs(heads=2, n_query=n_query)
    visible = per_head(lambda b, h: cached_keys(query[b, h], key[b, h], budget, recent, size))
    options = {"budget": budget, "recent": recent, "chunk_size": size, "is_causal": True}
    got = baselines.heavy_hitter_attention(query, key, value, **options)
    assert_same(got, dense(query, key, value, visible))


def test_heads_of_a_group_share_a_cache():
    query, key, value = inputs(batch=1, heads=2, kv_heads=1)
    options = {"budget": 3, "chunk_size": 4, "is_causal": True}
    alone = baselines.heavy_hitter_attention(query[:, :1], key, value, **options)
    assert_differ([baselines.heavy_hitter_attention(query, key, value, **options).output[:, :1]], [alone.output])
    twice = baselines.heavy_hitter_attention(query[:, :1].expand(-1, 2, -1, -1), key, value, **options)
    assert_same([t[:, :1] for t in twice], alone)


def test_heavy_hitters_without_causality_are_the_oracle():
    tensors = inputs(n_query=9)
    got, expected = baselines.heavy_hitter_attention, baselines.oracle_attention
    assert_same(got(*tensors, budget=4), expected(*tensors, budget=4))


@causal_or_not
@pytest.mark.parametrize("n_query", [23, 8, 1])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 3), (2, 1), (4, 2), (5, 9), (7, 0), (22, 1), (30, 40)])
def test_streaming_is_a_dense_band(is_causal, n_query, window, sinks):
    query, key, value = inputs(n_query=n_query)
    got = baselines.streaming_attention(query, key, value, window=window, sinks=sinks, is_causal=is_causal)
    i, j = torch.arange(23 - n_query, 23)[:, None], torch.arange(23)
    visible = (j <= i) & ((i - j < window) | (j < sinks)) if is_causal else ((i - j).abs() <= window) | (j < sinks)
    assert_same(got, dense(query, key, value, visible))


def bucket_mates(query, key, n_buckets, size, n_rounds, is_causal, seed):
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


@pytest.mark.parametrize(
    ("n_query", "n_keys", "is_causal"),
    [(23, 23, False), (23, 23, True), (9, 23, False), (9, 23, True), (31, 12, False)],
)
@pytest.mark.parametrize(("n_buckets", "size", "n_rounds"), [(2, 3, 1), (4, 2, 3), (8, 1, 2), (2, 30, 4)])
def test_reformer_is_the_union_of_its_rounds(n_query, n_keys, is_causal, n_buckets, size, n_rounds):
    query, key, value = inputs(n_query=n_query, n_keys=n_keys)
    settings = (n_buckets, size, n_rounds, is_causal, 5)
    visible = per_head(lambda b, h: bucket_mates(query[b, h], key[b, h // 2], *settings), heads=4)
    got = baselines.reformer_attention(
        query, key, value, n_buckets=n_buckets, chunk_size=size, n_rounds=n_rounds, is_causal=is_causal,
        generator=5,
    )  # fmt: skip
    assert_same(got, dense(query, key, value, visible))


@causal_or_not
@pytest.mark.parametrize("n_query", [23, 9])
def test_performer_is_the_kernel_of_its_features(monkeypatch, is_causal, n_query):
    monkeypatch.setattr(performer, "_CHUNK", 4)
    query, key, value = inputs(n_query=n_query)
    got = baselines.performer_attention(
        query, key, value, n_features=20, is_causal=is_causal, scale=0.3, generator=7
    )
    directions = performer.orthogonal_features(20, 8, Streams(7), like=query)

    def features(rows):
        rows = rows * 0.3**0.5
        return torch.exp(rows @ directions.t() - rows.square().sum(-1, keepdim=True) / 2) / 20**0.5

    kernel = features(query) @ features(key).repeat_interleave(2, 1).transpose(-1, -2)
    if is_causal:
        kernel = kernel.tril(23 - n_query)
    total = kernel.sum(-1, keepdim=True)
    assert_same(got, (kernel @ value.repeat_interleave(2, 1) / total, total.log().squeeze(-1)))


def test_directions_are_normal_and_orthogonal():
    directions = performer.orthogonal_features(20, 8, Streams(0), like=torch.empty(0))
    gram = directions[:8] @ directions[:8].t()
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-10, rtol=0)  # float64 rounding
    many = performer.orthogonal_features(8 * 2000, 8, Streams(1), like=torch.empty(0))
    # standard errors are 1 / sqrt(16000) = 0.008 for the mean and 0.011 for the variance
    assert many.mean(0).abs().max() < 0.04
    torch.testing.assert_close(many.t() @ many / len(many), torch.eye(8, dtype=torch.float64), atol=0.06, rtol=0)


@causal_or_not
def test_long_keys_neither_overflow_nor_vanish(monkeypatch, is_causal):
    monkeypatch.setattr(performer, "_CHUNK", 4)  # so that maxima change from chunk to chunk by hundreds
    query, key, value = (t.float() for t in inputs())
    got = baselines.performer_attention(query * 20, key * 20, value, n_features=64, is_causal=is_causal)
    assert got.lse.isfinite().all()
    low, high = (t.repeat_interleave(2, 1)[:, :, None] for t in (value.amin(2), value.amax(2)))
    assert ((got.output <= high + 1e-4) & (got.output >= low - 1e-4)).all()  # a weighted mean stays inside
    before = baselines.performer_attention(query, key, value, n_features=16, is_causal=True)
    key[:, :, 14:] *= 1000
    after = baselines.performer_attention(query, key, value, n_features=16, is_causal=True)
    assert torch.equal(after.output[:, :, :14], before.output[:, :, :14])
    assert after.output.isfinite().all()
