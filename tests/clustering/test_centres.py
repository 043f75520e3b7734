import pytest
import torch

from prescore.scoring.metrics import best_members, zero_of_gradient


def _problem(dtype=torch.float64, odd=True):
    generator = torch.Generator().manual_seed(4)
    n = 41 if odd else 40
    points = torch.randn(2, n, 3, generator=generator, dtype=dtype).exp()  # skewed: mean, median and others differ
    labels = torch.randint(3, (2, n), generator=generator)
    membership = (labels[:, None] == torch.arange(3)[:, None]).to(dtype)
    return points, labels, membership, membership.sum(-1)


def _cost(points, centres, membership, p):
    gaps = (points[:, None] - centres[:, :, None]).abs().pow(p)
    return torch.einsum("pkn,pknd->pkd", membership, gaps)


@pytest.mark.parametrize("p", [1.0, 1.2, 1.5, 2.0, 3.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_a_dense_search(p, dtype):
    points, labels, membership, sizes = _problem(dtype)
    found = zero_of_gradient(points, labels, membership, sizes, p)
    cost = _cost(points.double(), found.double(), membership.double(), p)
    low, high = points.amin(1)[:, None].double(), points.amax(1)[:, None].double()
    grid = torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None]
    tried = low + grid * (high - low)
    best = torch.stack(
        [
            _cost(points.double(), tried, membership[:, [k]].double().expand(-1, 1001, -1), p).amin(1)
            for k in range(3)
        ],
        dim=1,
    )
    # 20 halvings of the bracket in float32: 1e-6 of a standard deviation, so 1e-5 of the cost at p = 1
    assert (cost <= best * (1 + (1e-12 if dtype == torch.float64 else 1e-5))).all()


def test_at_two_it_is_the_mean():
    points, labels, membership, sizes = _problem()
    means = membership @ points / sizes[..., None]
    torch.testing.assert_close(zero_of_gradient(points, labels, membership, sizes, 2.0), means)


@pytest.mark.parametrize("odd", [True, False])
def test_at_one_it_is_a_median(odd):
    points, labels, membership, sizes = _problem(odd=odd)
    found = zero_of_gradient(points, labels, membership, sizes, 1.0)
    for problem in range(2):
        for cluster in range(3):
            members = points[problem, labels[problem] == cluster].sort(dim=0).values
            middle = (len(members) - 1) / 2
            low, high = members[int(middle)], members[int(middle + 0.5)]
            # any point between the middle two is a median; 50 halvings leave 1e-15 of a standard deviation
            assert ((found[problem, cluster] >= low - 1e-9) & (found[problem, cluster] <= high + 1e-9)).all()


def test_below_one_a_member_beats_the_mean():
    points, labels, membership, sizes = _problem()
    means = membership @ points / sizes[..., None]
    found = best_members(points, labels, membership, sizes, 0.5)
    better = _cost(points, found, membership, 0.5).sum(-1)
    assert (better < _cost(points, means, membership, 0.5).sum(-1)).all()
    for problem in range(2):
        for cluster in range(3):
            members = points[problem, labels[problem] == cluster]
            assert (members == found[problem, cluster]).all(-1).any()
