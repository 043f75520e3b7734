"""The routed engine against its definition in loops: every shape, mask, size and kind of head, gradients too."""

import pytest
import torch
from attention_checks import check_routed
from copying_heads import CONFIG as COPY_CONFIG
from copying_heads import SCALE as COPY_SCALE
from copying_heads import copying
from hypothesis import given, settings
from hypothesis import strategies as st

from prescore import Routed, exact_attention
from prescore.testing.inputs import MASKS, attention_tensors, random_mask
from prescore.testing.routed import routed_oracle
from prescore.testing.routed_pieces import bisect, make_levels, make_piece, round_sizes

SMALL = Routed(rows=8, leaf_size=4, chunk_size=16, sinks=3, exact_until=0)


@st.composite
def configs(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    leaf = pick(1, 2, 3, 4, 8)
    return Routed(
        rows=pick(0, leaf, 2 * leaf, 3 * leaf, 1000),
        leaf_size=leaf,
        chunk_size=leaf * pick(1, 2, 3, 4) + pick(0, 1),
        sinks=pick(0, 1, 4),
        exact_until=pick(0, 0, 20, 60),
    )


@st.composite
def cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    n_keys, batch, kv_heads, is_causal = pick(1, 7, 40, 81, 130), pick(1, 2, 3), pick(1, 2), draw(st.booleans())
    n_query = pick(n_keys, n_keys, 1, max(1, n_keys // 3), n_keys if is_causal else n_keys + 3)
    seed = draw(st.integers(0, 10_000))
    sizes = {"heads": kv_heads * pick(1, 2), "kv_heads": kv_heads, "dim": pick(3, 8), "value_dim": pick(1, 5)}
    tensors = attention_tensors(batch=batch, n_query=n_query, n_keys=n_keys, seed=seed, **sizes)
    return tensors, random_mask(pick(*MASKS), batch, n_keys, seed=seed), is_causal


@given(cases(), configs())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_the_engine_is_the_definition(case, config):
    tensors, mask, is_causal = case
    check_routed(config, tensors, is_causal=is_causal, mask=mask)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_query", [90, 70, 5])
@pytest.mark.parametrize("rows", [0, 8, 24, 1000])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_sizes_rows_and_padding(is_causal, n_query, rows, padding):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_query=n_query, n_keys=90, dim=8, value_dim=5)
    places = torch.arange(90)
    mask = {"left": places >= torch.tensor([[0], [29]]), "right": places < torch.tensor([[90], [61]])}.get(padding)
    stats = check_routed(SMALL.replace(rows=rows), tensors, is_causal=is_causal, mask=mask)
    assert stats["n_pieces"] > 0


LEVELS = [
    # leaf_size, chunk_size, keys, queries, levels of nodes
    (2, 4, 150, 150, 1),
    (2, 4, 450, 450, 2),
    (4, 8, 300, 300, 1),
    (4, 8, 900, 60, 2),
    (4, 4, 450, 60, 1),
    (2, 16, 700, 60, 2),
    (1, 1, 90, 90, 1),
    (16, 16, 900, 60, 1),
    (5, 13, 500, 60, 2),
    (1, 1, 1200, 40, 3),
]


@pytest.mark.parametrize(("leaf_size", "chunk_size", "n_keys", "n_query", "n_levels"), LEVELS)
def test_far_keys_are_seen_as_nodes(leaf_size, chunk_size, n_keys, n_query, n_levels, monkeypatch):
    for module in ("routed.layout", "testing.routed_pieces"):
        monkeypatch.setattr(f"prescore.{module}.WIDTH", 8)
    sizes = {"heads": 2, "kv_heads": 1, "dim": 8, "value_dim": 5, "spread": 1.0}
    tensors = attention_tensors(n_query=n_query, n_keys=n_keys, seed=n_keys, **sizes)
    config = Routed(rows=leaf_size, leaf_size=leaf_size, chunk_size=chunk_size, sinks=3, exact_until=0)
    assert check_routed(config, tensors)["n_levels"] == n_levels


@pytest.mark.parametrize("n_query", [1350, 700])
def test_strips_and_groups(n_query, monkeypatch):
    """Chunks long enough to be cut into strips, several dispatches, large and small tiles, sampled directions."""
    monkeypatch.setattr("prescore.routed.lanes.PAIRS_AT_ONCE", 2000)
    tensors = attention_tensors(heads=2, n_query=n_query, n_keys=1350, dim=8, value_dim=5, spread=1.0)
    config = Routed(rows=96, leaf_size=32, chunk_size=256, sinks=3, exact_until=0)
    stats = check_routed(config, tensors, scale=8**-0.5)
    assert (stats["chunk"], stats["n_pieces"]) == (256, 4)


@pytest.mark.parametrize("n_query", [560, 330, 100])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_heads_that_copy(n_query, padding):
    query, key, value = copying(n=560, batch=2, heads=(True, False))
    places = torch.arange(560)
    masks = {"left": places >= torch.tensor([[0], [60]]), "right": places < torch.tensor([[560], [460]])}
    tensors = (query[:, :, -n_query:], key, value)
    stats = check_routed(COPY_CONFIG, tensors, mask=masks.get(padding), scale=COPY_SCALE)
    # late queries cannot be asked; where padding lies behind the queries a sequence reads exactly
    assert (stats["fine_heads"] > 0) == (n_query > 100)


@pytest.mark.parametrize("rows", [0, 16, 32, 64, 512])
@pytest.mark.parametrize("heads", [(True, True), (True, False), (True, True, False)])
def test_heads_share_rows(rows, heads):
    """Those of another sequence keep theirs, and nobody reads a leaf where there are rows for none."""
    one, other = copying(n=500, heads=heads), copying(n=500, heads=(False,) * len(heads), seed=1)
    both = [torch.cat(pair) for pair in zip(one, other, strict=True)]
    assert check_routed(COPY_CONFIG.replace(rows=rows), both, scale=COPY_SCALE)["fine_heads"] == sum(heads)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_oracle_is_exact_attention_where_everything_is_read(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=75, dim=8)
    exact = exact_attention(*tensors, is_causal=is_causal)
    for config in (SMALL.replace(rows=4000), SMALL.replace(exact_until=76), SMALL.replace(sinks=75)):
        oracle = routed_oracle(*tensors, config, is_causal=is_causal)
        torch.testing.assert_close(oracle.output, exact.output, rtol=0, atol=1e-12)
        torch.testing.assert_close(oracle.lse, exact.lse, rtol=0, atol=1e-12)


def test_pieces_by_hand():
    """Two clear groups beside one stray key: the stray one is single, the groups are leaves."""
    key = torch.tensor([[9.0, 1.0], [5.0, 0.1], [9.1, 1.1], [5.1, 0.2], [-3.0, 1.0], [9.0, 1.2]]).double()
    sizes = round_sizes(0, 6, 3, 3)
    assert (sizes.levels, sizes.chunk, sizes.singles, sizes.leaf) == (1, 6, 2, 2)
    piece = make_piece(key, torch.ones(6, dtype=torch.bool), 0, sizes, large=False)
    assert piece.singles[0] == 4  # then one of the group that the mean is farther from
    assert sorted(len(leaf.keys) for leaf in piece.leaves) == [2, 2]
    real = torch.tensor([True, True, True, True, False, True])
    piece = make_piece(key, real, 0, sizes, large=False)
    assert 4 not in piece.singles
    assert sorted([*piece.singles, *(place for leaf in piece.leaves for place in leaf.keys)]) == [0, 1, 2, 3, 5]


def test_bisection_by_hand():
    points = torch.tensor([[3.0, 0.0], [0.0, 0.1], [2.0, 0.0], [1.0, 0.1]], dtype=torch.float64)
    alive = torch.ones(4, dtype=torch.bool)
    assert bisect(points, alive, [0, 1, 2, 3], 1) == [[1, 3], [2, 0]]
    assert bisect(points, alive, [0, 1, 2, 3], 2) == [[1], [3], [2], [0]]
    alive[1] = False
    assert bisect(points, alive, [0, 1, 2, 3], 1) == [[3, 2], [0, 1]]  # the dead come last
    assert bisect(torch.ones(4, 2, dtype=torch.float64), alive, [0, 2, 3, 1], 1) == [[0, 2], [3, 1]]


def test_nodes_hold_every_key_of_their_pieces_once():
    sizes = round_sizes(0, 16, 2, 2)
    key = torch.randn(16 * 4 * 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real = torch.ones(len(key), dtype=torch.bool)
    large = [make_piece(key, real, number, sizes, large=True) for number in range(8)]
    levels = make_levels(key, large, sizes)
    assert [len(level) for level in levels] == [256, 32, 4]
    kept = [single for piece in large for single in piece.singles[: sizes.kept]]
    for level, beside in ((1, kept), (2, [])):
        keys = [place for node in levels[level] for place in node.keys]
        assert sorted(keys + beside) == list(range(len(key)))


def test_tolerance_is_not_the_oracles():
    with pytest.raises(ValueError, match=r"tolerance must be None for the oracle, .* got 0\.1"):
        routed_oracle(*attention_tensors(), SMALL.replace(tolerance=0.1), is_causal=True)
