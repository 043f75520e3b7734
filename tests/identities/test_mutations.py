"""The mutation table: break one line of the code on purpose, and a named check must fail.

A row is data: the module, the text, what replaces it (see `breaks.Break`), and the check. When the code moves, the
first test lists every row whose text is gone.
"""

from functools import cache

import pytest
from attention_checks import (
    check_centroids_of_equal_keys,
    check_exact,
    check_future,
    check_gradients,
    check_gray_neighbours,
    check_merge_of_split,
    check_oracle,
    check_padding_sides,
    check_routed,
    check_unbiased,
    with_lsh,
)
from breaks import Break, stale
from oracles.inputs import attention_tensors, random_mask

from prescore import Coupling, Lsh, Routed, Selected

LSH = Lsh(block_size=4, sample_size=3, n_projections=3, alignment="rank")
PAPER = Selected.paper("key-norm", 12, min_seq_len=0, inner=LSH)
HASHED = Selected.paper("key-norm", 3, min_seq_len=4, inner=LSH.replace(alignment="hash"))
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)
WIDE = ROUTED.replace(cluster_size=32, chunk_size=32)
"""Half of a cluster's keys are outliers. The others are compared where its logits reach the threshold."""
SEEDS = 400


def _oracle(config, is_causal=False):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=31, seed=6)
    check_oracle(config, tensors, is_causal=is_causal)


def _routed(is_causal=True, kind="none", dim=8, mask_seed=1, config=ROUTED, outliers=1.0):
    """`outliers`: factor of one key in every cluster."""
    tensors = attention_tensors(batch=2, heads=2, kv_heads=1, dim=dim, value_dim=5, n_keys=130, seed=6)
    tensors[1][:, :, 10::32] *= outliers
    check_routed(config, tensors, is_causal=is_causal, mask=random_mask(kind, 2, 130, seed=mask_seed))


CHECKS = {
    "unbiased over selected keys": lambda: check_unbiased(PAPER, seeds=SEEDS, selected=True),
    "unbiased over all keys": lambda: check_unbiased(PAPER, seeds=SEEDS, selected=False),
    "oracle": lambda: _oracle(PAPER),
    "oracle, ragged block": lambda: _oracle(PAPER.replace(top_k=11)),
    "oracle, hash": lambda: _oracle(with_lsh(PAPER, alignment="hash")),
    "oracle, causal": lambda: _oracle(HASHED, is_causal=True),
    "equal keys": check_centroids_of_equal_keys,
    "future": lambda: check_future(HASHED, n_keys=38),
    "gray neighbours": lambda: check_gray_neighbours(4),
    "merge of a split": check_merge_of_split,
    "exact with padding": lambda: check_exact(
        attention_tensors(batch=2, n_keys=13), mask=random_mask("right", 2, 13, seed=3)
    ),
    "gradients": lambda: check_gradients(
        HASHED, attention_tensors(heads=2, kv_heads=1, n_keys=21, seed=2), is_causal=True
    ),
    "padding sides": lambda: check_padding_sides(HASHED, is_causal=True),
    "routed": _routed,
    "routed, 20 dimensions": lambda: _routed(dim=20),
    "routed, large clusters": lambda: _routed(config=WIDE),
    "routed, outliers": lambda: _routed(config=WIDE, outliers=4.0),
    "routed, holes": lambda: _routed(kind="holes"),
    "routed, holes, not causal": lambda: _routed(is_causal=False, kind="holes"),
    "routed, right padding, not causal": lambda: _routed(is_causal=False, kind="right", mask_seed=0),
}

RESIDUAL_OF_ALL = Break("selected.blocks", 'if coupling.residual_weight == "all":', "if True:")
OVERLAP_COUNTED = Break("selected.blocks", 'if keys.block_size and coupling.overlap == "exclude":', "if False:")
GRAY_CODE_AS_RANK = Break("scoring.hashing", "        shift *= 2\n", "        shift = n_bits\n")
GAPS_OVERLOOKED = Break("routed.attention", "return gaps if bool(gaps.any()) else None", "return None")

MUTATIONS = {
    "residual weighted by n, not |S|": (RESIDUAL_OF_ALL, "unbiased over selected keys"),
    "residual weighted by n, not |S|, oracle": (RESIDUAL_OF_ALL, "oracle"),
    "query's block not excluded from the residual": (OVERLAP_COUNTED, "unbiased over selected keys"),
    "query's block not excluded, all keys": (OVERLAP_COUNTED, "unbiased over all keys"),
    "last key never sampled": (
        Break("selected.blocks", "(draws * count[..., None]).floor()", "(draws * (count[..., None] - 1)).floor()"),
        "oracle",
    ),
    "centroid without log count": (
        Break("selected.centroids", "torch.log(count).view(shape)", "torch.log(count).clamp_max(0.0).view(shape)"),
        "equal keys",
    ),
    "block reads one key too far": (
        Break("selected.causal_grid", "- 1) * width + step", "- 1) * width + step + 1"),
        "oracle, causal",
    ),
    "leaf reads one key ahead": (
        Break("selected.causal_grid", "(head + positions.clamp_max(", "(head + (positions + 1).clamp_max("),
        "future",
    ),
    "Gray code used as the rank": (GRAY_CODE_AS_RANK, "gray neighbours"),
    "Gray code used as the rank, oracle": (GRAY_CODE_AS_RANK, "oracle"),
    "parts folded with a wrong weight": (
        Break("ops.parts", "torch.logaddexp(old.lse, lse)", "torch.logaddexp(old.lse, lse + 0.1)"),
        "oracle, causal",
    ),
    "merge by plain average": (
        Break("ops.parts", "(wide * (weights / safe)[..., None]).sum(0)", "wide.mean(0)"),
        "merge of a split",
    ),
    "padding bias dropped": (Break("ops.parts", ".masked_fill_(~valid, -torch.inf)", ""), "exact with padding"),
    "gradient under the part's own lse": (
        Break("ops.cpu", "wide, output = _same_width(tile), merged.output",
              "merged = self.forward(tile); wide, output = _same_width(tile), merged.output"),
        "gradients",
    ),
    "positions counted from the first slot": (
        Break("call", "mask.to(torch.uint8).argmax(dim=1)", "mask.to(torch.uint8).argmax(dim=1) * 0"),
        "padding sides",
    ),
    "filler of the last block gets mass": (
        Break("selected.blocks", "slot < keys.count[..., None]", "slot >= 0 * keys.count[..., None]"),
        "oracle, ragged block",
    ),
    "wrong block of a query": (
        Break("selected.blocks", "flat = ranks.flatten(2)", "flat = ranks.flatten(2) + 1"),
        "oracle, hash",
    ),
}  # fmt: skip
ROUTED_MUTATIONS = {
    "tree cut across another direction": (
        Break("routed.index", "(points, layout.levels)", "(points, layout.levels, power_iterations=0)"),
        "routed",
    ),
    "keys quantized without subtracting their centroid": (
        Break("routed.index", "encode_keys(away.detach().view(keys.shape))", "encode_keys(keys.detach())"),
        "routed",
    ),
    "one scale for both halves of an int4 key": (
        Break("routed.index", "<< 4), scales)", "<< 4), scales.amax(-1, keepdim=True).expand_as(scales))"),
        "routed, 20 dimensions",
    ),
    "halves of an int4 key swapped": (
        Break("routed.index", "numbers[..., 0, :] | (numbers[..., 1, :] << 4)",
              "numbers[..., 1, :] | (numbers[..., 0, :] << 4)"),
        "routed",
    ),
    "key covariance of one chunk, not of all": (
        Break("routed.index", "return parts.cumsum(1) / count[:, None, None]", "return parts"),
        "routed",
    ),
    "keys read stay in their centroid": (
        Break("routed.reference", "seen.rows.shape[1] - found.hits", "seen.rows.shape[1] - 0 * found.hits"),
        "routed",
    ),
    "clusters searched within two deviations": (
        Break("routed.reference", "search.reach * scores.spread", "2.0 * scores.spread"),
        "routed, large clusters",
    ),
    "outlier keys compared no more than others": (
        Break("routed.reference", "min(ODD, seen.rows.shape[1])", "min(0, seen.rows.shape[1])"),
        "routed, outliers",
    ),
    "keys nearest to the centroid are outliers": (
        Break("routed.index", "odd.argsort(dim=2, descending=True", "odd.argsort(dim=2, descending=False"),
        "routed, outliers",
    ),
    "sinks count in full in the threshold": (
        Break("routed.reference", "scores.sinks + math.log(SINK_PART)", "scores.sinks"),
        "routed",
    ),
    "half the minimum weight": (
        Break("routed.attention", "Search(1 / config.min_weight", "Search(2 / config.min_weight"),
        "routed",
    ),
    "threshold without the covariance correction": (
        Break("routed.reference", ".clamp_max(MOST_KNOWN_GAIN)", "* 0"),
        "routed",
    ),
    "covariance correction unbounded": (
        Break("routed.reference", ".clamp(-MOST_GAIN, MOST_GAIN)", ""),
        "routed",
    ),
    "no covariance correction of a centroid": (
        Break("routed.reference", "scores.nodes + gain + left.clamp_min(1)", "scores.nodes + left.clamp_min(1)"),
        "routed",
    ),
    "values of centroids not corrected": (
        Break("routed.reference", "columns[:, n_sinks:] * weighed.move", "columns[:, n_sinks:] * 0"),
        "routed",
    ),
    "query's chunk read beyond the query": (Break("routed.local", "causal=True)", "causal=False)"), "routed"),
    "one far chunk too many": (
        Break("routed.attention", "seen = (chunks * layout.nodes_per_chunk",
              "seen = ((chunks + 1).clamp_max(layout.n_chunks) * layout.nodes_per_chunk"),
        "routed",
    ),
    "holes overlooked": (GAPS_OVERLOOKED, "routed, holes"),
    "holes overlooked, not causal": (GAPS_OVERLOOKED, "routed, holes, not causal"),
    "filler behind a short sequence gets mass": (
        Break("routed.local", "None if bool(inside.all()) else hidden)", "None)"),
        "routed, right padding, not causal",
    ),
    "centroids pass no gradient to keys": (
        Break("routed.plain", "node_key=node_key,", "node_key=node_key.detach() + 0 * node_key,"),
        "routed",
    ),
    "key covariance passes no gradient": (
        Break("routed.plain", "spread=spread,", "spread=spread.detach() + 0 * spread,"),
        "routed",
    ),
    "key-value covariance passes no gradient": (
        Break("routed.plain", "drift=drift,", "drift=drift.detach() + 0 * drift,"),
        "routed",
    ),
    "backward pass finds keys by another threshold": (
        Break("routed.plain", "scores_of(own, seen), limit[place])", "scores_of(own, seen), limit[place] + 0.5)"),
        "routed",
    ),
    "threshold passes no gradient to local keys": (
        Break("routed.plain", "grad_limit[place] = grads[9]", "grad_limit[place] = 0 * grads[9]"),
        "routed",
    ),
    "threshold passes no gradient to centroids": (
        Break("routed.plain", "followed_limit(limit, scores, seen, view.search)", "limit"),
        "routed",
    ),
}  # fmt: skip
"""Rows of the routed engine."""
ALL = {**MUTATIONS, **ROUTED_MUTATIONS}


@cache
def _holds(check):
    CHECKS[check]()
    return True


def test_every_text_is_there():
    assert stale({name: row for name, (row, _) in ALL.items()}) == {}


@pytest.mark.parametrize("name", ALL)
def test_a_deliberate_break_is_caught(name, monkeypatch):
    row, check = ALL[name]
    assert _holds(check)
    row.apply(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check]()


def test_the_switches_of_coupling_are_the_same_breaks():
    for artefact in (Coupling(residual_weight="all"), Coupling(overlap="count")):
        with pytest.raises(AssertionError, match="standard errors away"):
            check_unbiased(PAPER.replace(coupling=artefact), seeds=SEEDS, selected=True)
