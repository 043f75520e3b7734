import pytest
import torch

from prescore.attention.exact import exact_attention
from prescore.attention.routed import routed_attention
from prescore.attention.routed_reference import routed_reference
from prescore.clustering.tree import bisection_tree
from prescore.config import PrescoreConfig

SCALE = 8**-0.5


def build(points, levels, valid):
    return bisection_tree(points, levels, valid=valid)


def options(is_causal, *, rows=8, valid=None, **fields):
    config = PrescoreConfig(
        **{"rows": rows, "leaf_size": 4, "chunk_size": 16, "sinks": 3, "min_seq_len": 0, **fields}
    )
    return {"is_causal": is_causal, "valid": valid, "config": config, "scale": SCALE, "tree_builder": build}


def inputs(n_query, n_key, *, batch=2, heads=4, kv_heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, n_query, 8), (batch, kv_heads, n_key, 8), (batch, kv_heads, n_key, 5))
    return [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


def length_mask(n_key, *lengths):
    return torch.arange(n_key) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_query", [90, 70, 5])
@pytest.mark.parametrize("rows", [0, 8, 24, 1000])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_reference_forward_and_backward(is_causal, n_query, rows, padded):
    tensors = inputs(n_query, 90)
    lengths = torch.tensor([90, 61])
    valid = length_mask(90, 90, 61) if padded else None
    arguments = options(is_causal, rows=rows, valid=valid)
    expected, (got, _) = routed_reference(*tensors, **arguments), routed_attention(*tensors, **arguments)
    real = torch.ones(2, 1, n_query, dtype=torch.bool)
    if padded and is_causal:
        real = (torch.arange(90 - n_query, 90) < lengths[:, None])[:, None]
    real = real.expand(expected.lse.shape)
    torch.testing.assert_close(got.output[real], expected.output[real], rtol=0, atol=1e-13)
    torch.testing.assert_close(got.lse[real], expected.lse[real], rtol=0, atol=1e-13)
    weights = torch.randn(*real.shape, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(result):
        loss = (result.output * weights)[real].sum() + (result.lse * weights[..., 0])[real].sum()
        return torch.autograd.grad(loss, tensors)

    for ours, theirs in zip(gradients(got), gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradcheck(is_causal):
    tensors = inputs(41, 41, batch=1, heads=2, kv_heads=1)
    arguments = options(is_causal, rows=4, chunk_size=8, sinks=1)

    def run(*values):
        return tuple(routed_attention(*values, **arguments)[0])

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("is_causal", [True, False])
def test_reading_every_leaf_is_exact_attention(is_causal):
    tensors = inputs(75, 75)
    got, _ = routed_attention(*tensors, **options(is_causal, rows=4000))
    expected = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-13)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-13)


def test_short_sequences_are_exact_with_no_rows():
    tensors = inputs(35, 35)
    got, stats = routed_attention(*tensors, **options(True, rows=0))
    expected = exact_attention(*tensors, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-13)
    assert stats["exact_queries"] == 35


def test_later_queries_keys_and_values_change_nothing():
    tensors = [t.detach() for t in inputs(130, 130)]
    before, _ = routed_attention(*tensors, **options(True))
    for place in range(3):
        changed = [t.clone() for t in tensors]
        changed[place][:, :, 83:] = torch.randn(changed[place][:, :, 83:].shape, dtype=torch.float64) * 9
        after, _ = routed_attention(*changed, **options(True))
        torch.testing.assert_close(after.output[:, :, :83], before.output[:, :, :83], rtol=0, atol=1e-12)
        assert not torch.allclose(after.output[:, :, 83:], before.output[:, :, 83:])


@pytest.mark.parametrize("length", [1, 2, 20, 52, 67, 101])
def test_truncation_changes_nothing_before(length):
    query, key, value = (t.detach() for t in inputs(130, 130))
    whole, _ = routed_attention(query, key, value, **options(True))
    part, _ = routed_attention(*(t[:, :, :length] for t in (query, key, value)), **options(True))
    torch.testing.assert_close(part.output, whole.output[:, :, :length], rtol=0, atol=1e-12)
    torch.testing.assert_close(part.lse, whole.lse[:, :, :length], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_query", [1, 17, 60])
def test_last_queries_alone_equal_the_whole_call(n_query):
    query, key, value = (t.detach() for t in inputs(130, 130))
    whole, _ = routed_attention(query, key, value, **options(True))
    tail, _ = routed_attention(query[:, :, -n_query:], key, value, **options(True))
    torch.testing.assert_close(tail.output, whole.output[:, :, -n_query:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_batch_and_padding_change_nothing(is_causal):
    query, key, value = (t.detach() for t in inputs(90, 90))
    together, _ = routed_attention(query, key, value, **options(is_causal, valid=length_mask(90, 90, 61)))
    lone = [t[1:, :, :61] for t in (query, key, value)]
    alone, _ = routed_attention(*lone, **options(is_causal))
    torch.testing.assert_close(together.output[1:, :, :61], alone.output, rtol=0, atol=1e-12)


def test_query_heads_share_the_trees_of_their_key_head():
    query, key, value = (t.detach() for t in inputs(90, 90))
    grouped, _ = routed_attention(query, key, value, **options(True))
    repeated, _ = routed_attention(
        query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1), **options(True)
    )
    torch.testing.assert_close(grouped.output, repeated.output, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", [(0, 9, 9), (1, 0, 9), (1, 1, 1), (1, 3, 3)])
def test_empty_and_tiny(is_causal, shape):
    batch, n_query, n_key = shape
    tensors = inputs(n_query, n_key, batch=batch)
    got, _ = routed_attention(*tensors, **options(is_causal))
    assert got.output.shape == (batch, 4, n_query, 5)
    expected = exact_attention(*tensors, is_causal=is_causal, scale=SCALE) if is_causal else None
    if expected is not None:
        torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_float64(dtype):
    query, key, value = (t.detach() for t in inputs(90, 90))
    # rows for every leaf: rounding may not move a choice then
    arguments = options(True, rows=4000)
    exact, _ = routed_attention(query, key, value, **arguments)
    got, _ = routed_attention(*(t.to(dtype) for t in (query, key, value)), **arguments)
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
    got, _ = routed_attention(*tensors, **options(is_causal, rows=4, chunk_size=32, valid=valid))
    expected = exact_attention(*(t.double() for t in tensors), is_causal=is_causal, scale=SCALE)
    torch.testing.assert_close(
        got.output.double(), expected.output, rtol=0, atol=16
    )  # numbers of 25000 lie 16 apart
    torch.testing.assert_close(got.lse.double(), expected.lse, rtol=2e-3, atol=0.1)


@pytest.mark.parametrize("is_causal", [True, False])
def test_equal_keys_are_exact_whatever_is_read(is_causal):
    query, key, value = (t.detach() for t in inputs(90, 90))
    key = key[:, :, :1].expand_as(key).contiguous()
    got, _ = routed_attention(query, key, value, **options(is_causal, rows=4))
    expected = exact_attention(query, key, value, is_causal=is_causal, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-12)


def test_a_lone_unlike_key_is_read_by_everyone():
    query, key, value = (t.detach() for t in inputs(130, 130, batch=1, heads=1, kv_heads=1))
    key = key * 0.1 + 3.0
    key[:, :, 20] = -3.0
    query = query * 0.1 - 3.0  # every query wants exactly that key
    got, _ = routed_attention(query, key, value, **options(True, rows=0))
    expected = exact_attention(query, key, value, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-6)


@pytest.mark.parametrize("n_query", [1350, 700])
def test_strips_and_groups_equal_the_reference(n_query, monkeypatch):
    """Chunks long enough to be cut into strips, several dispatches, large and small tiles."""
    monkeypatch.setattr("prescore.attention.routed.PAIRS_AT_ONCE", 2000)
    tensors = inputs(n_query, 1350, batch=1, heads=2, kv_heads=1)
    arguments = options(True, rows=96, leaf_size=32, chunk_size=256)
    expected, (got, stats) = routed_reference(*tensors, **arguments), routed_attention(*tensors, **arguments)
    assert (stats["chunk"], stats["n_pieces"]) == (256, 4)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-12)
    weights = torch.randn(got.output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((got.output * weights).sum(), tensors)
    theirs = torch.autograd.grad((expected.output * weights).sum(), tensors)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_filler_of_tiles_borrows_a_query_without_harm():
    """A tile's filler is query 0, which never met the leaf: its weights there may overflow."""
    query, key, value = (t.detach().float() for t in inputs(130, 130, batch=1, heads=2, kv_heads=2))
    query[:, 0] = query[:, 0] * 0.1 + 8
    key[:, 0] = key[:, 0] * 0.1 - 3
    key[:, 1] = key[:, 1] * 0.3 + 60  # what head 0 would see there is far above its own lse
    arguments = options(True, rows=12)
    tensors = [t.requires_grad_() for t in (query, key, value)]
    grads = torch.autograd.grad(routed_attention(*tensors, **arguments)[0].output.square().sum(), tensors)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(routed_reference(*wide, **arguments).output.square().sum(), wide)
    assert float((wide[0][0, 0] @ wide[1][0, 1].T * SCALE).detach().max()) > 1000
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=2e-2)  # logits of 100s
