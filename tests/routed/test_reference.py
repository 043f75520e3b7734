"""The oracle by hand, and the reference of the engine against the oracle."""

import math

import pytest
import torch
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors
from oracles.routed import below_threshold, int8_query, int8_rows, oracle_reads, routed_oracle, subclusters
from routed_checks import FLOAT64, assert_alike, check_reference, differing_queries

from prescore import Routed, exact_attention
from prescore.routed.reference import centroid_corrections, reference_attention
from prescore.types import Attended

SMALL = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)

# --- the oracle


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_oracle_is_exact_attention_where_every_key_is_read(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=75, dim=8)
    exact = exact_attention(*tensors, is_causal=is_causal)
    for config in (SMALL.replace(min_weight=1e-20), SMALL.replace(exact_until=76), SMALL.replace(sinks=75)):
        oracle = routed_oracle(*tensors, config, is_causal=is_causal)
        for got, wanted in zip(oracle, exact, strict=True):
            assert_within(got, wanted, 1e-12)


def test_a_query_by_hand():
    """Two clusters of two keys: the query reads one key, and half of its cluster is left."""
    key = torch.tensor([[5.0, 0.0], [3.0, 0.0], [-1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    value = torch.tensor([[1.0], [2.0], [3.0], [5.0], [7.0]], dtype=torch.float64)
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    config = Routed(min_weight=1 / 2, cluster_size=2, chunk_size=4, sinks=0, exact_until=0)
    tensors = [t[None, None] for t in (query, key, value)]
    (reads,) = oracle_reads(*tensors, config, is_causal=False, scale=1.0)[0, 0]
    assert reads.always.tolist() == [False, False, False, False, True]
    assert reads.hits.tolist() == [True, False, False, False, False]
    assert reads.n_compared == 3  # the subcluster of one cluster, and its keys
    # logits are 1, -1, 0, 0 from their centroids, values -0.5, 0.5, -1, 1
    std, direction = math.sqrt(0.5), -0.25
    masses = (math.exp(4 + 0.25) * 2, math.exp(-1 + 0.25) * 2)
    threshold = math.log(1 + sum(masses)) - math.log(2)
    assert 4.0 < threshold < 5.0
    gain, move = below_threshold(torch.tensor([threshold - 4, threshold + 1], dtype=torch.float64), std)
    logits = [4 + float(gain[0]), -1 + math.log(2) + float(gain[1])]
    values = [1.5 + direction * float(move[0]), 4.0 + direction * float(move[1])]
    order = sorted(range(2), key=lambda i: -float(reads.centroid_logits[i]))
    assert reads.centroid_logits[order].tolist() == pytest.approx(logits)
    assert reads.centroid_values[order, 0].tolist() == pytest.approx(values)
    weights = [math.exp(5), 1.0, *map(math.exp, logits)]
    wanted = sum(w * v for w, v in zip(weights, [1.0, 7.0, *values], strict=True)) / sum(weights)
    result = routed_oracle(*tensors, config, is_causal=False, scale=1.0)
    assert float(result.output) == pytest.approx(wanted)
    assert float(result.lse) == pytest.approx(math.log(sum(weights)))


def test_quantized_keys_queries_and_subclusters_by_hand():
    key = torch.tensor([6.3, -6.3, 0.26, -0.04, 0.0, 3.0], dtype=torch.float64)
    assert int8_rows(key, 63).tolist() == pytest.approx([6.3, -6.3, 0.3, 0.0, 0.0, 3.0])
    query = torch.tensor([-127.0, 0.4, 0.6, 0.0], dtype=torch.float64)
    assert int8_query(query).tolist() == pytest.approx([-127.0, 0.0, 1.0, 0.0])
    offsets = torch.tensor([*[1.0] * 8, *[3.0] * 8, -1.0, 1.0]).view(1, 18, 1)
    (first, mean, spread), (last, last_mean, last_spread) = subclusters(offsets)
    assert (first, last) == (slice(0, 16), slice(16, 18))
    assert [float(t) for t in (mean, spread, last_mean, last_spread)] == pytest.approx([2.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_of_the_oracle_are_finite_differences(is_causal, monkeypatch):
    monkeypatch.setattr("oracles.routed.LIGHT_WEIGHT", 1e-300)  # int8 logits have the gradients of exact ones
    tensors = attention_tensors(heads=2, n_keys=27, dim=4, value_dim=3, seed=1, spread=1.0)
    tensors = [t.requires_grad_() for t in tensors]

    def run(*inputs):
        return tuple(routed_oracle(*inputs, SMALL.replace(min_weight=1 / 8, chunk_size=8), is_causal=is_causal))

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_checks_refuse_what_is_wrong():
    one = Attended(torch.zeros(1, 1, 4, 2), torch.tensor([[[0.0, math.nan, -math.inf, 1.0]]]))
    other = Attended(one.output.clone(), one.lse.clone())
    assert not differing_queries(one, other, 0.1).any()
    other.output[0, 0, 0, 1] = 0.2
    other.lse[0, 0, 1:] = torch.tensor([0.0, math.inf, math.nan])
    assert differing_queries(one, other, 0.1).all()
    with pytest.raises(AssertionError, match="4 of 4 queries of native code differ"):
        assert_alike(one, other, 0.1)


# --- the reference


def check_reads(config, tensors, *, is_causal, scale=None):
    """Result, gradients, keys read and centroid logits of the reference are those of the oracle."""
    heads, n_hits = check_reference(config, tensors, is_causal=is_causal, scale=scale), 0
    for place, reads in oracle_reads(*tensors, config, is_causal=is_causal, scale=scale).items():
        own = heads[place]
        for i, read in enumerate(reads):
            assert torch.equal(own.local[i], read.always)
            assert torch.equal(own.hits[i], read.hits)
            n_visible = len(read.centroid_logits)
            assert_within(own.centroid_logits[i, :n_visible], read.centroid_logits, FLOAT64, "centroid logits")
            assert torch.isneginf(own.centroid_logits[i, n_visible:]).all()
            n_hits += int(read.hits.sum())
    return n_hits


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("n_query", "n_keys", "changes"),
    [
        *((90, 90, {"min_weight": min_weight}) for min_weight in (1.0, 0.2, 1 / 16, 1e-3, 1e-6)),
        (30, 90, {"exact_until": 50}),
        (60, 90, {"exact_until": 50}),
        (1, 90, {}),
        (12, 12, {}),  # fewer keys than a chunk
        (1, 1, {"sinks": 0}),
        (80, 80, {"cluster_size": 20, "chunk_size": 20}),  # two subclusters, one of them small
        (200, 200, {"cluster_size": 64, "chunk_size": 64}),  # bisected twice into subclusters
        (90, 90, {"cluster_size": 5, "chunk_size": 13, "sinks": 0}),
        (40, 40, {"cluster_size": 1, "chunk_size": 1, "sinks": 1}),
        (40, 40, {"sinks": 60}),
    ],
)
def test_the_reference_is_the_definition(is_causal, n_query, n_keys, changes):
    tensors = attention_tensors(heads=2, n_query=n_query, n_keys=n_keys, dim=20, value_dim=3, seed=n_keys)
    n_hits = check_reads(SMALL.replace(**changes), tensors, is_causal=is_causal, scale=0.4)
    if "min_weight" in changes:
        assert (n_hits > 0) == (changes["min_weight"] < 1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_in_low_precision(is_causal, dtype):
    tensors = attention_tensors(heads=4, n_keys=120, dim=16, dtype=dtype, seed=3)
    heads = [
        reference_attention(query, *(t[0, 0] for t in tensors[1:]), SMALL, is_causal=is_causal)
        for query in tensors[0][0]
    ]
    got = Attended(*(torch.stack([getattr(h, name) for h in heads])[None] for name in ("output", "lse")))
    assert got.output.dtype == torch.float32
    # sums in float32
    assert_alike(got, routed_oracle(*tensors, SMALL, is_causal=is_causal), 2e-5, what="the reference")


# --- corrections of centroids, against normal logits that are cut off, integrated numerically


def integrated(distance, std):
    """Log of the mean of exp over normal logits below `distance`, and the share of the direction."""
    x = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64) * std
    density = torch.exp(-0.5 * (x / std) ** 2) * (x < distance)
    weight = density * torch.exp(x)
    return float((weight.sum() / density.sum()).log()), float((weight * x).sum() / weight.sum() / std**2)


@pytest.mark.parametrize("std", [0.05, 0.5, 1.0, 1.9])
@pytest.mark.parametrize("deviations", [-1.0, 0.0, 1.0, 3.0, math.inf])
def test_corrections_are_those_of_normal_logits_below_the_threshold(std, deviations):
    gain, move = centroid_corrections(torch.tensor([[deviations * std]]).double(), torch.tensor([[std]]).double())
    wanted_gain, wanted_move = integrated(deviations * std, std)
    # the approximation of the distribution function is a few hundredths off in logs where little is left
    assert float(gain) == pytest.approx(max(-2.0, min(2.0, wanted_gain)), abs=0.03)
    assert float(move) == pytest.approx(max(-1.0, min(1.0, wanted_move)), abs=0.1 + 0.004 / std)


def test_corrections_are_bounded_finite_and_grow_with_the_threshold():
    distance = torch.tensor([[-torch.inf, -1e30, -1e3, -5.0, 0.0, 1e-20, 5.0, 1e3, 1e30, torch.inf]])
    for dtype in (torch.float32, torch.float64):
        for std in (1e-3, 0.1, 2.0, 30.0, 1e8):
            gain, move = centroid_corrections(distance.to(dtype), torch.tensor([[std]], dtype=dtype))
            assert float(gain.abs().max()) <= 2
            assert float(move.abs().max()) <= 1
    for std in (0.2, 1.0, 1.8):  # down to where the distribution function is cut off
        distance = torch.linspace(-4.0 + std, 8.0, 200, dtype=torch.float64)[None] * std
        gain, move = centroid_corrections(distance, torch.tensor([[std]]).double())
        assert float(gain.diff().min()) >= -1e-3
        assert float(move.diff().min()) >= -1e-2
