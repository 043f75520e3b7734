"""Inertia beside scikit-learn's KMeans: same k, 10 iterations, best of three restarts on both sides."""

import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs

from prescore.rng import Streams
from prescore.scoring.lloyd import fit
from prescore.scoring.metrics import EUCLIDEAN
from prescore.scoring.sampling import draw_sample

RESTARTS = range(3)


def key_like(n=6000, dim=32):
    """Normalised, anisotropic, off-centre, with soft topics: the shape of real keys."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -1.2, dim)
    topics = torch.randn(40, dim, generator=generator) * scale
    topic = torch.randint(40, (n,), generator=generator)
    points = torch.randn(n, dim, generator=generator) * scale + topics[topic]
    points = points + 2 * torch.randn(dim, generator=generator) * scale
    return torch.nn.functional.normalize(points, dim=-1)


def inertia(points, fit_size, seed):
    sample = draw_sample(points, None, fit_size, Streams(seed), "fit sample")
    result = fit(points, sample, n_clusters=33, metric=EUCLIDEAN, streams=Streams(seed))
    return result.distances.double().square().sum().item()


@pytest.mark.parametrize("name", ["blobs", "keys"])
def test_inertia_is_scikit_learns(name):
    blobs, _ = make_blobs(6000, 32, centers=33, cluster_std=4.0, random_state=1)
    points = torch.tensor(blobs, dtype=torch.float32) if name == "blobs" else key_like()
    reference = min(
        KMeans(33, n_init=1, max_iter=10, random_state=seed, algorithm="lloyd").fit(points.numpy()).inertia_
        for seed in RESTARTS
    )
    for fit_size, allowed in ((None, 1.02), (2048, 1.05)):
        found = min(inertia(points[None], fit_size, seed) for seed in RESTARTS)
        assert found <= allowed * reference, f"fit_size={fit_size}: {found / reference:.3f}"
