"""What is made of the keys: nodes, means, and how keys and values spread within nodes."""

import pytest
import torch

from prescore import Routed
from prescore.routed.index import build_nodes, encode_keys, pooled, take_rows
from prescore.routed.layout import make_layout

LAYOUT = make_layout(90, 90, causal=True, config=Routed(cluster_size=4, chunk_size=16, sinks=3, exact_until=0))


def made(dtype=torch.float64, n_lanes=3):
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(n_lanes, 90, size, generator=generator, dtype=torch.float64) for size in (8, 5))
    key, value = key.to(dtype).requires_grad_(), value.to(dtype).requires_grad_()
    return key, value, build_nodes(key, value, LAYOUT, 3, 4)


@pytest.mark.parametrize("n_lanes", [1, 3])
def test_every_key_of_a_chunk_is_in_one_of_its_nodes(n_lanes):
    _, _, nodes = made(n_lanes=n_lanes)
    assert nodes.rows.shape == (n_lanes, 16, 4)
    for lane in nodes.rows.view(n_lanes, 4, 16).tolist():
        for chunk, rows in enumerate(lane):
            assert sorted(rows) == list(range(3 + 16 * chunk, 19 + 16 * chunk))


def test_means_covariances_and_codes_are_those_of_the_nodes_keys():
    key, value, nodes = made()
    for lane in range(3):
        spread, drift = torch.zeros(4, 8, 8).double(), torch.zeros(4, 8, 5).double()
        for node, rows in enumerate(nodes.rows[lane]):
            keys, values = key[lane, rows], value[lane, rows]
            torch.testing.assert_close(nodes.key[lane, node], keys.mean(0))
            torch.testing.assert_close(nodes.value[lane, node], values.mean(0))
            both = torch.cov(torch.cat((keys, values), dim=1).T, correction=0)
            spread[node // 4] += both[:8, :8] / 4
            drift[node // 4] += both[:8, 8:] / 4
            codes = encode_keys(keys - keys.mean(0))
            assert torch.equal(nodes.codes.packed[lane, node], codes.packed)
            assert torch.equal(nodes.codes.scales[lane, node], codes.scales)
        torch.testing.assert_close(nodes.spread[lane], spread)
        torch.testing.assert_close(nodes.drift[lane], drift)


def test_gradients_reach_keys_and_values_through_means_and_covariances_not_through_codes():
    key, value, nodes = made()
    assert not any(t.requires_grad for t in (nodes.rows, *nodes.codes))
    (grad,) = torch.autograd.grad(nodes.key.sum(), key, retain_graph=True)
    wanted = torch.zeros(90).double()
    wanted[3:67] = 1 / 4
    assert torch.equal(grad, wanted[None, :, None].expand_as(key))
    assert torch.autograd.grad(nodes.key.sum(), value, retain_graph=True, allow_unused=True) == (None,)

    def covariances(keys, values):  # with the nodes that were found: a tree is a choice
        apart, beside = (take_rows(t, nodes.rows) for t in (keys, values))
        apart, beside = ((t - t.mean(2, keepdim=True)).reshape(3, 4, 16, -1) for t in (apart, beside))
        return [torch.einsum("tcki,tckj->tcij", apart, other) / 16 for other in (apart, beside)]

    for own, other in zip((nodes.spread, nodes.drift), covariances(key, value), strict=True):
        weight = torch.randn(own.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        grads = [
            torch.autograd.grad((t * weight).sum(), (key, value), retain_graph=True, materialize_grads=True)
            for t in (own, other)
        ]
        for got, expected in zip(*grads, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
        assert float(grads[0][0].abs().max()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_float32(dtype):
    key, value, nodes = made(dtype)
    wide = build_nodes(key.float(), value.float(), LAYOUT, 3, 4)
    assert nodes.key.dtype == nodes.value.dtype == nodes.spread.dtype == torch.float32
    for one, other in ((nodes.rows, wide.rows), (nodes.key, wide.key), (nodes.codes.packed, wide.codes.packed)):
        assert torch.equal(one, other)


def test_pooled_are_the_means_of_the_first_chunks():
    parts = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for n in range(1, 6):
        torch.testing.assert_close(pooled(parts)[:, n - 1], parts[:, :n].mean(1))


@pytest.mark.parametrize("n_lanes", [1, 2])
def test_rows_are_taken_from_their_own_lane(n_lanes):
    tensor = torch.randn(n_lanes, 7, 3)
    rows = torch.tensor([[[0, 6], [3, 3]], [[5, 1], [2, 4]]])[:n_lanes]
    found = take_rows(tensor, rows)
    for lane in range(n_lanes):
        assert torch.equal(found[lane], tensor[lane][rows[lane]])
