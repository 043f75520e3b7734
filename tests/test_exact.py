"""Calls that are exact attention as they stand go straight to the operator, checked like all others."""

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


def draw(n, *, dim=8):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(1, 2, n, dim, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_call_that_is_exact_goes_straight_to_the_operator(name, kv_heads, monkeypatch):
    config, causal = DIRECT[name]
    query, key, value = draw(200)
    key, value = key[:, :kv_heads], value[:, :kv_heads]
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    wanted = exact_attention(*inputs, is_causal=causal).output
    wanted_grads = torch.autograd.grad(wanted.square().sum(), inputs)

    def refuse(*_, **__):
        raise AssertionError("no engine is needed")

    for engine in ("attend_exact", "routed.attend_routed", "selected.attend_selected"):
        monkeypatch.setattr(f"prescore.engines.{engine}", refuse)
    got = prescored_attention(*inputs, config=config, is_causal=causal)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for grad, right in zip(torch.autograd.grad(got.square().sum(), inputs), wanted_grads, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("config", [Exact(), Selected(min_seq_len=100), Routed()], ids=lambda c: type(c).__name__)
def test_the_direct_call_knows_decode_shapes_and_other_value_widths(config, value_dim):
    query, key, value = draw(100)
    value = value[..., :value_dim]
    for n_query in (1, 7, 100):
        got = prescored_attention(query[:, :, -n_query:], key, value, config, is_causal=True)
        wanted = exact_attention(query[:, :, -n_query:], key, value, is_causal=True).output
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_the_direct_call_still_checks_and_still_advances_the_generator():
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


def test_padding_is_never_counted():
    query, key, value = (torch.randn(2, 1, 8, 4) for _ in range(3))
    real = torch.ones(2, 8, dtype=torch.bool)
    real[1, 4:] = False
    for config, is_causal, rows in (
        (Exact(), False, 20 / 3),  # eight queries see 8 keys, four see 4
        (Exact(), True, (36 + 10) / 12),
    ):
        _, aux = prescored_attention(
            query, key, value, config, is_causal=is_causal, key_padding_mask=real, return_aux=True
        )
        assert aux.stats["keys_selected"] == 6
        assert aux.stats["keys_per_query"] == pytest.approx(rows)
    _, aux = prescored_attention(query, key, value, Routed(), key_padding_mask=real, return_aux=True)
    assert aux.stats["keys_selected"] == 6
