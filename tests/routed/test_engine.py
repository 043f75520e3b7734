import pytest
import torch
from attention_checks import lanes

from prescore import Routed, exact_attention
from prescore.testing.routed import routed_oracle

SCALE = 8**-0.5


def options(is_causal, *, rows=8, valid=None, **fields):
    config = Routed(**{"rows": rows, "leaf_size": 4, "chunk_size": 16, "sinks": 3, "exact_until": 0, **fields})
    return {"is_causal": is_causal, "valid": valid, "config": config, "scale": SCALE}


def inputs(n_query, n_key, *, batch=2, heads=4, kv_heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, n_query, 8), (batch, kv_heads, n_key, 8), (batch, kv_heads, n_key, 5))
    return [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


def length_mask(n_key, *lengths):
    return torch.arange(n_key) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradcheck(is_causal):
    tensors = inputs(41, 41, batch=1, heads=2, kv_heads=1)
    arguments = options(is_causal, rows=4, chunk_size=8, sinks=1)

    def run(*values):
        return tuple(lanes(*values, **arguments)[0])

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("is_causal", [True, False])
def test_reading_every_leaf_is_exact_attention(is_causal):
    tensors = inputs(75, 75)
    got, _ = lanes(*tensors, **options(is_causal, rows=4000))
    expected = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-13)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-13)


def test_short_sequences_are_exact_with_no_rows():
    tensors = inputs(35, 35)
    got, stats = lanes(*tensors, **options(True, rows=0))
    expected = exact_attention(*tensors, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-13)
    assert stats["exact_queries"] == 35


def test_later_queries_keys_and_values_change_nothing():
    tensors = [t.detach() for t in inputs(130, 130)]
    before, _ = lanes(*tensors, **options(True))
    for place in range(3):
        changed = [t.clone() for t in tensors]
        changed[place][:, :, 83:] = torch.randn(changed[place][:, :, 83:].shape, dtype=torch.float64) * 9
        after, _ = lanes(*changed, **options(True))
        torch.testing.assert_close(after.output[:, :, :83], before.output[:, :, :83], rtol=0, atol=1e-12)
        assert not torch.allclose(after.output[:, :, 83:], before.output[:, :, 83:])


@pytest.mark.parametrize("length", [1, 2, 20, 52, 67, 101])
def test_truncation_changes_nothing_before(length):
    query, key, value = (t.detach() for t in inputs(130, 130))
    whole, _ = lanes(query, key, value, **options(True))
    part, _ = lanes(*(t[:, :, :length] for t in (query, key, value)), **options(True))
    torch.testing.assert_close(part.output, whole.output[:, :, :length], rtol=0, atol=1e-12)
    torch.testing.assert_close(part.lse, whole.lse[:, :, :length], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_query", [1, 17, 60])
def test_last_queries_alone_equal_the_whole_call(n_query):
    query, key, value = (t.detach() for t in inputs(130, 130))
    whole, _ = lanes(query, key, value, **options(True))
    tail, _ = lanes(query[:, :, -n_query:], key, value, **options(True))
    torch.testing.assert_close(tail.output, whole.output[:, :, -n_query:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_batch_and_padding_change_nothing(is_causal):
    query, key, value = (t.detach() for t in inputs(90, 90))
    together, _ = lanes(query, key, value, **options(is_causal, valid=length_mask(90, 90, 61)))
    lone = [t[1:, :, :61] for t in (query, key, value)]
    alone, _ = lanes(*lone, **options(is_causal))
    torch.testing.assert_close(together.output[1:, :, :61], alone.output, rtol=0, atol=1e-12)


def test_query_heads_share_the_trees_of_their_key_head():
    query, key, value = (t.detach() for t in inputs(90, 90))
    grouped, _ = lanes(query, key, value, **options(True))
    repeated, _ = lanes(query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1), **options(True))
    torch.testing.assert_close(grouped.output, repeated.output, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", [(0, 9, 9), (1, 0, 9), (1, 1, 1), (1, 3, 3)])
def test_empty_and_tiny(is_causal, shape):
    batch, n_query, n_key = shape
    tensors = inputs(n_query, n_key, batch=batch)
    got, _ = lanes(*tensors, **options(is_causal))
    assert got.output.shape == (batch, 4, n_query, 5)
    expected = exact_attention(*tensors, is_causal=is_causal, scale=SCALE) if is_causal else None
    if expected is not None:
        torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_float64(dtype):
    query, key, value = (t.detach() for t in inputs(90, 90))
    # rows for every leaf: rounding may not move a choice then
    arguments = options(True, rows=4000)
    exact, _ = lanes(query, key, value, **arguments)
    got, _ = lanes(*(t.to(dtype) for t in (query, key, value)), **arguments)
    assert got.output.dtype == dtype
    assert got.lse.dtype == torch.float32
    # a few roundings of inputs and outputs of size about 1
    torch.testing.assert_close(got.output.double(), exact.output, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_sums_beyond_half_precision(is_causal, padded):
    """Means of rows whose sum is above 65504, the largest number of float16."""
    query, key, value = (t.detach() for t in inputs(90, 90))
    tensors = [t.half() for t in (query * 0.001, key * 0.1 + 25000, value + 25000)]
    valid = length_mask(90, 90, 90) if padded else None
    got, _ = lanes(*tensors, **options(is_causal, rows=4, chunk_size=32, valid=valid))
    expected = exact_attention(*(t.double() for t in tensors), is_causal=is_causal, scale=SCALE)
    torch.testing.assert_close(
        got.output.double(), expected.output, rtol=0, atol=16
    )  # numbers of 25000 lie 16 apart
    torch.testing.assert_close(got.lse.double(), expected.lse, rtol=2e-3, atol=0.1)


@pytest.mark.parametrize("is_causal", [True, False])
def test_equal_keys_are_exact_whatever_is_read(is_causal):
    query, key, value = (t.detach() for t in inputs(90, 90))
    key = key[:, :, :1].expand_as(key).contiguous()
    got, _ = lanes(query, key, value, **options(is_causal, rows=4))
    expected = exact_attention(query, key, value, is_causal=is_causal, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-12)


def test_a_lone_unlike_key_is_read_by_everyone():
    query, key, value = (t.detach() for t in inputs(130, 130, batch=1, heads=1, kv_heads=1))
    key = key * 0.1 + 3.0
    key[:, :, 20] = -3.0
    query = query * 0.1 - 3.0  # every query wants exactly that key
    got, _ = lanes(query, key, value, **options(True, rows=0))
    expected = exact_attention(query, key, value, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-6)


def test_filler_of_tiles_borrows_a_query_without_harm():
    """A tile's filler is query 0, which never met the leaf: its weights there may overflow."""
    query, key, value = (t.detach().float() for t in inputs(130, 130, batch=1, heads=2, kv_heads=2))
    query[:, 0] = query[:, 0] * 0.1 + 8
    key[:, 0] = key[:, 0] * 0.1 - 3
    key[:, 1] = key[:, 1] * 0.3 + 60  # what head 0 would see there is far above its own lse
    arguments = options(True, rows=12)
    tensors = [t.requires_grad_() for t in (query, key, value)]
    grads = torch.autograd.grad(lanes(*tensors, **arguments)[0].output.square().sum(), tensors)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    oracle = routed_oracle(*wide, arguments["config"], is_causal=True, scale=SCALE)
    expected = torch.autograd.grad(oracle.output.square().sum(), wide)
    assert float((wide[0][0, 0] @ wide[1][0, 1].T * SCALE).detach().max()) > 1000
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=2e-2)  # logits of 100s
