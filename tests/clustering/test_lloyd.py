import pytest
import torch

from prescore.rng import Streams
from prescore.scoring.lloyd import assign, fit
from prescore.scoring.metrics import EUCLIDEAN, MEDIAN, LpMetric, Metric, metric_for

METRICS = [EUCLIDEAN, MEDIAN, LpMetric(1.5), LpMetric(3.0), LpMetric(0.5)]


def _blobs(n_problems=2, n_clusters=4, size=30, dim=3, *, spread=0.1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(n_problems, n_clusters, dim, generator=generator, dtype=torch.float64) * 10
    truth = torch.arange(n_clusters).repeat(size).expand(n_problems, -1)
    noise = torch.randn(n_problems, n_clusters * size, dim, generator=generator, dtype=torch.float64)
    return centres.gather(1, truth[..., None].expand(-1, -1, dim)) + spread * noise, truth, centres


def _inertia(result, p=2.0):
    return result.distances.pow(p).sum(dim=1)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"p={metric.p}")
@pytest.mark.parametrize("seeding", ["k-means++", "random"])
def test_finds_separated_blobs(metric, seeding):
    points, truth, centres = _blobs()
    result = fit(points, n_clusters=4, metric=metric, streams=Streams(3), seeding=seeding, max_iter=20)
    if seeding == "random":  # may merge two blobs; it must still be a clustering of all points
        assert result.labels.shape == truth.shape
        return
    for problem in range(2):
        pairs = set(zip(truth[problem].tolist(), result.labels[problem].tolist(), strict=True))
        assert len(pairs) == 4  # one cluster per blob and one blob per cluster
        nearest = torch.cdist(centres[problem], result.centres[problem]).amin(dim=1)
        assert nearest.max() < 0.2  # noise of 0.1 per coordinate averaged over 30 points, or a member for p < 1


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"p={metric.p}")
@pytest.mark.parametrize("max_iter", [0, 1, 10])
def test_labels_distances_and_centres_agree(metric, max_iter):
    points = torch.randn(3, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = fit(points, n_clusters=6, metric=metric, streams=Streams(0), max_iter=max_iter)
    gaps = (points[:, :, None] - result.centres[:, None]).abs().pow(metric.p).sum(-1).pow(1 / metric.p)
    torch.testing.assert_close(result.distances, gaps.amin(-1))
    torch.testing.assert_close(result.labels, gaps.argmin(-1))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"p={metric.p}")
def test_more_iterations_do_not_cost_more(metric):
    points = torch.randn(2, 200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    costs = [
        _inertia(fit(points, n_clusters=5, metric=metric, streams=Streams(0), max_iter=i, tol=0.0), metric.p)
        for i in (0, 15)
    ]
    assert (costs[1] < costs[0]).all()


def test_exponents_two_and_one_are_the_named_metrics():
    assert metric_for(2.0) is EUCLIDEAN
    assert metric_for(2) is EUCLIDEAN
    assert metric_for(1.0) is MEDIAN
    assert isinstance(metric_for(1.7), Metric)


@pytest.mark.parametrize("p", [0, -1.0, float("inf"), float("nan")])
def test_bad_exponent_is_named(p):
    with pytest.raises(ValueError, match=f"p must be finite and above 0.0, got {p}"):
        metric_for(p)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"p={metric.p}")
@pytest.mark.parametrize("fit_size", [0, 25])
def test_zero_weights_are_absent_points(metric, fit_size):
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(2, 60, 3, dtype=torch.float64, generator=generator)
    holes = torch.rand(2, 60, generator=generator) < 0.4
    holes[1, 40:] = True
    poisoned = points.masked_fill(holes[..., None], 1e6)
    weights = (~holes).double()
    options = {"n_clusters": 4, "metric": metric, "streams": Streams(5), "fit_size": fit_size}
    masked = fit(poisoned, weights=weights, **options)
    for problem in range(2):
        present = ~holes[problem]
        alone = fit(points[problem, present][None], **options)
        torch.testing.assert_close(masked.centres[problem], alone.centres[0])
        torch.testing.assert_close(masked.labels[problem, present], alone.labels[0])
        torch.testing.assert_close(masked.distances[problem, present], alone.distances[0])


def test_integer_weights_are_repetitions():
    points = torch.randn(1, 20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights = torch.tensor([1.0, 3.0] * 10, dtype=torch.float64)[None]
    repeated = points[0].repeat_interleave(weights[0].long(), dim=0)[None]
    # one cluster, so that seeding does not matter
    options = {"n_clusters": 1, "streams": Streams(0)}
    for metric in (EUCLIDEAN, LpMetric(1.5)):
        weighted = fit(points, weights=weights, metric=metric, **options).centres
        torch.testing.assert_close(weighted, fit(repeated, metric=metric, **options).centres)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"p={metric.p}")
def test_degenerate_points(metric):
    options = {"metric": metric, "streams": Streams(0)}
    equal = fit(torch.ones(2, 30, 3), n_clusters=4, **options)
    assert (equal.distances == 0).all()
    few = fit(torch.randn(2, 3, 3), n_clusters=7, **options)
    assert few.centres.shape == (2, 7, 3)
    # every point is its own centre
    assert (few.distances == 0).all()
    assert fit(torch.zeros(2, 0, 3), n_clusters=4, **options).labels.shape == (2, 0)
    assert fit(torch.zeros(0, 5, 3), n_clusters=4, **options).centres.shape == (0, 4, 3)
    nothing = fit(torch.zeros(1, 5, 3), n_clusters=2, weights=torch.zeros(1, 5), **options)
    assert torch.isfinite(nothing.centres).all()


def test_empty_clusters_take_the_farthest_points():
    # random seeding lands twice on the heap of equal points and leaves a cluster empty at first
    points = torch.cat([torch.zeros(98, 2), torch.tensor([[10.0, 0.0], [0.0, 20.0]])])[None].double()
    for seed in range(5):
        result = fit(points, n_clusters=3, metric=EUCLIDEAN, streams=Streams(seed), seeding="random")
        assert _inertia(result).item() == pytest.approx(0.0, abs=1e-12)  # exact: three different points


def test_a_converged_problem_is_frozen():
    easy, _, _ = _blobs(1, seed=1)
    hard = torch.randn(1, 120, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    options = {"n_clusters": 4, "metric": EUCLIDEAN, "streams": Streams(0), "max_iter": 50, "tol": 0.05}
    both = fit(torch.cat([easy, hard]), **options)
    torch.testing.assert_close(both.centres[:1], fit(easy, **options).centres)
    torch.testing.assert_close(both.centres[1:], fit(hard, **options).centres)


def test_a_sampled_fit_looks_at_few_points_and_assigns_all():
    points, truth, _ = _blobs(2, size=200)
    result = fit(points, n_clusters=4, metric=EUCLIDEAN, streams=Streams(0), fit_size=40)
    full = fit(points, n_clusters=4, metric=EUCLIDEAN, streams=Streams(0), fit_size=0)
    assert result.labels.shape == truth.shape
    assert not torch.equal(result.centres, full.centres)
    assert (_inertia(result) < 1.3 * _inertia(full)).all()  # 10 points per centre: 10 % expected


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"p={metric.p}")
def test_a_short_problem_does_not_notice_a_long_one(metric):
    points = torch.randn(2, 200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weights = (torch.arange(200) < torch.tensor([[200], [40]])).double()
    options = {"n_clusters": 9, "metric": metric, "streams": Streams(0), "fit_size": 60}
    both = fit(points, weights=weights, **options)
    long, short = fit(points[:1], **options), fit(points[1:, :40], **options)
    torch.testing.assert_close(both.distances[:1], long.distances)
    torch.testing.assert_close(both.distances[1:, :40], short.distances)
    assert torch.equal(both.labels[1:, :40], short.labels)


def test_lifted_points_are_clustered_in_feature_space():
    points, _, _ = _blobs()
    result = fit(points, n_clusters=4, metric=EUCLIDEAN, streams=Streams(0), lift=lambda x: x[..., :1])
    assert result.centres.shape == (2, 4, 1)
    labels, distances = assign(points[..., :1], result.centres, EUCLIDEAN)
    assert torch.equal(labels, result.labels)
    torch.testing.assert_close(distances, result.distances)


@pytest.mark.parametrize(("name", "value"), [("n_clusters", 0), ("max_iter", -1), ("fit_size", -3), ("tol", -0.5)])
def test_bad_arguments_are_named(name, value):
    options = {"n_clusters": 2, "metric": EUCLIDEAN, "streams": Streams(0), name: value}
    with pytest.raises(ValueError, match=rf"{name} must be .*got {value}"):
        fit(torch.zeros(1, 5, 2), **options)


def test_unknown_seeding_is_named():
    with pytest.raises(ValueError, match="seeding must be one of 'k-means\\+\\+', 'random', got 'best'"):
        fit(torch.zeros(1, 5, 2), n_clusters=2, metric=EUCLIDEAN, streams=Streams(0), seeding="best")
