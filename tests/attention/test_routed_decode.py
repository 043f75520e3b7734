import pytest
import torch

from prescore.attention.routed import routed_attention
from prescore.attention.routed_decode import RoutedIndex
from prescore.clustering.tree import bisection_tree
from prescore.config import PrescoreConfig

CONFIG = PrescoreConfig(rows=8, leaf_size=4, chunk_size=16, sinks=3, min_seq_len=0)
SCALE = 8**-0.5


def build(points, levels, valid):
    return bisection_tree(points, levels, valid=valid)


def inputs(length, *, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, 4, length, 8), (batch, 2, length, 8), (batch, 2, length, 5))
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def whole(query, key, value):
    return routed_attention(query, key, value, is_causal=True, config=CONFIG, scale=SCALE, tree_builder=build)[0]


def test_steps_equal_the_whole_call():
    query, key, value = inputs(150)
    expected = whole(query, key, value)
    index = RoutedIndex(CONFIG, scale=SCALE, tree_builder=build)
    index.extend(key[:, :, :20], value[:, :, :20])
    for length in range(21, 151):  # through several chunks and two joined pieces
        got = index.attend(query[:, :, length - 1 : length], key[:, :, :length], value[:, :, :length])
        place = slice(length - 1, length)
        torch.testing.assert_close(got.output, expected.output[:, :, place], rtol=0, atol=1e-12)
        torch.testing.assert_close(got.lse, expected.lse[:, :, place], rtol=0, atol=1e-12)


def test_a_long_prompt_at_once_equals_growing():
    query, key, value = inputs(150)
    index = RoutedIndex(CONFIG, scale=SCALE, tree_builder=build)
    got = index.attend(query[:, :, -1:], key, value)
    torch.testing.assert_close(got.output, whole(query, key, value).output[:, :, -1:], rtol=0, atol=1e-12)


def test_left_padding_changes_nothing():
    query, key, value = inputs(130, batch=3)
    start = torch.tensor([0, 29, 0])
    index = RoutedIndex(CONFIG, scale=SCALE, tree_builder=build, start=start)
    got = index.attend(query[:, :, -1:], key, value)
    for place, first in enumerate(start.tolist()):
        lone = [t[place : place + 1, :, first:] for t in (query, key, value)]
        expected = whole(*lone).output[:, :, -1:]
        torch.testing.assert_close(got.output[place : place + 1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [None, torch.tensor([0, 29, 29])])
def test_beams_can_be_reordered(start):
    query, key, value = inputs(130, batch=3)
    index = RoutedIndex(CONFIG, scale=SCALE, tree_builder=build, start=start)
    before = index.attend(query[:, :, -1:], key, value)
    rows = torch.tensor([2, 0, 0])
    index.reorder(rows)
    after = index.attend(query[rows, :, -1:], key[rows], value[rows])
    torch.testing.assert_close(after.output, before.output[rows], rtol=0, atol=1e-12)


def test_several_positions_are_refused():
    query, key, value = inputs(40)
    index = RoutedIndex(CONFIG, scale=SCALE, tree_builder=build)
    with pytest.raises(ValueError, match="one position in a decoding step, got 2"):
        index.attend(query[:, :, -2:], key, value)
