"""Device meshes, and which rank gets which heads."""

import pytest
import torch
from oracles.inputs import attention_tensors
from parallel_work import in_meshes

import prescore
from prescore.parallel.ulysses import Share, share_heads


def test_a_mesh_of_one_dimension_is_a_group(crew):
    *parts, sentences = zip(*crew.run(in_meshes, ranks=4), strict=True)
    wanted = prescore.exact_attention(*attention_tensors(n_keys=24), is_causal=True)
    for shards, expected in zip(parts, wanted, strict=True):
        torch.testing.assert_close(torch.cat(shards, dim=2), expected)
    assert set(sentences) == {"group must be a DeviceMesh of one dimension (take one by name: mesh['cp']), got 2"}


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
