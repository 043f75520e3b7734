"""`inner="auto"`: exact where that is cheaper, the paper's path where it is not, and per row of a batch."""

import pytest
import torch

from prescore import PrescoreConfig, exact_attention, hyper_attention, prescored_attention
from prescore.attention.exact import exact_parts
from prescore.pipeline import attend_with_plan
from prescore.plan import FITTING_COLUMNS

AUTO = PrescoreConfig.paper("key-norm", 64, inner="auto", block_size=16, sample_size=16, min_seq_len=64)


def draw(n, *, batch=1, dim=8):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(batch, 2, n, dim, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_short_call_is_one_exact_part(causal):
    query, key, value = draw(500)
    attended, plan, _ = attend_with_plan(query, key, value, AUTO, causal)
    wanted = exact_attention(query, key, value, is_causal=causal)
    torch.testing.assert_close(attended.output, wanted.output, rtol=0, atol=0)
    assert len(plan.parts) == len(exact_parts(query, key, is_causal=causal, valid=None)) == 1


def test_everything_is_reported_as_selected_when_everything_is_read():
    query, key, value = draw(100)
    _, aux = prescored_attention(query, key, value, config=AUTO, return_aux=True)
    assert aux.selection.indices[0, 0].tolist() == list(range(100))
    assert aux.stats["keys_kept"] == 100


def test_the_paths_part_where_reading_everything_costs_more(monkeypatch):
    monkeypatch.setattr("prescore.plan.FITTING_COLUMNS", 0)
    monkeypatch.setattr("prescore.plan.SORTING_COLUMNS", 0)
    query, key, value = draw(500)
    got = prescored_attention(query, key, value, config=AUTO)
    wanted = prescored_attention(query, key, value, config=AUTO.replace(inner="hyper"))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert FITTING_COLUMNS > 0


def test_rows_of_a_batch_decide_for_themselves(monkeypatch):
    monkeypatch.setattr("prescore.plan.FITTING_COLUMNS", 0)
    monkeypatch.setattr("prescore.plan.SORTING_COLUMNS", 0)
    query, key, value = draw(500, batch=2)
    mask = torch.ones(2, 500, dtype=torch.bool)
    mask[1, 120:] = False
    both = prescored_attention(query, key, value, config=AUTO, key_padding_mask=mask)
    short = [tensor[1:, :, :120] for tensor in (query, key, value)]
    alone = prescored_attention(*short, config=AUTO)
    torch.testing.assert_close(both[1:, :, :120], alone, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(alone, exact_attention(*short).output, rtol=1e-10, atol=1e-12)


def test_one_leaf_is_exact_whatever_the_inner_attention():
    query, key, value = draw(60)
    for inner in ("hyper", "exact", "auto"):
        got = prescored_attention(query, key, value, config=AUTO.replace(inner=inner), is_causal=True)
        wanted = exact_attention(query, key, value, is_causal=True).output
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_failed_delta_test_runs_unfiltered_hyperattention_also_for_inner_exact():
    query, key, value = draw(300)
    config = AUTO.replace(inner="exact", top_k=10, min_fraction=0.5, min_seq_len=0)
    got, aux = prescored_attention(query, key, value, config=config, return_aux=True)
    wanted = hyper_attention(query, key, value, config=config)
    torch.testing.assert_close(got, wanted.output, rtol=0, atol=0)
    assert aux.stats["fallbacks"] == 1


DIRECT = [
    (AUTO, False),
    (AUTO, True),
    (AUTO.replace(inner="hyper", min_seq_len=200), True),
    (PrescoreConfig(), False),
    (PrescoreConfig(), True),
]


@pytest.mark.parametrize(("config", "causal"), DIRECT)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_call_that_is_exact_goes_straight_to_the_operator(config, causal, kv_heads, monkeypatch):
    query, key, value = draw(200)
    key, value = key[:, :kv_heads], value[:, :kv_heads]
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    wanted = exact_attention(*inputs, is_causal=causal).output
    wanted_grads = torch.autograd.grad(wanted.square().sum(), inputs)

    def refuse(*_, **__):
        raise AssertionError("no plan is needed")

    monkeypatch.setattr("prescore.pipeline.Planner", refuse)
    monkeypatch.setattr("prescore.pipeline.route", refuse)
    got = prescored_attention(*inputs, config=config, is_causal=causal)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for grad, right in zip(torch.autograd.grad(got.square().sum(), inputs), wanted_grads, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value_dim", [8, 5])
def test_the_direct_call_knows_decode_shapes_and_other_value_widths(value_dim):
    query, key, value = draw(100)
    value = value[..., :value_dim]
    for n_query in (1, 7, 100):
        got = prescored_attention(query[:, :, -n_query:], key, value, config=AUTO, is_causal=True)
        wanted = exact_attention(query[:, :, -n_query:], key, value, is_causal=True).output
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_the_direct_call_still_checks_and_still_advances_the_generator():
    query, key, value = draw(50)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    prescored_attention(query, key, value, config=AUTO, generator=generator)
    assert not torch.equal(generator.get_state(), before)
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'fastest'"):
        prescored_attention(query, key, value, config=AUTO, backend="fastest")
    key[0, 1, 3, 2] = torch.inf
    with pytest.raises(ValueError, match=r"key must be finite where it is not padding, got inf at \(0, 1, 3, 2\)"):
        prescored_attention(query, key, value, config=AUTO)
