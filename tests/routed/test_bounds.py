import pytest
import torch
from attention_checks import call_of, lanes

from prescore import Routed, exact_attention
from prescore.routed import bounds
from prescore.routed import lanes as routed_lanes
from prescore.routed.bounds import exact_for

SCALE = 8**-0.5


def run(tensors, is_causal, **fields):
    config = Routed(**{"rows": 8, "leaf_size": 4, "chunk_size": 16, "sinks": 3, "exact_until": 0, **fields})
    return lanes(*tensors, config, is_causal=is_causal, scale=SCALE, explain=True)


def inputs(length, *, batch=2, heads=4, kv_heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, length, 8), (batch, kv_heads, length, 8), (batch, kv_heads, length, 5))
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def furthest_value(output, value, is_causal):
    """Largest distance of a visible value from each query's output, [B, Hq, Nq]."""
    value = value.repeat_interleave(output.shape[1] // value.shape[1], dim=1)
    distance = torch.cdist(output, value)
    if is_causal:
        distance = distance.tril()
    return distance.amax(-1)


def watch_bars(monkeypatch):
    """A list that receives the bounds of every query before anything is recomputed."""
    bars = []
    original = routed_lanes._within_tolerance

    def spy(call, answer, bar, config, explain):
        bars.append(bar)
        return original(call, answer, bar, config, explain)

    monkeypatch.setattr(routed_lanes, "_within_tolerance", spy)
    return bars


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("strength", [0.05, 0.5, 1.0, 4.0])
def test_true_errors_stay_under_the_bounds(is_causal, strength, monkeypatch):
    query, key, value = inputs(130)
    tensors = (query * strength, key, value)
    bars = watch_bars(monkeypatch)
    got, stats = run(tensors, is_causal)
    exact = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
    lost = 1 - torch.exp(got.lse - exact.lse)
    assert (lost >= -1e-12).all()  # stand-ins never count too much
    assert (lost <= bars[0].lost + 1e-12).all()
    error = (got.output - exact.output).norm(dim=-1)
    assert (error <= bars[0].misplaced * furthest_value(got.output, value, is_causal) + 1e-12).all()
    assert stats["misplaced_bound_max"] == float(bars[0].misplaced.max())
    assert stats["misplaced_bound_max"] > 0
    if strength < 0.1:  # narrow leaves: the bound says something
        assert stats["misplaced_bound_max"] < 0.2


def test_reading_everything_leaves_no_doubt():
    _, stats = run(inputs(130), True, rows=10_000)
    assert stats["misplaced_bound_max"] == 0
    assert stats["sampled_error"] < 1e-12


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3, 2.0])
def test_tolerance_is_kept(is_causal, tolerance):
    query, key, value = inputs(130)
    tensors = (query * 0.2, key, value)
    got, stats = run(tensors, is_causal, tolerance=tolerance)
    assert stats["misplaced_bound_max"] <= tolerance
    exact = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
    error = (got.output - exact.output).norm(dim=-1)
    assert (error <= tolerance * furthest_value(got.output, value, is_causal) + 1e-12).all()
    assert (stats["recomputed_queries"] > 0) == (tolerance < 2)


def test_gradients_of_recomputed_queries_are_exact():
    tensors = [t.requires_grad_() for t in inputs(90)]
    weights = torch.randn(2, 4, 90, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, _ = run(tensors, True, tolerance=0.0)
    exact = exact_attention(*tensors, is_causal=True, scale=SCALE)
    for ours, theirs in zip(
        torch.autograd.grad((got.output * weights).sum(), tensors),
        torch.autograd.grad((exact.output * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_hidden_needle_shows_in_the_bound_and_is_found_by_tolerance():
    query, key, value = inputs(130, batch=1, heads=1, kv_heads=1)
    key = key * 0.3
    query = query * 0.3
    direction = torch.zeros(8, dtype=torch.float64)
    direction[0] = 1.0
    key[0, 0, 20] = key[0, 0, 20] + 8 * direction  # not unlike enough alone: others point elsewhere
    query[0, 0, -1] = 4 * direction
    tensors = (query, key, value)
    exact = exact_attention(*tensors, is_causal=True, scale=SCALE)
    plain, stats = run(tensors, True, rows=0)
    missed = (plain.output - exact.output).norm(dim=-1)[0, 0, -1]
    certified, after = run(tensors, True, rows=0, tolerance=0.2)
    assert (certified.output - exact.output).norm(dim=-1)[0, 0, -1] <= missed
    assert after["misplaced_bound_max"] <= 0.2 < stats["misplaced_bound_max"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_query", [40, 11])
@pytest.mark.parametrize("share", [0.3, 1.1])
def test_only_wanted_rows_are_computed(causal, n_query, share, monkeypatch):
    monkeypatch.setattr(bounds, "ROWS_AT_ONCE", 8)
    query, key, value = inputs(40)
    query = query[:, :, -n_query:]
    wanted = torch.rand(2, 4, n_query, generator=torch.Generator().manual_seed(3)) < share
    valid = torch.arange(40) < torch.tensor([[40], [25]])
    got = exact_for(call_of(query, key, value, valid, is_causal=causal, scale=SCALE), wanted)
    exact = exact_attention(query, key, value, is_causal=causal, key_padding_mask=valid, scale=SCALE)
    torch.testing.assert_close(got.output[wanted], exact.output[wanted], rtol=0, atol=1e-12)
    assert (got.output[~wanted] == 0).all()
    assert torch.isneginf(got.lse[~wanted]).all()


def adversary(kind):
    """Inputs built to fool means: outlier norms, one dense cluster among scattered keys, a late-wanted needle."""
    query, key, value = inputs(150, batch=1, heads=2, kv_heads=1, seed=5)
    query = query * 0.3
    if kind == "outlier norms":
        key[:, :, 7::11] *= 30
    elif kind == "dense cluster":
        key[:, :, ::2] = key[:, :, :1] + 0.01 * key[:, :, ::2]
    elif kind == "needle":
        key[:, :, 40] *= 12
        query[:, :, 120:] = key[:, :, 40:41] / 4
    return query, key, value


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["outlier norms", "dense cluster", "needle"])
def test_adversaries_stay_within_tolerance(is_causal, kind):
    tensors = adversary(kind)
    _, before = run(tensors, is_causal, rows=4)
    got, stats = run(tensors, is_causal, rows=4, tolerance=0.1)
    exact = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
    error = (got.output - exact.output).norm(dim=-1)
    assert (error <= 0.1 * furthest_value(got.output, tensors[2], is_causal) + 1e-12).all()
    assert stats["misplaced_bound_max"] <= 0.1 < before["misplaced_bound_max"]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["random", "outlier norms", "dense cluster", "needle"])
@pytest.mark.parametrize("strength", [0.2, 1.0, 5.0])
def test_misplaced_weight_stays_under_the_bound(is_causal, kind, strength, monkeypatch):
    """With unit vectors for values the output is the weights, so that they can be compared one by one."""
    query, key, _ = adversary(kind)
    tensors = (query * strength, key, torch.eye(150, dtype=torch.float64).expand(1, 1, 150, 150).contiguous())
    bars = watch_bars(monkeypatch)
    got, _ = run(tensors, is_causal, rows=4)
    exact = exact_attention(*tensors, is_causal=is_causal, scale=SCALE)
    moved = (got.output - exact.output).abs().sum(-1) / 2
    assert (moved <= bars[0].misplaced + 1e-12).all()
    assert moved.max() > 1e-3


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("strength", [3.0, 60.0, 2000.0])
def test_stand_ins_too_light_for_a_number_still_count(is_causal, strength, monkeypatch):
    """Logits of 100s and 1000s: `exp` of a stand-in is 0, and the key behind it outweighs everything."""
    query, key, value = (t.float() for t in adversary("outlier norms"))
    tensors = (query * strength, key, value)
    bars = watch_bars(monkeypatch)
    got, before = run(tensors, is_causal, rows=4)
    wide = tuple(t.double() for t in tensors)
    exact = exact_attention(*wide, is_causal=is_causal, scale=SCALE)
    error = (got.output.double() - exact.output).norm(dim=-1)
    furthest = furthest_value(got.output.double(), wide[2], is_causal)
    rounding = 1e-6 * (1 + 100 * strength)  # of logits of up to 100 * strength
    assert (error <= bars[0].misplaced * furthest + rounding).all()
    assert ((1 - torch.exp(got.lse.double() - exact.lse)) <= bars[0].lost + rounding).all()
    assert error.max() > 1
    assert before["misplaced_bound_max"] >= 1
    certified, _ = run(tensors, is_causal, rows=4, tolerance=0.1)
    error = (certified.output.double() - exact.output).norm(dim=-1)
    assert (error <= 0.1 * furthest_value(certified.output.double(), wide[2], is_causal) + rounding).all()


def test_masks_of_recomputed_queries_grow_with_the_length_only(monkeypatch):
    """Real keys leave every query to be recomputed: a mask of all queries and keys would not fit into memory."""
    masks = []
    original = bounds.attend_parts

    def spy(query, key, value, parts, **options):
        masks.append(sum(part.bias.numel() for part in parts if part.bias is not None))
        return original(query, key, value, parts, **options)

    monkeypatch.setattr(bounds, "attend_parts", spy)
    monkeypatch.setattr(bounds, "ROWS_AT_ONCE", 8)
    query, key, value = inputs(200)
    wanted = torch.ones(query.shape[:3], dtype=torch.bool)
    exact_for(call_of(query, key, value, is_causal=True, scale=SCALE), wanted)
    assert 0 < masks[0] <= 4 * 8 * 200  # sequences, rows of a part, keys
