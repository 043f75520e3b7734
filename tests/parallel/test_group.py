"""The collectives: what arrives, what comes back as gradients, what was sent; and which rank gets which heads."""

import pytest
import torch
from oracles.inputs import attention_tensors
from parallel_work import gathered, in_meshes, tied_exchange

import prescore
from prescore.parallel.ulysses import Share, share_heads


@pytest.mark.parametrize("use", [True, False], ids=["used", "unused"])
def test_an_exchange_has_gradients_even_from_a_rank_that_used_nothing(crew, use):
    (parts0, grad0, sent0), (parts1, grad1, sent1) = crew.run(tied_exchange, use, ranks=2)
    assert [part.tolist() for part in parts0] == [[0.0], [10.0]]
    assert [part.tolist() for part in parts1] == [[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]]
    there = 2.0 if use else 0.0
    assert grad0.tolist() == grad1.tolist() == [2.0, there, there, there]
    assert (sent0, sent1) == (8 * (3 + 1), 8 * (1 + 3))  # forward and back, without what stays


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gathering_adds_gradients_up(crew, dtype):
    for full, grad, sent in crew.run(gathered, dtype, ranks=3):
        assert full.shape == (3, 2, 3)
        assert full[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
        assert grad.tolist() == [[0.0, 6.0, 12.0]] * 2
        assert sent == 2 * 2 * 6 * torch.finfo(dtype).bits // 8


def test_a_mesh_of_one_dimension_is_a_group(crew):
    results = crew.run(in_meshes, ranks=4)
    wanted = prescore.exact_attention(*attention_tensors(n_keys=24), is_causal=True)
    for place, expected in enumerate(zip(wanted.output.chunk(4, 2), wanted.lse.chunk(4, 2), strict=True)):
        found, refusal = results[place]
        torch.testing.assert_close(tuple(found), expected)
        assert refusal == "group must be a DeviceMesh of one dimension (take one by name: mesh['cp']), got 2"


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
