"""Calls that are exact attention as they stand run the fused operator alone, checked like all others."""

import pytest
import torch

from prescore import Exact, Hyper, Lsh, Routed, Selected, exact_attention, prescored_attention

DIRECT = {
    "exact": (Exact(), False),
    "exact causal": (Exact(), True),
    "selected in one leaf": (Selected.paper("key-norm", 64, min_seq_len=200), True),
    "zeroed in one leaf": (Selected.early("key-norm", 64, min_seq_len=200), True),
    "hyper in one leaf": (Hyper(Lsh(16, 16), min_seq_len=200), True),
    "routed, short": (Routed(), False),
    "routed, short and causal": (Routed(), True),
    "routed, two chunks": (Routed(chunk_size=100, exact_until=0), True),
}


def draw(n, *, kv_heads=2, value_dim=8):
    generator = torch.Generator().manual_seed(n)
    sizes = ((2, 8), (kv_heads, 8), (kv_heads, value_dim))
    return [torch.randn(1, heads, n, dim, generator=generator, dtype=torch.float64) for heads, dim in sizes]


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_call_that_is_exact_runs_no_engine(name, kv_heads, monkeypatch):
    config, is_causal = DIRECT[name]
    inputs = [t.requires_grad_() for t in draw(200, kv_heads=kv_heads)]
    wanted = exact_attention(*inputs, is_causal=is_causal).output
    wanted_grads = torch.autograd.grad(wanted.square().sum(), inputs)
    for engine in ("attend_exact", "routed.attend_routed", "selected.attend_selected"):
        monkeypatch.setattr(f"prescore.engines.{engine}", lambda *_, **__: pytest.fail("no engine is needed"))
    got = prescored_attention(*inputs, config=config, is_causal=is_causal)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for grad, right in zip(torch.autograd.grad(got.square().sum(), inputs), wanted_grads, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("config", [Exact(), Selected(min_seq_len=100), Routed()], ids=lambda c: type(c).__name__)
def test_decode_shapes_and_other_value_widths(config, value_dim):
    query, key, value = draw(100, value_dim=value_dim)
    for n_query in (1, 7, 100):
        last = query[:, :, -n_query:]
        got = prescored_attention(last, key, value, config, is_causal=True)
        wanted = exact_attention(last, key, value, is_causal=True).output
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_an_exact_call_is_checked_and_advances_the_generator():
    query, key, value = draw(50)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    prescored_attention(query, key, value, Exact(), generator=generator)
    assert not torch.equal(generator.get_state(), before)
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'fastest'"):
        prescored_attention(query, key, value, Exact(), backend="fastest")
    key[0, 1, 3, 2] = torch.inf
    with pytest.raises(ValueError, match=r"key must be finite where it is not padding, got inf at \(0, 1, 3, 2\)"):
        prescored_attention(query, key, value, Exact())
