"""The mutation table of all but the routed engine: break one line of code, and a named check must fail.

A row is data: the module, the text, what replaces it (see `breaks.Break`), and the check. When the code moves, the
first test lists every row whose text is gone.
"""

from functools import cache

import pytest
from attention_checks import (
    check_centroids_of_equal_keys,
    check_exact,
    check_gradients,
    check_gray_neighbours,
    check_merge_of_split,
    check_oracle,
    check_unbiased,
    with_lsh,
)
from breaks import Break, stale
from oracles.inputs import attention_tensors, random_mask

import prescore
from prescore import Coupling, Lsh, Selected

LSH = Lsh(block_size=4, sample_size=3, n_projections=3, alignment="rank")
PAPER = Selected.paper("key-norm", 12, min_seq_len=0, inner=LSH)
HASHED = Selected.paper("key-norm", 3, min_seq_len=4, inner=LSH.replace(alignment="hash"))
SEEDS = 400


def _oracle(config, is_causal=False, given=False):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=31, seed=6)
    selection = prescore.select(tensors[1], "key-norm", top_k=9, sinks=2) if given else None
    check_oracle(config, tensors, is_causal=is_causal, selection=selection)


CHECKS = {
    "unbiased over selected keys": lambda: check_unbiased(PAPER, seeds=SEEDS, selected=True),
    "unbiased over all keys": lambda: check_unbiased(PAPER, seeds=SEEDS, selected=False),
    "oracle": lambda: _oracle(PAPER),
    "oracle, ragged block": lambda: _oracle(PAPER.replace(top_k=11)),
    "oracle, hash": lambda: _oracle(with_lsh(PAPER, alignment="hash")),
    "oracle, causal": lambda: _oracle(HASHED, is_causal=True),
    "oracle, given selection": lambda: _oracle(PAPER, given=True),
    "equal keys": check_centroids_of_equal_keys,
    "gray neighbours": lambda: check_gray_neighbours(4),
    "merge of a split": check_merge_of_split,
    "exact with padding": lambda: check_exact(
        attention_tensors(batch=2, n_keys=13), mask=random_mask("right", 2, 13, seed=3)
    ),
    "gradients": lambda: check_gradients(
        HASHED, attention_tensors(heads=2, kv_heads=1, n_keys=21, seed=2), is_causal=True
    ),
}

RESIDUAL_OF_ALL = Break("selected.blocks", 'if coupling.residual_weight == "all":', "if True:")
OVERLAP_COUNTED = Break("selected.blocks", 'if keys.block_size and coupling.overlap == "exclude":', "if False:")
GRAY_CODE_AS_RANK = Break("scoring.hashing", "        shift *= 2\n", "        shift = n_bits\n")

MUTATIONS = {
    "residual weighted by n, not |S|": (RESIDUAL_OF_ALL, "unbiased over selected keys"),
    "residual weighted by n, not |S|, oracle": (RESIDUAL_OF_ALL, "oracle"),
    "query's block not excluded from the residual": (OVERLAP_COUNTED, "unbiased over selected keys"),
    "query's block not excluded, all keys": (OVERLAP_COUNTED, "unbiased over all keys"),
    "last key never sampled": (
        Break("selected.blocks", "(draws * count[..., None]).floor()", "(draws * (count[..., None] - 1)).floor()"),
        "oracle",
    ),
    "first key of a given selection lost": (
        Break("attention", "call.valid, key.shape[2])", "call.valid, key.shape[2]); members[..., 0] = False"),
        "oracle, given selection",
    ),
    "centroid without log count": (
        Break("selected.centroids", "torch.log(count).view(shape)", "torch.log(count).clamp_max(0.0).view(shape)"),
        "equal keys",
    ),
    "block reads one key too far": (
        Break("selected.causal_grid", "- 1) * width + step", "- 1) * width + step + 1"),
        "oracle, causal",
    ),
    "Gray code used as the rank": (GRAY_CODE_AS_RANK, "gray neighbours"),
    "Gray code used as the rank, oracle": (GRAY_CODE_AS_RANK, "oracle"),
    "parts folded with a wrong weight": (
        Break("ops.parts", "(old.peak - shift), lse - shift))", "(old.peak - shift), lse + 0.1 - shift))"),
        "oracle, causal",
    ),
    "merge by plain average": (
        Break("ops.parts", "(outputs * weights[..., None]).sum(0)", "outputs.mean(0)"),
        "merge of a split",
    ),
    "padding bias dropped": (Break("ops.parts", ".masked_fill_(~visible, -torch.inf)", ""), "exact with padding"),
    "gradient under the part's own lse": (
        Break("ops.cpu", "wide, output = _same_width(tile), merged.output",
              "merged = self.forward(tile); wide, output = _same_width(tile), merged.output"),
        "gradients",
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


@cache
def _holds(check):
    CHECKS[check]()
    return True


def test_every_text_is_there():
    assert stale({name: row for name, (row, _) in MUTATIONS.items()}) == {}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_break_is_caught(name, monkeypatch):
    row, check = MUTATIONS[name]
    assert _holds(check)
    row.apply(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check]()


def test_the_switches_of_coupling_are_the_same_breaks():
    for artefact in (Coupling(residual_weight="all"), Coupling(overlap="count")):
        with pytest.raises(AssertionError, match="standard errors away"):
            check_unbiased(PAPER.replace(coupling=artefact), seeds=SEEDS, selected=True)
