"""What every baseline must do, whatever it approximates."""

import inspect

import pytest
import torch
from baseline_reference import assert_differ, assert_same, inputs
from torch.nn.functional import pad

from prescore import exact_attention
from prescore.bench.baselines import BASELINES

# small enough that every mechanism is at work on 23 keys
SMALL = {
    "lev-attention": {"budget": 3, "chunk_size": 5},
    "streaming": {"window": 4, "sinks": 2},
    "heavy-hitters": {"budget": 3, "recent": 1, "chunk_size": 5},
    "oracle": {"budget": 3, "chunk_size": 5},
    "reformer": {"n_buckets": 4, "chunk_size": 2, "n_rounds": 2},
    "performer": {"n_features": 16},
    "quest": {"budget": 4, "page_size": 2, "chunk_size": 5},
    "snapkv": {"budget": 3, "window": 2, "kernel_size": 3, "chunk_size": 5},
    "minference": {"budget": 4, "window": 3, "sinks": 1, "chunk_size": 5},
    "flexprefill": {"budget": 3, "block_size": 2, "chunk_size": 4},
    "xattention": {"budget": 2, "block_size": 2, "stride": 2, "chunk_size": 5},
}
FULL = {
    "lev-attention": {"epsilon": 0.0, "chunk_size": 5},
    "streaming": {"window": 64, "sinks": 2},
    "heavy-hitters": {"budget": 64, "chunk_size": 5},
    "oracle": {"budget": 64, "chunk_size": 5},
    "reformer": {"n_buckets": 1, "chunk_size": 64, "n_rounds": 3},
    "quest": {"budget": 64, "page_size": 4, "chunk_size": 5},
    "snapkv": {"budget": 64, "chunk_size": 5},
    "minference": {"budget": 64, "chunk_size": 5},
    "flexprefill": {"budget": 64, "block_size": 4, "chunk_size": 8},
    "xattention": {"budget": 64, "block_size": 4, "stride": 2, "chunk_size": 5},
}
CAUSAL = {"quest", "snapkv", "minference", "flexprefill", "xattention"}
"""Rules that choose among earlier keys."""
every_baseline = pytest.mark.parametrize("name", BASELINES)
every_baseline_and_mask = pytest.mark.parametrize(
    ("name", "is_causal"),
    [(name, mask) for name in BASELINES for mask in (False, True) if mask or name not in CAUSAL],
)


def attend(name, *tensors, **options):
    return BASELINES[name](*tensors, **{**SMALL[name], **options})


@every_baseline
def test_call_shape(name):
    parameters = inspect.signature(BASELINES[name]).parameters
    assert list(parameters)[:3] == ["query", "key", "value"]
    shared = ["is_causal", "key_padding_mask", "scale", "generator"]
    assert list(parameters)[-4:] == shared
    assert [parameters[p].default for p in shared] == [False, None, None, None]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[3:])


@every_baseline_and_mask
@pytest.mark.parametrize("n_query", [23, 7, 1])
@pytest.mark.parametrize("hidden", [[], list(range(6)), list(range(17, 23)), [3, 4, 11]], ids=str)
def test_full_budget_is_exact(name, is_causal, n_query, hidden):
    if name not in FULL:
        pytest.skip("random features are never exact")
    tensors, mask = inputs(n_query=n_query), torch.ones(2, 23, dtype=torch.bool)
    mask[0, hidden] = False
    options = {"is_causal": is_causal, "key_padding_mask": mask if hidden else None, "scale": 0.4}
    got, expected = BASELINES[name](*tensors, **FULL[name], **options), exact_attention(*tensors, **options)
    rows = slice(None)
    if name == "streaming" and 0 in hidden and not is_causal:
        rows = slice(max(0, 6 - (23 - n_query)), None)  # before the first token there is no position
    blind = torch.zeros(2, n_query, dtype=torch.bool)
    if is_causal and 22 in hidden:  # queries after the last real key are padding
        blind[0, max(0, n_query - len(hidden)) :] = True
    for row in range(2):
        seen = (~blind[row]).nonzero().squeeze(1)
        seen = seen[seen >= (rows.start or 0)]
        assert_same([t[row : row + 1, :, seen] for t in got], [t[row : row + 1, :, seen] for t in expected])


@every_baseline_and_mask
@pytest.mark.parametrize("n_query", [17, 9])
@pytest.mark.parametrize("amount", [(6, 0), (0, 6)], ids=["left", "right"])
def test_padding_and_batch_change_nothing(name, n_query, is_causal, amount):
    if not is_causal and n_query == 9:
        pytest.skip("without causality and with other numbers queries have no positions")
    alone = [t[:1] for t in inputs(n_query=n_query, n_keys=17)]
    own = [pad(t, (0, 0, *amount), value=torch.nan) for t in alone]
    own[0] = own[0][:, :, -n_query - amount[1] :]  # queries are the last positions
    mate = [t[1:] for t in inputs(n_query=own[0].shape[2], n_keys=23, seed=1)]
    padded = [torch.cat(pair) for pair in zip(own, mate, strict=True)]
    mask = torch.cat((pad(torch.ones(1, 17, dtype=torch.bool), amount), torch.ones(1, 23, dtype=torch.bool)))
    got = attend(name, *padded, is_causal=is_causal, key_padding_mask=mask)
    rows = slice(got.lse.shape[2] - amount[1] - n_query, got.lse.shape[2] - amount[1])
    assert_same([t[:1, :, rows] for t in got], attend(name, *alone, is_causal=is_causal))
    assert_same([t[1:] for t in got], attend(name, *mate, is_causal=is_causal))


@every_baseline_and_mask
def test_rows_that_see_nothing(name, is_causal):
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0] = mask[1, :4] = False
    got = attend(name, *inputs(n_query=9, n_keys=9), is_causal=is_causal, key_padding_mask=mask)
    assert not got.output[0].any()
    assert torch.isneginf(got.lse[0]).all()
    assert not got.output.isnan().any()
    assert not is_causal or torch.isneginf(got.lse[1, :, :4]).all()
    assert got.lse[1].isfinite().any()


@every_baseline_and_mask
def test_gradients(name, is_causal):
    tensors = [t.requires_grad_() for t in inputs(batch=1, heads=2, kv_heads=1, n_query=6, n_keys=7, dim=3)]
    options = {"is_causal": is_causal, "key_padding_mask": torch.tensor([[False] + [True] * 6])}

    def run(*tensors):
        output, lse = attend(name, *tensors, **options)
        return output, lse.masked_fill(torch.isneginf(lse), 0.0)

    assert torch.autograd.gradcheck(run, tensors)


@every_baseline_and_mask
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name, is_causal, dtype):
    tensors = [t.to(dtype) for t in inputs()]
    got = attend(name, *tensors, is_causal=is_causal)
    assert (got.output.dtype, got.lse.dtype) == (dtype, torch.float32)
    expected = attend(name, *(t.double() for t in tensors), is_causal=is_causal)
    # rounding may flip a choice in a few rows; half precision rounds logits of size 10 to about 0.04
    limit = 1e-4 if dtype == torch.float32 else 0.1
    wrong = (got.output.double() - expected.output).abs().amax(-1) > limit
    assert wrong.double().mean() <= 0.1
    assert_differ(expected, exact_attention(*(t.double() for t in tensors), is_causal=is_causal))


@every_baseline_and_mask
def test_degenerate_sizes_and_keys(name, is_causal):
    query, key, value = inputs()
    cases = [(query, keys, value) for keys in (key * 0, key[:, :, :1].expand_as(key).contiguous())]
    for batch, n_query, n_keys in ((0, 23, 23), (2, 0, 23), (2, 1, 1), (2, 2, 3), (2, 0, 0)):
        cases.append(inputs(batch=batch, n_query=n_query, n_keys=n_keys))
    for query, key, value in cases:
        got = attend(name, query, key, value, is_causal=is_causal)
        assert got.output.shape == (*query.shape[:3], value.shape[-1])
        assert got.lse.shape == query.shape[:3]
        assert got.output.isfinite().all()


@every_baseline_and_mask
def test_same_seed_same_bits_whatever_the_defaults_of_torch(name, is_causal):
    tensors, state = inputs(), torch.random.get_rng_state()
    first, other = (attend(name, *tensors, is_causal=is_causal, generator=seed) for seed in (3, 4))
    try:
        torch.set_default_dtype(torch.float16)
        with torch.device("meta"):
            again = attend(name, *tensors, is_causal=is_causal, generator=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(left, right) for left, right in zip(again, first, strict=True))
    assert torch.equal(first.output, other.output) == (name not in ("reformer", "performer"))
    assert torch.equal(state, torch.random.get_rng_state())


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
        ("quest", {"budget": 2}, ValueError, "is_causal must be True .*, got False"),
        ("quest", {"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ("snapkv", {"kernel_size": 4, "is_causal": True}, ValueError, "kernel_size must be odd, got 4"),
        ("minference", {"sinks": -1, "is_causal": True}, ValueError, "sinks must be at least 0, got -1"),
        ("flexprefill", {"tau": -0.1, "is_causal": True}, ValueError, "tau must be .* at least 0, got -0.1"),
        ("flexprefill", {"block_size": 0, "is_causal": True}, ValueError, "block_size must be at least 1, got 0"),
        (
            "xattention",
            {"block_size": 12, "is_causal": True},
            ValueError,
            "block_size must be a multiple of the stride 8, got 12",
        ),
        ("performer", {"n_features": 0}, ValueError, "n_features must be at least 1, got 0"),
    ],
)
def test_wrong_parameters(name, options, error, message):
    with pytest.raises(error, match=message):
        BASELINES[name](*inputs(), **options)


@every_baseline
def test_wrong_inputs(name):
    query, key, value = inputs()
    shorter = key[:, :, 1:], value[:, :, 1:]
    for message, tensors, options in (
        (r"query must have 4 dimensions .* got \(4, 23, 8\)", (query[0], key, value), {}),
        ("at most the key length 22 when is_causal=True, got 23", (query, *shorter), {"is_causal": True}),
        (r"key_padding_mask must have shape \(2, 23\)", inputs(), {"key_padding_mask": torch.ones(2, 5).bool()}),
    ):
        with pytest.raises(ValueError, match=message):
            attend(name, *tensors, **{"is_causal": name in CAUSAL, **options})
    if name == "streaming":
        with pytest.raises(ValueError, match="must be at most the key length 22 for a window, got 23"):
            attend(name, query, *shorter)
