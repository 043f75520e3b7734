"""Decode steps equal the rows of the whole call, whatever happens to the cache in between."""

import pytest
import torch
from decode_checks import (
    NATIVE,
    SCALE,
    SMALL,
    assert_steps,
    check_crop,
    check_reorder,
    check_steps,
    index_of,
    rows_of_whole_call,
    step,
    tensors,
)
from fuzz_cases import MEMORY
from routed_checks import LargestTensor, attend, levels_here, native_level, needs_native

from prescore import exact_attention
from prescore.errors import Unsupported
from prescore.routed import native
from prescore.routed.native import library


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("exact_until", [0, 70])
def test_steps_equal_the_whole_call(backend, exact_until):
    check_steps(SMALL.replace(exact_until=exact_until), backend)


@needs_native
@pytest.mark.parametrize("level", levels_here())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_steps_equal_the_whole_call(level, dtype):
    inputs = [t.to(dtype) for t in tensors(300, config=NATIVE)]
    full, _ = attend(inputs, NATIVE, scale=SCALE, backend="plain")
    with native_level(level):
        index, differ = index_of(NATIVE), 0
        for length in range(120, 301):
            got = step(index, inputs, length, backend="native")
            budget = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
            off = (got.output.double() - full.output[:, :, length - 1 : length].double()).abs().amax(-1)
            off = torch.maximum(off, (got.lse - full.lse[:, :, length - 1 : length]).abs())
            differ += int((off > budget).sum())
        assert index.stats == {"backend": "native", "native_level": level}
    assert got.output.dtype == dtype
    assert differ <= 2  # rounding may move a key across the threshold


def test_a_long_prompt_at_once_and_several_positions_at_once():
    inputs = query, key, value = tensors()
    for begin in (149, 60):
        index = index_of()
        if begin < 149:
            step(index, inputs, begin)
        got = index.attend(query[:, :, begin:], key, value)
        assert_steps(got, rows_of_whole_call(inputs, slice(begin, None)))


@pytest.mark.parametrize("start", [[0, 29, 0], [29, 29, 3], [100, 0, 149]])
def test_left_padding_changes_nothing(start):
    inputs = tensors(batch=3)
    index = index_of(start=torch.tensor(start))
    got = step(index, inputs)
    n_read = 0.0
    for row, first in enumerate(start):
        alone = [t[row : row + 1, :, first:] for t in inputs]
        wanted, stats = attend((alone[0][:, :, -1:], *alone[1:]), SMALL, scale=SCALE)
        assert_steps(type(got)(*(t[row : row + 1] for t in got)), wanted)
        n_read += stats.keys_per_query / 3
    assert index.reads.keys == pytest.approx(n_read)
    with pytest.raises(ValueError, match="start must be at least 0, got -1"):
        step(index_of(start=torch.tensor([0, -1, 0])), inputs)


@pytest.mark.parametrize("config", [SMALL, NATIVE], ids=["plain", "native"])
@pytest.mark.parametrize("start", [None, [0, 29, 29], [29, 0, 0]])
@pytest.mark.parametrize("rows", [[2, 0, 0], [0, 2, 2], [0, 2, 1]])
def test_beams_can_be_reordered(config, start, rows):
    check_reorder(config, rows, start)


@pytest.mark.parametrize("config", [SMALL, NATIVE], ids=["plain", "native"])
@pytest.mark.parametrize("length", [50, 115, 130, 140, 149])
def test_a_cropped_sequence_may_grow_in_another_way(config, length):
    check_crop(config, length)


@pytest.mark.parametrize("way", MEMORY)
def test_memory_layout_does_not_matter(way):
    inputs = tensors(config=NATIVE)
    got, expected = (step(index_of(NATIVE), given) for given in (map(MEMORY[way], inputs), inputs))
    torch.testing.assert_close(got.output, expected.output)


@needs_native
def test_stats_say_which_backend_ran(monkeypatch):
    inputs, index = tensors(160, config=NATIVE), index_of(NATIVE)
    step(index, inputs, 41)
    assert index.stats == {}  # nothing was far
    for backend, wanted in (("auto", library.loaded_level()), ("plain", None), ("native", library.loaded_level())):
        step(index, inputs, backend=backend)
        assert index.stats["backend"] == ("plain" if wanted is None else "native")
        assert index.stats.get("native_level") == wanted
    index.crop(60)
    step(index, inputs, 60)
    assert index.stats == {}
    monkeypatch.setattr(native, "call_library", lambda *_: pytest.fail("native code must not run"))
    step(index, inputs, backend="plain")


def test_native_steps_are_refused_with_their_reasons(monkeypatch):
    with pytest.raises(Unsupported, match=r"backend 'native' cannot run: .* got torch\.float64"):
        step(index_of(), tensors(), backend="native")
    monkeypatch.setenv(library.VARIABLE, "0")
    with pytest.raises(Unsupported, match="PRESCORE_NATIVE=0"):
        step(index_of(NATIVE), tensors(config=NATIVE), backend="native")
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'fast'"):
        step(index_of(), tensors(), backend="fast")


def test_a_step_without_far_keys_is_exact():
    inputs = tensors(40)
    got = step(index_of(SMALL.replace(exact_until=41)), inputs)
    wanted = exact_attention(inputs[0][:, :, -1:], *inputs[1:], scale=SCALE)
    assert_steps(got, wanted)


@pytest.mark.parametrize("start", [None, [0, 29, 0], [29, 29, 29]])
def test_a_step_copies_no_keys(start):
    """Neither with padding nor where keys lie in a buffer with room for more, as they do in our cache."""
    query, key, value = tensors(700, batch=3)
    cache = [torch.cat((t, torch.full_like(t[:, :, :100], torch.nan)), dim=2)[:, :, :700] for t in (key, value)]
    assert not cache[0].is_contiguous()
    start = None if start is None else torch.tensor(start)
    index, query = index_of(start=start), query[:, :, -1:]
    expected = index_of(start=start).attend(query, key, value)
    index.attend(query, *cache)  # builds the index that later steps use
    with LargestTensor() as largest:
        got = index.attend(query, *cache)
    assert_steps(got, expected)
    assert 0 < largest.size < 0.2 * key.numel()
