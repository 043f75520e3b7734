import pytest
import torch
from attention_checks import lanes
from torch.utils._python_dispatch import TorchDispatchMode

from prescore import Routed
from prescore.integrations.decode import KVBuffer
from prescore.routed.decode import RoutedIndex

CONFIG = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)
SCALE = 8**-0.5


def inputs(length, *, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, 4, length, 8), (batch, 2, length, 8), (batch, 2, length, 5))
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def whole(query, key, value):
    return lanes(query, key, value, CONFIG, scale=SCALE).attended


def test_steps_equal_the_whole_call():
    query, key, value = inputs(150)
    expected = whole(query, key, value)
    index = RoutedIndex(CONFIG, scale=SCALE)
    for length in range(21, 151):  # through several chunks and two joined pieces
        got = index.attend(query[:, :, length - 1 : length], key[:, :, :length], value[:, :, :length])
        place = slice(length - 1, length)
        torch.testing.assert_close(got.output, expected.output[:, :, place], rtol=0, atol=1e-12)
        torch.testing.assert_close(got.lse, expected.lse[:, :, place], rtol=0, atol=1e-12)


def test_a_long_prompt_at_once_equals_growing():
    query, key, value = inputs(150)
    index = RoutedIndex(CONFIG, scale=SCALE)
    got = index.attend(query[:, :, -1:], key, value)
    torch.testing.assert_close(got.output, whole(query, key, value).output[:, :, -1:], rtol=0, atol=1e-12)


def test_left_padding_changes_nothing():
    query, key, value = inputs(130, batch=3)
    start = torch.tensor([0, 29, 0])
    index = RoutedIndex(CONFIG, scale=SCALE, start=start)
    got = index.attend(query[:, :, -1:], key, value)
    for place, first in enumerate(start.tolist()):
        lone = [t[place : place + 1, :, first:] for t in (query, key, value)]
        expected = whole(*lone).output[:, :, -1:]
        torch.testing.assert_close(got.output[place : place + 1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [None, torch.tensor([0, 29, 29]), torch.tensor([29, 0, 0])])
@pytest.mark.parametrize("rows", [torch.tensor([2, 0, 0]), torch.tensor([0, 2, 2]), torch.tensor([0, 2, 1])])
def test_beams_can_be_reordered(start, rows):
    query, key, value = inputs(130, batch=3)
    index = RoutedIndex(CONFIG, scale=SCALE, start=start)
    before = index.attend(query[:, :, -1:], key, value)
    index.reorder(rows)
    after = index.attend(query[rows, :, -1:], key[rows], value[rows])
    torch.testing.assert_close(after.output, before.output[rows], rtol=0, atol=1e-12)


def test_several_positions_are_steps_one_after_another():
    query, key, value = inputs(150)
    expected = whole(query, key, value)
    index = RoutedIndex(CONFIG, scale=SCALE)
    index.attend(query[:, :, 59:60], key[:, :, :60], value[:, :, :60])
    got = index.attend(query[:, :, 60:], key, value)
    torch.testing.assert_close(got.output, expected.output[:, :, 60:], rtol=0, atol=1e-12)
    torch.testing.assert_close(got.lse, expected.lse[:, :, 60:], rtol=0, atol=1e-12)


def test_a_sequence_can_be_cropped_and_grow_otherwise():
    query, key, value = inputs(150)
    index = RoutedIndex(CONFIG, scale=SCALE)
    index.attend(query[:, :, -1:], key, value)
    index.crop(50)
    for tensor, other in zip((query, key, value), inputs(150, seed=1), strict=True):
        tensor[:, :, 50:] = other[:, :, 50:]
    got = index.attend(query[:, :, -1:], key, value)
    torch.testing.assert_close(got.output, whole(query, key, value).output[:, :, -1:], rtol=0, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """The size of the largest tensor that any operation makes, views not counted."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.size = max(self.size, made.numel())
        return result


@pytest.mark.parametrize("start", [None, [0, 29, 0], [29, 29, 29]])
def test_a_step_copies_no_past(start):
    """Neither with padding nor where keys lie in a buffer with room for more, as they do in our cache."""
    query, key, value = inputs(700, batch=3)
    rows = KVBuffer(key[:, :, :-1], value[:, :, :-1])
    rows.append(key[:, :, -1:], value[:, :, -1:])
    assert not rows.key.is_contiguous()
    start = None if start is None else torch.tensor(start)
    index = RoutedIndex(CONFIG, scale=SCALE, start=start)
    query = query[:, :, -1:]
    expected = RoutedIndex(CONFIG, scale=SCALE, start=start).attend(query, key, value)
    index.attend(query, rows.key, rows.value)  # builds what later steps use
    with LargestTensor() as largest:
        got = index.attend(query, rows.key, rows.value)
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=1e-12)
    assert 0 < largest.size < 0.2 * key.numel()
