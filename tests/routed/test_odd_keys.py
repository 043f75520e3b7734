"""Keys that lie far from the mean of their node: they come first in it, and every query compares them."""

import math

import pytest
import torch

from prescore import Routed, exact_attention, prescored_attention
from oracles.routed import odd_keys
from prescore.ops.backend import Needs, pick_backend
from prescore.ops.native import library
from prescore.routed import reference as far
from prescore.routed.index import build_nodes
from prescore.routed.layout import ODD, make_layout
from prescore.routed.native import build_nodes_compiled, can_build

LAYOUT = make_layout(300, 300, causal=True, config=Routed(cluster_size=32, chunk_size=64, sinks=3, exact_until=0))
DISTANCES = ("random", "in pairs", "equal")


def keys_of(distances):
    """`[2, 300, 16]`, of lengths that all differ, that come in pairs, or that are all the same."""
    key = torch.randn(2, 300, 16, generator=torch.Generator().manual_seed(3))
    if distances == "in pairs":
        key[:, 1::2] = -key[:, ::2]  # as far from a mean of 0 in every whole chunk
    elif distances == "equal":
        key = torch.eye(16).repeat(2, 20, 1)[:, :300].contiguous()
    return key


def nodes_of(key, build):
    with torch.no_grad():
        return build(key, key, LAYOUT, 3, 4)


@pytest.mark.parametrize("distances", DISTANCES)
def test_the_farthest_keys_come_first_and_the_others_keep_their_order(distances, monkeypatch):
    key = keys_of(distances)
    rows = nodes_of(key, build_nodes).rows
    monkeypatch.setattr("prescore.routed.index.ODD", 0)
    tree_order = nodes_of(key, build_nodes).rows
    for lane in range(2):
        members = key[lane, tree_order[lane]]
        odd = odd_keys(members - members.mean(1, keepdim=True), tree_order[lane])
        assert bool((odd.sum(1) == ODD).all())
        for node in range(rows.shape[1]):
            own, is_odd = tree_order[lane, node], odd[node]
            assert rows[lane, node].tolist() == [*own[is_odd].tolist(), *own[~is_odd].tolist()]


@pytest.mark.skipif(library.loaded_level() == library.NO_LEVEL, reason="no compiled code here")
@pytest.mark.parametrize("distances", DISTANCES[:2])  # among equal ones the tree itself is one of rounding
def test_compiled_nodes_have_the_same_order(distances):
    key = keys_of(distances)
    assert can_build(key, key, LAYOUT, pick_backend(Needs.of(key)))
    assert torch.equal(nodes_of(key, build_nodes_compiled).rows.long(), nodes_of(key, build_nodes).rows)


def lone_key(n=3000):
    """Tight keys, and one far back that every later query looks for, many deviations off its node's mean."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 64, generator=generator) for _ in range(3))
    direction = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    key *= 0.1
    key[:, :, 700] = 30 * direction
    return 0.1 * query + 2.5 * direction, key, value


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_a_lone_key_is_found_however_far_from_its_nodes_mean(backend, monkeypatch):
    query, key, value = lone_key()
    late = query[:, :, -50:]
    exact = exact_attention(late, key, value, is_causal=True).output

    def error():
        # few rows are asked for: its node would be passed over
        output = prescored_attention(late, key, value, Routed(min_weight=1 / 16), is_causal=True, backend=backend)
        return float((output - exact).square().sum() / exact.square().sum())

    assert error() < 1e-3
    if backend == "plain":
        monkeypatch.setattr(far, "ODD", 0)
        assert error() > 0.1


def test_sinks_that_draw_all_mass_hide_no_far_key():
    """A tenth of their mass counts: the limit lies that much lower, and at the rest where they weigh little."""
    scores = far.Scores(torch.tensor([[9.0], [-30.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.ones(2, 1))
    nothing = torch.zeros(0)
    seen = far.Seen(*[nothing] * 6, torch.zeros(2, 32), far.Codes(nothing, nothing), nothing, nothing)
    near = torch.tensor([2.0, 2.0])
    limit = far.limit_of(scores, seen, far.Search(100.0), near)
    rest = math.exp(2.0) + 32 * math.exp(0.5) * (math.e + 1)
    wanted = [math.log(share) - math.log(100) for share in (0.1 * math.exp(9.0) + rest, rest)]
    torch.testing.assert_close(limit, torch.tensor(wanted))
