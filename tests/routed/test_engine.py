"""What holds for routed attention whatever it finds: causality, pieces, padding, batches, odd numbers."""

import pytest
import torch
from attention_checks import lanes
from oracles.budgets import assert_within

from prescore import Routed, exact_attention, prescored_attention
from oracles.routed import routed_oracle

SCALE = 8**-0.5


def options(is_causal, *, rows=8, valid=None, **fields):
    config = Routed(**{"rows": rows, "leaf_size": 4, "chunk_size": 16, "sinks": 3, "exact_until": 0, **fields})
    return {"is_causal": is_causal, "valid": valid, "config": config, "scale": SCALE}


def inputs(n_query, n_key, *, batch=2, heads=4, kv_heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, n_query, 8), (batch, kv_heads, n_key, 8), (batch, kv_heads, n_key, 5))
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def length_mask(n_key, *lengths):
    return torch.arange(n_key) < torch.tensor(lengths)[:, None]


def assert_same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_reading_every_row_is_exact_attention(is_causal):
    tensors = inputs(75, 75)
    got, figures = lanes(*tensors, **options(is_causal, rows=2**31 - 1))
    expected = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
    assert_same(got.output, expected.output)
    assert_same(got.lse, expected.lse)
    assert figures["far_keys_read"] > 16


def test_short_sequences_are_exact_with_no_rows():
    tensors = inputs(35, 35)
    got, figures = lanes(*tensors, **options(True, rows=0))
    assert_same(got.output, exact_attention(*tensors, is_causal=True, scale=SCALE).output)
    assert figures["exact_queries"] == 35


@pytest.mark.parametrize("rows", [0, 8, 60])
def test_later_queries_keys_and_values_change_nothing(rows):
    tensors = inputs(130, 130)
    before = lanes(*tensors, **options(True, rows=rows)).attended
    for place in range(3):
        changed = [t.clone() for t in tensors]
        changed[place][:, :, 83:] = torch.randn(changed[place][:, :, 83:].shape, dtype=torch.float64) * 9
        after = lanes(*changed, **options(True, rows=rows)).attended
        assert_same(after.output[:, :, :83], before.output[:, :, :83])
        assert not torch.allclose(after.output[:, :, 83:], before.output[:, :, 83:])


@pytest.mark.parametrize("length", [1, 2, 20, 52, 67, 101])
def test_truncation_changes_nothing_before(length):
    tensors = inputs(130, 130)
    whole = lanes(*tensors, **options(True)).attended
    part = lanes(*(t[:, :, :length] for t in tensors), **options(True)).attended
    assert_same(part.output, whole.output[:, :, :length])
    assert_same(part.lse, whole.lse[:, :, :length])


@pytest.mark.parametrize("exact_until", [0, 61])
@pytest.mark.parametrize("cuts", [(130,), (1, 129), (60, 61, 9), (35, 16, 16, 63), (100, 1, 1, 1, 27)])
def test_pieces_of_a_prompt_equal_the_whole_call(cuts, exact_until):
    query, key, value = inputs(130, 130)
    whole = lanes(query, key, value, **options(True, exact_until=exact_until)).attended
    stop = 0
    for size in cuts:
        start, stop = stop, stop + size
        piece = (query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop])
        part = lanes(*piece, **options(True, exact_until=exact_until)).attended
        assert_same(part.output, whole.output[:, :, start:stop])
        assert_same(part.lse, whole.lse[:, :, start:stop])
    assert stop == 130


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [61, 20, 1])
def test_batch_and_padding_change_nothing(is_causal, length):
    tensors = inputs(90, 90, batch=3)
    config = options(is_causal)["config"]
    mask = length_mask(90, 90, length, 90)
    arguments = {"is_causal": is_causal, "scale": SCALE}
    parallel_group = prescored_attention(*tensors, config, key_padding_mask=mask, **arguments)
    alone = prescored_attention(*(t[1:2, :, :length] for t in tensors), config, **arguments)
    assert_same(parallel_group[1:2, :, :length], alone)
    for row in (0, 2):
        lone = prescored_attention(*(t[row : row + 1] for t in tensors), config, **arguments)
        assert_same(parallel_group[row : row + 1], lone)


@pytest.mark.parametrize("is_causal", [True, False])
def test_query_heads_share_the_nodes_of_their_key_head(is_causal):
    query, key, value = inputs(90, 90)
    grouped = lanes(query, key, value, **options(is_causal)).attended
    repeated = [t.repeat_interleave(2, dim=1) for t in (key, value)]
    assert_same(lanes(query, *repeated, **options(is_causal)).attended.output, grouped.output)


@pytest.mark.parametrize("at_once", [1, 90 * 8 * 3, 2**22])
def test_how_many_lanes_go_together_changes_nothing(at_once, monkeypatch):
    tensors = inputs(90, 90)
    whole = lanes(*tensors, **options(True)).attended
    monkeypatch.setattr("prescore.routed.attention.KEY_NUMBERS_AT_ONCE", at_once)
    assert_same(lanes(*tensors, **options(True)).attended.output, whole.output)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", [(0, 9, 9), (1, 0, 9), (1, 1, 1), (1, 3, 3)])
def test_empty_and_tiny(is_causal, shape):
    batch, n_query, n_key = shape
    tensors = inputs(n_query, n_key, batch=batch)
    output = prescored_attention(*tensors, options(is_causal)["config"], is_causal=is_causal, scale=SCALE)
    assert output.shape == (batch, 4, n_query, 5)
    assert_same(output, exact_attention(*tensors, is_causal=is_causal, scale=SCALE).output)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_stays_near_the_definition(dtype, is_causal):
    tensors = [t.to(dtype) for t in inputs(90, 90)]
    # nothing to read: rounding may not move a choice then
    arguments = options(is_causal, rows=0)
    got = lanes(*tensors, **arguments).attended
    wanted = routed_oracle(*tensors, arguments["config"], is_causal=is_causal, scale=SCALE)
    assert got.output.dtype == dtype
    assert got.lse.dtype == torch.float32
    # a few roundings of outputs of size about 1
    assert_within(got.output, wanted.output, 8 * torch.finfo(dtype).eps + 2e-6)
    assert_within(got.lse, wanted.lse, 2e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_sums_beyond_half_precision(is_causal, padded):
    """Means of rows whose sum is above 65504, the largest number of float16."""
    query, key, value = inputs(90, 90)
    tensors = [t.half() for t in (query * 0.001, key * 0.1 + 25000, value + 25000)]
    valid = length_mask(90, 90, 90) if padded else None
    got = lanes(*tensors, **options(is_causal, rows=4, chunk_size=32, valid=valid)).attended
    expected = exact_attention(*(t.double() for t in tensors), is_causal=is_causal, scale=SCALE)
    assert_within(got.output, expected.output, 16)  # numbers of 25000 lie 16 apart
    torch.testing.assert_close(got.lse.double(), expected.lse, rtol=2e-3, atol=0.1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rows", [0, 4, 1000])
def test_equal_keys_are_exact_whatever_is_read(is_causal, rows):
    query, key, value = inputs(90, 90)
    key = key[:, :, :1].expand_as(key).contiguous()
    got = lanes(query, key, value, **options(is_causal, rows=rows)).attended
    expected = exact_attention(query, key, value, is_causal=is_causal, scale=SCALE)
    # the least deviation that is assumed is 1e-3, half its square is the gain
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("place", [3, 20, 50, 90])
def test_a_needle_that_only_late_queries_want_is_found(is_causal, place):
    query, key, value = inputs(200, 200, batch=1, heads=2, kv_heads=1)
    needle = torch.ones(8, dtype=torch.float64) * 3
    key[:, :, place] = needle
    late = slice(190, 200)
    query[:, :, late] = 0.1 * query[:, :, late] + needle
    for dtype, budget in ((torch.float64, 1e-3), (torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        tensors = [t.to(dtype) for t in (query, key, value)]
        got, figures = lanes(*tensors, **options(is_causal))
        expected = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
        assert_within(got.output[:, :, late], expected.output[:, :, late].double(), budget, "needle")
        lost, _ = lanes(*tensors, **options(is_causal, rows=0))
        assert float((lost.output - expected.output)[:, :, late].abs().max()) > 10 * budget
        assert figures["far_keys_read"] > 0


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e4), (torch.float64, 1e12), (torch.float32, 1e4)])
def test_a_huge_key_overflows_nothing(is_causal, dtype, size):
    query, key, value = inputs(130, 130, batch=1, heads=2, kv_heads=1)
    key[:, :, 60] = size
    query[:, 0, ::2] = -query[:, 0, ::2].abs()  # some look away from it, the others at nothing else
    query[:, 1, ::2] = query[:, 1, ::2].abs()
    tensors = [t.to(dtype).requires_grad_() for t in (query, key, value)]
    arguments = options(is_causal, rows=60)
    got = lanes(*tensors, **arguments).attended
    assert torch.isfinite(got.output).all()
    assert torch.isfinite(got.lse).all()
    grads = torch.autograd.grad(got.output.square().sum(), tensors)
    assert all(torch.isfinite(grad).all() for grad in grads)
    late = slice(100, None, 2)
    expected = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
    assert_within(got.output[:, 1, late], expected.output[:, 1, late].double(), 1e-5, "who looks at it")


@pytest.mark.parametrize("is_causal", [True, False])
def test_nan_in_padding_is_felt_by_nobody(is_causal):
    query, key, value = (t.requires_grad_() for t in inputs(90, 90))
    mask = length_mask(90, 90, 55)
    arguments = {"config": options(True)["config"], "is_causal": is_causal, "key_padding_mask": mask}
    clean = prescored_attention(query, key, value, **arguments)
    wanted = torch.autograd.grad(clean[mask[:, None].expand(clean.shape[:3])].sum(), (query, key, value))
    dirty = [t.masked_fill(~mask[:, None, :, None], torch.nan) for t in (key, value)]
    got = prescored_attention(query, *dirty, **arguments)
    real = mask[:, None].expand(got.shape[:3])
    assert torch.equal(got[real], clean[real])
    grads = torch.autograd.grad(got[real].sum(), (query, key, value))
    for one, other in zip(grads, wanted, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("is_causal", [True, False])
def test_dropout_keeps_the_normaliser_and_repeats(is_causal):
    tensors = inputs(90, 90)
    config = options(is_causal)["config"]

    def run(p, seed=0):
        return prescored_attention(
            *tensors, config, is_causal=is_causal, dropout_p=p, generator=seed, return_aux=True
        )

    (whole, aux), (dropped, other) = run(0.0), run(0.4)
    assert_same(other.lse, aux.lse)
    assert torch.equal(run(0.4)[0], dropped)
    assert not torch.allclose(run(0.4, seed=1)[0], dropped)
    mean = torch.stack([run(0.4, seed)[0] for seed in range(60)]).mean(0)
    # sixty draws of weights that are 0 or 1 / 0.6: the mean is nearer by sqrt(60)
    assert float((mean - whole).square().mean()) < 2 / 60 * float((dropped - whole).square().mean())
