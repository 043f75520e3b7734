"""What native code does for int8 layers, beside the product: the bits of plain torch. `make sanitize` runs it."""

import pytest
import torch
from routed_checks import needs_native
from torch import nn

from prescore.int8 import linear
from prescore.int8.linear import Int8Linear


@needs_native
@pytest.mark.parametrize(("n_rows", "n_in", "n_out"), [(0, 8, 8), (1, 640, 5), (7, 33, 17), (130, 96, 200)])
@torch.no_grad()
def test_native_code_gives_the_bits_of_plain_torch(n_rows, n_in, n_out, monkeypatch):
    generator = torch.Generator().manual_seed(n_rows)
    wide = torch.randn(n_rows, 2 * n_in, generator=generator) * torch.randn(n_rows, 1, generator=generator).exp()
    wide[1:2], wide[2:3, 4], wide[3:4, 6], wide[4:5] = 0, torch.inf, torch.nan, 1e-20
    inputs = wide.to(torch.bfloat16)[:, ::2]
    layer, called = Int8Linear(nn.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16, device="cpu")), []
    original = linear.call_library
    monkeypatch.setattr(linear, "call_library", lambda name, call: (called.append(name), original(name, call)))
    output = linear._int8_linear(inputs, layer.weight, layer.scale)
    assert called == ["prescore_round_rows", "prescore_scale_products"]
    monkeypatch.setenv("PRESCORE_NATIVE", "0")
    plain = linear._int8_linear(inputs, layer.weight, layer.scale)
    assert torch.equal(output.isnan(), plain.isnan())
    assert bool(output[2:4].isnan().all())
    assert torch.equal(output.nan_to_num(), plain.nan_to_num())
    assert len(called) == 2
