"""Rows that grow, selections kept through steps."""

import pytest
import torch

from prescore import PrescoreConfig, prescored_attention
from prescore.decoding.follow import FollowedSelection
from prescore.decoding.refresh import refresh_due
from prescore.decoding.rows import Rows
from prescore.decoding.state import SelectionState, attend_last


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 60, 8, generator=generator)
    key, value = (torch.randn(2, 2, 60, 8, generator=generator) for _ in range(2))
    return query, key, value


def padding():
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[0, :7] = False
    return mask


def test_rows_grow_like_concatenation(qkv):
    _, key, value = qkv
    rows = Rows(key[:, :, :5], value[:, :, :5])
    buffers = set()
    for number in range(5, 60):
        rows.append(key[:, :, number : number + 1], value[:, :, number : number + 1])
        buffers.add(rows.key.data_ptr())
    assert torch.equal(rows.key, key)
    assert torch.equal(rows.value, value)
    assert len(buffers) == 1  # one copy, then only new rows are written
    rows.crop(20)
    rows.append(key[:, :, 30:33], value[:, :, 30:33], torch.full((2, 2, 3), -1.0))
    assert torch.equal(rows.key, torch.cat((key[:, :, :20], key[:, :, 30:33]), 2))
    assert rows.bias[0, 0].tolist() == [0.0] * 20 + [-1.0] * 3
    rows.take(torch.tensor([1, 1, 0]))
    assert torch.equal(rows.value[2], torch.cat((value[0, :, :20], value[0, :, 30:33]), 1))
    rows.repeat(2)
    assert rows.key.shape[0] == 6


def test_the_callers_tensors_are_left_alone(qkv):
    _, key, value = qkv
    before = key.clone()
    rows = Rows(key, value)
    rows.crop(10)
    rows.append(value[:, :, :5], value[:, :, :5])
    assert torch.equal(key, before)


def test_gradients_reach_appended_rows(qkv):
    _, key, value = qkv
    new = key[:, :, :1].clone().requires_grad_()
    rows = Rows(key[:, :, :5], value[:, :, :5])
    rows.append(new, value[:, :, :1])
    rows.key.sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "kmeans", "recent": 3},
        {"remainder": "none"},
        {"top_k": 0.3},
        {"inner": "hyper", "remainder": "none"},
        {"coupling": {"mask": "zero"}, "remainder": "none"},
    ],
    ids=str,
)
def test_fresh_selection_is_prescored_attention(qkv, mask, changes):
    """Identity 10."""
    query, key, value = (t[:, :, :50] for t in qkv)
    config = PrescoreConfig(**{"top_k": 12, "n_clusters": 4, **changes})
    state = SelectionState.select(key, value, mask, config)
    got = state.attend(query[:, :, -1:], 0.4)
    expected = prescored_attention(query[:, :, -1:], key, value, config=config, key_padding_mask=mask, scale=0.4)
    # one float32 softmax over the same rows, in one sum or merged from parts
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_selected_rows_and_later_tokens(qkv):
    """Without stand-ins, a step is exact attention over the selected keys and every token since."""
    import prescore

    query, key, value = qkv
    config = PrescoreConfig(top_k=12, remainder="none")
    state = SelectionState.select(key[:, :, :50], value[:, :, :50], None, config)
    state.append(key[:, :, 50:], value[:, :, 50:], None)
    got = state.attend(query[:, :, -1:], None)
    kept = prescore.select(key[:, :, :50], config=config).indices
    later = torch.arange(50, 60).expand(2, 2, 10)
    index = torch.cat((kept, later), -1)[..., None].expand(-1, -1, -1, 8)
    expected = prescore.exact_attention(query[:, :, -1:], key.gather(2, index), value.gather(2, index)).output
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)  # float32, another order of summing
    assert (state.n_rows, state.n_since) == (12, 10)


@pytest.mark.parametrize("bias", [False, True])
def test_several_queries_are_causal_among_themselves(qkv, bias):
    query, key, value = qkv
    weight = torch.randn(2, 2, 60, generator=torch.Generator().manual_seed(1)) if bias else None
    together = attend_last(query[:, :, -4:], key, value, weight, None)
    for back in range(4):
        end = 60 - back
        rows = None if weight is None else weight[:, :, :end]
        alone = attend_last(query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end], rows, None)
        torch.testing.assert_close(together[:, :, 3 - back], alone[:, :, 0], atol=1e-6, rtol=1e-5)  # float32


def test_padding_among_new_tokens_is_not_seen(qkv):
    query, key, value = qkv
    config = PrescoreConfig(top_k=12, n_clusters=4)
    clean, dirty = (SelectionState.select(key[:, :, :50], value[:, :, :50], None, config) for _ in range(2))
    poisoned = key[:, :, 50:53].clone()
    poisoned[:, :, 1] = torch.nan
    seen = torch.tensor([[True, False, True]] * 2)
    dirty.append(poisoned, value[:, :, 50:53], seen)
    clean.append(key[:, :, [50, 52]], value[:, :, [50, 52]], None)
    got, expected = (state.attend(query[:, :, -1:], None) for state in (dirty, clean))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)  # float32


def test_refresh_due():
    assert not refresh_due(10**6, None)
    assert [refresh_due(n, 3) for n in (1, 2, 3, 4)] == [False, False, True, True]


def test_followed_selection_notices_other_keys(qkv):
    _, key, value = qkv
    config = PrescoreConfig(top_k=12, n_clusters=4)
    follow = FollowedSelection()
    first = follow.state_for(key[:, :, :51], value[:, :, :51], None, 1, config)
    again = follow.state_for(key[:, :, :52], value[:, :, :52], None, 1, config)
    assert again is first
    assert (first.n_selected_from, first.n_since) == (50, 2)
    other = key.clone()
    other[:, :, 49] += 1
    fresh = follow.state_for(other[:, :, :53], value[:, :, :53], None, 1, config)
    assert fresh is not first
    assert fresh.n_selected_from == 52
    recent = other.clone()
    recent[:, :, 52] += 1
    same = follow.state_for(recent[:, :, :54], value[:, :, :54], None, 1, config)
    assert same is fresh
    assert torch.equal(same.rows.key[:, :, -2:], recent[:, :, 52:54])
    follow.forget()
    assert follow.state_for(recent[:, :, :54], value[:, :, :54], None, 1, config) is not same
