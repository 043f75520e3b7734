"""Keys and values as int8 rows: what they stand for, and native steps that read them."""

import pytest
import torch
from routed_checks import levels_here, needs_native

from prescore import Routed
from prescore.routed.decode import StepAttention
from prescore.routed.int8_rows import UNIT_NUMBERS, from_int8_rows, row_size, to_int8_rows

CONFIG = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=32, sinks=2, exact_until=32)


def test_rows_stand_for_their_numbers():
    """Half a unit at most, in each group of its own; zeros, infinities and NaN stay what they are."""
    generator = torch.Generator().manual_seed(0)
    for dim in (16, 32, 48, 256):
        wide = torch.randn(2, 3, dim, generator=generator)
        wide[0, 0, : dim // 2] *= 1000
        wide[1, 1] = 0
        rows = to_int8_rows(wide)
        assert rows.shape == (2, 3, row_size(dim))
        assert rows.dtype == torch.uint8
        for first in range(0, dim, UNIT_NUMBERS):
            some = slice(first, first + UNIT_NUMBERS)
            error = (from_int8_rows(rows, dim, torch.float64) - wide)[..., some].abs().amax(-1)
            # the unit has eight bits, so a number next to the largest may be clamped by 127 * 2^-9 of it
            assert (error <= wide[..., some].abs().amax(-1) / 127 * (0.5 + 127 / 2**9) * 1.01).all()
    odd = torch.tensor([[torch.inf] * 16, [torch.nan] * 16])
    assert not from_int8_rows(to_int8_rows(odd), 16, torch.float32).isfinite().any()


@needs_native
@pytest.mark.parametrize("level", levels_here())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (48, 80)])
@torch.no_grad()
def test_native_steps_read_rows_as_what_they_stand_for(dim, value_dim, dtype, level, monkeypatch):
    monkeypatch.setenv("PRESCORE_NATIVE", level)
    generator = torch.Generator().manual_seed(dim)
    key, value = (torch.randn(2, 2, 300, size, generator=generator).to(dtype) for size in (dim, value_dim))
    query = torch.randn(2, 6, 1, dim, generator=generator).to(dtype) * 3
    end = 2 + (300 - 2 - 1) // 32 * 32 - 32  # the sinks, and all chunks but the last whole one
    rows = tuple(to_int8_rows(t[:, :, :end]) for t in (key, value))
    for t, some in zip((key, value), rows, strict=True):
        t[:, :, :end] = from_int8_rows(some, t.shape[-1], dtype)
    attend = StepAttention(CONFIG, scale=dim**-0.5)
    assert not attend.reads_int8_rows(300, end)
    expected = attend.attend(query, key, value)
    assert attend.reads_int8_rows(300, end)
    reads = attend.reads
    got = attend.attend_int8_rows(query, key[:, :, end:], value[:, :, end:], rows)
    assert attend.reads == reads
    # rows stand for float32 numbers, which the keys above round to the dtype; the output is rounded too
    size = torch.finfo(dtype).eps
    assert torch.allclose(got.output.float(), expected.output.float(), rtol=8 * size, atol=8 * size)
    assert torch.allclose(got.lse, expected.lse, rtol=8 * size, atol=16 * size)
    with pytest.raises(ValueError, match="far rows must be those before the local keys, got 10 of 52"):
        attend.attend_int8_rows(query, key[:, :, end:], value[:, :, end:], tuple(t[:, :, :10] for t in rows))
    prepared, heads = attend._prepared[1], query.reshape(4, 3, 1, dim)
    for wrong, message in (
        (tuple(t[:, :1] for t in rows), "far key must be uint8"),
        (tuple(t[..., :-1] for t in rows), "far key must be uint8"),
        ((rows[0], rows[1].float()), "far value must be uint8"),
        (tuple(t[:, :, :240] for t in rows), "far key must hold position 257"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared.attend(heads, key[:, :, end:], value[:, :, end:], 16, wrong[0].shape[2], wrong)
