"""A selection kept through steps."""

import pytest
import torch

import prescore
from prescore import Coupling, KMeans, Lsh, Selected, prescored_attention
from prescore.integrations.state import SelectionState, attend_last

ARTEFACTS = Coupling(mask="zero", residual_weight="all", overlap="count")


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


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scorer": KMeans(n_clusters=4), "recent": 3},
        {"remainder": "none"},
        {"top_k": 0.3},
        {"inner": Lsh(), "remainder": "none"},
        {"coupling": Coupling(mask="zero"), "remainder": "none"},
        {"inner": Lsh(), "remainder": "none", "leaf_inclusive": True, "coupling": ARTEFACTS},
        {"min_fraction": 0.9, "inner": Lsh()},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 5])
def test_fresh_selection_is_prescored_attention(qkv, mask, changes, seed):
    """Identity 10."""
    query, key, value = (t[:, :, :50] for t in qkv)
    config = Selected(**{"top_k": 12, **changes})
    state = SelectionState.select(key, value, mask, config, seed)
    got = state.attend(query[:, :, -1:], 0.4)
    last = query[:, :, -1:]
    expected = prescored_attention(
        last, key, value, config, key_padding_mask=mask, scale=0.4, generator=seed, is_causal=False
    )
    # one float32 softmax over the same rows, in one sum or merged from parts
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_in_half_precision_is_as_good_as_the_call(dtype):
    """Centroids weigh as many keys as they stand for: log(1001) is 6.9087, and 6.9062 in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, n, 16, generator=generator).to(dtype) for n in (1, 4000, 4000)]
    config = Selected(KMeans(n_clusters=4), top_k=4)
    exact = prescored_attention(*(t.double() for t in inputs), config, generator=0)
    called = prescored_attention(*inputs, config, generator=0)
    state = SelectionState.select(*inputs[1:], None, config, 0)
    assert state.rows.bias.dtype == torch.float32
    again = state.rows.bias.clone()
    state.append(*(t[:, :, :1] for t in inputs[1:]), torch.tensor([[True], [False]]))  # and takes padding
    assert torch.equal(state.rows.bias[:, :, :-1], again)
    state.crop(0)
    stepped = state.attend(inputs[0], None)
    errors = [float((got.double() - exact).abs().max()) for got in (stepped, called)]
    assert errors[0] <= 1.5 * errors[1]


def test_selected_rows_and_later_tokens(qkv):
    """Without centroids, a step is exact attention over the selected keys and every token since."""
    query, key, value = qkv
    config = Selected(top_k=12, remainder="none")
    state = SelectionState.select(key[:, :, :50], value[:, :, :50], None, config)
    state.append(key[:, :, 50:], value[:, :, 50:], None)
    got = state.attend(query[:, :, -1:], None)
    kept = prescore.select(key[:, :, :50], "key-diff", top_k=12).indices
    later = torch.arange(50, 60).expand(2, 2, 10)
    index = torch.cat((kept, later), -1)[..., None].expand(-1, -1, -1, 8)
    expected = prescore.exact_attention(query[:, :, -1:], key.gather(2, index), value.gather(2, index)).output
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)  # float32, another order of summing
    assert (state.n_rows, state.n_since) == (12, 10)


@pytest.mark.parametrize("bias", [False, True])
def test_several_queries_are_causal_among_themselves(qkv, bias):
    query, key, value = qkv
    weight = torch.randn(2, 2, 60, generator=torch.Generator().manual_seed(1)) if bias else None
    parallel_group = attend_last(query[:, :, -4:], key, value, weight, None)
    for back in range(4):
        end = 60 - back
        rows = None if weight is None else weight[:, :, :end]
        alone = attend_last(query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end], rows, None)
        torch.testing.assert_close(parallel_group[:, :, 3 - back], alone[:, :, 0], atol=1e-6, rtol=1e-5)  # float32


def test_padding_among_new_tokens_is_not_seen(qkv):
    query, key, value = qkv
    config = Selected(KMeans(n_clusters=4), top_k=12)
    clean, dirty = (SelectionState.select(key[:, :, :50], value[:, :, :50], None, config) for _ in range(2))
    poisoned = key[:, :, 50:53].clone()
    poisoned[:, :, 1] = torch.nan
    seen = torch.tensor([[True, False, True]] * 2)
    dirty.append(poisoned, value[:, :, 50:53], seen)
    clean.append(key[:, :, [50, 52]], value[:, :, [50, 52]], None)
    got, expected = (state.attend(query[:, :, -1:], None) for state in (dirty, clean))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)  # float32


def test_nothing_but_padding_selects_nothing(qkv):
    query, key, value = qkv
    nothing = torch.zeros(2, 50, dtype=torch.bool)
    state = SelectionState.select(key[:, :, :50], value[:, :, :50], nothing, Selected(top_k=12))
    assert (state.n_selected_from, state.n_rows) == (50, 0)
    state.append(key[:, :, 50:51], value[:, :, 50:51], None)
    got = state.attend(query[:, :, -1:], None)
    torch.testing.assert_close(got, value[:, :, 50:51].repeat_interleave(2, dim=1))  # one key, all the weight


def test_other_configurations_keep_no_selection(qkv):
    _, key, value = qkv
    with pytest.raises(TypeError, match="config must be a Selected to keep a selection, got Routed"):
        SelectionState.select(key, value, None, prescore.Routed())
