import pytest
import torch

from prescore.routed.columns import best_columns
from prescore.routed.pairs import TILES, dispatch


@pytest.mark.parametrize("n_columns", [4, 20, 97, 130, 255, 256, 300])
def test_best_columns_are_the_largest(n_columns):
    scores = torch.randn(3, 5, n_columns, generator=torch.Generator().manual_seed(n_columns))
    best = best_columns(scores, 4).sort(-1).values
    assert torch.equal(best, scores.topk(4, dim=-1).indices.sort(-1).values)


def test_filler_is_never_chosen():
    scores = torch.full((2, 130), -torch.inf)
    scores[0, -1] = 1.0
    best = best_columns(scores, 4)
    assert (best < 130).all()
    assert (best[0] == 129).sum() == 1
    assert [len(set(row.tolist())) for row in best] == [4, 4]


def test_every_pair_has_one_slot_in_a_tile_of_its_leaf():
    generator = torch.Generator().manual_seed(0)
    leaves = torch.multinomial(torch.tensor([0.7, 0.1, 0.05, 0.15]).expand(900, 4), 2, generator=generator)
    pairs = dispatch(leaves, 4)
    assert pairs.slots.unique().numel() == leaves.numel()
    # the leaf of every slot, from the tiles
    owner = torch.cat([part.repeat_interleave(tile) for tile, part in zip(TILES, pairs.leaves, strict=True)])
    assert torch.equal(owner[pairs.slots], leaves)
    rows = torch.arange(900)[:, None].expand(900, 2)
    assert torch.equal(pairs.query_rows[pairs.slots], rows)
    assert (pairs.query_rows >= 0).sum() == leaves.numel()
    assert min(len(part) for part in pairs.leaves) > 0  # both tile sizes occur
