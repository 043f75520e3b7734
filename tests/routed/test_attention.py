"""Routed attention through the public call: definition, causality, chunked prefill, padding, odd inputs, stats."""

import random

import pytest
import torch
from fuzz_cases import MEMORY, random_case
from oracles import routed as routed_oracles
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors
from oracles.routed import routed_oracle
from routed_checks import attend, check_native, check_routed, check_stats, needs_native

from fuzz import check
from prescore import Exact, Routed, exact_attention, prescored_attention
from prescore.routed import layout, native, reference
from prescore.routed.native import library

SMALL = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)
WIDE = Routed(min_weight=1 / 64, cluster_size=32, chunk_size=64, sinks=4, exact_until=128)
"""Sizes that native code knows."""
both = pytest.mark.parametrize("is_causal", [True, False])


def tensors(n_keys=90, **sizes):
    usual = {"batch": 2, "heads": 4, "kv_heads": 2, "dim": 8, "value_dim": 5, "spread": 1.0}
    return attention_tensors(**{**usual, "n_keys": n_keys, **sizes})


def large(length=700, seed=0):
    """`[1, 2, length, 32]` in float32, which native code runs."""
    sizes = {"heads": 2, "kv_heads": 2, "n_keys": length, "dim": 32, "spread": 1.0}
    return list(attention_tensors(**sizes, dtype=torch.float32, seed=seed))


def assert_same(got, wanted):
    assert_within(got, wanted, 1e-12)  # float64 sums in another order


# --- the definition


def test_random_calls_are_the_definition():
    cases = (random_case(random.Random(f"routed/{number}")) for number in range(400))
    assert sum(check("routed_definition", case) for case in cases) > 50


@needs_native
@both
def test_the_threshold_falls_where_there_are_many_far_keys(is_causal, monkeypatch):
    few, many = tensors(heads=2, kv_heads=1), large()
    before = check_routed(SMALL, few, is_causal=is_causal)
    native_before = check_native(WIDE, many, is_causal=is_causal)
    for module in (reference, native, routed_oracles):
        monkeypatch.setattr(module, "MASS_KEYS", 40)
    assert check_routed(SMALL, few, is_causal=is_causal)["far_keys_read"] > before["far_keys_read"]
    assert check_native(WIDE, many, is_causal=is_causal)["far_keys_read"] > native_before["far_keys_read"]


@needs_native
@both
def test_every_span_has_its_covariances(is_causal, monkeypatch):
    for module, name in ((layout, "SPAN_CLUSTERS"), (routed_oracles, "SPAN")):
        monkeypatch.setattr(module, name, 16)
    check_routed(SMALL, tensors(300, heads=2, kv_heads=1, batch=1), is_causal=is_causal)
    check_native(WIDE.replace(cluster_size=16), large(), is_causal=is_causal)


@both
@pytest.mark.parametrize("n_query", [90, 70, 5])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_numbers_of_queries_and_padding(is_causal, n_query, padding):
    position = torch.arange(90)
    mask = {
        "left": position >= torch.tensor([[0], [29]]),
        "right": position < torch.tensor([[90], [61]]),
        "holes": position.remainder(17) != torch.tensor([[100], [3]]),
    }.get(padding)
    stats = check_routed(SMALL, tensors(n_query=n_query, heads=2, kv_heads=1), is_causal=is_causal, mask=mask)
    assert stats["far_keys_read"] > 0
    gaps = padding == "holes" or (is_causal and padding == "right" and n_query < 90)
    assert stats.exact_sequences == (1 if gaps else None)


@both
def test_long_chunks_are_cut_into_strips_and_blocks(is_causal, monkeypatch):
    """Chunks of two strips, several blocks of queries, few int8 logits at once, directions from samples."""
    monkeypatch.setattr("prescore.routed.plain.LOGITS_AT_ONCE", 20_000)
    config = Routed(min_weight=1 / 64, cluster_size=32, chunk_size=256, sinks=3, exact_until=0)
    inputs = tensors(1000, batch=1, heads=1, kv_heads=1, n_query=400)
    assert check_routed(config, inputs, is_causal=is_causal, scale=0.3)["n_chunks"] == (2 if is_causal else 3)


def equal_in_clusters(key):
    key[:, :, 3:83] = key[:, :, 3:23].repeat_interleave(4, dim=2)


UNUSUAL = {
    "equal keys": lambda query, key: key.copy_(key[:, :, :1].clone()),
    "zero keys": lambda query, key: key.zero_(),
    "one huge key": lambda query, key: key[:, :, 30].mul_(40),
    "zero queries": lambda query, key: query[:, :, ::3].zero_(),
    "equal in clusters": lambda query, key: equal_in_clusters(key),
    # from keys that hardly differ to keys so far apart that gains, moves and deviations reach their bounds
    "tight keys": lambda query, key: key.mul_(0.02),
    "wide keys": lambda query, key: key.mul_(6.0),
}


@both
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_keys(name, is_causal):
    query, key, value = tensors(batch=1, heads=2, kv_heads=1, seed=4)
    UNUSUAL[name](query, key)
    check_routed(SMALL, (query, key, value), is_causal=is_causal)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["plain", "cpu-flash"])
def test_low_precision(dtype, is_causal, backend):
    inputs = tensors(dtype=dtype, batch=1)
    config = SMALL.replace(min_weight=1.0)  # no key is read, so rounding moves no choice
    got, _ = attend(inputs, config, is_causal=is_causal, backend=backend)
    wanted = routed_oracle(*inputs, config, is_causal=is_causal)
    assert (got.output.dtype, got.lse.dtype) == (dtype, torch.float32)
    # a few roundings of outputs of size about 1
    assert_within(got.output, wanted.output, 8 * torch.finfo(dtype).eps + 2e-6)
    assert_within(got.lse, wanted.lse, 2e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps)


def test_gradients_of_the_output_alone_and_of_the_lse_alone():
    inputs = [t.requires_grad_() for t in tensors(70, batch=1)]
    (output, lse), _ = attend(inputs, SMALL)
    losses = (output.sin().sum() + lse.cos().sum(), output.sin().sum(), lse.cos().sum())
    grads = [torch.autograd.grad(x, inputs, retain_graph=True, materialize_grads=True) for x in losses]
    for full, by_output, by_lse in zip(*grads, strict=True):
        assert_same(by_output + by_lse, full)


# --- exact attention


@both
@pytest.mark.parametrize("place", [3, 50, 90])
def test_a_needle_that_only_late_queries_look_for_is_found(is_causal, place):
    query, key, value = tensors(200, batch=1, heads=2, kv_heads=1)
    needle, late = torch.full((8,), 3.0, dtype=torch.float64), slice(190, 200)
    key[:, :, place] = needle
    query[:, :, late] = 0.1 * query[:, :, late] + needle
    for dtype, budget in ((torch.float64, 1e-3), (torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        inputs = [t.to(dtype) for t in (query, key, value)]
        expected = exact_attention(*inputs, is_causal=is_causal).output[:, :, late].double()
        outputs = [
            prescored_attention(*inputs, config, is_causal=is_causal)[:, :, late].double()
            for config in (SMALL, SMALL.replace(min_weight=1.0))
        ]
        assert_within(outputs[0], expected, budget, "needle")
        assert float((outputs[1] - expected).abs().max()) > 10 * budget


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_an_outlier_is_found_however_far_from_its_centroid(backend):
    """Tight keys, and one far back that every late query looks for, many deviations off its centroid."""
    query, key, value = (t.float() for t in tensors(3000, batch=1, heads=2, dim=64, value_dim=64))
    direction = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(0)), dim=0)
    query, key = (0.1 * query + 2.5 * direction)[:, :, -50:], 0.1 * key
    key[:, :, 700] = 30 * direction
    exact = exact_attention(query, key, value, is_causal=True).output

    output = prescored_attention(query, key, value, Routed(min_weight=1 / 16), is_causal=True, backend=backend)
    assert float((output - exact).square().sum() / exact.square().sum()) < 1e-3


@pytest.mark.parametrize("backend", [pytest.param("auto", marks=needs_native), "plain"])
@pytest.mark.parametrize("scale", [1, 3, 12, 25, 100, 1000])
def test_sharp_heads_find_the_keys_that_hold_the_weight(scale, backend):
    """Normal queries and keys, logits of standard deviation `scale`: from 12 on a few keys hold all the weight."""
    query, key, value = (t.float() for t in tensors(4352, batch=1, heads=2, dim=64, value_dim=64, seed=2))
    query, key = scale * query[:, :, -256:] / query.std(), key / key.std()
    exact = exact_attention(query, key, value, is_causal=True).output
    output, aux = prescored_attention(
        query, key, value, Routed(), is_causal=True, backend=backend, return_aux=True
    )
    off = (output - exact).norm(dim=-1) > 0.5 * exact.norm(dim=-1)
    assert float(off.double().mean()) <= 0.004, "a query in 256"
    assert aux.stats.far_keys_read >= 10


# --- causality, chunks, batches, padding


@pytest.mark.parametrize("exact_until", [0, 61])
@pytest.mark.parametrize("sizes", [(130,), (1, 129), (60, 61, 9), (35, 16, 16, 63), (100, 1, 1, 1, 27)])
def test_chunked_prefill_equals_the_whole_call(sizes, exact_until):
    query, key, value = tensors(130)
    config = SMALL.replace(exact_until=exact_until)
    full, _ = attend((query, key, value), config)
    stop = 0
    for size in sizes:
        start, stop = stop, stop + size
        part, _ = attend((query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]), config)
        assert_same(part.output, full.output[:, :, start:stop])
        assert_same(part.lse, full.lse[:, :, start:stop])


@both
def test_groups_of_heads_and_batches_of_heads_change_nothing(is_causal, monkeypatch):
    query, key, value = tensors()
    full = prescored_attention(query, key, value, SMALL, is_causal=is_causal)
    repeated = [t.repeat_interleave(2, dim=1) for t in (key, value)]
    assert_same(prescored_attention(query, *repeated, SMALL, is_causal=is_causal), full)
    for at_once in (1, 90 * 8 * 3):
        monkeypatch.setattr("prescore.routed.attention.KEY_NUMBERS_AT_ONCE", at_once)
        assert_same(prescored_attention(query, key, value, SMALL, is_causal=is_causal), full)


# --- tensors as callers have them


@pytest.mark.parametrize("way", [*MEMORY, "one head for all"])
@both
def test_memory_layout_does_not_matter(way, is_causal):
    change = MEMORY.get(way, lambda t: t[:, :1].expand(-1, 2, -1, -1))
    given = [change(t) for t in large()]
    plain = [t.resolve_neg().clone().contiguous() for t in given]
    expected = prescored_attention(*plain, WIDE, is_causal=is_causal)
    for place in range(4):  # each of them alone, then all
        mixed = [one if place in (i, 3) else two for i, (one, two) in enumerate(zip(given, plain, strict=True))]
        torch.testing.assert_close(prescored_attention(*mixed, WIDE, is_causal=is_causal), expected)


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_keys_whose_covariance_overflows(backend):
    query, key, value = large()
    output = prescored_attention(query, key * 1e19, value, WIDE, is_causal=True, backend=backend)
    assert output.isfinite().all()


@both
@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e4), (torch.float64, 1e12), (torch.float32, 1e4)])
def test_a_huge_key_overflows_nothing(is_causal, dtype, size):
    query, key, value = tensors(130, batch=1, heads=2, kv_heads=1)
    key[:, :, 60] = size
    query[:, 0, ::2] = -query[:, 0, ::2].abs()  # the first head avoids it, the second looks at nothing else
    query[:, 1, ::2] = query[:, 1, ::2].abs()
    inputs = [t.to(dtype).requires_grad_() for t in (query, key, value)]
    got, _ = attend(inputs, SMALL.replace(min_weight=1 / 120), is_causal=is_causal)
    grads = torch.autograd.grad(got.output.square().sum(), inputs)
    assert all(torch.isfinite(t).all() for t in (*got, *grads))
    late = slice(100, None, 2)
    expected = exact_attention(*inputs, is_causal=is_causal).output
    assert_within(got.output[:, 1, late], expected[:, 1, late], 1e-5)


@both
def test_sums_beyond_half_precision(is_causal):
    """Centroids of keys and values whose sum is above 65504, the largest number of float16."""
    query, key, value = tensors()
    inputs = [t.half() for t in (query * 0.001, key * 0.1 + 25000, value + 25000)]
    got, _ = attend(inputs, SMALL.replace(min_weight=1 / 8, chunk_size=32), is_causal=is_causal)
    expected = exact_attention(*(t.double() for t in inputs), is_causal=is_causal)
    assert_within(got.output, expected.output, 16)  # float16 numbers of 25000 lie 16 apart
    torch.testing.assert_close(got.lse.double(), expected.lse, rtol=2e-3, atol=0.1)


# --- stats


@pytest.mark.parametrize(("n_query", "n_keys", "causal"), [(300, 300, True), (50, 300, True), (70, 290, False)])
@pytest.mark.parametrize("min_weight", [1.0, 1 / 32])
@pytest.mark.parametrize("backend", ["plain", "auto"])
def test_stats_count_what_the_oracle_reads(n_query, n_keys, causal, min_weight, backend):
    config = Routed(chunk_size=32, cluster_size=16, min_weight=min_weight, exact_until=64)
    dtype = torch.float64 if backend == "plain" else torch.float32  # native code
    sizes = {"batch": 1, "heads": 2, "n_query": n_query, "dim": 16, "value_dim": 16}
    inputs = tensors(n_keys, **sizes, dtype=dtype, seed=2, spread=1.5)
    check_stats(config, inputs, is_causal=causal, backend=backend)


def test_stats_of_calls_that_read_every_key():
    query, key = torch.randn(2, 1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    for config in (Routed(), Exact()):
        for causal, n_read in ((True, 20.5), (False, 40.0)):
            assert attend((query, key, key), config, is_causal=causal)[1].keys_per_query == n_read
        late = attend((query[:, :, -4:], key, key), config)[1]
        assert late.keys_per_query == (37 + 38 + 39 + 40) / 4


@both
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_stats(side, is_causal):
    names = ("keys_per_query", "far_keys_read", "centroids_per_query", "keys_compared")
    inputs, empty = large(500), torch.zeros(1, 2, 400, 32)
    _, alone = attend(inputs, WIDE, is_causal=is_causal)
    padded = [torch.cat((empty, t) if side == "left" else (t, empty), dim=2) for t in inputs]
    position = torch.arange(900)[None]
    mask = position >= 400 if side == "left" else position < 500
    _, stats = attend(padded, WIDE, is_causal=is_causal, key_padding_mask=mask)
    assert alone.far_keys_read > 0
    # without a causal mask padding queries are answered, and search as others do
    for name in names if is_causal else ("centroids_per_query",):
        assert stats[name] == pytest.approx(alone[name]), name


def test_without_native_code_auto_runs_exactly_what_routes_long_texts(monkeypatch):
    """Plain torch routes more slowly than exact attention."""
    monkeypatch.setenv(library.VARIABLE, "0")
    query, key, value = large(2400)
    mask = torch.arange(2400) >= torch.tensor([[3]])
    for n_query in (2400, 5):
        call = query[:, :, -n_query:], key, value
        output, aux = prescored_attention(*call, is_causal=True, key_padding_mask=mask, return_aux=True)
        wanted = exact_attention(*call, is_causal=True, key_padding_mask=mask)
        torch.testing.assert_close(output, wanted.output, rtol=0, atol=0)
        assert aux.stats.exact_reason == "native code: none (PRESCORE_NATIVE=0)"
        for backend, config in (("auto", WIDE), ("plain", Routed())):  # the first routes short texts
            aux = prescored_attention(*call, config, is_causal=True, backend=backend, return_aux=True)[1]
            assert (aux.stats.exact_reason, aux.stats.backend) == (None, "plain")


SLOWER = {
    "double": (
        "it knows torch.float32, torch.bfloat16, torch.float16, got torch.float64",
        {"dtype": torch.float64},
    ),
    "odd keys": ("the head dimension must be a multiple of 16 up to 256, got 20", {"dim": 20}),
    "odd values": ("the value dimension must be a multiple of 16 up to 256, got 24", {"value_dim": 24}),
}


@needs_native
@pytest.mark.parametrize("name", SLOWER)
def test_auto_runs_exactly_what_native_code_does_not_know(name):
    reason, change = SLOWER[name]
    inputs = attention_tensors(heads=1, n_keys=2400, **{"dim": 16, "dtype": torch.float32, **change})
    _, aux = prescored_attention(*inputs, is_causal=True, return_aux=True)
    assert aux.stats.exact_reason == f"native code: {reason}"
    assert prescored_attention(*inputs, WIDE, is_causal=True, return_aux=True)[1].stats.backend == "plain"


def test_dropout_routes():
    """Exact attention with dropout is slower than routing in plain torch."""
    _, aux = prescored_attention(*large(2400), is_causal=True, dropout_p=0.1, generator=0, return_aux=True)
    assert (aux.stats.exact_reason, aux.stats.backend) == (None, "plain")
