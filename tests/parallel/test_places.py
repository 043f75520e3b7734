"""Who holds and who needs what, without any process."""

import pytest
import torch

from prescore.config import Selected
from prescore.parallel.shards import Map, Shard, Span
from prescore.parallel.ulysses import Share, share_heads
from prescore.selected.causal_grid import Queries, levels


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "n_ranks"),
    [(8, 8, 2), (9, 3, 2), (6, 3, 4), (4, 1, 4), (4, 1, 3), (1, 1, 3), (32, 8, 16), (12, 4, 3)],
)
def test_every_query_head_goes_to_one_rank_with_its_key_head(n_heads, n_kv_heads, n_ranks):
    shares = share_heads(n_heads, n_kv_heads, n_ranks)
    assert len(shares) == n_ranks
    assert [head for share in shares for head in range(share.first, share.end)] == list(range(n_heads))
    group = n_heads // n_kv_heads
    for share in shares:
        needed = {head // group for head in range(share.first, share.end)}
        assert needed == set(range(share.first_key, share.end_key))
        if share.end > share.first and len(needed) > 1:  # one call has one group size
            assert share.n_query_heads == group * len(needed)


def test_shares_that_can_be_equal_are():
    assert share_heads(8, 4, 2) == [Share(0, 2, 0, 4), Share(2, 4, 4, 8)]
    assert share_heads(4, 1, 2) == [Share(0, 1, 0, 2), Share(0, 1, 2, 4)]


class _Ranks:
    rank = 0

    def __init__(self, size):
        self.size = size


def piece(n_query, n_keys, ranks, *, is_causal=True):
    query, key = torch.zeros(1, 1, n_query, 2), torch.zeros(1, 1, n_keys, 2)
    return Shard(_Ranks(ranks), query, key, key, None, is_causal, None, None, None)


@pytest.mark.parametrize(("n_query", "n_keys", "ranks", "leaf"), [(24, 24, 4, 8), (10, 10, 3, 4), (5, 16, 2, 3)])
def test_blocks_are_those_of_the_grid(n_query, n_keys, ranks, leaf):
    places = Map(piece(n_query, n_keys, ranks), Selected(top_k=2, min_seq_len=leaf))
    total, first = n_keys * ranks, (n_keys - n_query) * ranks
    wanted = set()
    for level in levels(leaf, Queries(1, 1, 1, n_query * ranks, first, torch.device("cpu"))):
        for keys, queries in zip(level.key_positions.tolist(), level.query_positions.tolist(), strict=True):
            inside = [position for position in queries if first <= position < total]
            wanted.add((keys[0], keys[-1] + 1, inside[0], inside[-1] + 1))
    found = {(b.keys.begin, b.keys.end, b.queries.begin, b.queries.end) for b in places.blocks}
    assert found == wanted


def test_a_block_knows_its_ranks():
    places = Map(piece(8, 8, 4), Selected(top_k=2, sinks=1, recent=1, min_seq_len=8))
    own, wide = places.blocks[0], places.blocks[-1]
    assert (own.keys, places.holders(own), places.needers(own)) == (Span(0, 8), [0], [1])
    assert (wide.keys, places.holders(wide), places.needers(wide)) == (Span(0, 16), [0, 1], [2, 3])
    assert places.columns(wide, 1) == Span(8, 16)
    assert (own.first, own.last, own.n_free) == (Span(0, 1), Span(7, 8), 0)
    assert places.near[2] == Span(16, 24)


@pytest.mark.parametrize(
    ("sinks", "recent", "top_k", "first", "last"),
    [(3, 2, 4, (0, 3), (6, 7)), (3, 9, 6, (0, 3), (3, 6)), (9, 0, 2, (0, 2), (8, 8)), (0, 2, 5, (0, 0), (6, 8))],
)
def test_protected_keys_are_cut_to_the_budget(sinks, recent, top_k, first, last):
    places = Map(piece(8, 8, 2), Selected(top_k=top_k, sinks=sinks, recent=recent, min_seq_len=8))
    block = places.blocks[0]
    assert (block.first.begin, block.first.end) == first
    assert block.last.length == last[1] - last[0]
    if block.last.length:
        assert (block.last.begin, block.last.end) == last
