"""Identity 12: k ranks give what one process gives, forward and backward, whatever the configuration."""

import pytest
import torch
from oracles.inputs import attention_tensors, random_mask
from parallel_work import alone, attend, attend_quietly, gradient_weights, joined, piece

from prescore import (
    Companions,
    Coupling,
    Exact,
    GaussianKMeans,
    Hyper,
    KMeans,
    KMedian,
    Leverage,
    Lsh,
    Minkowski,
    Routed,
    Selected,
    prescored_attention,
)

NAMES = ("output", "lse", "gradient of query", "gradient of key", "gradient of value")
FLOAT64 = 1e-9
"""Sums in another order, of numbers of size 1 to 100; a wrong key changes the first digit."""
BY_RANK = Lsh(8, 8, alignment="rank")

BY_ROWS = {
    "key-diff": Selected(top_k=8, min_seq_len=16),
    "kmeans": Selected("kmeans", 8, min_seq_len=16),
    "no centroids": Selected("kmeans", 8, remainder="none", sinks=0, min_seq_len=16),
    "recent": Selected("kmeans", 8, sinks=3, recent=4, min_seq_len=16),
    "too many recent": Selected("kmeans", 8, sinks=3, recent=12, min_seq_len=16),
    "kmedian": Selected(KMedian(n_clusters=5, fit_size=9), 8, min_seq_len=16),
    "minkowski": Selected(Minkowski(p=3, rule="farthest"), 8, min_seq_len=16),
    "gaussian": Selected(GaussianKMeans(n_clusters=4), 8, min_seq_len=16),
    "noise": Selected(KMeans(noise=0.3, n_clusters=4, fit_size=0), 8, min_seq_len=16),
    "leverage": Selected("leverage", 8, min_seq_len=16),
    "sketch": Selected(Leverage(sketch_size=20, noise=0.1, normalize=True), 8, min_seq_len=16),
    "other clusters": Selected("key-norm", 8, remainder=KMeans(n_clusters=3), min_seq_len=16),
    "a share": Selected("uniform", 0.3, min_seq_len=16),
    "fallback": Selected("kmeans", 2, min_fraction=0.2, min_seq_len=16),
    "hash": Selected("kmeans", 12, inner=Lsh(8, 8), min_seq_len=16),
    "paper": Selected.paper("kmeans", 12, inner=BY_RANK, min_seq_len=16),
    "paper + sinks": Selected.paper("kmeans", 12, inner=BY_RANK, sinks=3, leaf_inclusive=True, min_seq_len=16),
    "large leaves": Selected("kmeans", 8, min_seq_len=64),
    "odd leaves": Selected("kmeans", 8, min_seq_len=7),
}
BY_HEADS = {
    "routed": Routed(min_weight=1 / 32, cluster_size=8, chunk_size=16, exact_until=32),
    "hyper": Hyper(Lsh(8, 8), min_seq_len=16),
    "published": Hyper.published(lsh=BY_RANK, min_seq_len=16),
    "zero": Selected.early("kmeans", 12, inner=BY_RANK, min_seq_len=16),
    "blocks of all keys": Selected.paper(
        "kmeans", 12, inner=BY_RANK, min_seq_len=16, coupling=Coupling(blocks="all")
    ),
    "companions": Selected(Companions(window=8), 8, min_seq_len=16),
    "balanced": Selected(KMeans(rule="balanced"), 8, min_seq_len=16),
    "sample": Selected("key-norm", 8, selector="sample", min_seq_len=16),
}
EVERY = {"exact": Exact(), "default": Routed(), **BY_ROWS, **BY_HEADS}


def way(name, masked=False):
    if name == "exact":
        return "gather"
    return "rows" if name in BY_ROWS and not masked else "heads"


def tensors(dtype=torch.float64, **sizes):
    return attention_tensors(
        **{"batch": 2, "heads": 6, "kv_heads": 3, "n_keys": 96, "dim": 8, **sizes}, dtype=dtype
    )


def assert_same(found, wanted, budget=FLOAT64):
    for name, left, right in zip(NAMES, found, wanted[:5], strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, rtol=budget, atol=budget, msg=lambda text, n=name: f"{n}: {text}")


def check(crew, name, inputs, mask=None, *, ranks, **options):
    options = {"generator": 3, **options}
    results = crew.run(attend, EVERY[name], inputs, mask, options, ranks=ranks)
    assert {result[5]["way"] for result in results} == {way(name, mask is not None)}
    assert_same(joined(results), alone(EVERY[name], inputs, mask, options))
    return results


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", EVERY)
def test_every_configuration(crew, name, ranks, is_causal):
    check(crew, name, tensors(), ranks=ranks, is_causal=is_causal)


@pytest.mark.parametrize("kind", ["left", "right"])
@pytest.mark.parametrize("name", ["exact", "kmeans", "paper", "hyper", "routed"])
def test_padding(crew, name, kind):
    inputs, mask = tensors(), random_mask(kind, 2, 96)
    for tensor in inputs[1:]:
        tensor.masked_fill_(~mask[:, None, :, None], torch.nan)  # padding may hold anything
    options = {"generator": 3, "is_causal": True}
    results = crew.run(attend, EVERY[name], inputs, mask, options, ranks=3)
    assert results[0][5]["way"] == way(name, True)
    found, wanted = joined(results), alone(EVERY[name], inputs, mask, options)
    assert_same(found, wanted)


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
    inputs = tensors(n_query=36, n_keys=96, value_dim=5)
    check(crew, name, inputs, ranks=2, is_causal=is_causal, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["exact", "key-diff", "kmeans", "paper", "leverage", "hyper", "routed"])
def test_lower_precision(crew, name, dtype):
    inputs, options = tensors(dtype), {"generator": 3, "is_causal": True}
    results = crew.run(attend, EVERY[name], inputs, None, options, ranks=2)
    # outputs and gradients of size 1 to 10: some roundings of the dtype, far less than one wrong key
    assert_same(joined(results), alone(EVERY[name], inputs, None, options), 64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["routed", "hyper", "companions"])
def test_heads_change_hands_bit_for_bit(crew, name):
    inputs, options = tensors(torch.float32, heads=4, kv_heads=4), {"generator": 3, "is_causal": True}
    found = joined(crew.run(attend, EVERY[name], inputs, None, options, ranks=2))
    wanted = alone(EVERY[name], inputs, None, options)
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 3, 2), (6, 3, 4), (1, 1, 3)])
def test_to_a_tolerance(crew, heads, kv_heads, ranks, is_causal):
    """Which queries read on, and which keys are sampled, is no matter of the rank; some ranks may have no head."""
    config = EVERY["routed"].replace(rows=4, sinks=2, tolerance=0.1, confidence=0.8)
    inputs, options = tensors(heads=heads, kv_heads=kv_heads), {"generator": 3, "is_causal": is_causal}
    found = torch.cat(crew.run(attend_quietly, config, inputs, None, options, ranks=ranks), dim=2)
    wanted, aux = prescored_attention(*inputs, config, **options, return_aux=True)
    torch.testing.assert_close(found, wanted, rtol=FLOAT64, atol=FLOAT64)
    assert 0 < aux.stats.read_all < 1  # and where the limit lies matters


def test_a_choice_by_rounding_is_the_same_on_every_rank(crew):
    """Equal keys have equal scores: the lower positions are kept, wherever they lie."""
    query, key, value = tensors()
    key = key[:, :, :1].expand_as(key).contiguous()
    config = Selected("key-norm", 20, remainder="none", sinks=0, min_seq_len=16)
    for is_causal in (False, True):
        options = {"generator": 3, "is_causal": is_causal}
        results = crew.run(attend, config, (query, key, value), None, options, ranks=4)
        assert_same(joined(results), alone(config, (query, key, value), None, options))


@pytest.mark.parametrize("name", ["exact", "kmeans", "routed"])
def test_without_lse(crew, name):
    inputs, options = tensors(), {"generator": 3, "is_causal": True}
    found = torch.cat(crew.run(attend_quietly, EVERY[name], inputs, None, options, ranks=2), dim=2)
    torch.testing.assert_close(found, alone(EVERY[name], inputs, None, options)[0], rtol=FLOAT64, atol=FLOAT64)


def test_one_rank_is_a_group_too(crew):
    for name in ("exact", "paper", "routed"):
        check(crew, name, tensors(), ranks=1, is_causal=True)


def test_the_check_notices_a_wrong_key():
    config = EVERY["kmeans"]
    inputs, options = tensors(), {"generator": 3, "is_causal": True}
    wanted = alone(config, inputs, None, options)
    other = alone(config.replace(top_k=7), inputs, None, options)
    with pytest.raises(AssertionError, match="output"):
        assert_same(other[:5], wanted)
    assert piece(torch.arange(4), _Rank(1, 2), 0).tolist() == [2, 3]
    assert len(gradient_weights(inputs).unique()) > 100
    assert EVERY["zero"].coupling == Coupling("zero", "all", "count")


class _Rank:
    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size
