"""The Lloyd loop, its seeds and its samples."""

import pytest
import torch

from prescore.rng import Streams
from prescore.scoring.lloyd import assign, fit, pairwise_costs, seed_centres
from prescore.scoring.metrics import EUCLIDEAN, metric_for
from prescore.scoring.sampling import Scratch, draw_sample, gather_rows, sample_positions

EXPONENTS = (2.0, 1.0, 1.5, 3.0, 0.5)
every_metric = pytest.mark.parametrize("metric", [metric_for(p) for p in EXPONENTS], ids=lambda m: f"p={m.p}")


def normal(*size, seed=1):
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def blobs(n_problems=2, size=30, seed=0):
    """Four far blobs of standard deviation 0.1 for each problem, and which blob each point is of."""
    centres = normal(n_problems, 4, 3, seed=seed) * 10
    truth = torch.arange(4).repeat(size).expand(n_problems, -1)
    points = gather_rows(centres, truth) + 0.1 * normal(n_problems, 4 * size, 3, seed=seed + 1)
    return points, truth, centres


def inertia(result, p=2.0):
    return result.distances.pow(p).sum(dim=1)


def sampled_fit(points, fit_size, *, weights=None, seed=0, **options):
    """A fit on a sample, as the clustering scorers do it."""
    sample = draw_sample(points, weights, fit_size, Streams(seed), "fit sample")
    return fit(points, sample, streams=Streams(seed), **options)


@every_metric
def test_finds_separated_blobs(metric):
    points, truth, centres = blobs()
    result = fit(points, n_clusters=4, metric=metric, streams=Streams(3), max_iter=20)
    for problem in range(2):
        pairs = set(zip(truth[problem].tolist(), result.labels[problem].tolist(), strict=True))
        assert len(pairs) == 4  # one cluster per blob and one blob per cluster
        nearest = torch.cdist(centres[problem], result.centres[problem]).amin(dim=1)
        assert nearest.max() < 0.2  # noise of 0.1 per coordinate averaged over 30 points, or a member for p < 1


@every_metric
@pytest.mark.parametrize("max_iter", [0, 1, 10])
@pytest.mark.parametrize("seeding", ["k-means++", "random"])
def test_labels_distances_and_centres_agree(metric, max_iter, seeding):
    points = normal(3, 50, 4)
    options = {"n_clusters": 6, "metric": metric, "max_iter": max_iter, "seeding": seeding}
    result = fit(points, streams=Streams(0), **options)
    gaps = (points[:, :, None] - result.centres[:, None]).abs().pow(metric.p).sum(-1).pow(1 / metric.p)
    torch.testing.assert_close(result.distances, gaps.amin(-1))
    torch.testing.assert_close(result.labels, gaps.argmin(-1))


@every_metric
def test_more_iterations_do_not_cost_more(metric):
    options = {"n_clusters": 5, "metric": metric, "streams": Streams(0), "tol": 0.0}
    first, last = (inertia(fit(normal(2, 200, 4), max_iter=i, **options), metric.p) for i in (0, 15))
    assert (last < first).all()


@every_metric
@pytest.mark.parametrize("fit_size", [None, 25])
def test_zero_weights_are_absent_points(metric, fit_size):
    points = normal(2, 60, 3)
    holes = torch.rand(2, 60, generator=torch.Generator().manual_seed(2)) < 0.4
    holes[1, 40:] = True
    poisoned, options = points.masked_fill(holes[..., None], 1e6), {"n_clusters": 4, "metric": metric}
    masked = sampled_fit(poisoned, fit_size, weights=(~holes).double(), **options)
    for problem in range(2):
        present = ~holes[problem]
        alone = sampled_fit(points[problem, present][None], fit_size, **options)
        torch.testing.assert_close(masked.centres[problem], alone.centres[0])
        torch.testing.assert_close(masked.labels[problem, present], alone.labels[0])
        torch.testing.assert_close(masked.distances[problem, present], alone.distances[0])


def test_integer_weights_are_repetitions():
    points, weights = normal(1, 20, 3), torch.tensor([1.0, 3.0] * 10, dtype=torch.float64)[None]
    repeated = points[0].repeat_interleave(weights[0].long(), dim=0)[None]
    for p in (2.0, 1.5):  # one cluster, so that seeding does not matter
        options = {"n_clusters": 1, "metric": metric_for(p)}
        weighted = sampled_fit(points, None, weights=weights, **options).centres
        torch.testing.assert_close(weighted, sampled_fit(repeated, None, **options).centres)


@every_metric
def test_degenerate_points(metric):
    options = {"metric": metric, "streams": Streams(0)}
    assert (fit(torch.ones(2, 30, 3), n_clusters=4, **options).distances == 0).all()
    few = fit(torch.randn(2, 3, 3), n_clusters=7, **options)
    assert few.centres.shape == (2, 7, 3)
    assert (few.distances == 0).all()  # every point is its own centre
    assert fit(torch.zeros(2, 0, 3), n_clusters=4, **options).labels.shape == (2, 0)
    assert fit(torch.zeros(0, 5, 3), n_clusters=4, **options).centres.shape == (0, 4, 3)
    absent = sampled_fit(torch.zeros(1, 5, 3), None, weights=torch.zeros(1, 5), n_clusters=2, metric=metric)
    assert torch.isfinite(absent.centres).all()


def test_empty_clusters_take_the_farthest_points():
    # random seeding lands twice on the heap of equal points and leaves a cluster empty at first
    points = torch.cat([torch.zeros(98, 2), torch.tensor([[10.0, 0.0], [0.0, 20.0]])])[None].double()
    for seed in range(5):
        result = fit(points, n_clusters=3, metric=EUCLIDEAN, streams=Streams(seed), seeding="random")
        assert inertia(result).item() == pytest.approx(0.0, abs=1e-12)  # exact: three different points


def test_a_converged_problem_is_frozen():
    easy, hard = blobs(1, seed=1)[0], normal(1, 120, 3, seed=3)
    options = {"n_clusters": 4, "metric": EUCLIDEAN, "streams": Streams(0), "max_iter": 50, "tol": 0.05}
    both = fit(torch.cat([easy, hard]), **options)
    torch.testing.assert_close(both.centres[:1], fit(easy, **options).centres)
    torch.testing.assert_close(both.centres[1:], fit(hard, **options).centres)


def test_a_sampled_fit_reads_few_points_and_assigns_all():
    points, truth, _ = blobs(size=200)
    on_some, on_all = (sampled_fit(points, size, n_clusters=4, metric=EUCLIDEAN) for size in (40, None))
    assert on_some.labels.shape == truth.shape
    assert not torch.equal(on_some.centres, on_all.centres)
    assert (inertia(on_some) < 1.3 * inertia(on_all)).all()  # 10 points per centre: 10 % expected


@every_metric
def test_a_short_problem_does_not_notice_a_long_one(metric):
    points, weights = normal(2, 200, 6, seed=3), (torch.arange(200) < torch.tensor([[200], [40]])).double()
    options = {"fit_size": 60, "n_clusters": 9, "metric": metric}
    both = sampled_fit(points, weights=weights, **options)
    long, short = sampled_fit(points[:1], **options), sampled_fit(points[1:, :40], **options)
    torch.testing.assert_close(both.distances[:1], long.distances)
    torch.testing.assert_close(both.distances[1:, :40], short.distances)
    assert torch.equal(both.labels[1:, :40], short.labels)


def test_lifted_points_are_clustered_in_feature_space():
    points, _, _ = blobs()
    result = fit(points, n_clusters=4, metric=EUCLIDEAN, streams=Streams(0), lift=lambda x: x[..., :1])
    assert result.centres.shape == (2, 4, 1)
    labels, distances = assign(points[..., :1], result.centres, EUCLIDEAN)
    assert torch.equal(labels, result.labels)
    torch.testing.assert_close(distances, result.distances)


# Seeds.


def seeds(points, n_clusters, seeding="k-means++", weights=None, seed=0):
    options = {"n_clusters": n_clusters, "seeding": seeding, "power": 2.0, "streams": Streams(seed)}
    return seed_centres(points, weights, **options)


def test_plus_plus_takes_one_point_of_each_far_blob():
    points = (torch.eye(6, dtype=torch.float64).repeat(20, 1) * 100 + normal(120, 6))[None]
    for seed in range(10):
        assert sorted(seeds(points, 6, seed=seed).argmax(-1)[0].tolist()) == list(range(6))


@pytest.mark.parametrize("seeding", ["k-means++", "random"])
def test_seeds_are_points_of_weight_and_distinct_while_there_are_any(seeding):
    points = normal(2, 9, 3)
    gaps = torch.cdist(seeds(points, 9, seeding), points)
    assert (gaps.amin(-1) < 1e-12).all()
    assert (gaps.amin(-2) < 1e-12).all()
    assert (torch.cdist(seeds(points, 15, seeding), points).amin(-1) < 1e-12).all()
    far, weights = normal(1, 50, 3), (torch.arange(50) < 10).double()[None]
    far[:, 10:] += 1000
    assert seeds(far, 12, seeding, weights).max() < 500


def test_random_seeds_change_with_the_seed():
    points = normal(1, 50, 3)
    assert not torch.equal(seeds(points, 5, "random", seed=0), seeds(points, 5, "random", seed=1))


def test_pairwise_costs_are_powers_of_distances():
    points = normal(2, 8, 3)
    for power in (1.0, 2.0, 3.0):
        torch.testing.assert_close(pairwise_costs(points, power), torch.cdist(points, points) ** power)


# Samples.


def test_one_point_from_each_slice():
    points = torch.arange(100.0)[None, :, None]
    sample = draw_sample(points, None, 10, Streams(1), "test")
    assert (sample.weights, sample.is_partial.tolist()) == (None, [True])
    assert (sample.points[0, :, 0] // 10).tolist() == list(range(10))
    assert len(set((sample.points[0, :, 0] % 10).tolist())) > 1
    assert sample.points[0, :, 0].tolist() == sample_positions(100, 10, Streams(1), "test").tolist()
    for size in (None, 100, 200):
        assert draw_sample(points, None, size, Streams(1), "test").points is points
        assert sample_positions(100, size, Streams(1), "test").tolist() == list(range(100))
    assert sample_positions(100, 0, Streams(1), "test").tolist() == []


def test_shorter_problems_get_filler_of_weight_zero():
    points = torch.arange(100.0)[None, :, None].repeat(2, 1, 1)
    weights = (torch.arange(100) < torch.tensor([[100], [5]])).float()
    sample = draw_sample(points, weights, 10, Streams(1), "test")
    assert sample.weights.sum(1).tolist() == [10, 5]
    assert sample.points[1, :5, 0].tolist() == [0, 1, 2, 3, 4]
    assert sample.is_partial.tolist() == [True, False]
    assert torch.equal(sample.points[:1], draw_sample(points[:1], None, 10, Streams(1), "test").points)


def test_points_of_weight_zero_move_behind():
    points, weights = torch.arange(4.0)[None, :, None], torch.tensor([[0.0, 2.0, 0.0, 3.0]])
    sample = draw_sample(points, weights, None, Streams(1), "test")
    assert sample.points[0, :2, 0].tolist() == [1, 3]
    assert sample.weights.tolist() == [[2, 3]]


def test_scratch_grows_and_is_reused():
    scratch, like = Scratch(), torch.zeros(1)
    large = scratch.take("a", 4, 5, like=like)
    small = scratch.take("a", 2, 3, like=like)
    assert (small.data_ptr(), small.shape) == (large.data_ptr(), (2, 3))
    assert scratch.take("a", 30, like=like).numel() == 30
    assert scratch.take("a", 2, like=like.long()).dtype == torch.int64
    assert scratch.take("b", 4, 5, like=like).data_ptr() != large.data_ptr()
