"""sortLSH: identity 8, and the hash by its definition."""

import pytest
import torch
from attention_checks import check_gray_neighbours
from oracles.naive import gray_position

from prescore.rng import Streams
from prescore.scoring.hashing import gray_rank, hash_ranks, projections


def draw(*size, dtype=torch.float64):
    return torch.randn(*size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("n_bits", range(1, 13))
def test_identity_8_neighbouring_buckets_differ_in_one_bit(n_bits):
    check_gray_neighbours(n_bits)


@pytest.mark.parametrize("n_bits", [1, 2, 7, 16, 24, 25, 30])
def test_the_rank_is_the_inverse_of_the_gray_code(n_bits):
    ranks = torch.randint(2**n_bits, (500,), generator=torch.Generator().manual_seed(n_bits))
    assert torch.equal(gray_rank(ranks ^ (ranks >> 1), n_bits), ranks)


@pytest.mark.parametrize("n_bits", [1, 3, 7, 12])
def test_the_hash_by_its_definition(n_bits):
    vectors = torch.cat((draw(40, 6), torch.zeros(1, 6, dtype=torch.float64)))
    directions = projections(n_bits, vectors, Streams(3))
    assert directions.shape == (6, n_bits)
    ranks = hash_ranks(vectors, directions)
    assert ranks.tolist() == [gray_position(vector @ directions >= 0) for vector in vectors]
    opposite = hash_ranks(-vectors[:-1], directions)
    codes, others = (r ^ (r >> 1) for r in (ranks[:-1], opposite))
    assert torch.equal(codes ^ others, torch.full_like(codes, 2**n_bits - 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_hash_depends_on_the_direction_only(dtype):
    vectors = draw(2, 3, 50, 8, dtype=dtype)
    directions = projections(7, vectors, Streams(2))
    ranks = hash_ranks(vectors, directions)
    assert ranks.shape == (2, 3, 50)
    assert (int(ranks.min()) >= 0, int(ranks.max()) < 2**7) == (True, True)
    assert torch.equal(ranks, hash_ranks(vectors * 4, directions))  # a power of two rounds nothing
    assert torch.equal(directions, projections(7, vectors, Streams(2)))
    assert not torch.equal(directions, projections(7, vectors, Streams(3)))
