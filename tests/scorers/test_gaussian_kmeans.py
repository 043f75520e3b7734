import torch

from prescore.rng import Streams
from prescore.scoring.kmeans import GaussianKMeans, bandwidth, fourier_features


def _keys(n=300, dim=4):
    return torch.randn(1, 2, n, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _kernel_distances(points, labels, width):
    """Distance of each image to the mean of its cluster's images, from the kernel matrix alone."""
    kernel = torch.exp(-torch.cdist(points, points).square() / (2 * width**2))
    membership = torch.nn.functional.one_hot(labels, int(labels.max()) + 1).double()
    membership = membership / membership.sum(0).clamp(min=1)
    within = torch.einsum("nk,nm,mk->k", membership, kernel, membership)
    return (1 - 2 * (kernel @ membership).gather(1, labels[:, None])[:, 0] + within[labels]).clamp(min=0).sqrt()


def test_distances_are_those_of_the_exact_kernel():
    keys = _keys()
    scorer = GaussianKMeans(
        n_clusters=5, rule="farthest", normalize=False, n_features=8192, max_iter=50, fit_size=0
    )
    scored = scorer.score(keys, valid=None, streams=Streams(0))
    widths = bandwidth(keys[0], None, Streams(0))
    for head in range(2):
        exact = _kernel_distances(keys[0, head], scored.labels[0, head], widths[head])
        # 4096 frequencies: kernel errors of about 1/64, less after averaging over a cluster
        assert (scored.scores[0, head] - exact).abs().max() < 0.05
        assert torch.corrcoef(torch.stack([scored.scores[0, head], exact]))[0, 1] > 0.99


def test_it_is_no_map_of_the_euclidean_distance():
    # a ring around a core: one Euclidean mean cannot tell them apart, kernel k-means can
    angle = torch.linspace(0, 6.28, 200, dtype=torch.float64)
    ring = torch.stack([angle.cos(), angle.sin()], -1) * 4
    core = torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.2
    scored = GaussianKMeans(n_clusters=2, n_features=2048, rule="farthest", normalize=False, fit_size=0).score(
        torch.cat([ring, core])[None, None], valid=None, streams=Streams(0)
    )
    core_labels = scored.labels[0, 0, 200:]
    assert (core_labels == core_labels[0]).all()
    assert scored.scores[0, 0, :200].mean() > 2 * scored.scores[0, 0, 200:].mean()


def test_features_approach_the_kernel():
    points = _keys(50)[0]
    widths = torch.tensor([1.0, 2.0], dtype=torch.float64)
    frequencies = Streams(1).normal("test", 20000, 4, like=points).t() / widths[:, None, None]
    features = fourier_features(points, frequencies)
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(2, 50, dtype=torch.float64))
    exact = torch.exp(-torch.cdist(points, points).square() / (2 * widths[:, None, None] ** 2))
    # standard error below 1/sqrt(2 * 20000) = 0.005, largest of 2500 pairs within 5 of them
    assert (features @ features.transpose(1, 2) - exact).abs().max() < 0.025


def test_bandwidth_is_the_median_distance_of_valid_points():
    points = _keys(60)[0]
    distances = torch.cdist(points[0, :20], points[0, :20])[~torch.eye(20, dtype=torch.bool)]
    present = (torch.arange(60) < 20).expand(2, -1)
    poisoned = points.masked_fill(~present[..., None], 1e5)
    torch.testing.assert_close(bandwidth(poisoned, present, Streams(0))[0], distances.median())
    assert bandwidth(torch.zeros(1, 9, 2), None, Streams(0)).tolist() == [1.0]
