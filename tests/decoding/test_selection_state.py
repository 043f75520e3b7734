"""A selection that steps reuse, and the buffer it grows in."""

import pytest
import torch

import prescore
from prescore import Coupling, KMeans, Lsh, Selected, prescored_attention
from prescore.integrations.decode import KVBuffer, SelectionState

ARTEFACTS = Coupling(mask="zero", residual_weight="all", overlap="count")
FLOAT32 = {"atol": 1e-6, "rtol": 1e-5}  # one softmax over the same keys, in another order of summing


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 60, 8, generator=generator)
    key, value = (torch.randn(2, 2, 60, 8, generator=generator) for _ in range(2))
    return query, key, value


@pytest.mark.parametrize("n_padding", [0, 7])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scorer": KMeans(n_clusters=4), "recent": 3},
        {"remainder": "none"},
        {"top_k": 0.3},
        {"top_k": None, "scorer": "key-norm", "min_score": 2.5},
        {"inner": Lsh(), "remainder": "none"},
        {"coupling": Coupling(mask="zero"), "remainder": "none"},
        {"inner": Lsh(), "remainder": "none", "leaf_inclusive": True, "coupling": ARTEFACTS},
        {"min_fraction": 0.9, "inner": Lsh()},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 5])
def test_a_fresh_selection_is_prescored_attention(qkv, n_padding, changes, seed):
    """Identity 10."""
    query, key, value = (t[:, :, :50] for t in qkv)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[0, :n_padding] = False
    config = Selected(**{"top_k": 12, **changes})
    got = SelectionState.select(key, value, mask, config, seed).attend(query[:, :, -1:], 0.4)
    expected = prescored_attention(
        query[:, :, -1:], key, value, config, key_padding_mask=mask, scale=0.4, generator=seed
    )
    torch.testing.assert_close(got, expected, **FLOAT32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_in_half_precision_is_as_good_as_the_call(dtype):
    """Centroids weigh as many keys as they represent: log(1001) is 6.9087, and 6.9062 in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, n, 16, generator=generator).to(dtype) for n in (1, 4000, 4000)]
    config = Selected(KMeans(n_clusters=4), top_k=4)
    exact = prescored_attention(*(t.double() for t in inputs), config, generator=0)
    called = prescored_attention(*inputs, config, generator=0)
    state = SelectionState.select(*inputs[1:], None, config, 0)
    bias = state.buffer.bias.clone()
    assert bias.dtype == torch.float32
    state.append(*(t[:, :, :1] for t in inputs[1:]), torch.tensor([[True], [False]]))  # and takes padding
    assert torch.equal(state.buffer.bias[:, :, :-1], bias)
    state.crop(0)
    errors = [float((got.double() - exact).abs().max()) for got in (state.attend(inputs[0], None), called)]
    assert errors[0] <= 1.5 * errors[1]


def test_selected_keys_and_later_tokens(qkv):
    """Without centroids, a step is exact attention over the selected keys and every token since."""
    query, key, value = qkv
    state = SelectionState.select(key[:, :, :50], value[:, :, :50], None, Selected(top_k=12, remainder="none"))
    state.append(key[:, :, 50:], value[:, :, 50:], None)
    selected = prescore.select(key[:, :, :50], "key-diff", top_k=12).indices
    index = torch.cat((selected, torch.arange(50, 60).expand(2, 2, 10)), -1)[..., None].expand(-1, -1, -1, 8)
    expected = prescore.exact_attention(query[:, :, -1:], key.gather(2, index), value.gather(2, index)).output
    torch.testing.assert_close(state.attend(query[:, :, -1:], None), expected, **FLOAT32)
    assert (state.n_entries, state.n_centroids, state.n_since) == (12, 0, 10)


@pytest.mark.parametrize("bias", [False, True])
def test_several_queries_are_causal_among_themselves(qkv, bias):
    query, key, value = qkv
    weight = torch.randn(2, 2, 60, generator=torch.Generator().manual_seed(1)) if bias else None
    state = SelectionState(Selected(), KVBuffer(key, value, weight), 0, 0, 0)
    at_once = state.attend(query[:, :, -4:], None)
    for end in range(60, 56, -1):
        state.crop(end)
        alone = state.attend(query[:, :, end - 1 : end], None)
        torch.testing.assert_close(at_once[:, :, end - 57], alone[:, :, 0], **FLOAT32)


def test_padding_among_new_tokens_is_hidden(qkv):
    query, key, value = qkv
    config = Selected(KMeans(n_clusters=4), top_k=12)
    clean, padded = (SelectionState.select(key[:, :, :50], value[:, :, :50], None, config) for _ in range(2))
    poisoned = key[:, :, 50:53].clone()
    poisoned[:, :, 1] = torch.nan
    padded.append(poisoned, value[:, :, 50:53], torch.tensor([[True, False, True]] * 2))
    clean.append(key[:, :, [50, 52]], value[:, :, [50, 52]], None)
    got, expected = (state.attend(query[:, :, -1:], None) for state in (padded, clean))
    torch.testing.assert_close(got, expected, **FLOAT32)


def test_nothing_but_padding_selects_nothing(qkv):
    query, key, value = qkv
    padding = torch.zeros(2, 50, dtype=torch.bool)
    state = SelectionState.select(key[:, :, :50], value[:, :, :50], padding, Selected(top_k=12))
    assert (state.n_selected_from, state.n_entries) == (50, 0)
    state.append(key[:, :, 50:51], value[:, :, 50:51], None)
    got = state.attend(query[:, :, -1:], None)
    torch.testing.assert_close(got, value[:, :, 50:51].repeat_interleave(2, dim=1))  # one key, all the weight


def test_other_configurations_keep_no_selection(qkv):
    with pytest.raises(TypeError, match="config must be a Selected to keep a selection, got Routed"):
        SelectionState.select(qkv[1], qkv[2], None, prescore.Routed())


def test_a_buffer_grows_like_concatenation(qkv):
    _, key, value = qkv
    before = key.clone()
    buffer, pointers = KVBuffer(key[:, :, :5], value[:, :, :5]), set()
    for number in range(5, 60):
        buffer.append(key[:, :, number : number + 1], value[:, :, number : number + 1])
        pointers.add(buffer.key.data_ptr())
    assert torch.equal(buffer.key, key)
    assert torch.equal(buffer.value, value)
    assert len(pointers) == 1  # one copy, then only new positions are written
    buffer.crop(20)
    buffer.append(key[:, :, 30:33], value[:, :, 30:33], torch.full((2, 2, 3), -1.0))
    assert torch.equal(buffer.key, torch.cat((key[:, :, :20], key[:, :, 30:33]), 2))
    assert buffer.bias[0, 0].tolist() == [0.0] * 20 + [-1.0] * 3
    buffer.take(torch.tensor([1, 1, 0]))
    assert torch.equal(buffer.value[2], torch.cat((value[0, :, :20], value[0, :, 30:33]), 1))
    given = KVBuffer(key, value)
    given.crop(10)
    given.append(value[:, :, :5], value[:, :, :5])
    assert torch.equal(key, before)  # the caller's tensors are left alone


def test_the_bias_keeps_its_precision(qkv):
    key, value = (t[:, :, :5].bfloat16() for t in qkv[1:])
    fine = torch.full((2, 2, 5), 1.0009765625)  # no bfloat16
    biased, plain = KVBuffer(key, value, fine), KVBuffer(key, value)
    biased.append(key, value)
    plain.append(key, value, fine)
    assert biased.bias[0, 0].tolist() == [1.0009765625] * 5 + [0.0] * 5
    assert plain.bias[0, 0].tolist() == [0.0] * 5 + [1.0009765625] * 5


def test_gradients_reach_appended_keys(qkv):
    _, key, value = qkv
    new = key[:, :, :1].clone().requires_grad_()
    buffer = KVBuffer(key[:, :, :5], value[:, :, :5])
    buffer.append(new, value[:, :, :1])
    buffer.key.sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
