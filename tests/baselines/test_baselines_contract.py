"""What every baseline must do, whatever it approximates."""

import inspect

import pytest
import torch
from baseline_reference import assert_differ, assert_same, inputs

from prescore import exact_attention
from prescore.baselines import BASELINES

# small enough that every mechanism is at work on 23 keys
SMALL = {
    "lev-attention": {"budget": 3, "chunk_size": 5},
    "streaming": {"window": 4, "sinks": 2},
    "heavy-hitters": {"budget": 3, "recent": 1, "chunk_size": 5},
    "oracle": {"budget": 3, "chunk_size": 5},
    "reformer": {"n_buckets": 4, "chunk_size": 2, "n_rounds": 2},
    "performer": {"n_features": 16},
}
FULL = {
    "lev-attention": {"epsilon": 0.0, "chunk_size": 5},
    "streaming": {"window": 64, "sinks": 2},
    "heavy-hitters": {"budget": 64, "chunk_size": 5},
    "oracle": {"budget": 64, "chunk_size": 5},
    "reformer": {"n_buckets": 1, "chunk_size": 64, "n_rounds": 3},
}
every_baseline = pytest.mark.parametrize("name", BASELINES)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])


def test_every_baseline_has_small_parameters():
    assert set(SMALL) == set(BASELINES)


@every_baseline
def test_call_shape(name):
    parameters = inspect.signature(BASELINES[name]).parameters
    assert list(parameters)[:3] == ["query", "key", "value"]
    shared = ["is_causal", "key_padding_mask", "scale", "generator"]
    assert list(parameters)[-4:] == shared
    assert [parameters[p].default for p in shared] == [False, None, None, None]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[3:])


@pytest.mark.parametrize("name", FULL)
@causal_or_not
@pytest.mark.parametrize("n_query", [23, 7, 1])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_full_budget_is_exact(name, is_causal, n_query, padding):
    query, key, value = inputs(n_query=n_query)
    mask = None if padding == "none" else _mask(padding, 2, 23)
    got = BASELINES[name](query, key, value, **FULL[name], is_causal=is_causal, key_padding_mask=mask, scale=0.4)
    expected = exact_attention(query, key, value, is_causal=is_causal, key_padding_mask=mask, scale=0.4)
    rows = slice(None)
    if name == "streaming" and padding == "left" and not is_causal:
        rows = slice(max(0, 6 - (23 - n_query)), None)  # before the first token there is no position
    assert_same([t[:, :, rows] for t in got], [t[:, :, rows] for t in expected])


@every_baseline
def test_small_budget_is_not_exact(name):
    query, key, value = inputs()
    for is_causal in (False, True):
        got = BASELINES[name](query, key, value, **SMALL[name], is_causal=is_causal)
        assert_differ(got, exact_attention(query, key, value, is_causal=is_causal))


@every_baseline
@pytest.mark.parametrize("n_query", [23, 9])
@pytest.mark.parametrize("position", [4, 11, 17, 21])
def test_the_future_changes_nothing(name, n_query, position):
    query, key, value = inputs(n_query=n_query)
    before = BASELINES[name](query, key, value, **SMALL[name], is_causal=True)
    # large on purpose: a leak through a maximum or a sort must show
    key, value = key.clone(), value.clone()
    key[:, :, position + 1 :] *= -30
    value[:, :, position + 1 :] += 100
    own = position + 1 - (23 - n_query)
    if name != "oracle":
        query = query.clone()
        query[:, :, max(own, 0) :] *= -30
    after = BASELINES[name](query, key, value, **SMALL[name], is_causal=True)
    assert_same([t[:, :, : max(own, 0)] for t in after], [t[:, :, : max(own, 0)] for t in before])
    assert_differ(after, before)


@every_baseline
@causal_or_not
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batch_change_nothing(name, is_causal, side):
    query, key, value = inputs(n_query=17, n_keys=17)
    mate = inputs(n_query=23, n_keys=23, seed=1)
    alone = BASELINES[name](query[:1], key[:1], value[:1], **SMALL[name], is_causal=is_causal)
    amount = (6, 0) if side == "left" else (0, 6)
    padded = [
        torch.cat((torch.nn.functional.pad(t[:1], (0, 0, *amount), value=torch.nan), m[1:]))
        for t, m in zip((query, key, value), mate, strict=True)
    ]
    rows = slice(6, None) if side == "left" else slice(17)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0] = False
    mask[0, rows] = True
    got = BASELINES[name](*padded, **SMALL[name], is_causal=is_causal, key_padding_mask=mask)
    assert_same([t[:1, :, rows] for t in got], alone)
    second = BASELINES[name](*[m[1:] for m in mate], **SMALL[name], is_causal=is_causal)
    assert_same([t[1:] for t in got], second)


@every_baseline
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_last_queries(name, side):
    query, key, value = inputs(batch=1, n_query=9, n_keys=17)
    alone = BASELINES[name](query, key, value, **SMALL[name], is_causal=True)
    amount = (6, 0) if side == "left" else (0, 6)
    key, value = (torch.nn.functional.pad(t, (0, 0, *amount), value=torch.nan) for t in (key, value))
    if side == "right":
        query = torch.nn.functional.pad(query, (0, 0, 0, 6))
    mask = torch.nn.functional.pad(torch.ones(1, 17, dtype=torch.bool), amount)
    got = BASELINES[name](query, key, value, **SMALL[name], is_causal=True, key_padding_mask=mask)
    assert_same([t[:, :, :9] for t in got], alone)


@every_baseline
@causal_or_not
def test_rows_that_see_nothing(name, is_causal):
    query, key, value = inputs(n_query=9, n_keys=9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0] = False
    mask[1, :4] = False
    got = BASELINES[name](query, key, value, **SMALL[name], is_causal=is_causal, key_padding_mask=mask)
    assert (got.output[0] == 0).all()
    assert torch.isneginf(got.lse[0]).all()
    assert not got.output.isnan().any()
    if is_causal:
        assert torch.isneginf(got.lse[1, :, :4]).all()
    assert got.lse[1].isfinite().any()


@every_baseline
@causal_or_not
def test_gradients(name, is_causal):
    query, key, value = (
        t.requires_grad_() for t in inputs(batch=1, heads=2, kv_heads=1, n_query=6, n_keys=7, dim=3, value_dim=2)
    )
    mask = torch.tensor([[False] + [True] * 6])
    options = {**SMALL[name], "n_features": 6} if name == "performer" else SMALL[name]

    def run(*tensors):
        output, lse = BASELINES[name](*tensors, **options, is_causal=is_causal, key_padding_mask=mask)
        return output, lse.masked_fill(torch.isneginf(lse), 0.0)

    assert torch.autograd.gradcheck(run, (query, key, value))


@every_baseline
@causal_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name, is_causal, dtype):
    query, key, value = (t.to(dtype) for t in inputs())
    got = BASELINES[name](query, key, value, **SMALL[name], is_causal=is_causal)
    assert got.output.dtype == dtype
    assert got.lse.dtype == torch.float32
    expected = BASELINES[name](query.double(), key.double(), value.double(), **SMALL[name], is_causal=is_causal)
    # rounding may flip a choice in a few rows; half precision rounds logits of size 10 to about 0.04
    limit = 1e-4 if dtype == torch.float32 else 0.1
    wrong = (got.output.double() - expected.output).abs().amax(-1) > limit
    assert wrong.double().mean() <= 0.1


@every_baseline
@causal_or_not
def test_degenerate_sizes(name, is_causal):
    for sizes in ({"batch": 0}, {"n_query": 0}, {"n_query": 1, "n_keys": 1}, {"n_query": 2, "n_keys": 3}):
        query, key, value = inputs(**sizes)
        got = BASELINES[name](query, key, value, **SMALL[name], is_causal=is_causal)
        assert got.output.shape == (*query.shape[:3], value.shape[-1])
        assert got.lse.shape == query.shape[:3]
        assert got.output.isfinite().all()
    query, key, value = inputs(n_query=0, n_keys=0)
    assert BASELINES[name](query, key, value, **SMALL[name], is_causal=is_causal).output.shape == (2, 4, 0, 5)


@every_baseline
@causal_or_not
def test_equal_and_zero_keys(name, is_causal):
    query, key, value = inputs()
    for keys in (torch.zeros_like(key), key[:, :, :1].expand_as(key).contiguous()):
        got = BASELINES[name](query, keys, value, **SMALL[name], is_causal=is_causal)
        assert got.output.isfinite().all()


@every_baseline
def test_same_seed_same_bits_and_no_global_seed(name):
    tensors = inputs()
    state = torch.random.get_rng_state()
    first = BASELINES[name](*tensors, **SMALL[name], generator=3)
    second = BASELINES[name](*tensors, **SMALL[name], generator=3)
    assert torch.equal(first.output, second.output)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("name", ["reformer", "performer"])
def test_another_seed_another_result(name):
    tensors = inputs()
    runs = [BASELINES[name](*tensors, **SMALL[name], generator=seed) for seed in (3, 4)]
    assert_differ(*runs)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("lev-attention", {}, ValueError, "epsilon or budget must be given, got None for both"),
        ("lev-attention", {"epsilon": -0.5}, ValueError, "epsilon must be finite and at least 0.0, got -0.5"),
        ("lev-attention", {"budget": -2}, ValueError, "budget must be at least 0, got -2"),
        ("lev-attention", {"budget": 2, "chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ("streaming", {"window": 0}, ValueError, "window must be at least 1, got 0"),
        ("streaming", {"sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
        ("heavy-hitters", {"budget": 2.5}, TypeError, "budget must be an int, got float 2.5"),
        ("heavy-hitters", {"budget": 2, "recent": 3}, ValueError, "recent must be at most the budget 2, got 3"),
        ("heavy-hitters", {"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ("oracle", {"budget": -1}, ValueError, "budget must be at least 0, got -1"),
        ("oracle", {"chunk_size": -7}, ValueError, "chunk_size must be at least 1, got -7"),
        ("reformer", {"n_buckets": 5}, ValueError, "n_buckets must be 1 or even, got 5"),
        ("reformer", {"n_rounds": 0}, ValueError, "n_rounds must be at least 1, got 0"),
        ("reformer", {"generator": "x"}, TypeError, "generator must be an int, .* got str 'x'"),
        ("performer", {"n_features": 0}, ValueError, "n_features must be at least 1, got 0"),
    ],
)
def test_wrong_parameters(name, options, error, message):
    with pytest.raises(error, match=message):
        BASELINES[name](*inputs(), **options)


@every_baseline
def test_wrong_inputs(name):
    query, key, value = inputs()
    with pytest.raises(ValueError, match=r"query must have 4 dimensions .* got \(4, 23, 8\)"):
        BASELINES[name](query[0], key, value, **SMALL[name])
    with pytest.raises(ValueError, match="at most the key length 22 when is_causal=True, got 23"):
        BASELINES[name](query, key[:, :, 1:], value[:, :, 1:], **SMALL[name], is_causal=True)
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(2, 23\)"):
        BASELINES[name](query, key, value, **SMALL[name], key_padding_mask=torch.ones(2, 5, dtype=torch.bool))


def _mask(kind, batch, length):
    mask = torch.ones(batch, length, dtype=torch.bool)
    if kind == "left":
        mask[0, :6] = False
    elif kind == "right":
        mask[0, -6:] = False
    else:
        mask[0, [3, 4, 11]] = False
    return mask
