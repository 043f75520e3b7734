"""The key index: layout, bisection tree, clusters, subclusters, int8 keys; native code builds the same."""

import pytest
import torch
from oracles.routed import Sequence
from routed_checks import levels_here, native_level, needs_native

from prescore import Routed
from prescore.routed import native
from prescore.routed.backends import build_index as build_new_chunks
from prescore.routed.index import GrowingIndex
from prescore.routed.layout import make_layout, why_exact
from prescore.routed.reference import build_index, covariances_of_spans, int8_logits, quantize_keys
from prescore.routed.tree import bisection_tree

SMALL = Routed(cluster_size=4, chunk_size=16, sinks=3, exact_until=0)


def normal(*size, seed=0, dtype=torch.float64):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- layout


LAYOUTS = {
    "usual": SMALL,
    "odd sizes": Routed(cluster_size=5, chunk_size=13, sinks=0, exact_until=0),
    "exact until": SMALL.replace(exact_until=70),
    "single keys": Routed(cluster_size=1, chunk_size=1, sinks=1, exact_until=0),
    "only sinks": Routed(cluster_size=8, chunk_size=8, sinks=200, exact_until=0),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("n_query", "n_keys"), [(130, 130), (40, 130), (70, 130), (71, 130), (1, 130), (36, 36), (1, 1)]
)
def test_far_chunks_are_those_of_the_definition(name, causal, n_query, n_keys):
    config = LAYOUTS[name]
    sequence = Sequence.of(torch.ones(n_keys, dtype=torch.bool), n_query, causal, config)
    wanted = [sequence.far_chunks(i) for i in range(n_query)]
    assert bool(why_exact(config, n_query, n_keys, is_causal=causal)) == (max(wanted) == 0)
    layout = make_layout(n_query, n_keys, causal=causal, config=config)
    if not causal and n_query <= config.exact_until:
        return  # such a call is exact, whatever its layout is
    assert layout.far_chunks(torch.arange(n_query) + layout.first).tolist() == wanted
    assert layout.n_chunks == max(wanted)
    assert layout.n_exact == sum(count == 0 for count in wanted)


# --- tree


def test_separated_groups_become_clusters():
    generator = torch.Generator().manual_seed(1)
    centres = torch.tensor([[0.0, 0.0], [0.0, 10.0], [100.0, 0.0], [100.0, 10.0]])
    label = torch.arange(4).repeat_interleave(8)[torch.randperm(32, generator=generator)]
    clusters = label[bisection_tree(centres[label] + 0.1 * torch.randn(32, 2, generator=generator), 2)].view(4, 8)
    assert (clusters == clusters[:, :1]).all()
    assert set(clusters[:2, 0].tolist()) in ({0, 1}, {2, 3})  # the wide axis is cut first


@pytest.mark.parametrize("dim", [5, 200])  # 200: products of points with points are the smaller matrix
def test_cuts_are_at_the_median_of_the_main_direction(dim):
    points = normal(2, 3, 48, dim)
    order = bisection_tree(points, 1)
    assert torch.equal(order.sort(-1).values, torch.arange(48).expand(2, 3, 48))
    for tree, chunk in zip(order.view(6, 2, 24), points.view(6, 48, dim), strict=True):
        centred = chunk - chunk.mean(0)
        direction = centred[:, centred.square().sum(0).argmax()] @ centred  # the start of the power iteration
        for _ in range(3):
            direction = centred.T @ (centred @ (direction / direction.norm()))
        left, right = (centred[half] @ direction for half in tree)
        assert left.max() <= right.min()


def test_invalid_points_come_last_and_do_not_move_the_cut():
    points, valid = normal(16, 3, seed=2), torch.arange(16) < 11
    order = bisection_tree(points, 2, valid=valid)
    assert valid[order].tolist() == [True] * 11 + [False] * 5
    moved = torch.where(valid[:, None], points, 1e6)
    assert torch.equal(bisection_tree(moved, 2, valid=valid)[:11], order[:11])


def test_scale_strides_and_equal_points_of_a_tree():
    points = normal(3, 70, 4)[:, 5:37]
    order = bisection_tree(points, 3)
    assert not points.is_contiguous()
    assert torch.equal(bisection_tree(points.contiguous(), 3), order)
    for scale in (1e-18, 1e18):
        assert torch.equal(bisection_tree(points * scale, 3), order)
    assert torch.equal(bisection_tree(torch.ones(16, 3), 2), torch.arange(16))
    with pytest.raises(ValueError, match="multiple of 8 for 3 levels, got 12"):
        bisection_tree(torch.zeros(12, 2), 3)


# --- clusters, covariances and int8 keys are those of the oracle: see test_attention.py and test_mutations.py


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_dtypes_are_summed_in_float32(dtype):
    layout = make_layout(90, 90, causal=True, config=SMALL)
    key, value = (normal(3, 90, dim, seed=dim, dtype=dtype) for dim in (8, 5))
    index, wide = (build_index(*pair, layout, 3, 4) for pair in ((key, value), (key.float(), value.float())))
    assert index.centroid_key.dtype == index.centroid_value.dtype == index.key_cov.dtype == torch.float32
    for name in ("positions", "centroid_key", "int8"):
        assert torch.equal(getattr(index, name), getattr(wide, name))


def test_int8_keys_follow_the_scale():
    key = normal(30, 32, dtype=torch.float32)
    int8, scales = quantize_keys(key)
    for scale in (2.0**-100, 2.0**100):
        scaled = quantize_keys(key * scale)
        assert torch.equal(scaled[0], int8)
        assert torch.equal(scaled[1], scales * scale)


def test_int8_logits_are_good_enough_to_search_by():
    query, key = normal(100, 64), normal(400, 64, seed=1)
    int8, scales = quantize_keys(key[None])
    error = int8_logits(query, int8, scales)[:, 0] - query @ key.T
    # numbers are off by a unit over sqrt(12), and a unit is a 63rd of the largest of 64 x 400 normals, about 4.1
    assert 0.015 < float(error.std()) / 8 < 0.03
    assert abs(float(error.mean())) < 0.01


# --- native code


@needs_native
@pytest.mark.parametrize("level", levels_here())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cluster_size", "chunk_size"), [(16, 64), (32, 32), (48, 192), (128, 256)])
def test_native_code_builds_the_same_index(level, dtype, cluster_size, chunk_size):
    config = Routed(cluster_size=cluster_size, chunk_size=chunk_size, sinks=3, exact_until=0)
    layout = make_layout(600, 600, causal=True, config=config)
    key, value = (normal(2, 2, 600, dim, seed=dim, dtype=dtype).transpose(0, 1) for dim in (64, 48))
    assert native.can_build(key, value, layout)
    with native_level(level):
        built = native.build_index(key, value, layout, 5, 2)
    wanted = build_index(key.flatten(0, 1), value.flatten(0, 1), layout, 5, 2)
    assert torch.equal(built.positions.long(), wanted.positions)
    for name in ("centroid_key", "centroid_value", "key_cov", "key_value_cov"):
        torch.testing.assert_close(getattr(built, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
    blocks = wanted.int8.unflatten(2, (-1, 16)).unflatten(4, (-1, 4)).transpose(3, 4)
    # sums in another order move a number across the middle of two now and then
    assert (built.int8.int() - native.KEY_ZERO != blocks.int()).double().mean() < 1e-3
    numbers = built.sub_int8.int() - native.KEY_ZERO
    assert (numbers != wanted.sub_int8.int()).double().mean() < 1e-3
    for name in ("scales", "sub_scales", "spread", "radius"):
        torch.testing.assert_close(getattr(built, name), getattr(wanted, name), rtol=1e-4, atol=1e-6)


@needs_native
def test_native_code_builds_no_index_with_gradients():
    layout = make_layout(300, 300, causal=True, config=Routed(cluster_size=32, chunk_size=64, exact_until=0))
    key = torch.zeros(1, 300, 64)
    assert native.can_build(key, key, layout)
    assert not native.can_build(key.clone().requires_grad_(), key, layout)
    with torch.no_grad():
        assert native.can_build(key.clone().requires_grad_(), key, layout)
    assert not native.can_build(key.double(), key, layout)


# --- growing


def test_a_growing_index_holds_no_sums_of_earlier_chunks():
    key = normal(1, 2, 200, 8)
    index = GrowingIndex(build_new_chunks)
    index.extend(key, key, make_layout(1, 200, causal=True, config=SMALL), backend="plain")
    assert index._sums[0].shape == (2, 1, 8, 8)
    assert [sums.untyped_storage().nbytes() for sums in index._sums] == [8 * 2 * 8 * 8] * 2  # float64


def test_the_means_of_a_growing_index_are_those_of_one_call_to_the_bit():
    key = normal(1, 2, 1300, 8).float() + 3
    index = GrowingIndex(build_new_chunks)
    for n in (*range(100, 1300, 110), 1300):
        layout = make_layout(1, n, causal=True, config=SMALL)
        grown = index.extend(key[:, :, :n], key[:, :, :n], layout, backend="plain")
        whole = covariances_of_spans(build_new_chunks(key, key, layout, 0, "plain"), layout)
        for name in ("key_cov", "key_value_cov"):
            assert torch.equal(getattr(grown, name)[:, -1], getattr(whole, name)[:, -1])
            assert torch.equal(getattr(grown, f"span_{name}"), getattr(whole, f"span_{name}"))
    assert whole.span_key_cov.shape[1] > 1


def test_covariances_of_spans_are_means_over_their_chunks():
    key = normal(1, 1300, 8)
    for is_causal in (True, False):
        layout = make_layout(1300, 1300, causal=is_causal, config=SMALL)
        built = build_index(key, key, layout, layout.sinks, layout.n_chunks)
        index, size = covariances_of_spans(built, layout), layout.chunks_per_span
        n_chunks = built.key_cov.shape[1]
        assert n_chunks > 2 * size
        spans = [
            built.key_value_cov[0, begin : begin + size].mean(0) for begin in range(0, n_chunks - size + 1, size)
        ]
        torch.testing.assert_close(index.span_key_value_cov[0], torch.stack(spans))
        for count in range(1, n_chunks + 1) if is_causal else [n_chunks]:
            begin = (count - 1) // size * size
            own = index.key_cov[0, count - 1 if is_causal else 0]
            torch.testing.assert_close(own, built.key_cov[0, begin:count].mean(0))
