import pytest
import torch

from prescore.rng import Streams
from prescore.scoring.leverage import Leverage, exact_leverage


def _oracle(keys):
    """Squared row norms of the left singular vectors, in float64."""
    left, values, _ = torch.linalg.svd(keys.double(), full_matrices=False)
    return (left.square() * (values > 1e-6 * values.amax(-1, keepdim=True))[..., None, :]).sum(-1)


def _keys(n=500, dim=16, rank=16, dtype=torch.float32, condition=1.0):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(2, 3, n, rank, generator=generator, dtype=torch.float64)
    basis = torch.randn(2, 3, dim, dim, generator=generator, dtype=torch.float64)
    right = torch.linalg.qr(basis).Q[..., :rank, :]
    return (left * torch.logspace(0, -condition, rank, dtype=torch.float64) @ right).to(dtype)


def _score(keys, **options):
    return Leverage(**options).score(keys, valid=None, streams=Streams(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("condition", [0.0, 2.0, 4.5])
def test_equals_the_svd(dtype, condition):
    keys = _keys(dtype=dtype, condition=condition)
    gap = (_score(keys).double() - _oracle(keys)).abs().max()
    assert gap < 1e-6


@pytest.mark.parametrize("rank", [1, 5, 15])
def test_rank_deficient_keys_sum_to_their_rank(rank):
    keys = _keys(rank=rank)
    scores = _score(keys)
    torch.testing.assert_close(scores.sum(-1), torch.full((2, 3), float(rank)), rtol=1e-4, atol=0.0)
    assert (scores.double() - _oracle(keys)).abs().max() < 1e-6


def test_fewer_keys_than_dimensions_and_zero_keys():
    torch.testing.assert_close(_score(_keys(n=5)), torch.ones(2, 3, 5))
    assert (_score(torch.zeros(1, 2, 9, 4)) == 0).all()


def test_well_and_badly_conditioned_heads_share_a_batch():
    keys = torch.cat([_keys(condition=0.0), _keys(rank=3)])
    assert (_score(keys).double() - _oracle(keys)).abs().max() < 1e-6


def test_more_keys_than_one_block():
    rows = torch.randn(1, 5000, 4, generator=torch.Generator().manual_seed(0))
    assert (exact_leverage(rows).double() - _oracle(rows)).abs().max() < 1e-6


def test_a_sketch_as_long_as_the_keys_is_exact():
    keys = _keys()
    torch.testing.assert_close(_score(keys, sketch_size=500), _score(keys), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sketch_size", [128, 512, 2048])
def test_sketched_error_is_as_stated_and_falls(sketch_size):
    keys = torch.randn(1, 4, 16384, 32, generator=torch.Generator().manual_seed(0))
    relative = _score(keys, sketch_size=sketch_size) / _score(keys) - 1
    columns = min(32, max(8, sketch_size // 16))
    stated = 2 * (32 / sketch_size) ** 0.5 + (2 / columns) ** 0.5 * (columns < 32)
    assert relative.square().mean().sqrt() < stated


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="sketch_size must be at least 1, got 0"):
        Leverage(sketch_size=0)
