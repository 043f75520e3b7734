import pytest
import torch

from prescore.rng import Streams
from prescore.scoring import metrics as shortlist
from prescore.scoring.lloyd import assign, fit
from prescore.scoring.metrics import EUCLIDEAN, MEDIAN, SPHERICAL, LpMetric
from prescore.scoring.sampling import Scratch


def _points(n_centres, *, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(n_centres)
    points = scale * torch.randn(2, 300, 6, generator=generator, dtype=dtype)
    return points, scale * torch.randn(2, n_centres, 6, generator=generator, dtype=dtype)


@pytest.mark.parametrize("n_centres", [2, 3, 64, 65])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_two_nearest_centres(n_centres, scale):
    points, centres = _points(n_centres, scale=scale)
    first, second = shortlist.two_nearest(points, centres, Scratch())
    wanted = torch.cdist(points, centres).topk(2, dim=2, largest=False).indices
    assert torch.equal(first.long(), wanted[..., 0])  # float64 leaves 45 bits: no ties among random points
    assert torch.equal(second.long(), wanted[..., 1])


def test_in_float32_only_near_ties_are_swapped():
    points, centres = _points(65, dtype=torch.float32)
    first, _ = shortlist.two_nearest(points, centres, Scratch())
    squares = torch.cdist(points.double(), centres.double()).square()
    found = squares.gather(2, first.long()[..., None])[..., 0]
    assert (found <= squares.amin(2) * (1 + 2**-15)).all()  # 16 bits of the square are compared


def test_many_centres_need_no_packing(monkeypatch):
    points, centres = _points(65)
    packed = shortlist.two_nearest(points, centres, Scratch())
    monkeypatch.setattr(shortlist, "MOST_CENTRES", 2)
    for got, wanted in zip(shortlist.two_nearest(points, centres, Scratch()), packed, strict=True):
        assert torch.equal(got, wanted.long())


def test_equal_centres_are_both_on_the_shortlist():
    points, centres = _points(5)
    centres[:, 3] = centres[:, 1] = points[:, 0]
    first, second = shortlist.two_nearest(points[:, :1], centres, Scratch())
    assert first.flatten().tolist() == [1, 1]
    assert second.flatten().tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_the_sphere_it_is_the_euclidean_metric_to_four_digits(dtype):
    points, centres = _points(65, dtype=dtype)
    points = torch.nn.functional.normalize(points, dim=-1)
    centres = 0.5 * torch.nn.functional.normalize(centres, dim=-1)
    labels, distances = assign(points, centres, SPHERICAL)
    _, wanted = assign(points, centres, EUCLIDEAN)
    torch.testing.assert_close(distances, wanted, rtol=2**-15, atol=1e-6)
    own = torch.cdist(points, centres).gather(2, labels[..., None])[..., 0]
    torch.testing.assert_close(own, wanted, rtol=2**-15, atol=1e-6)


@pytest.mark.parametrize("metric", [MEDIAN, LpMetric(1.5), LpMetric(3.0)], ids=lambda metric: f"p={metric.p}")
def test_a_shortlist_of_two_is_compared_in_the_metric(metric):
    points, centres = _points(9)
    labels, distances = assign(points, centres, metric, exact=False)
    costs = (points[:, :, None] - centres[:, None]).abs().pow(metric.p).sum(-1)
    near = torch.cdist(points, centres).topk(2, dim=2, largest=False).indices
    best = costs.gather(2, near).min(dim=2)
    assert torch.equal(labels, near.gather(2, best.indices[..., None])[..., 0])
    torch.testing.assert_close(distances, best.values.pow(1 / metric.p))


def test_converged_early_iterations_still_end_in_the_metrics_own_centres():
    # one skewed cluster: the means converge at once, and the median is elsewhere
    points = torch.randn(1, 101, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    centres = fit(points, n_clusters=1, metric=MEDIAN, streams=Streams(0), max_iter=10).centres[0, 0]
    median, mean = points[0].median(dim=0).values, points[0].mean(dim=0)
    # ten halvings of a standard deviation
    assert ((centres - median).abs() < points[0].std(dim=0) * 2**-9).all()
    assert ((centres - mean).abs() > 0.1).all()


def test_scratch_grows_and_is_reused():
    scratch, like = Scratch(), torch.zeros(1)
    large = scratch.take("a", 4, 5, like=like)
    small = scratch.take("a", 2, 3, like=like)
    assert small.data_ptr() == large.data_ptr()
    assert small.shape == (2, 3)
    assert scratch.take("a", 30, like=like).numel() == 30
    assert scratch.take("a", 2, like=like, dtype=torch.int64).dtype == torch.int64
    assert scratch.take("b", 4, 5, like=like).data_ptr() != large.data_ptr()
