"""The native call of int8 layers against plain torch, at every level of the processor. `make sanitize` runs it."""

import pytest
import torch
from routed_checks import needs_native
from torch import nn

from prescore.int8 import linear
from prescore.int8.linear import Int8Linear
from prescore.routed.native.library import levels_of_processor

SHAPES = [(0, 8, 8), (1, 640, 5), (7, 33, 17), (23, 150, 40), (130, 96, 200), (800, 130, 33)]
"""Rows, inputs, outputs: less than a panel, a quarter, a group or a tile of rows, and more than a slab of rows."""


def case(n_rows, n_in, n_out, *, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(n_rows)
    wide = torch.randn(n_rows, 2 * n_in, generator=generator) * torch.randn(n_rows, 1, generator=generator).exp()
    layer = nn.Linear(n_in, n_out, dtype=dtype, device="cpu")
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return Int8Linear(layer), wide.to(dtype)[:, ::2]


def calls_of(monkeypatch):
    called, original = [], linear.call_library
    monkeypatch.setattr(linear, "call_library", lambda name, call: (called.append(name), original(name, call)))
    return called


@needs_native
@pytest.mark.parametrize("level", levels_of_processor())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_every_level_gives_the_numbers_of_plain_torch(shape, dtype, level, monkeypatch):
    layer, inputs = case(*shape, dtype=dtype)
    inputs[1:2], inputs[2:3, 4], inputs[3:4, 6], inputs[4:5] = 0, torch.inf, torch.nan, 1e-20
    monkeypatch.setenv("PRESCORE_NATIVE", level)
    called = calls_of(monkeypatch)
    output = layer(inputs)
    assert called == ["prescore_int8_linear"]
    if len(output) > 8:
        assert torch.equal(
            layer(inputs[5:8])[1],
            output[6],
        )  # a row gives the same alone and among others
        assert torch.equal(layer(inputs[6]), output[6])
    monkeypatch.setenv("PRESCORE_NATIVE", "0")
    called.clear()
    plain = layer(inputs)
    assert not called
    assert bool(output[2:4].isnan().all())
    assert bool(plain[2:4].isnan().all())
    rest = [row for row in range(len(inputs)) if row not in (2, 3)]
    size = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    scale = plain[rest].float().abs().amax() if rest else 1.0
    assert torch.allclose(output[rest].float(), plain[rest].float(), rtol=size, atol=1e-6 * float(scale))


@needs_native
@torch.no_grad()
def test_whole_numbers_are_exact(monkeypatch):
    """Products of the extremes, in every place of a group: nothing saturates."""
    weight = torch.tensor([127.0, -127.0, 1.0, 0.0]).repeat_interleave(96).view(4, 96)
    inputs = torch.tensor([[127.0], [-127.0]]).expand(2, 96).contiguous()
    layer = nn.Linear(96, 4, bias=False)
    layer.weight.copy_(weight)
    for level in levels_of_processor():
        monkeypatch.setenv("PRESCORE_NATIVE", level)
        assert torch.allclose(Int8Linear(layer)(inputs), inputs @ weight.t(), rtol=1e-6)


@needs_native
@pytest.mark.parametrize("name", ["numbers", "scale", "bias"])
@torch.no_grad()
def test_what_native_code_would_read_outside_of_is_refused(name):
    layer, inputs = case(3, 40, 40)
    tensors = {"numbers": layer.numbers, "scale": layer.scale, "bias": layer.bias}
    tensors[name] = tensors[name][:-1]
    with pytest.raises(ValueError, match=f"{name} must be "):
        linear._multiply_native(inputs, tensors["numbers"], tensors["scale"], tensors["bias"].float(), 40)
