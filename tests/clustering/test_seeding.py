import torch

from prescore.rng import Streams
from prescore.scoring.lloyd import pairwise_costs, seed_centres


def _seeds(points, n_clusters, seeding="k-means++", weights=None, seed=0, power=2.0):
    return seed_centres(
        points, weights, n_clusters=n_clusters, seeding=seeding, power=power, streams=Streams(seed)
    )


def test_plus_plus_takes_one_point_of_each_far_blob():
    corners = torch.eye(6, dtype=torch.float64) * 100
    points = (corners.repeat(20, 1) + torch.randn(120, 6, generator=torch.Generator().manual_seed(0)))[None]
    for seed in range(10):
        blobs = _seeds(points, 6, seed=seed).argmax(-1)
        assert sorted(blobs[0].tolist()) == list(range(6))


def test_seeds_are_points_and_distinct_while_there_are_any():
    points = torch.randn(2, 9, 3, dtype=torch.float64)
    for seeding in ("k-means++", "random"):
        gaps = torch.cdist(_seeds(points, 9, seeding), points)
        assert (gaps.amin(-1) < 1e-12).all()
        assert (gaps.amin(-2) < 1e-12).all()
        assert (torch.cdist(_seeds(points, 15, seeding), points).amin(-1) < 1e-12).all()


def test_points_of_weight_zero_are_never_seeds():
    points = torch.randn(1, 50, 3, dtype=torch.float64)
    points[:, 10:] += 1000
    weights = (torch.arange(50) < 10).double()[None]
    for seeding in ("k-means++", "random"):
        assert _seeds(points, 12, seeding, weights).max() < 500


def test_pairwise_costs_are_powers_of_distances():
    points = torch.randn(2, 8, 3, dtype=torch.float64)
    for power in (1.0, 2.0, 3.0):
        torch.testing.assert_close(pairwise_costs(points, power), torch.cdist(points, points) ** power)


def test_random_seeds_change_with_the_seed():
    points = torch.randn(1, 50, 3)
    assert not torch.equal(_seeds(points, 5, "random", seed=0), _seeds(points, 5, "random", seed=1))
