import torch

from prescore.rng import Streams
from prescore.scoring.sampling import count_valid, fit_counts, gather_rows, holes_last, stratified


def test_gather_rows_equals_advanced_indexing():
    rows = torch.randn(3, 7, 2)
    index = torch.randint(7, (3, 5))
    assert torch.equal(gather_rows(rows, index), rows[torch.arange(3)[:, None], index])


def test_sizes_come_from_valid_points():
    n_valid = torch.tensor([10, 2048, 2049, 100000])
    assert fit_counts(n_valid, 10, None, per_cluster=32).tolist() == [10, 2048, 2048, 2048]
    assert fit_counts(n_valid, 100, None, per_cluster=32).tolist() == [10, 2048, 2049, 3200]
    assert fit_counts(n_valid, 10, 0, per_cluster=32).tolist() == n_valid.tolist()
    assert fit_counts(n_valid, 10, 50, per_cluster=32).tolist() == [10, 50, 50, 50]


def test_one_point_from_each_slice():
    points = torch.arange(100.0)[None, :, None]
    n_valid = count_valid(points, None)
    sample, weights = stratified(points, None, n_valid, torch.tensor([10]), Streams(1), "test")
    assert weights is None
    assert (sample[0, :, 0] // 10).tolist() == list(range(10))
    assert len(set((sample[0, :, 0] % 10).tolist())) > 1


def test_shorter_problems_get_filler_of_weight_zero():
    points = torch.arange(100.0)[None, :, None].repeat(2, 1, 1)
    weights = (torch.arange(100) < torch.tensor([[100], [5]])).float()
    n_valid = count_valid(points, weights)
    counts = n_valid.clamp(max=10)
    sample, sampled = stratified(points, weights, n_valid, counts, Streams(1), "test")
    assert sampled.sum(1).tolist() == [10, 5]
    assert sample[1, :5, 0].tolist() == [0, 1, 2, 3, 4]
    alone, _ = stratified(points[:1], None, n_valid[:1], counts[:1], Streams(1), "test")
    assert torch.equal(sample[:1], alone)


def test_holes_move_behind():
    points = torch.arange(4.0)[None, :, None]
    weights = torch.tensor([[0.0, 2.0, 0.0, 3.0]])
    moved, moved_weights = holes_last(points, weights, count_valid(points, weights))
    assert moved[0, :2, 0].tolist() == [1, 3]
    assert moved_weights.tolist() == [[2, 3, 0, 0]]
    aligned = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    assert holes_last(points, aligned, torch.tensor([2]))[0] is points
