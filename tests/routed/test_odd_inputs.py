"""Tensors as callers may have them: strided, negated, padded, of numbers that are none or too large."""

from __future__ import annotations

import pytest
import torch

from prescore import Attended, Exact, Hyper, Lsh, Routed, Selected, exact_attention, merge, prescored_attention
from prescore.errors import Unsupported
from prescore.routed.decode import RoutedIndex

CONFIG = Routed(min_weight=1 / 64, chunk_size=64, cluster_size=32, sinks=4, exact_until=128)
FIGURES = ("keys_per_query", "far_keys_read", "centroids_per_query", "keys_compared")


def tensors(length=700, dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, dim, generator=generator) for _ in range(3)]


WAYS = {
    "columns side by side": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "every second number": lambda t: torch.stack((t, t), dim=-1).flatten(-2)[..., ::2],
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "a negated view": lambda t: torch._neg_view(-t),
    "one head for all": lambda t: t[:, :1].expand(-1, 2, -1, -1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_where_numbers_lie_does_not_matter(way, is_causal):
    plain = tensors()
    given = [WAYS[way](t) for t in plain]
    expected = prescored_attention(
        *(t.resolve_neg().clone().contiguous() for t in given), CONFIG, is_causal=is_causal
    )
    for odd in range(4):  # each of them alone, then all
        mixed = [t if odd in (place, 3) else t.clone().contiguous() for place, t in enumerate(given)]
        torch.testing.assert_close(prescored_attention(*mixed, CONFIG, is_causal=is_causal), expected)


@pytest.mark.parametrize("way", WAYS)
def test_nor_in_steps(way):
    query, key, value = (WAYS[way](t) for t in tensors())
    step = RoutedIndex(CONFIG, scale=32**-0.5).attend(query[:, :, -1:], key, value)
    same = [t.resolve_neg().clone() for t in (query[:, :, -1:], key, value)]
    expected = RoutedIndex(CONFIG, scale=32**-0.5).attend(*same)
    torch.testing.assert_close(step.output, expected.output)


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [100, 400])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_a_query_that_is_no_number_gives_none(spoilt, at, size):
    query, key, value = tensors()
    query[0, 0, at] = spoilt
    found = prescored_attention(query, key, value * size, CONFIG, is_causal=True)
    expected = prescored_attention(query, key, value * size, Exact(), is_causal=True)
    assert torch.equal(found.isnan(), expected.isnan())
    assert found.isnan().any()


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_keys_whose_spread_is_beyond_all_numbers(backend):
    query, key, value = tensors()
    found = prescored_attention(query, key * 1e19, value, CONFIG, is_causal=True, backend=backend)
    assert found.isfinite().all()


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_in_no_figure(left):
    alone = tensors(500)
    _, aux = prescored_attention(*alone, CONFIG, is_causal=True, return_aux=True)
    wanted = {name: aux.stats[name] for name in FIGURES}
    empty = torch.zeros(1, 2, 400, 32)
    padded = [torch.cat((empty, t) if left else (t, empty), dim=2) for t in alone]
    mask = torch.cat([torch.full((1, n), n == 500) for n in ((400, 500) if left else (500, 400))], dim=1)
    _, aux = prescored_attention(*padded, CONFIG, is_causal=True, key_padding_mask=mask, return_aux=True)
    assert {name: aux.stats[name] for name in FIGURES} == pytest.approx(wanted)
    assert wanted["far_keys_read"] > 0


def test_stand_ins_of_padded_chunks_are_not_counted():
    alone = tensors(500)
    _, aux = prescored_attention(*alone, CONFIG, return_aux=True)
    padded = [torch.cat((t, torch.zeros(1, 2, 400, 32)), dim=2) for t in alone]
    mask = (torch.arange(900) < 500)[None]
    _, other = prescored_attention(*padded, CONFIG, key_padding_mask=mask, return_aux=True)
    assert other.stats["centroids_per_query"] == aux.stats["centroids_per_query"] > 0


def test_a_step_that_reads_everything_has_no_error_bars():
    query, key, value = tensors()
    index = RoutedIndex(CONFIG.replace(tolerance=0.05), scale=32**-0.5)
    index.attend(query[:, :, -1:], key, value)
    assert "error_bound_max" in index.figures
    index.crop(100)
    index.attend(query[:, :, 99:100], key[:, :, :100], value[:, :, :100])
    assert "error_bound_max" not in index.figures


@pytest.mark.parametrize("config", [Routed(), Selected(min_seq_len=8), Hyper(Lsh(8, 8), min_seq_len=8), Exact()])
@pytest.mark.parametrize("is_causal", [True, False])
def test_no_heads_at_all(config, is_causal):
    query, key, value = tensors(96)
    found, aux = prescored_attention(query[:, :0], key, value, config, is_causal=is_causal, return_aux=True)
    assert found.shape == (1, 0, 96, 32)
    assert aux.lse.shape == (1, 0, 96)


def test_a_tolerance_has_no_gradients_at_any_length():
    query, key, value = tensors(40)
    with pytest.raises(Unsupported, match="not differentiable"):
        prescored_attention(query.requires_grad_(), key, value, Routed(tolerance=0.05), is_causal=True)
    with torch.no_grad():
        prescored_attention(query, key, value, Routed(tolerance=0.05), is_causal=True)


def test_parts_that_cannot_be_merged():
    whole = exact_attention(*tensors(20))
    with pytest.raises(TypeError, match="got Tensor and NoneType at 1"):
        merge(whole, Attended(whole.output, None))
    with pytest.raises(ValueError, match="one device, cpu, got meta and meta at 1"):
        merge(whole, Attended(whole.output.to("meta"), whole.lse.to("meta")))
