"""Clustering: the Lloyd loop, its seeds, samples, centres and nearest centres, and its inertia."""

import math

import pytest
import torch
from sklearn.cluster import KMeans

from prescore.paper.planted.model import PlantedSetting
from prescore.paper.planted.study import best_recovery
from prescore.rng import Streams
from prescore.scoring import lloyd
from prescore.scoring.lloyd import assign, fit
from prescore.scoring.metrics import EUCLIDEAN, MEDIAN, metric_for, nearest_columns, sum_clusters, zero_of_gradient
from prescore.scoring.sampling import draw_sample, gather_rows, sample_positions

EXPONENTS = (2.0, 1.0, 1.5, 3.0, 0.5)
every_metric = pytest.mark.parametrize("metric", [metric_for(p) for p in EXPONENTS], ids=lambda m: f"p={m.p}")


def draws(seed, n_problems, first=0):
    """Uniforms of the problems of a fit: problem i draws what KV head `first + i` would."""
    streams, like = Streams(seed, first_head=first), torch.empty(1, n_problems)
    return lambda name, *size: streams.head_uniform(name, *size, like=like)[0]


def normal(*size, seed=1):
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def blobs(n_problems=2, size=30, seed=0):
    """Four far blobs of standard deviation 0.1 for each problem, and which blob each point is of."""
    centres = normal(n_problems, 4, 3, seed=seed) * 10
    truth = torch.arange(4).repeat(size).expand(n_problems, -1)
    points = gather_rows(centres, truth) + 0.1 * normal(n_problems, 4 * size, 3, seed=seed + 1)
    return points, truth, centres


@every_metric
def test_finds_separated_blobs(metric):
    points, truth, centres = blobs()
    result = fit(points, n_clusters=4, metric=metric, draw=draws(3, 2), max_iter=20)
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
    result = fit(points, draw=draws(0, 3), **options)
    gaps = (points[:, :, None] - result.centres[:, None]).abs().pow(metric.p).sum(-1).pow(1 / metric.p)
    torch.testing.assert_close(result.distances, gaps.amin(-1))
    torch.testing.assert_close(result.labels, gaps.argmin(-1))


@every_metric
def test_with_few_points_each_is_its_own_centre(metric):
    few = fit(torch.randn(2, 3, 3), n_clusters=7, metric=metric, draw=draws(0, 2))
    assert few.centres.shape == (2, 7, 3)
    assert (few.distances == 0).all()


def test_empty_clusters_take_the_farthest_points():
    # random seeding lands twice on the heap of equal points and leaves a cluster empty at first
    points = torch.cat([torch.zeros(98, 2), torch.tensor([[10.0, 0.0], [0.0, 20.0]])])[None].double()
    for seed in range(5):
        result = fit(points, n_clusters=3, metric=EUCLIDEAN, draw=draws(seed, 1), seeding="random")
        assert float(result.distances.square().sum()) <= 1e-12  # exact: three different points


def test_a_converged_problem_is_frozen():
    easy, hard = blobs(1, seed=1)[0], normal(1, 120, 3, seed=3)
    options = {"n_clusters": 4, "metric": EUCLIDEAN, "max_iter": 50, "tol": 0.05}
    both = fit(torch.cat([easy, hard]), draw=draws(0, 2), **options)
    for number, points in enumerate((easy, hard)):
        alone = fit(points, draw=draws(0, 1, first=number), **options).centres
        torch.testing.assert_close(both.centres[number : number + 1], alone)


def test_one_point_from_each_slice():
    points = torch.arange(100.0)[None, :, None]
    sample = draw_sample(points, None, 10)
    assert (sample.weights, sample.is_partial.tolist()) == (None, [True])
    assert (sample.points[0, :, 0] // 10).tolist() == list(range(10))
    assert len(set((sample.points[0, :, 0] % 10).tolist())) > 1
    assert sample.points[0, :, 0].tolist() == sample_positions(100, 10).tolist()
    for size in (None, 100, 200):
        assert draw_sample(points, None, size).points is points
        assert sample_positions(100, size).tolist() == list(range(100))
    assert sample_positions(100, 0).tolist() == []


# Centres of clusters in l_p, and the nearest centres of points.


def clusters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    points = torch.randn(
        2, 41, 3, generator=generator, dtype=dtype
    ).exp()  # skewed: mean, median and others differ
    labels = torch.randint(3, (2, 41), generator=generator)
    weights = torch.ones(2, 41, dtype=dtype)
    weights[:, ::5] = 0  # filler
    membership = (labels[:, None] == torch.arange(3)[:, None]).to(dtype) * weights[:, None]
    return points, labels, weights, membership


def cost(points, centres, membership, p):
    gaps = (points[:, None] - centres[:, :, None]).abs().pow(p)
    return torch.einsum("pkn,pknd->pkd", membership, gaps)


@pytest.mark.parametrize("p", [1.0, 1.2, 1.5, 2.0, 3.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_centres_against_a_dense_search(p, dtype):
    points, labels, weights, membership = clusters(dtype)
    steps = 50 if dtype == torch.float64 else 20  # until the dtype has no more digits
    centres = zero_of_gradient(points, labels, weights, membership.sum(-1), p, steps=steps).double()
    points, membership = points.double(), membership.double()
    low, high = points.amin(1)[:, None], points.amax(1)[:, None]
    tried = low + torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None] * (high - low)
    best = [cost(points, tried, membership[:, [k]].expand(-1, 1001, -1), p).amin(1) for k in range(3)]
    # 20 halvings of the bracket in float32: 1e-6 of a standard deviation, so 1e-5 of the cost at p = 1
    slack = 1 + (1e-12 if dtype == torch.float64 else 1e-5)
    assert (cost(points, centres, membership, p) <= torch.stack(best, dim=1) * slack).all()


@pytest.mark.parametrize("p", [0.5, 0.8])
def test_below_one_the_median_is_nearly_the_best_member(p):
    points, labels, weights, membership = clusters()
    centres = metric_for(p).update(points, labels, weights, membership.sum(-1), final=True)
    reached = cost(points, centres, membership, p).sum(-1)
    for problem in range(2):
        for cluster in range(3):
            member = membership[problem, cluster] > 0
            some = points[problem, member][None]
            best = cost(some, some, torch.ones(1, *[int(member.sum())] * 2, dtype=points.dtype), p).amin(1).sum()
            assert reached[problem, cluster] <= 1.05 * best  # the best value of every coordinate


def points_and_centres(n_centres, *, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(n_centres)
    points = scale * torch.randn(2, 300, 6, generator=generator, dtype=dtype)
    return points, scale * torch.randn(2, n_centres, 6, generator=generator, dtype=dtype)


@pytest.mark.parametrize("n_centres", [2, 3, 9, 64, 65])
@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_shortlist_of_two_is_compared_in_the_metric(p, n_centres, scale):
    points, centres = points_and_centres(n_centres, scale=scale)
    costs = (points[:, :, None] - centres[:, None]).abs().pow(p).sum(-1)
    near = torch.cdist(points, centres).topk(2, dim=2, largest=False).indices
    best = costs.gather(2, near).min(dim=2)
    labels, distances = assign(points, centres, metric_for(p), exact=torch.tensor([False, False]))
    assert torch.equal(labels, near.gather(2, best.indices[..., None])[..., 0])
    torch.testing.assert_close(distances, best.values.pow(1 / p))


def test_nearest_columns_takes_the_first_of_equals():
    table = torch.tensor([[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 5.0, 0.0], [1.0, 0.0, 5.0, 0.0]])
    assert nearest_columns(table[None]).tolist() == [[1, 2, 0, 0]]
    assert nearest_columns(table[None, :, :3]).tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("weights", [None, torch.arange(4.0)[None]])
def test_sum_clusters_by_definition(weights):
    values, labels = torch.tensor([[[1.0], [2.0], [4.0], [8.0]]]), torch.tensor([[2, 0, 2, 0]])
    wanted = [10.0, 0.0, 5.0] if weights is None else [26.0, 0.0, 8.0]
    assert sum_clusters(values, labels, weights, 3).flatten().tolist() == wanted


# Seeds come from all points.


@pytest.mark.parametrize(("n_keys", "epsilon"), [(4096, 0.1), (16384, 0.1), (4096, 1.0)])
def test_kmeans_recovers_small_planted_groups(n_keys, epsilon):
    """Theorem 2 and Corollary 1, small noise: 32 groups of 10 keys, or single ones.

    A subsample of the seeds would miss groups, and keys as seeds give the noise two of them.
    """
    model = PlantedSetting(n_keys, 32, epsilon).draw("small-noise", generator=1)
    recovered = best_recovery(model, 1, 1)
    assert (recovered.groups, recovered.noise) == (1.0, 1.0)


def test_a_single_far_point_among_many_is_a_seed():
    points = normal(2, 5000, 4) * 0.01
    far = torch.tensor([[4321, 17], [5, 4999]])
    for problem in range(2):
        points[problem, far[problem]] += torch.tensor([[3.0, 0, 0, 0], [0, 3.0, 0, 0]], dtype=torch.float64)
    for seed in range(5):
        centres = fit(points, n_clusters=3, metric=EUCLIDEAN, draw=draws(seed, 2), max_iter=0).centres
        assert (torch.cdist(points.gather(1, far[..., None].expand(-1, -1, 4)), centres).amin(2) == 0).all()


def test_candidates_stand_for_all_points():
    points, weights = normal(2, 1000, 3), torch.ones(2, 1000, dtype=torch.float64)
    weights[1, 200:] = 0
    means, counts = lloyd._candidates(points, weights, 64, 2.0, draws(0, 2))
    assert means.shape == (2, 257, 3)
    assert counts.sum(1).tolist() == [1000, 200]
    assert torch.equal(means[1, :200], points[1, :200])  # a short problem has all of its points
    torch.testing.assert_close((means[0] * counts[0, :, None]).sum(0), points[0].sum(0))
    nearest = torch.cdist(points[:1], means[:1]).amin(2)
    assert nearest.square().mean() < 0.1 * points[0].var()


def test_converged_early_iterations_still_end_in_the_metrics_own_centres():
    # one skewed cluster: the means converge at once, and the median is elsewhere
    points = normal(1, 101, 2, seed=0).exp()
    centres = fit(points, n_clusters=1, metric=MEDIAN, draw=draws(0, 1)).centres[0, 0]
    # ten halvings of a standard deviation
    assert ((centres - points[0].median(dim=0).values).abs() < points[0].std(dim=0) * 2**-9).all()
    assert ((centres - points[0].mean(dim=0)).abs() > 0.1).all()


def key_like(n=6000, dim=32):
    """Normalised, anisotropic, off-centre, with soft topics: the shape of real keys."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -1.2, dim)
    topics = torch.randn(40, dim, generator=generator) * scale
    topic = torch.randint(40, (n,), generator=generator)
    points = torch.randn(n, dim, generator=generator) * scale + topics[topic]
    points = points + 2 * torch.randn(dim, generator=generator) * scale
    return torch.nn.functional.normalize(points, dim=-1)


def test_inertia_is_scikit_learns():
    """With the same k, 10 iterations, and the best of three restarts on both sides."""
    points = key_like()
    reference = KMeans(33, n_init=3, max_iter=10, random_state=0, algorithm="lloyd")
    best = reference.fit(points.numpy()).inertia_
    for fit_size, allowed in ((None, 1.02), (2048, 1.05)):
        found = math.inf
        for seed in range(3):
            sample = draw_sample(points[None], None, fit_size)
            fitted = fit(points[None], sample, draw=draws(seed, 1), n_clusters=33, metric=EUCLIDEAN)
            found = min(found, float(fitted.distances.double().square().sum()))
        assert found <= allowed * best, f"fit_size={fit_size}: {found / best:.3f}"
