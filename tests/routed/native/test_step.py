"""The native attention of a decode step against softmax attention in float64."""

import pytest
import torch
from routed_checks import needs_native

from prescore.routed import native
from prescore.routed.native.library import levels_of_processor

pytestmark = needs_native


def inputs(batch, heads, n_query, n_keys, dim, value_dim, dtype):
    generator = torch.Generator().manual_seed(n_keys)

    def made(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    # as a cache has them: the keys of a head in a larger tensor, the values of a token side by side
    key = made(batch, heads, n_keys + 5, dim)[:, :, :n_keys]
    return made(batch, heads, n_query, dim), key, made(batch, n_keys, heads, value_dim).transpose(1, 2)


@pytest.mark.parametrize("level", levels_of_processor())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 3, 3, 512, 64, 64),
        (2, 1, 1, 1, 16, 32),
        (1, 2, 7, 67, 128, 48),
        (2, 2, 16, 1000, 256, 256),
        (1, 4, 2, 63, 80, 80),
    ],
)
def test_a_step_is_softmax_attention(shape, dtype, level, monkeypatch):
    query, key, value = inputs(*shape, dtype)
    query[:, :, 0] *= 40  # one key has nearly all the weight
    monkeypatch.setenv("PRESCORE_NATIVE", level)
    output = native.attend_step(query, key, value, 0.3)
    wide = [tensor.double() for tensor in (query, key, value)]
    wanted = (0.3 * wide[0] @ wide[1].mT).softmax(-1) @ wide[2]
    size = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert output.dtype == dtype
    assert torch.allclose(output.double(), wanted, rtol=size, atol=2e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (torch.ones(1, 2, 5, 16), torch.ones(1, 2, 4, 16)),
        (torch.ones(1, 2, 5, 32), torch.ones(1, 2, 5, 16)),
        (torch.ones(1, 2, 5, 16), torch.ones(1, 2, 5, 16, dtype=torch.bfloat16)),
        (torch.ones(1, 2, 0, 16), torch.ones(1, 2, 0, 16)),
    ],
)
def test_what_it_would_read_outside_of_is_refused(key, value):
    with pytest.raises(ValueError, match="must be"):
        native.attend_step(torch.ones(1, 2, 1, 16), key, value, 1.0)
