"""Each scorer against its formula."""

import pytest
import torch

import prescore
from prescore import Companions, GaussianKMeans, KMeans, Leverage
from prescore.paper.planted.model import PlantedSetting
from prescore.rng import Streams
from prescore.scoring.kmeans import bandwidths
from prescore.scoring.leverage import exact_leverage
from prescore.scoring.rules import apply_rule
from prescore.scoring.sampling import draw_sample


def normal(*size, dtype=torch.float64):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0), dtype=dtype)


KEYS = normal(2, 3, 60, 4)


def test_key_norm_is_the_length_and_key_diff_minus_the_cosine_to_the_mean_of_normalised_keys():
    torch.testing.assert_close(prescore.score(KEYS, "key-norm"), KEYS.square().sum(-1).sqrt())
    unit = torch.nn.functional.normalize(KEYS, dim=-1)
    expected = -torch.cosine_similarity(KEYS, unit.mean(2, keepdim=True), dim=-1)
    torch.testing.assert_close(prescore.score(KEYS, "key-diff"), expected)
    odd_one_out = torch.tensor([[1.0, 0.1], [1.0, -0.1], [1.0, 0.0], [-1.0, 0.2]])[None, None]
    assert prescore.score(odd_one_out, "key-diff").argmax() == 3
    assert (prescore.score(torch.zeros(1, 1, 3, 2), "key-diff") == 0).all()


def test_uniform_depends_on_position_head_and_seed_only():
    scores = prescore.score(KEYS, "uniform", generator=0)
    assert (scores == scores[:1]).all()
    assert len(scores[0].unique()) == scores[0].numel()
    assert ((scores >= 0) & (scores < 1)).all()
    assert not torch.equal(scores, prescore.score(KEYS, "uniform", generator=1))


@pytest.mark.parametrize("n", [4096, 16384])
@pytest.mark.parametrize("reading", ["normalized", "small-noise"])
def test_companions_recovers_planted_keys_in_both_readings(n, reading):
    for seed in range(2):  # the table of ten seeds is in experiments/planted/README.md
        model = PlantedSetting(n, 32, 0.1).draw(reading, generator=seed)
        planted = model.groups > 0
        kept = prescore.score(model.keys[None, None], Companions(), generator=seed)[0, 0].topk(int(planted.sum()))
        assert planted[kept.indices].double().mean() >= 0.95


def test_companions_in_one_window_is_the_second_largest_cosine():
    unit = torch.nn.functional.normalize(KEYS, dim=-1)
    expected = (unit @ unit.transpose(2, 3)).topk(3, dim=-1).values[..., 2]  # the largest is the key itself
    torch.testing.assert_close(prescore.score(KEYS, Companions(window=64)), expected)


def leverage_by_svd(keys):
    """Squared row norms of the left singular vectors, in float64."""
    left, values, _ = torch.linalg.svd(keys.double(), full_matrices=False)
    return (left.square() * (values > 1e-6 * values.amax(-1, keepdim=True))[..., None, :]).sum(-1)


def keys_of(n=500, dim=16, rank=16, dtype=torch.float32, condition=1.0):
    left, basis = normal(2, 3, n, rank), normal(2, 3, dim, dim)
    right = torch.linalg.qr(basis).Q[..., :rank, :]
    return (left * torch.logspace(0, -condition, rank, dtype=torch.float64) @ right).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("condition", [0.0, 2.0, 4.5])
def test_leverage_equals_the_svd(dtype, condition):
    keys = keys_of(dtype=dtype, condition=condition)
    assert (prescore.score(keys, "leverage").double() - leverage_by_svd(keys)).abs().max() < 1e-6


@pytest.mark.parametrize("rank", [1, 5, 15])
def test_identity_7_leverage_of_rank_deficient_keys_sums_to_their_rank(rank):
    keys = torch.cat([keys_of(rank=rank), keys_of(condition=0.0)])  # one batch with well conditioned heads
    scores = prescore.score(keys, "leverage")
    torch.testing.assert_close(scores.sum(-1)[:2], torch.full((2, 3), float(rank)), rtol=1e-4, atol=0.0)
    assert (scores.double() - leverage_by_svd(keys)).abs().max() < 1e-6


def test_leverage_of_few_zero_and_many_keys():
    torch.testing.assert_close(prescore.score(keys_of(n=5), "leverage"), torch.ones(2, 3, 5))
    assert (prescore.score(torch.zeros(1, 2, 9, 4), "leverage") == 0).all()
    rows = normal(1, 5000, 4, dtype=torch.float32)  # more than one block
    assert (exact_leverage(rows).double() - leverage_by_svd(rows)).abs().max() < 1e-6
    exact, sketched = (prescore.score(keys_of(), Leverage(sketch_size=size)) for size in (None, 500))
    torch.testing.assert_close(sketched, exact, rtol=1e-4, atol=1e-6)  # a sketch as long as the keys


@pytest.mark.parametrize("period", [16384, 32])
@pytest.mark.parametrize("sketch_size", [128, 512, 2048])
def test_identity_7_sketched_error_is_as_stated_and_falls(sketch_size, period):
    keys = normal(1, 4, period, 32, dtype=torch.float32).repeat(1, 1, 16384 // period, 1)
    relative = prescore.score(keys, Leverage(sketch_size=sketch_size)) / prescore.score(keys, "leverage") - 1
    columns = min(32, max(8, 4 * sketch_size // 32))
    stated = 2 * (32 / sketch_size) ** 0.5 + (2 / columns) ** 0.5 * (columns < 32)
    assert relative.square().mean().sqrt() < stated


def kernel_distances(points, labels, width):
    """Distance of each image to the mean of its cluster's images, from the kernel matrix alone."""
    kernel = torch.exp(-torch.cdist(points, points).square() / (2 * width**2))
    membership = torch.nn.functional.one_hot(labels, int(labels.max()) + 1).double()
    membership = membership / membership.sum(0).clamp(min=1)
    within = torch.einsum("nk,nm,mk->k", membership, kernel, membership)
    return (1 - 2 * (kernel @ membership).gather(1, labels[:, None])[:, 0] + within[labels]).clamp(min=0).sqrt()


def test_distances_are_those_of_the_exact_kernel():
    keys = normal(1, 2, 300, 4)
    scorer = GaussianKMeans(n_clusters=5, rule="farthest", normalize=False, n_features=8192, max_iter=50)
    scored = scorer.score(keys, valid=None, streams=Streams(0))
    widths = bandwidths(draw_sample(keys[0], None, 128))
    for head in range(2):
        exact = kernel_distances(keys[0, head], scored.labels[0, head], widths[head])
        # 4096 frequencies: kernel errors of about 1/64, less after averaging over a cluster
        assert (scored.scores[0, head] - exact).abs().max() < 0.05
        assert torch.corrcoef(torch.stack([scored.scores[0, head], exact]))[0, 1] > 0.99


def test_bandwidth_is_the_median_distance_of_valid_points():
    points, present = normal(1, 60, 4), (torch.arange(60) < 20)[None]
    distances = torch.cdist(points[0, :20], points[0, :20])[~torch.eye(20, dtype=torch.bool)]
    poisoned = points.masked_fill(~present[..., None], 1e5)
    sample = draw_sample(poisoned, present.double(), 128)
    torch.testing.assert_close(bandwidths(sample)[0], distances.median())
    assert bandwidths(draw_sample(torch.zeros(1, 9, 2), None, 128)).tolist() == [1.0]


# Rules: two clusters, {0, 2, 4} at distances 1, 3, 4 and {1, 3} at 2, 0; point 5 is padding.

DISTANCES = torch.tensor([[1.0, 2.0, 3.0, 0.0, 4.0, 9.0]], dtype=torch.float64)
LABELS = torch.tensor([[0, 1, 0, 1, 0, 0]])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("nearest", [-1.0, -2.0, -3.0, 0.0, -4.0]),
        ("farthest", [1.0, 2.0, 3.0, 0.0, 4.0]),
        ("cluster-share", [1 / 8, 1.0, 3 / 8, 0.0, 4 / 8]),
        ("sensitivity", [1 / 26 + 1 / 3, 1 + 1 / 2, 9 / 26 + 1 / 3, 1 / 2, 16 / 26 + 1 / 3]),
        # rank within the cluster, and half the distance over the largest to order equal ranks
        ("balanced", [-1 / 8, -1 - 2 / 8, -1 - 3 / 8, 0.0, -2 - 4 / 8]),
    ],
)
def test_rules_on_a_toy_solved_by_hand(rule, expected):
    scores = apply_rule(rule, DISTANCES, LABELS, n_clusters=3, valid=torch.arange(6)[None] < 5)[0, :5]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64))
    flat = apply_rule(rule, torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.int64), n_clusters=2)
    assert torch.isfinite(flat).all()  # coinciding points


@pytest.mark.parametrize(
    "scorer", [KMeans(n_clusters=1, rule="farthest", normalize=False, noise=0.5), Leverage(noise=0.5)]
)
def test_noise_moves_scores_in_every_head(scorer):
    keys, mask = torch.zeros(2, 3, 50, 8, dtype=torch.float64), (torch.arange(50) < 20).expand(2, -1)
    scores = prescore.score(keys, scorer)
    assert (scores == scores[:1]).all()  # the sequences of a batch share their draws
    assert len(scores[0].unique()) == scores[0].numel()
    if isinstance(scorer, KMeans):  # the mean length of a normal vector in 8 dimensions is about sqrt(7.5)
        assert scores.mean() == pytest.approx(0.5 * 7.5**0.5, rel=0.1)
    padded = prescore.score(keys, scorer, key_padding_mask=mask)
    torch.testing.assert_close(padded[..., :20], prescore.score(keys[:, :, :20], scorer))  # padding gets no noise


@pytest.mark.parametrize("kind", ["kmeans", "kmedian", "gaussian-kmeans", "leverage"])
def test_normalisation(kind):
    keys = normal(2, 2, 300, 8)
    keys[:, :, 7] = 0.0
    unit, mask = torch.nn.functional.normalize(keys, dim=-1), torch.arange(300) < torch.tensor([[300], [60]])
    scorer = prescore.registry.get_scorer(kind)
    size = {} if kind == "leverage" else {"fit_size": 100}
    got = prescore.score(keys * 4, scorer(normalize=True, **size), key_padding_mask=mask)
    raw = prescore.score(unit, scorer(normalize=False, **size), key_padding_mask=mask)
    torch.testing.assert_close(got, raw)  # a power of two changes no digit of the unit keys
    other = prescore.score(keys, scorer(normalize=False, **size), key_padding_mask=mask)
    assert not torch.allclose(other, raw)
