"""sortLSH: identity 8, the hash itself, stability."""

import pytest
import torch
from attention_checks import check_gray_neighbours
from oracles.naive import gray_position

from prescore.rng import Streams
from prescore.scoring.hashing import gray_rank, hash_ranks, projections, zero_rank


@pytest.mark.parametrize("n_bits", range(1, 13))
def test_identity_8_neighbouring_buckets_differ_in_one_bit(n_bits):
    check_gray_neighbours(n_bits)


@pytest.mark.parametrize("n_bits", [1, 2, 7, 16, 24, 25, 30])
def test_the_rank_is_the_inverse_of_the_gray_code(n_bits):
    ranks = torch.randint(2**n_bits, (500,), generator=torch.Generator().manual_seed(n_bits))
    assert torch.equal(gray_rank(ranks ^ (ranks >> 1), n_bits), ranks)


@pytest.mark.parametrize("n_bits", [1, 3, 7, 12])
def test_hash_of_zero_is_what_zero_rank_says(n_bits):
    directions = projections(n_bits, torch.zeros(1, 5), Streams(1))
    assert int(hash_ranks(torch.zeros(1, 5), directions)) == zero_rank(n_bits)
    assert gray_position(torch.ones(n_bits, dtype=torch.bool)) == zero_rank(n_bits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_hash_depends_on_direction_only(dtype):
    vectors = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    directions = projections(7, vectors, Streams(2))
    ranks = hash_ranks(vectors, directions)
    assert ranks.shape == (2, 3, 50)
    assert int(ranks.min()) >= 0
    assert int(ranks.max()) < 2**7
    assert torch.equal(ranks, hash_ranks(vectors * 4, directions))  # a power of two rounds nothing
    assert torch.equal(ranks, hash_ranks(vectors, directions))


def test_hash_by_the_definition():
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    directions = projections(6, vectors, Streams(3))
    expected = [gray_position(vector @ directions >= 0) for vector in vectors]
    assert hash_ranks(vectors, directions).tolist() == expected
    assert len(set(expected)) > 10


def test_opposite_vectors_land_in_complementary_buckets():
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    directions = projections(5, vectors, Streams(3))
    rank, opposite = hash_ranks(vectors, directions), hash_ranks(-vectors, directions)
    code, other = rank ^ (rank >> 1), opposite ^ (opposite >> 1)
    assert torch.equal(code ^ other, torch.full_like(code, 2**5 - 1))


def test_more_projections_keep_the_first_ones_random_stream():
    like = torch.zeros(1, 4, dtype=torch.float64)
    assert projections(3, like, Streams(1)).shape == (4, 3)
    assert torch.equal(projections(3, like, Streams(1)), projections(3, like, Streams(1)))
    assert not torch.equal(projections(3, like, Streams(1)), projections(3, like, Streams(2)))
