"""Rows that grow."""

import pytest
import torch

from prescore.integrations.state import Rows


@pytest.fixture
def key_value():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 2, 60, 8, generator=generator) for _ in range(2))


def test_rows_grow_like_concatenation(key_value):
    key, value = key_value
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


def test_the_bias_keeps_its_precision(key_value):
    key, value = (t.bfloat16() for t in key_value)
    fine = torch.full((2, 2, 5), 1.0009765625)  # no bfloat16
    rows = Rows(key[:, :, :5], value[:, :, :5], fine)
    rows.append(key[:, :, 5:7], value[:, :, 5:7])
    plain = Rows(key[:, :, :5], value[:, :, :5])
    plain.append(key[:, :, :5], value[:, :, :5], fine)
    assert rows.bias[0, 0].tolist() == [1.0009765625] * 5 + [0.0] * 2
    assert plain.bias[0, 0].tolist() == [0.0] * 5 + [1.0009765625] * 5


def test_the_callers_tensors_are_left_alone(key_value):
    key, value = key_value
    before = key.clone()
    rows = Rows(key, value)
    rows.crop(10)
    rows.append(value[:, :, :5], value[:, :, :5])
    assert torch.equal(key, before)


def test_gradients_reach_appended_rows(key_value):
    key, value = key_value
    new = key[:, :, :1].clone().requires_grad_()
    rows = Rows(key[:, :, :5], value[:, :, :5])
    rows.append(new, value[:, :, :1])
    rows.key.sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
