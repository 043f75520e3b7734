"""Keys in four bits and queries in six."""

import pytest
import torch

from oracles.routed import coded_keys, coded_query
from prescore.routed.index import coded_logits, encode_keys, encode_queries


def unpacked(codes):
    """`[..., D']` whole numbers."""
    return torch.cat((codes.packed & 15, codes.packed >> 4), dim=-1).to(torch.int64) - 8


def normal(*size, seed=0, dtype=torch.float64):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dim", [1, 3, 8, 9, 16, 17, 40, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_coded_logits_are_those_of_the_definition(dim, dtype):
    query, key = normal(20, dim, dtype=dtype), normal(50, dim, seed=1, dtype=dtype)
    got = coded_logits(query, encode_keys(key))
    wanted = coded_query(query) @ coded_keys(key).T
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_no_number_is_more_than_half_a_unit_off_but_the_largest():
    key = normal(200, 32)
    codes = encode_keys(key)
    numbers = unpacked(codes)
    assert codes.packed.shape == (200, 16)
    assert int(numbers.min()) == -7
    assert int(numbers.max()) == 7
    units = codes.scales.repeat_interleave(16, dim=-1)
    off = (numbers * units - key).abs() / units
    assert float(off.max()) <= 0.5 + 1e-9
    for half in (slice(0, 16), slice(16, 32)):  # the largest number of each half is 7.49 units
        torch.testing.assert_close(key[:, half].abs().amax(1) / 7.49, codes.scales[:, half.start // 16])


def test_queries_have_one_scale():
    query = normal(50, 24)
    numbers, scale = encode_queries(query)
    assert numbers.shape == (50, 2, 16)
    assert float(numbers.abs().max()) == 31
    torch.testing.assert_close(scale.squeeze(1) * 31, query.abs().amax(1))
    back = (numbers.flatten(1) * scale)[:, :24]
    assert float(((back - query).abs() / scale).max()) <= 0.5 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zeros_have_codes_and_logits_of_zero(dtype):
    key = normal(4, 20, dtype=dtype)
    key[0] = 0
    key[1, :16] = 0
    query = normal(3, 20, seed=1, dtype=dtype)
    query[2] = 0
    got = coded_logits(query, encode_keys(key))
    assert torch.isfinite(got).all()
    assert (got[:, 0] == 0).all()
    assert (got[2] == 0).all()
    assert (got[:2, 1:] != 0).all()


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-20, 2.0**20, 2.0**100])
def test_codes_do_not_depend_on_the_scale(scale):
    key = normal(30, 16, dtype=torch.float32)
    assert torch.equal(encode_keys(key * scale).packed, encode_keys(key).packed)
    assert torch.equal(encode_keys(key * scale).scales, encode_keys(key).scales * scale)
    assert torch.equal(encode_queries(key * scale)[0], encode_queries(key)[0]) or scale < 1e-29


def test_a_huge_number_spoils_its_own_half_alone():
    key = normal(10, 32)
    key[:, 3] = 1e4
    codes = unpacked(encode_keys(key))
    assert (codes[:, :16].count_nonzero(1) == 1).all()
    wanted = unpacked(encode_keys(key[:, 16:].repeat(1, 2)))[:, 16:]
    assert torch.equal(codes[:, 16:], wanted)


def test_logits_are_good_enough_to_search_by():
    query, key = normal(100, 64), normal(400, 64, seed=1)
    off = coded_logits(query, encode_keys(key)) - query @ key.T
    # numbers are off by a unit over sqrt(12), a unit is a 7.5th of the largest of 32 normals, about 2.1
    assert 0.05 < float(off.std()) / 8 < 0.12
    assert abs(float(off.mean())) < 0.1
