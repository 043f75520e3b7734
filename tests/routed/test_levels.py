"""Sequences long enough that the far past is seen as nodes of one and of several levels."""

import pytest
import torch
from attention_checks import lanes

from prescore import Routed, exact_attention
from prescore.routed.decode import RoutedIndex
from prescore.routed.layout import FAN, make_layout, node_cuts
from prescore.routed.levels import level_counts, single_ranges, stand_in_ranges

SCALE = 8**-0.5
WIDE = 450
"""A length that reaches level 2 with chunks of 4 keys."""


@pytest.fixture(autouse=True)
def _few_columns(monkeypatch):
    monkeypatch.setattr("prescore.routed.layout.WIDTH", 8)


def options(**fields):
    config = Routed(**{"rows": 2, "leaf_size": 2, "chunk_size": 4, "sinks": 3, "exact_until": 0, **fields})
    return {"is_causal": True, "config": config, "scale": SCALE}


def inputs(n_query, n_key, *, batch=1, heads=2, kv_heads=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, n_query, 8), (batch, kv_heads, n_key, 8), (batch, kv_heads, n_key, 5))
    return [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


def layout_of(length, **fields):
    return make_layout(length, length, causal=True, config=options(**fields)["config"])


@pytest.mark.parametrize(("leaf", "chunk"), [(2, 4), (4, 4), (2, 16), (3, 24), (16, 256)])
def test_every_far_key_is_seen_once(leaf, chunk):
    """By itself, in a leaf or node, never twice, whatever the position."""
    n_key = 3 + 300 * chunk
    layout = layout_of(n_key, leaf_size=leaf, chunk_size=chunk, rows=leaf)
    counts = level_counts(layout)
    assert layout.n_levels >= 2
    for pieces in range(1, layout.n_pieces + 1):
        seen = 0
        for part in stand_in_ranges(layout, pieces):
            level = sum(part.start >= offset for offset in layout.level_offsets) - 1
            seen += (part.stop - part.start) * counts[level]
        seen += sum(part.stop - part.start for part in single_ranges(layout, pieces)[1:])
        assert seen == pieces * layout.chunk


def test_columns_grow_with_the_logarithm():
    columns = [sum(stop - start for start, stop in node_cuts(128, 16, 16 * pieces)) for pieces in (64, 512, 4096)]
    assert max(columns) <= 4 * (128 + 16)
    assert columns[2] - columns[1] <= 128 + FAN


def test_later_queries_keys_and_values_change_nothing():
    tensors = [t.detach() for t in inputs(WIDE, WIDE)]
    before, _ = lanes(*tensors, **options())
    for place in range(3):
        changed = [t.clone() for t in tensors]
        changed[place][:, :, 401:] = torch.randn(changed[place][:, :, 401:].shape, dtype=torch.float64) * 9
        after, _ = lanes(*changed, **options())
        torch.testing.assert_close(after.output[:, :, :401], before.output[:, :, :401], rtol=0, atol=1e-12)
        assert not torch.allclose(after.output[:, :, 401:], before.output[:, :, 401:])


def test_steps_equal_the_whole_call():
    query, key, value = (t.detach() for t in inputs(WIDE, WIDE, batch=2))
    expected, _ = lanes(query, key, value, **options())
    arguments = options()
    index = RoutedIndex(arguments["config"], scale=SCALE)
    for length in (30, 149, 150, 151, 300, 301, 302, 303, 304, 305, 443, 444, 445, 446, 447, 448, 449, 450):
        got = index.attend(query[:, :, length - 1 : length], key[:, :, :length], value[:, :, :length])
        place = slice(length - 1, length)
        torch.testing.assert_close(got.output, expected.output[:, :, place], rtol=0, atol=1e-12)
        torch.testing.assert_close(got.lse, expected.lse[:, :, place], rtol=0, atol=1e-12)


def test_equal_keys_are_exact_whatever_is_read():
    query, key, value = (t.detach() for t in inputs(WIDE, WIDE))
    key = key[:, :, :1].expand_as(key).contiguous()
    value = value[:, :, :1].expand_as(value).contiguous()
    got, _ = lanes(query, key, value, **options())
    expected = exact_attention(query, key, value, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-12)


def test_enough_rows_for_every_leaf_are_exact_attention():
    tensors = [t.detach() for t in inputs(WIDE, WIDE)]
    got, _ = lanes(*tensors, **options(rows=WIDE))
    expected = exact_attention(*tensors, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strength", [0.02, 0.1, 1.0, 2000.0])
def test_true_errors_stay_under_the_bounds(strength):
    query, key, value = (t.detach() for t in inputs(WIDE, WIDE))
    tensors = (query * strength, key, value)
    for tolerance in (0.05, 0.3):
        got, stats = lanes(*tensors, explain=True, **options(tolerance=tolerance))
        exact = exact_attention(*tensors, is_causal=True, scale=SCALE)
        error = (got.output - exact.output).norm(dim=-1)
        furthest = torch.cdist(got.output, value.repeat_interleave(2, dim=1)).tril().amax(-1)
        assert (error <= tolerance * furthest + 1e-12 * (1 + 10 * strength)).all()  # rounding of large logits
        assert stats["misplaced_bound_max"] <= tolerance
        if strength < 0.05:  # narrow leaves: the bound says something, so few queries are computed again
            assert stats["recomputed_queries"] < error.numel()
