import pytest
import torch

from prescore.routed.tree import bisection_tree, tree_levels


def test_levels_reach_the_leaf_size():
    assert [tree_levels(n, 32) for n in (1, 32, 33, 64, 65, 512)] == [0, 0, 1, 1, 2, 4]


def test_order_is_a_permutation_per_tree():
    points = torch.randn(2, 3, 48, 5, generator=torch.Generator().manual_seed(0))
    order = bisection_tree(points, 3)
    assert order.shape == (2, 3, 48)
    assert torch.equal(order.sort(-1).values, torch.arange(48).expand(2, 3, 48))


def test_separated_groups_become_leaves():
    generator = torch.Generator().manual_seed(1)
    centres = torch.tensor([[0.0, 0.0], [0.0, 10.0], [100.0, 0.0], [100.0, 10.0]])
    label = torch.arange(4).repeat_interleave(8)[torch.randperm(32, generator=generator)]
    points = centres[label] + 0.1 * torch.randn(32, 2, generator=generator)
    leaves = label[bisection_tree(points, 2)].view(4, 8)
    assert (leaves == leaves[:, :1]).all()
    # upper nodes are runs of leaves: the wide axis is cut first
    assert set(leaves[:2, 0].tolist()) in ({0, 1}, {2, 3})


def test_cut_is_at_the_median_of_the_main_direction():
    points = torch.tensor([[3.0], [0.0], [2.0], [1.0]]) * torch.tensor([1.0, 0.5])
    halves = bisection_tree(points, 1).view(2, 2)
    assert {frozenset(half.tolist()) for half in halves} == {frozenset({1, 3}), frozenset({0, 2})}


def test_dead_points_come_last_and_do_not_move_the_cut():
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(16, 3, generator=generator)
    valid = torch.arange(16) < 11
    order = bisection_tree(points, 2, valid=valid)
    assert valid[order].tolist() == [True] * 11 + [False] * 5
    moved = torch.where(valid[:, None], points, torch.full_like(points, 1e6))
    assert torch.equal(bisection_tree(moved, 2, valid=valid)[:11], order[:11])


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_scale_does_not_matter(scale):
    points = torch.randn(64, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.equal(bisection_tree(points * scale, 3), bisection_tree(points, 3))


def test_equal_points_keep_their_order():
    assert torch.equal(bisection_tree(torch.ones(16, 3), 2), torch.arange(16))


def test_indivisible_points_are_refused():
    with pytest.raises(ValueError, match="multiple of 8 for 3 levels, got 12"):
        bisection_tree(torch.zeros(12, 2), 3)


def test_points_may_lie_apart_in_memory():
    whole = torch.randn(3, 70, 4, generator=torch.Generator().manual_seed(4))
    points = whole[:, 5:37]  # a piece of each of three sequences
    assert not points.is_contiguous()
    assert torch.equal(bisection_tree(points, 3), bisection_tree(points.contiguous(), 3))
