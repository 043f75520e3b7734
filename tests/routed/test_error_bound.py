"""A tolerance: sampled keys, error bounds, which queries read every key, and the stats about it."""

import math

import pytest
import torch
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors
from routed_checks import attend, levels_here, native_level, needs_native

from prescore import Routed, exact_attention, prescored_attention
from prescore.errors import Unsupported
from prescore.routed import error_bound
from prescore.routed.decode import RoutedIndex
from prescore.routed.error_bound import Estimate, error_quantile, expected_error, single_query_confidence

CONFIG = Routed(min_weight=1 / 64, cluster_size=32, chunk_size=64, sinks=4, exact_until=128, tolerance=0.1)
SMALL = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=2, exact_until=0, tolerance=0.3)
LENGTH = 900
ERRORS = ("error_estimate", "error_bound_mean", "error_bound_max", "refined", "read_all")
backends = pytest.mark.parametrize("backend", ["auto", "plain"])


def clustered(seed=0, length=LENGTH, dim=32):
    """Keys around a few centres, queries that look for some of them."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, dim, generator=generator)
    labels = [torch.randint(12, (1, heads, length), generator=generator) for heads in (2, 4)]
    key = centres[labels[0]] + 0.5 * torch.randn(1, 2, length, dim, generator=generator)
    query = 2 * (centres[labels[1]] + torch.randn(1, 4, length, dim, generator=generator))
    return query, key, torch.randn(1, 2, length, dim, generator=generator)


def relative_error(output, inputs):
    exact = exact_attention(*inputs, is_causal=True).output
    return (output - exact).norm(dim=-1) / exact.norm(dim=-1)


def share_above(got, wanted, budget):
    """Of queries; a key at the threshold may be read by one and sampled by the other."""
    return float(((got - wanted).abs().amax(-1) > budget).double().mean())


# --- the tolerance holds


@backends
@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.3])
def test_nearly_all_queries_are_within_the_tolerance(tolerance, backend):
    inputs = clustered()
    got, stats = attend(inputs, CONFIG.replace(tolerance=tolerance), backend=backend)
    error = relative_error(got.output, inputs)[:, :, CONFIG.exact_until :]
    assert (error > tolerance).double().mean() <= 0.05
    assert stats.error_bound_max <= tolerance
    assert 0 <= stats.read_all <= 1


HOSTILE = (
    "a needle that late queries look for",
    "long keys",
    "all keys equal",
    "one dense cluster",
    "a needle among opposite keys",
    "values that follow the keys",
    "flat logits and a cluster of other values",
    "values on a line",
    "a few huge values",
    "logits beyond int4",
)


def hostile(name):
    """Inputs that could fool a centroid, a sample or an int4 key."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(1, 1, LENGTH, 32, generator=generator) for _ in range(3))
    direction = torch.nn.functional.normalize(torch.randn(32, generator=generator), dim=0)
    if name == HOSTILE[0]:
        query[:, :, 600:] += 12 * key[:, :, 77:78] / key[:, :, 77:78].norm()
        value[:, :, 77] *= 20
    elif name == HOSTILE[1]:
        key[:, :, 50::97] *= 30
    elif name == HOSTILE[2]:
        key[:] = key[:, :, :1].clone()
    elif name == HOSTILE[3]:
        key[:, :, : LENGTH // 2] = key[:, :, :1] + 0.01 * key[:, :, : LENGTH // 2]
    elif name == HOSTILE[4]:
        key[:, :, 64:192] = -4 * direction + 0.1 * key[:, :, 64:192]
        key[:, :, 100] = 40 * direction
        query[:, :, 600:] += 4 * direction
    elif name == HOSTILE[5]:
        value = key @ torch.randn(32, 32, generator=generator) + 0.1 * value
    elif name == HOSTILE[6]:
        query *= 0.3
        key[:, :, 64:96] = 2 * key[:, :, 64:65] + 0.1 * key[:, :, 64:96]
        value[:, :, 64:96] += 5
    elif name == HOSTILE[7]:
        value = value[..., :1] * torch.randn(32, generator=generator)
    elif name == HOSTILE[8]:
        value[:, :, 40::211] *= 50
    else:
        query *= 40
    return query, key, value


@backends
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_inputs_stay_within_the_tolerance(name, backend):
    inputs = hostile(name)
    output = prescored_attention(*inputs, CONFIG.replace(tolerance=0.05), is_causal=True, backend=backend)
    above = relative_error(output, inputs) > 0.05
    assert above[:, :, CONFIG.exact_until :].double().mean() <= 0.05
    assert above[:, :, 600:].double().mean() <= 0.05  # the late queries by themselves


def test_a_tolerance_of_0_is_exact_and_wider_ones_or_less_confidence_read_less():
    inputs = clustered(length=400)
    output = prescored_attention(*inputs, CONFIG.replace(tolerance=0.0), is_causal=True)
    assert relative_error(output, inputs).max() < 1e-5
    inputs = clustered(seed=6)
    for changes in (
        [{"tolerance": tolerance} for tolerance in (0.02, 0.2, 1.0)],
        [{"confidence": confidence} for confidence in (0.999, 0.95, 0.5)],
    ):
        n_read = [attend(inputs, CONFIG.replace(**change))[1].keys_per_query for change in changes]
        assert n_read[0] > n_read[1] > n_read[2]


def test_what_a_tolerance_refuses():
    query, key, value = clustered(length=40)
    with pytest.raises(ValueError, match=r"confidence must be None without a tolerance, got 0\.9"):
        Routed(confidence=0.9)
    with pytest.raises(Unsupported, match=r"tolerance cannot run: .* not differentiable"):  # at any length
        prescored_attention(query.requires_grad_(), key, value, CONFIG, is_causal=True)
    with torch.no_grad():
        prescored_attention(query, key, value, CONFIG, is_causal=True)


# --- backends, seeds, batches, chunks


@needs_native
@pytest.mark.parametrize("level", levels_here())
@pytest.mark.parametrize("is_causal", [True, False])
def test_native_code_samples_as_the_plain_backend_does(level, is_causal):
    inputs = clustered(seed=1)
    config = CONFIG if is_causal else CONFIG.replace(exact_until=0)
    plain, plain_stats = attend(inputs, config, is_causal=is_causal, backend="plain")
    with native_level(level):
        got, stats = attend(inputs, config, is_causal=is_causal, backend="native")
    assert stats.native_level == level
    assert share_above(got.output, plain.output, 1e-3) <= 0.01
    for name in (*ERRORS, "keys_per_query", "far_keys_read", "keys_compared"):
        assert stats[name] == pytest.approx(plain_stats[name], rel=0.02, abs=0.002), name


@pytest.mark.parametrize("size", [512, 520])  # native code knows the first one
def test_clusters_of_many_samples(size):
    config = CONFIG.replace(min_weight=1 / 8, cluster_size=size, chunk_size=size, exact_until=0, tolerance=0.3)
    query, key, value = clustered(seed=6, length=4 * size, dim=16)
    inputs = (query[:, :, -40:], key, value)
    got, stats = attend(inputs, config)
    assert (stats.backend == "native") == (size % 16 == 0 and bool(levels_here()))
    assert share_above(got.output, attend(inputs, config, backend="plain")[0].output, 1e-4) <= 0.02


def test_the_seed_moves_the_samples_and_nothing_else():
    inputs = clustered(seed=2)
    one, again, other = (
        prescored_attention(*inputs, CONFIG, is_causal=True, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(one[:, :, : CONFIG.exact_until], other[:, :, : CONFIG.exact_until])


@backends
def test_chunked_prefill_decode_steps_and_padding_draw_the_same_samples(backend):
    query, key, value = clustered(seed=3)
    full = prescored_attention(query, key, value, CONFIG, is_causal=True, backend=backend)
    chunk = prescored_attention(query[:, :, 500:], key, value, CONFIG, is_causal=True, backend=backend)
    assert share_above(chunk, full[:, :, 500:], 1e-4) <= 0.005
    index = RoutedIndex(CONFIG, scale=query.shape[-1] ** -0.5)
    n_differ = 0
    for n in (301, 302, 701, LENGTH):
        step = index.attend(query[:, :, n - 1 : n], key[:, :, :n], value[:, :, :n], backend=backend)
        off = (step.output - full[:, :, n - 1 : n]).abs().amax(-1)
        n_differ += int((off > 1e-4).sum())
        assert off.max() < 0.1
    assert n_differ <= 2
    padded = [torch.cat((torch.randn(1, t.shape[1], 37, t.shape[3]), t), dim=2) for t in (query, key, value)]
    mask = torch.arange(LENGTH + 37)[None] >= 37
    shifted = prescored_attention(*padded, CONFIG, is_causal=True, key_padding_mask=mask, backend=backend)
    assert share_above(shifted[:, :, 37:], full, 1e-4) <= 0.005


def test_a_batch_changes_nothing():
    """A sequence alone, or padded at either end beside another one."""
    one, other = clustered(seed=7, length=500), clustered(seed=8, length=700)
    alone = [prescored_attention(*inputs, CONFIG, is_causal=True) for inputs in (one, other)]
    for before, after in ((200, 0), (0, 200)):
        padded = [torch.nn.functional.pad(t, (0, 0, before, after)) for t in one]
        mask = torch.ones(2, 700, dtype=torch.bool)
        mask[0, :before] = mask[0, 700 - after :] = False
        batch = [torch.cat(pair) for pair in zip(padded, other, strict=True)]
        output = prescored_attention(*batch, CONFIG, is_causal=True, key_padding_mask=mask)
        for row, place in ((0, slice(before, before + 500)), (1, slice(0, 700))):
            assert share_above(output[row : row + 1, :, place], alone[row], 1e-4) <= 0.005


@pytest.mark.parametrize("cut", [200, 600])
def test_later_tokens_change_nothing(cut):
    inputs = clustered(seed=4)
    before = prescored_attention(*inputs, CONFIG, is_causal=True)
    for tensor in inputs:
        tensor[:, :, cut:] = 30 * torch.randn(tensor[:, :, cut:].shape, generator=torch.Generator().manual_seed(5))
    after = prescored_attention(*inputs, CONFIG, is_causal=True)
    torch.testing.assert_close(after[:, :, :cut], before[:, :, :cut], rtol=1e-4, atol=1e-5)


# --- bounds of single queries


def single_search(inputs, seed, backend):
    """True errors, expected errors and bounds of queries after one search, before any reads every key."""
    config, results = CONFIG.replace(exact_until=256), []

    def search(*arguments):
        results.append(original(*arguments))
        return results[0]._replace(bound=torch.zeros_like(results[0].bound))

    original = error_bound.refine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error_bound, "refine", search)
        patch.setattr(error_bound, "SEARCHES", 1)
        output = prescored_attention(*inputs, config, is_causal=True, generator=seed, backend=backend)
    far = slice(256 - LENGTH, None)  # native code takes the exact queries along
    error, bound = (t.flatten(0, 1)[:, far] for t in (results[0].error, results[0].bound))
    true = relative_error(output, inputs)[0, :, 256:]
    some = torch.isfinite(bound) & (bound > 0)
    return true[some], error[some], bound[some]


@backends
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
def test_a_bound_is_neither_too_small_nor_useless(sharpness, backend):
    """Bounds of single queries hold as often as they say, and are not much too wide."""
    query, key, value = clustered(seed=9)
    results = [single_search((sharpness * query, key, value), seed, backend) for seed in range(4)]
    true, error, bound = (torch.cat(parts) for parts in zip(*results, strict=True))
    assert len(true) > 1000
    assert (true > bound).double().mean() <= 1 - single_query_confidence(0.95)
    assert 0.5 < (true.square().mean() / error.square().mean()).sqrt() < 1.05


def test_unread_keys_are_estimated_without_a_bias():
    """Errors of many draws cancel, where values follow the keys and a centroid would be off for all of them."""
    query, key, _ = clustered(seed=10, length=600)
    value = key @ torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) + 1
    config = CONFIG.replace(min_weight=1 / 8, exact_until=256, tolerance=2.0)
    exact = exact_attention(query, key, value, is_causal=True).output[:, :, 256:]
    bias, single, n_draws = torch.zeros_like(exact), 0.0, 48
    for seed in range(n_draws):
        output = prescored_attention(query, key, value, config, is_causal=True, generator=seed)
        bias += (output[:, :, 256:] - exact) / n_draws
        single += float((output[:, :, 256:] - exact).square().sum()) / n_draws
    assert float(bias.square().sum()) < 2.5 * single / n_draws


@pytest.mark.parametrize(
    ("directions", "freedom", "confidence", "wanted"),
    [
        *((1, 5, 0.95, 2.571), (1, 10, 0.95, 2.228), (1, 300, 0.95, 1.968), (1, 30, 0.99, 2.750)),  # Student's
        *((4, 300, 0.95, 1.550), (8, 30, 0.95, 1.505), (30, 300, 0.95, 1.220), (8, 10, 0.5, 0.991)),
    ],
)
def test_the_quantile_is_the_root_of_that_of_an_f_variable(directions, freedom, confidence, wanted):
    given = (torch.tensor(float(number), dtype=torch.float64) for number in (directions, freedom))
    assert float(error_quantile(*given, confidence)) == pytest.approx(wanted, rel=0.02)


def test_few_terms_and_few_directions_have_wide_bounds():
    several = torch.tensor([1.0, 1.5, 2.0, 3.0, 5.0, 30.0], dtype=torch.float64)
    by_terms = error_quantile(torch.full_like(several, 8.0), several, 0.95)
    assert (by_terms[:-1] > by_terms[1:]).all()
    assert 15 < by_terms[0] < 16  # the truth is 15.5
    by_directions = error_quantile(several, torch.full_like(several, 100.0), 0.95)
    assert (by_directions[:-1] > by_directions[1:]).all()
    assert 636 < float(error_quantile(torch.ones(1), torch.ones(1), 0.999)) < 800  # the truth is 636.6


@pytest.mark.parametrize(("share", "single"), [(0.5, 0.5), (0.7, 0.7), (0.9, 0.75), (0.95, 0.8), (0.99, 0.96)])
def test_single_bounds_may_fail_more_often_than_all_together(share, single):
    assert single_query_confidence(share) == pytest.approx(single)


def estimate_of(terms, output):
    """The estimate with known error terms `[n, Dv]`."""
    squares, overlap, unused = terms.square().sum(1), (terms @ terms.t()).square().sum(), torch.zeros(1)
    moments = (squares.sum()[None], squares.square().sum()[None], overlap[None])
    return Estimate(output, unused, *moments, unused, unused.bool())


def test_the_bound_of_known_terms():
    output = torch.tensor([[3.0, 4.0]])
    along_one = torch.tensor([[0.1, 0.0]]).expand(50, 2)
    estimate = estimate_of(along_one, output)
    assert float(expected_error(estimate)) == pytest.approx(math.sqrt(0.5) / 5)
    # Student's with 100 degrees of freedom: squares of equal terms vary less than those of normal ones
    bound = float(error_bound.error_bound(estimate, 0.95))
    assert bound == pytest.approx(1.984 * math.sqrt(0.5) / 5, rel=0.02)
    along_two = torch.cat((along_one[:25], along_one[:25].flip(1)))
    assert float(error_bound.error_bound(estimate_of(along_two, output), 0.95)) < 0.9 * bound
    nothing = estimate_of(torch.zeros(1, 2), output)
    assert float(error_bound.error_bound(nothing, 0.95)) == float(expected_error(nothing)) == 0
    unknown = estimate._replace(variance=torch.tensor([torch.inf]), fourth=torch.tensor([torch.inf]))
    assert float(error_bound.error_bound(unknown, 0.95)) == torch.inf


def test_every_place_is_sampled_as_often():
    places = error_bound.sample_places(16000, 128, 7, torch.device("cpu"))
    counts = torch.bincount(places, minlength=16)
    assert 850 < counts.min() <= counts.max() < 1150
    assert torch.equal(places[:50], error_bound.sample_places(50, 128, 7, torch.device("cpu")))
    assert error_bound.sample_places(100, 3, 7, torch.device("cpu")).max() == 2  # within small clusters
    cheap, logits = error_bound.straight_exp, torch.linspace(-80, 0, 1000, dtype=torch.float64)
    assert float((cheap(logits) / logits.exp() - 1).abs().max()) < 0.0615
    assert_within(cheap(torch.tensor([-1000.0])), torch.zeros(1), 0.0)


# --- stats


def tensors(n=140):
    return attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=n, seed=n)


def error_stats(config, inputs, **options):
    stats = attend(inputs, config, **options)[1]
    return {name: stats[name] for name in ERRORS}


@pytest.mark.parametrize("easy", [0, 1])
def test_stats_count_sequences_that_begin_at_different_positions(easy):
    """One sequence of equal keys and values, whose samples agree, and one with wide bounds: both count."""
    query, key, value = tensors()
    query = query[:, :, -20:]
    key[easy], value[easy] = key[easy, :, :1].clone(), value[easy, :, :1].clone()
    mask = torch.ones(2, 140, dtype=torch.bool)
    mask[0, :30] = False
    config, other = SMALL.replace(tolerance=1.0), 1 - easy
    batch = error_stats(config, (query, key, value), key_padding_mask=mask)
    first = 30 if other == 0 else 0
    alone = error_stats(config, [t[other:][:1] for t in (query, key[:, :, first:], value[:, :, first:])])
    assert alone["error_bound_max"] > 0
    assert alone["refined"] > 0
    assert batch["error_bound_max"] == pytest.approx(alone["error_bound_max"])
    for name in ("error_estimate", "error_bound_mean", "refined", "read_all"):
        assert batch[name] == pytest.approx(alone[name] / 2, rel=1e-6, abs=1e-9)
    strict = error_stats(SMALL.replace(tolerance=1e-9), (query, key, value), key_padding_mask=mask)
    assert strict["read_all"] >= 0.5
    assert strict["error_bound_max"] <= 1e-9


@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_queries_are_in_no_stats(is_causal):
    query, key, value = tensors()
    rows = [[t[i : i + 1, :, : 140 - 70 * i] for t in (query, key, value)] for i in (0, 1)]
    alone = [error_stats(SMALL, inputs, is_causal=is_causal) for inputs in rows]
    query[1, :, 70:] = torch.nan
    mask = torch.arange(140) < torch.tensor([[140], [70]])
    batch = error_stats(SMALL, (query, key, value), is_causal=is_causal, key_padding_mask=mask)
    for name in ("error_estimate", "error_bound_mean", "refined", "read_all"):
        assert batch[name] == pytest.approx((2 * alone[0][name] + alone[1][name]) / 3, rel=1e-6)
    assert batch["error_bound_max"] == pytest.approx(max(own["error_bound_max"] for own in alone))


def test_exact_sequences_have_no_error():
    inputs = tensors()
    assert all(error_stats(SMALL.replace(tolerance=0.1), inputs, is_causal=False).values())
    mask = torch.ones(2, 140, dtype=torch.bool)
    mask[:, 50] = False  # padding between keys
    for changes, options in (({"exact_until": 200}, {}), ({}, {"key_padding_mask": mask})):
        assert not any(error_stats(SMALL.replace(**changes), inputs, **options).values())
    assert "error_bound_max" not in attend(inputs, SMALL.replace(tolerance=None))[1]


@backends
def test_keys_read_by_queries_that_read_every_key_are_counted(backend):
    inputs = clustered(length=400)
    config = CONFIG.replace(tolerance=1e-9, exact_until=0)
    stats = attend(inputs, config, backend=backend)[1]
    n_routed = 400 - stats.exact_queries
    assert stats.read_all == pytest.approx(n_routed / 400)
    visible = 400 / 2 + 0.5
    assert stats.keys_per_query > visible * stats.read_all
