"""The routed engine against its definition in loops: every shape, mask and size, gradients too."""

import math

import pytest
import torch
from attention_checks import check_routed
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.inputs import MASKS, attention_tensors, random_mask

from prescore import Routed, exact_attention
from oracles.routed import (
    Far,
    Sizes,
    coded_keys,
    coded_query,
    normal_rest,
    routed_oracle,
    routed_tables,
)

SMALL = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)


@st.composite
def configs(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    leaf = pick(1, 3, 4, 8, 20, 24)  # beyond sixteen not all keys of a node are odd
    return Routed(
        min_weight=1 / (2 * pick)(0, 1, 3, 8, 40, 1000),
        cluster_size=leaf,
        chunk_size=leaf * pick(1, 2, 3, 4 if leaf < 16 else 1) + pick(0, 1),
        sinks=pick(0, 1, 4, 20),
        exact_until=pick(0, 0, 20, 60),
    )


@st.composite
def cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    n_keys, batch, kv_heads, is_causal = pick(1, 7, 40, 81, 110), pick(1, 2, 3), pick(1, 2), draw(st.booleans())
    n_query = pick(n_keys, n_keys, 1, max(1, n_keys // 3), n_keys if is_causal else n_keys + 3)
    seed = draw(st.integers(0, 10_000))
    sizes = {"heads": kv_heads * pick(1, 2), "kv_heads": kv_heads, "dim": pick(3, 8, 20), "value_dim": pick(1, 5)}
    tensors = attention_tensors(batch=batch, n_query=n_query, n_keys=n_keys, seed=seed, **sizes)
    return tensors, random_mask(pick(*MASKS), batch, n_keys, seed=seed), is_causal


@given(cases(), configs())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_the_engine_is_the_definition(case, config):
    tensors, mask, is_causal = case
    check_routed(config, tensors, is_causal=is_causal, mask=mask)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_query", [90, 70, 5])
@pytest.mark.parametrize("rows", [0, 8, 1000])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_sizes_rows_and_padding(is_causal, n_query, rows, padding):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_query=n_query, n_keys=90, dim=8, value_dim=5)
    places = torch.arange(90)
    mask = {"left": places >= torch.tensor([[0], [29]]), "right": places < torch.tensor([[90], [61]])}.get(padding)
    stats = check_routed(SMALL.replace(min_weight=1 / (2 * rows)), tensors, is_causal=is_causal, mask=mask)
    assert stats["n_chunks"] > 0
    assert (stats["far_keys_read"] > 0) == (rows > 0)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("leaf_size", "chunk_size", "leaf", "chunk"),
    [
        (1, 1, 1, 1),
        (1, 16, 1, 16),
        (5, 13, 3, 12),
        (7, 20, 5, 20),
        (3, 3, 3, 3),
        (100, 24, 24, 24),
        (6, 31, 3, 24),
        (20, 40, 20, 40),
        (17, 17, 17, 17),
    ],
)
def test_odd_sizes(leaf_size, chunk_size, leaf, chunk, is_causal):
    config = Routed(min_weight=1 / 12, cluster_size=leaf_size, chunk_size=chunk_size, sinks=2, exact_until=0)
    tensors = attention_tensors(heads=2, n_query=40, n_keys=120, dim=8, value_dim=5, seed=chunk_size)
    stats = check_routed(config, tensors, is_causal=is_causal)
    assert (stats["leaf"], stats["chunk"]) == (leaf, chunk)
    assert stats["n_chunks"] > 0


@pytest.mark.parametrize("is_causal", [True, False])
def test_long_chunks_are_cut_into_strips_and_blocks(is_causal, monkeypatch):
    """Chunks long enough for two strips, several blocks of queries, few codes at once, directions from samples."""
    monkeypatch.setattr("prescore.routed.plain.LOGITS_AT_ONCE", 20_000)
    monkeypatch.setattr("prescore.routed.plain.QUERY_BLOCK", 100)
    tensors = attention_tensors(heads=2, n_query=500, n_keys=1000, dim=8, value_dim=5, spread=1.0)
    config = Routed(min_weight=1 / 64, cluster_size=32, chunk_size=256, sinks=3, exact_until=0)
    stats = check_routed(config, tensors, is_causal=is_causal, scale=0.3)
    assert (stats["chunk"], stats["n_chunks"]) == (256, 2 if is_causal else 3)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("case", ["equal keys", "zero keys", "one huge key", "zero queries", "equal in nodes"])
def test_unusual_keys(case, is_causal):
    query, key, value = attention_tensors(batch=2, heads=2, kv_heads=1, n_keys=90, dim=8, value_dim=5, seed=4)
    if case == "equal keys":
        key = key[:, :, :1].expand_as(key).contiguous()
    elif case == "zero keys":
        key = torch.zeros_like(key)
    elif case == "one huge key":
        key[:, :, 30] *= 40
    elif case == "zero queries":
        query[:, :, ::3] = 0
    else:
        key[:, :, 3:83] = key[:, :, 3:23].repeat_interleave(4, dim=2)
    check_routed(SMALL, (query, key, value), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_oracle_is_exact_attention_where_everything_is_read(is_causal):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=75, dim=8)
    exact = exact_attention(*tensors, is_causal=is_causal)
    # so many rows that every key is above the limit, however rare: logits here span less than 2 log(1e9)
    for config in (
        SMALL.replace(min_weight=1 / (2 * 2**31) - 1),
        SMALL.replace(exact_until=76),
        SMALL.replace(sinks=75),
    ):
        oracle = routed_oracle(*tensors, config, is_causal=is_causal)
        torch.testing.assert_close(oracle.output, exact.output, rtol=0, atol=1e-12)
        torch.testing.assert_close(oracle.lse, exact.lse, rtol=0, atol=1e-12)


def test_a_query_by_hand():
    """Two nodes of two keys: one holds the key that is looked for, which leaves half of its node behind."""
    key = torch.tensor([[5.0, 0.0], [3.0, 0.0], [-1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    value = torch.tensor([[1.0], [2.0], [3.0], [5.0], [7.0]], dtype=torch.float64)
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    config = Routed(min_weight=1 / 2, cluster_size=2, chunk_size=4, sinks=0, exact_until=0)
    tensors = [t[None, None] for t in (query, key, value)]
    table = routed_tables(*tensors, config, is_causal=False, scale=1.0)[0, 0]
    assert sorted(map(sorted, table.rows.tolist())) == [[0, 1], [2, 3]]
    near = int(table.rows[1].max() < 2)
    # deviations within nodes are 1, 1, 0, 0; those of the values are -0.5, 0.5, -1, 1
    deviation = math.sqrt(0.5)
    known = math.log(1 + math.exp(4 + math.log(2) + 0.25) + math.exp(-1 + math.log(2) + 0.25))
    limit = known - math.log(2)
    assert 4.0 < limit < 5.0
    assert table.keys.tolist() == [[True, False, False, False, True]]
    assert table.drift[0].tolist() == pytest.approx([-0.25])
    gain, move = normal_rest(torch.tensor([limit - 4, limit + 1], dtype=torch.float64), deviation)
    assert table.centroids[0, near] == pytest.approx(float(gain[0]))  # one key is left
    assert table.centroids[0, 1 - near] == pytest.approx(math.log(2) + float(gain[1]))
    weights = [math.exp(5), 1.0, math.exp(4 + float(gain[0])), 2 * math.exp(-1 + float(gain[1]))]
    values = [1.0, 7.0, 1.5 - 0.25 * float(move[0]), 4.0 - 0.25 * float(move[1])]
    wanted = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    found = routed_oracle(*tensors, config, is_causal=False, scale=1.0)
    assert float(found.output) == pytest.approx(wanted)
    assert float(found.lse) == pytest.approx(math.log(sum(weights)))


def test_codes_by_hand():
    key = torch.tensor([15.0, -15.0, 1.0, -0.9, 0.0, 7.0, 0.0, 0.0, 3.0], dtype=torch.float64)
    # the largest number of a half counts 7.49 units of it, which becomes 7
    first, second = 15 / 7.49, 3 / 7.49
    wanted = [7 * first, -7 * first, 0.0, 0.0, 0.0, 3 * first, 0.0, 0.0, 7 * second, *[0.0] * 7]
    assert coded_keys(key).tolist() == pytest.approx(wanted)
    query = torch.tensor([-31.0, 0.4, 0.6, 0.0], dtype=torch.float64)
    assert coded_query(query).tolist() == pytest.approx([-31.0, 0.0, 1.0, *[0.0] * 13])


def test_nodes_hold_every_key_of_their_chunks_once():
    sizes = Sizes.of(Routed(cluster_size=5, chunk_size=13, sinks=2))
    assert (sizes.levels, sizes.leaf, sizes.chunk) == (2, 3, 12)
    key = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    far = Far.of(key, key, sizes, 3)
    for chunk, rows in enumerate(far.rows.view(3, -1).tolist()):
        assert sorted(rows) == list(range(2 + 12 * chunk, 14 + 12 * chunk))


def test_tolerance_is_not_the_oracles():
    with pytest.raises(ValueError, match=r"tolerance must be None for the oracle, .* got 0\.1"):
        routed_oracle(*attention_tensors(), SMALL.replace(tolerance=0.1), is_causal=True)
