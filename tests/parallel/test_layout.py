"""Which rank holds and which rank reads what, without any process."""

from types import SimpleNamespace

import pytest
import torch

from prescore.config import Selected
from prescore.parallel.comm import Shard
from prescore.parallel.selected import Layout
from prescore.parallel.ulysses import Share, share_heads
from prescore.selected.causal_grid import Queries, levels


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "n_ranks"),
    [(8, 8, 2), (9, 3, 2), (6, 3, 4), (4, 1, 4), (4, 1, 3), (1, 1, 3), (32, 8, 16), (12, 4, 3)],
)
def test_every_query_head_goes_to_one_rank_with_its_kv_head(n_heads, n_kv_heads, n_ranks):
    shares = share_heads(n_heads, n_kv_heads, n_ranks)
    assert len(shares) == n_ranks
    assert [head for share in shares for head in share.heads] == list(range(n_heads))
    group = n_heads // n_kv_heads
    for share in shares:
        needed = {head // group for head in share.heads}
        assert needed == set(share.kv_heads)
        if len(needed) > 1:  # one call has one group size
            assert len(share.heads) == group * len(needed)


def test_shares_that_can_be_equal_are():
    assert share_heads(8, 4, 2) == [Share(range(2), range(4)), Share(range(2, 4), range(4, 8))]
    assert share_heads(4, 1, 2) == [Share(range(1), range(2)), Share(range(1), range(2, 4))]


def layout(n_query, n_keys, ranks, **config):
    query, key = torch.zeros(1, 1, n_query, 2), torch.zeros(1, 1, n_keys, 2)
    shard = Shard(SimpleNamespace(rank=0, size=ranks), query, key, key, None, True, None, None, None)
    return Layout(shard, Selected(**config))


@pytest.mark.parametrize(("n_query", "n_keys", "ranks", "leaf"), [(24, 24, 4, 8), (10, 10, 3, 4), (5, 16, 2, 3)])
def test_blocks_are_those_of_the_grid(n_query, n_keys, ranks, leaf):
    total, first = n_keys * ranks, (n_keys - n_query) * ranks
    wanted = set()
    for level in levels(leaf, Queries(1, 1, 1, n_query * ranks, first, torch.device("cpu"))):
        for keys, queries in zip(level.key_positions.tolist(), level.query_positions.tolist(), strict=True):
            inside = [position for position in queries if first <= position < total]
            wanted.add((range(keys[0], keys[-1] + 1), range(inside[0], inside[-1] + 1)))
    found = layout(n_query, n_keys, ranks, top_k=2, min_seq_len=leaf)
    assert {(block.keys, block.queries) for block in found.blocks} == wanted


def test_a_block_has_holders_and_readers():
    found = layout(8, 8, 4, top_k=2, sinks=1, recent=1, min_seq_len=8)
    small, wide = found.blocks[0], found.blocks[-1]
    assert (small.keys, found.holders(small), found.readers(small)) == (range(8), [0], [1])
    assert (wide.keys, found.holders(wide), found.readers(wide)) == (range(16), [0, 1], [2, 3])
    assert found.columns(wide, 1) == range(8, 16)
    assert (small.sinks, small.recent, small.n_free) == (range(1), range(7, 8), 0)
    assert found.local[2] == range(16, 24)


@pytest.mark.parametrize(
    ("sinks", "recent", "top_k", "wanted"),
    [
        (3, 2, 4, (range(3), range(6, 7))), (3, 9, 6, (range(3), range(3, 6))), (9, 0, 2, (range(2), range(0))),
        (0, 2, 5, (range(0), range(6, 8))),
    ],
)  # fmt: skip
def test_protected_keys_are_cut_to_the_budget(sinks, recent, top_k, wanted):
    block = layout(8, 8, 2, top_k=top_k, sinks=sinks, recent=recent, min_seq_len=8).blocks[0]
    assert (block.sinks, block.recent) == wanted
