"""Centres of clusters in l_p, and the nearest centres of points."""

import pytest
import torch

from prescore.rng import Streams
from prescore.scoring import metrics
from prescore.scoring.lloyd import assign, fit
from prescore.scoring.metrics import (
    EUCLIDEAN,
    MEDIAN,
    SPHERICAL,
    LpMetric,
    best_members,
    metric_for,
    zero_of_gradient,
)
from prescore.scoring.sampling import Scratch

STEPS = {torch.float64: 50, torch.float32: 20}
"""Bisection steps until the dtype has no more digits."""


def clusters(dtype=torch.float64, n=41):
    generator = torch.Generator().manual_seed(4)
    points = torch.randn(2, n, 3, generator=generator, dtype=dtype).exp()  # skewed: mean, median and others differ
    labels = torch.randint(3, (2, n), generator=generator)
    membership = (labels[:, None] == torch.arange(3)[:, None]).to(dtype)
    return points, labels, membership, membership.sum(-1)


def cost(points, centres, membership, p):
    gaps = (points[:, None] - centres[:, :, None]).abs().pow(p)
    return torch.einsum("pkn,pknd->pkd", membership, gaps)


@pytest.mark.parametrize("p", [1.0, 1.2, 1.5, 2.0, 3.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_centres_against_a_dense_search(p, dtype):
    points, labels, membership, sizes = clusters(dtype)
    centres = zero_of_gradient(points, labels, membership, sizes, p, steps=STEPS[dtype]).double()
    points, membership = points.double(), membership.double()
    low, high = points.amin(1)[:, None], points.amax(1)[:, None]
    tried = low + torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None] * (high - low)
    best = [cost(points, tried, membership[:, [k]].expand(-1, 1001, -1), p).amin(1) for k in range(3)]
    # 20 halvings of the bracket in float32: 1e-6 of a standard deviation, so 1e-5 of the cost at p = 1
    slack = 1 + (1e-12 if dtype == torch.float64 else 1e-5)
    assert (cost(points, centres, membership, p) <= torch.stack(best, dim=1) * slack).all()


def test_the_centre_at_two_is_the_mean():
    points, labels, membership, sizes = clusters()
    means = membership @ points / sizes[..., None]
    torch.testing.assert_close(zero_of_gradient(points, labels, membership, sizes, 2.0, steps=50), means)


@pytest.mark.parametrize("n", [41, 40])
def test_the_centre_at_one_is_a_median(n):
    points, labels, membership, sizes = clusters(n=n)
    centres = zero_of_gradient(points, labels, membership, sizes, 1.0, steps=50)
    for problem in range(2):
        for cluster in range(3):
            members = points[problem, labels[problem] == cluster].sort(dim=0).values
            low, high = members[(len(members) - 1) // 2], members[len(members) // 2]
            # any point between the middle two is a median; 50 halvings leave 1e-15 of a standard deviation
            assert ((centres[problem, cluster] >= low - 1e-9) & (centres[problem, cluster] <= high + 1e-9)).all()


def test_below_one_a_member_beats_the_mean():
    points, labels, membership, sizes = clusters()
    means, centres = membership @ points / sizes[..., None], best_members(points, labels, membership, sizes, 0.5)
    assert (cost(points, centres, membership, 0.5).sum(-1) < cost(points, means, membership, 0.5).sum(-1)).all()
    for problem in range(2):
        for cluster in range(3):
            members = points[problem, labels[problem] == cluster]
            assert (members == centres[problem, cluster]).all(-1).any()


def test_exponents_two_and_one_are_the_named_metrics():
    assert (metric_for(2.0), metric_for(2), metric_for(1.0)) == (EUCLIDEAN, EUCLIDEAN, MEDIAN)
    assert isinstance(metric_for(1.7), LpMetric)


def points_and_centres(n_centres, *, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(n_centres)
    points = scale * torch.randn(2, 300, 6, generator=generator, dtype=dtype)
    return points, scale * torch.randn(2, n_centres, 6, generator=generator, dtype=dtype)


@pytest.mark.parametrize("n_centres", [2, 3, 64, 65])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_two_nearest_centres(n_centres, scale, monkeypatch):
    points, centres = points_and_centres(n_centres, scale=scale)
    wanted = torch.cdist(points, centres).topk(2, dim=2, largest=False).indices.unbind(-1)
    for limit in (metrics.MAX_PACKED_CENTRES, 1):  # with packed bits, and by sorting
        monkeypatch.setattr(metrics, "MAX_PACKED_CENTRES", limit)
        for got, expected in zip(metrics.two_nearest(points, centres, Scratch()), wanted, strict=True):
            assert torch.equal(got.long(), expected)  # float64 leaves 45 bits: no ties among random points


def test_in_float32_only_near_ties_are_swapped():
    points, centres = points_and_centres(65, dtype=torch.float32)
    first, _ = metrics.two_nearest(points, centres, Scratch())
    squares = torch.cdist(points.double(), centres.double()).square()
    nearest = squares.gather(2, first.long()[..., None])[..., 0]
    assert (nearest <= squares.amin(2) * (1 + 2**-15)).all()  # 16 bits of the square are compared


def test_equal_centres_are_both_on_the_shortlist():
    points, centres = points_and_centres(5)
    centres[:, 3] = centres[:, 1] = points[:, 0]
    first, second = metrics.two_nearest(points[:, :1], centres, Scratch())
    assert (first.flatten().tolist(), second.flatten().tolist()) == ([1, 1], [3, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_the_sphere_it_is_the_euclidean_metric_to_four_digits(dtype):
    points, centres = points_and_centres(65, dtype=dtype)
    points = torch.nn.functional.normalize(points, dim=-1)
    centres = 0.5 * torch.nn.functional.normalize(centres, dim=-1)
    labels, distances = assign(points, centres, SPHERICAL)
    _, wanted = assign(points, centres, EUCLIDEAN)
    torch.testing.assert_close(distances, wanted, rtol=2**-15, atol=1e-6)
    own = torch.cdist(points, centres).gather(2, labels[..., None])[..., 0]
    torch.testing.assert_close(own, wanted, rtol=2**-15, atol=1e-6)


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
def test_a_shortlist_of_two_is_compared_in_the_metric(p):
    points, centres = points_and_centres(9)
    labels, distances = assign(points, centres, metric_for(p), exact=torch.tensor([False, False]))
    costs = (points[:, :, None] - centres[:, None]).abs().pow(p).sum(-1)
    near = torch.cdist(points, centres).topk(2, dim=2, largest=False).indices
    best = costs.gather(2, near).min(dim=2)
    assert torch.equal(labels, near.gather(2, best.indices[..., None])[..., 0])
    torch.testing.assert_close(distances, best.values.pow(1 / p))


def test_converged_early_iterations_still_end_in_the_metrics_own_centres():
    # one skewed cluster: the means converge at once, and the median is elsewhere
    points = torch.randn(1, 101, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    centres = fit(points, n_clusters=1, metric=MEDIAN, streams=Streams(0)).centres[0, 0]
    # ten halvings of a standard deviation
    assert ((centres - points[0].median(dim=0).values).abs() < points[0].std(dim=0) * 2**-9).all()
    assert ((centres - points[0].mean(dim=0)).abs() > 0.1).all()
