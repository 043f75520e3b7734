"""Identity 12: k ranks give what one process gives, forward and backward, whatever the configuration."""

import os
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from fuzz_cases import random_case
from fuzz_oracles import CLOSE, FLIPPED
from oracles.inputs import attention_tensors, random_mask
from parallel_work import attend, attend_without_lse, gradient_weights, joined, shard

import prescore
from prescore import Hyper, KMeans, Leverage, Lsh, Routed, Selected

NAMES = ("output", "lse", "gradient of query", "gradient of key", "gradient of value")
FLOAT64 = 1e-9
"""Sums in another order, of numbers of size 1 to 100; a wrong key changes the first digit."""
BY_RANK = Lsh(8, 8, alignment="rank")


@dataclass(frozen=True)
class Shortest(prescore.KeyNorm):
    """Overrides `score` alone, so the statistics of its base class do not hold for it."""

    name: ClassVar[str] = "shortest"

    def score(self, keys, *, valid, streams):
        return -super().score(keys, valid=valid, streams=streams)


def selected(*args, **fields):
    return Selected(*args, **{"min_seq_len": 16, **fields})


BY_SELECTED = {
    "key-diff": selected(top_k=8),
    "kmeans": selected("kmeans", 8),
    "sampled": selected(KMeans(fit_size=20), 8),
    "no centroids": selected("kmeans", 8, remainder="none", sinks=0),
    "recent": selected("kmeans", 8, sinks=3, recent=4),
    "too many recent": selected("kmeans", 8, sinks=3, recent=12),
    "kmedian": selected(prescore.KMedian(n_clusters=5, fit_size=9), 8),
    "minkowski": selected(prescore.Minkowski(p=3, rule="farthest"), 8),
    "gaussian": selected(prescore.GaussianKMeans(n_clusters=4), 8),
    "noise": selected(KMeans(noise=0.3, n_clusters=4), 8),
    "leverage": selected("leverage", 8),
    "sketch": selected(Leverage(sketch_size=20, noise=0.1, normalize=True), 8),
    "other clusters": selected("key-norm", 8, remainder=KMeans(n_clusters=3, fit_size=30)),
    "a share": selected("uniform", 0.3),
    "fallback": selected("kmeans", 2, min_fraction=0.2),
    "hash": selected("kmeans", 12, inner=Lsh(8, 8)),
    "paper": Selected.paper("kmeans", 12, inner=BY_RANK, min_seq_len=16),
    "paper + sinks": Selected.paper("kmeans", 12, inner=BY_RANK, sinks=3, leaf_inclusive=True, min_seq_len=16),
    "too many sinks": selected("kmeans", 2, sinks=9),
    "key-norm": selected("key-norm", 20, remainder="none", sinks=0),
    "large leaves": selected("kmeans", 8, min_seq_len=64),
    "odd leaves": selected("kmeans", 8, min_seq_len=7),
}
BY_ULYSSES = {
    "default": Routed(),
    "routed": Routed(min_weight=1 / 32, cluster_size=8, chunk_size=16, exact_until=32),
    "hyper": Hyper(Lsh(8, 8), min_seq_len=16),
    "published": Hyper.published(lsh=BY_RANK, min_seq_len=16),
    "zero": Selected.early("kmeans", 12, inner=BY_RANK, min_seq_len=16),
    "blocks of all keys": Selected.paper(
        "kmeans", 12, inner=BY_RANK, min_seq_len=16, coupling=prescore.Coupling(blocks="all")
    ),
    "companions": selected(prescore.Companions(window=8), 8),
    "balanced": selected(KMeans(rule="balanced"), 8),
    "sample": selected("key-norm", 8, selector="sample"),
    "min_score": selected("leverage", min_score=0.1),
    "min_score + hash": selected("key-norm", min_score=4.0, inner=Lsh(8, 8), min_fraction=0.3),
    "own score": selected(Shortest(), 8),
}
EVERY = {"exact": prescore.Exact(), **BY_SELECTED, **BY_ULYSSES}
REASONS = {
    "zero": 'coupling.mask="zero" keeps every key',
    "companions": "the scorer 'companions' compares all keys",
    "balanced": "the scorer 'kmeans' by 'balanced' compares all keys",
    "sample": "the selector 'sample' compares all scores",
    "min_score": "min_score keeps another number of keys in every head",
    "own score": "the scorer 'shortest' compares all keys",
}


def tensors(dtype=torch.float64, **sizes):
    sizes = {"batch": 2, "heads": 6, "kv_heads": 3, "n_keys": 96, "dim": 8, **sizes}
    return attention_tensors(**sizes, dtype=dtype)


def assert_same(found, wanted, budget=FLOAT64):
    for name, left, right in zip(NAMES, found, wanted[:5], strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, rtol=budget, atol=budget, msg=lambda text, n=name: f"{n}: {text}")


def check(crew, name, inputs, mask=None, *, ranks, budget=FLOAT64, **options):
    options = {"generator": 3, **options}
    results = crew.run(attend, EVERY[name], inputs, mask, options, ranks=ranks)
    by_selected = name in BY_SELECTED and mask is None
    exchange = "all-gather" if name == "exact" else "selected" if by_selected else "ulysses"
    for stats in (result[5] for result in results):
        assert (stats.exchange, stats.ranks) == (exchange, ranks)
        assert mask is not None or name not in REASONS or stats.exchange_reason == REASONS[name]
    found, wanted = joined(results), attend(None, EVERY[name], inputs, mask, options)
    assert_same(found, wanted, budget)
    return found, wanted


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", EVERY)
def test_every_configuration(crew, name, ranks, is_causal):
    check(crew, name, tensors(), ranks=ranks, is_causal=is_causal)


@pytest.mark.parametrize("kind", ["left", "right"])
@pytest.mark.parametrize("name", ["exact", "kmeans", "paper", "hyper", "routed", "min_score"])
def test_padding(crew, name, kind):
    inputs, mask = tensors(), random_mask(kind, 2, 96)
    for tensor in inputs[1:]:
        tensor.masked_fill_(~mask[:, None, :, None], torch.nan)  # padding may hold anything
    check(crew, name, inputs, mask, ranks=3, is_causal=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(6, 6, 4), (4, 1, 2), (4, 1, 4), (8, 2, 3), (1, 1, 3), (9, 3, 4)]
)
@pytest.mark.parametrize("name", ["kmeans", "routed", "exact"])
def test_grouped_heads(crew, name, heads, kv_heads, ranks):
    check(crew, name, tensors(heads=heads, kv_heads=kv_heads), ranks=ranks, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["exact", "kmeans", "paper", "routed", "hyper"])
def test_fewer_queries_than_keys(crew, name, is_causal):
    """The queries of all ranks are the last positions of the keys of all ranks."""
    inputs = tensors(n_query=36, value_dim=5)
    for ranks in (1, 2):  # one rank is a group too
        check(crew, name, inputs, ranks=ranks, is_causal=is_causal, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["exact", "key-diff", "kmeans", "sampled", "paper", "leverage", "hyper", "routed"]
)
def test_lower_precision(crew, name, dtype):
    # outputs and gradients of size 1 to 10: some roundings of the dtype, far less than one wrong key
    check(crew, name, tensors(dtype), ranks=2, is_causal=True, budget=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["routed", "hyper", "companions"])
def test_ulysses_gives_the_same_bits(crew, name):
    inputs = tensors(torch.float32, heads=4, kv_heads=4)
    found, wanted = check(crew, name, inputs, ranks=2, is_causal=True, budget=1e-4)
    assert torch.equal(found[0], wanted[0])


def test_a_tie_is_decided_alike_on_every_rank(crew):
    """Equal keys have equal scores: the lower positions are kept, wherever they lie."""
    query, key, value = tensors()
    key = key[:, :, :1].expand_as(key).contiguous()
    for is_causal in (False, True):
        check(crew, "key-norm", (query, key, value), ranks=4, is_causal=is_causal)


@pytest.mark.parametrize("name", ["exact", "kmeans", "routed"])
def test_without_lse(crew, name):
    inputs, options = tensors(), {"generator": 3, "is_causal": True}
    found = torch.cat(crew.run(attend_without_lse, EVERY[name], inputs, options, ranks=2), dim=2)
    wanted = attend_without_lse(None, EVERY[name], inputs, options)
    torch.testing.assert_close(found, wanted, rtol=FLOAT64, atol=FLOAT64)


def test_the_check_notices_a_wrong_key():
    config, inputs, options = EVERY["kmeans"], tensors(), {"generator": 3, "is_causal": True}
    wanted, other = (attend(None, each, inputs, None, options) for each in (config, config.replace(top_k=7)))
    with pytest.raises(AssertionError, match="output"):
        assert_same(other[:5], wanted)
    with pytest.raises(AssertionError):
        compare("another top_k", [other], wanted)
    second = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    assert shard(torch.arange(4), second, 0).tolist() == [2, 3]
    assert len(gradient_weights(inputs).unique()) > 100


CALLS = int(os.environ.get("RANK_CALLS", "30"))


def shared_case(draw, ranks):
    """A case whose sequence lies in equal shards on some ranks."""
    case = random_case(draw)
    n_keys = -(-case.n_keys // ranks) * ranks
    n_query = n_keys if case.n_query == case.n_keys else min(n_keys, -(-case.n_query // ranks) * ranks)
    mask = case.mask if case.mask in ("none", "left", "right", "both") else "none"
    memory = "rows" if case.memory == "negated" else case.memory  # a pending sign is lost between processes
    sizes = {"n_keys": n_keys, "n_query": n_query, "mask": mask, "memory": memory}
    return replace(case, **sizes, dtype=torch.float64, given=False, dropout_p=0.0)


def compare(case, shards, wanted):
    """Shards of all ranks with the result of one process."""
    output, lse, *grads = joined(shards)
    apart = ~((output - wanted[0]).abs().amax(-1) <= CLOSE)
    apart |= ~(((lse - wanted[1]).abs() <= CLOSE) | (lse == wanted[1]))
    assert int(apart.sum()) <= FLIPPED * apart.numel(), (case, int(apart.sum()))
    if bool(apart.any()):
        return  # a flipped choice has other gradients
    for name, own, one in zip(NAMES[2:], grads, wanted[2:5], strict=True):
        torch.testing.assert_close(own, one, rtol=1e-8, atol=1e-8, msg=lambda text, n=name: f"{case}, {n}: {text}")


def check_case(crew, case, ranks):
    """Whether the ranks ran it; raises where they differ from one process."""
    call = (case.config, case.tensors(), case.padding(), case.options())
    found = crew.outcomes(attend, *call, ranks=ranks)
    kinds = {kind for kind, _ in found}
    if kinds == {"raised"} and any(name != "Unsupported" for _, (name, _) in found):
        with pytest.raises(ValueError, match=r"must|cannot"):
            attend(None, *call)
    elif kinds != {"raised"}:
        assert kinds == {"done"}, (case, found)
        compare(case, [result for _, result in found], attend(None, *call))
    return kinds == {"done"}


def test_random_calls(crew):
    """`RANK_CALLS=1000 RANK_SEED=2 python -m pytest tests/parallel -k random_calls` runs longer."""
    seed, ran = os.environ.get("RANK_SEED", "1"), 0
    for number in range(CALLS):
        draw = random.Random(f"{seed}/ranks/{number}")
        ranks = draw.choice([2, 3, 4])
        ran += check_case(crew, shared_case(draw, ranks), ranks)
    assert ran >= CALLS // 2, f"seed {seed}: {ran} of {CALLS} calls ran"
