"""The mutation table: break the code on purpose, and a named check must fail.

Each row patches one line of meaning. The check passes on the code as it is and raises under the break.
"""

import dataclasses
import math

import pytest
import torch
from attention_checks import (
    check_exact,
    check_future,
    check_gradients,
    check_gray_neighbours,
    check_merge_of_split,
    check_oracle,
    check_padding_sides,
    check_routed,
    check_stand_ins_of_equal_keys,
    check_unbiased,
    with_lsh,
)
from copying_heads import CONFIG as COPY_CONFIG
from copying_heads import SCALE as COPY_SCALE
from copying_heads import copying

from prescore import Coupling, Lsh, Routed, Selected
from prescore.clustering import hashing
from prescore.hyper import blocks, grid
from prescore.ops import cpu, exact, parts
from prescore.routed import bounds, clusters, columns, engine, heads, lanes, levels, softmax
from prescore.testing.inputs import attention_tensors, random_mask

LSH = Lsh(block_size=4, sample_size=3, n_projections=3, alignment="rank")
PAPER = Selected.paper("key-norm", 12, min_seq_len=0, inner=LSH)
HASHED = Selected.paper("key-norm", 3, min_seq_len=4, inner=LSH.replace(alignment="hash"))
ROUTED = Routed(rows=8, leaf_size=4, chunk_size=16, sinks=3, exact_until=0)
NODES = Routed(rows=4, leaf_size=2, chunk_size=4, sinks=3, exact_until=0)
"""The far past of a few hundred keys is nodes."""
SEEDS = 400


def _residual(change):
    """Patch the residual: `change(coupling, draws, count)` -> what the original is called with."""

    def patch(monkeypatch):
        original = blocks._residual_columns

        def broken(meeting, keys, draws, coupling, dtype):
            coupling, draws = change(coupling, draws, keys.count)
            return original(meeting, keys, draws, coupling, dtype)

        monkeypatch.setattr(blocks, "_residual_columns", broken)

    return patch


def _weight_of_all_keys(monkeypatch):
    _residual(lambda c, draws, _: (dataclasses.replace(c, residual_weight="all"), draws))(monkeypatch)


def _overlap_counted(monkeypatch):
    _residual(lambda c, draws, _: (dataclasses.replace(c, overlap="count"), draws))(monkeypatch)


def _last_key_never_sampled(monkeypatch):
    _residual(lambda c, draws, n: (c, draws * float(n.max() - 1) / float(n.max())))(monkeypatch)


def _stand_in_without_its_count(monkeypatch):
    from prescore.hyper import plan

    original = plan.centroid_stand_ins

    def broken(*arguments):
        made, columns = original(*arguments)
        return made, dataclasses.replace(columns, bias=columns.bias.clamp_max(0.0))

    monkeypatch.setattr(plan, "centroid_stand_ins", broken)


def _block_one_key_too_far(monkeypatch):
    from prescore.hyper import plan

    original = plan.levels

    def broken(*arguments):
        return [
            dataclasses.replace(level, key_positions=level.key_positions + 1) for level in original(*arguments)
        ]

    monkeypatch.setattr(plan, "levels", broken)


def _leaf_sees_one_key_ahead(monkeypatch):
    original = grid.key_rows

    def broken(positions, queries, n_keys):
        return original((positions + 1).clamp_max(n_keys - 1), queries, n_keys)

    monkeypatch.setattr(grid, "key_rows", broken)


def _gray_code_as_rank(monkeypatch):
    monkeypatch.setattr(hashing, "gray_rank", lambda code, n_bits: code ^ (code >> 1))


def _fold_without_weights(monkeypatch):
    original = parts._fold_in

    def broken(total, part, found, n_rows):
        if total is not None:
            found = found._replace(lse=found.lse + 0.1)
        return original(total, part, found, n_rows)

    monkeypatch.setattr(parts, "_fold_in", broken)


def _merge_by_average(monkeypatch):
    import prescore

    def broken(*attended):
        lse = torch.stack([part.lse for part in attended]).logsumexp(0)
        return prescore.Attended(torch.stack([part.output for part in attended]).mean(0), lse)

    monkeypatch.setattr(prescore, "merge", broken, raising=False)


def _padding_bias_dropped(monkeypatch):
    original = exact.padding_bias
    monkeypatch.setattr(exact, "padding_bias", lambda *arguments: torch.zeros_like(original(*arguments)))


def _gradient_of_the_part_alone(monkeypatch):
    original = cpu.CpuFlash.backward

    def broken(self, tile, grad, merged):
        return original(self, tile, grad, self.forward(tile))

    monkeypatch.setattr(cpu.CpuFlash, "backward", broken)


def _positions_from_the_first_slot(monkeypatch):
    from prescore import call

    monkeypatch.setattr(call, "first_real", lambda mask: mask.new_zeros(mask.shape[0], dtype=torch.int64))


def _block_filler_has_mass(monkeypatch):
    original = blocks._block_columns

    def broken(*arguments):
        columns = original(*arguments)
        return dataclasses.replace(columns, bias=torch.zeros_like(columns.bias))

    monkeypatch.setattr(blocks, "_block_columns", broken)


def _query_in_the_next_bucket(monkeypatch):
    original = blocks.hash_tiles

    def broken(ranks, *others):
        return original(ranks + 1, *others)

    monkeypatch.setattr(blocks, "hash_tiles", broken)


def _chosen_leaf_keeps_its_stand_in(monkeypatch):
    monkeypatch.setattr(columns, "_take_away", lambda *arguments: None)


def _most_alike_keys_are_single(monkeypatch):
    original = clusters.unlikeness
    monkeypatch.setattr(clusters, "unlikeness", lambda points: -original(points))


def _tree_without_power_steps(monkeypatch):
    original = clusters.bisection_tree

    def broken(points, levels, **options):
        return original(points, levels, power_iterations=0, **options)

    monkeypatch.setattr(clusters, "bisection_tree", broken)


def _one_chunk_too_many_behind(monkeypatch):
    original = lanes.stand_in_ranges

    def broken(layout, pieces):
        return original(layout, min(pieces + 1, layout.n_pieces))

    monkeypatch.setattr(lanes, "stand_in_ranges", broken)


def _nodes_forget_their_singles(monkeypatch):
    for module in (levels, bounds):
        monkeypatch.setattr(module, "new_singles", lambda layout, level: 0)


def _down_to_the_worst_child(monkeypatch):
    original = levels.Descent.to_leaves

    def broken(self, query, *others):
        return original(self, -query, *others)

    monkeypatch.setattr(levels.Descent, "to_leaves", broken)


def _node_keeps_its_whole_weight(monkeypatch):
    original = levels.read_shares
    monkeypatch.setattr(levels, "read_shares", lambda layout: [-math.inf, *(0.0 for _ in original(layout)[1:])])


def _no_head_copies(monkeypatch):
    monkeypatch.setattr(heads, "TOO_FAR_OFF", float("inf"))


def _other_heads_give_up_nothing(monkeypatch):
    monkeypatch.setattr(heads, "SPARE", 0.0)


def _gaps_are_overlooked(monkeypatch):
    monkeypatch.setattr(engine, "_with_gaps", lambda call: None)


def _padding_is_clustered(monkeypatch):
    original = clusters._alive
    monkeypatch.setattr(clusters, "_alive", lambda *arguments: torch.ones_like(original(*arguments)))


def _large_pieces_beside_their_chunks(monkeypatch):
    original = clusters._seen
    monkeypatch.setattr(clusters, "_seen", lambda *arguments: torch.ones_like(original(*arguments)))


def _stand_ins_pass_no_gradient_to_keys(monkeypatch):
    original = softmax.attend_columns_backward

    def broken(*arguments):
        grads = original(*arguments)
        return grads._replace(key=torch.zeros_like(grads.key))

    monkeypatch.setattr(softmax, "attend_columns_backward", broken)


def _unbiased(selected, seeds=SEEDS):
    return lambda: check_unbiased(PAPER, seeds=seeds, selected=selected)


def _oracle(config, is_causal=False, kind="none"):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=31, seed=6)
    return lambda: check_oracle(config, tensors, is_causal=is_causal, mask=random_mask(kind, 2, 31, seed=1))


def _exact_with_padding():
    check_exact(attention_tensors(batch=2, n_keys=13), mask=random_mask("right", 2, 13, seed=3))


def _gradients():
    check_gradients(HASHED, attention_tensors(heads=2, kv_heads=1, n_keys=21, seed=2), is_causal=True)


def _routed(config=ROUTED, is_causal=True, kind="none", n_keys=130, n_query=None):
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "dim": 8, "value_dim": 5}
    tensors = attention_tensors(n_query=n_query, n_keys=n_keys, seed=6, **sizes)
    mask = random_mask(kind, 2, n_keys, seed=1)
    return lambda: check_routed(config, tensors, is_causal=is_causal, mask=mask)


def _copying():
    check_routed(COPY_CONFIG, copying(n=480), scale=COPY_SCALE)


def _nodes():
    return _routed(NODES, n_keys=400, n_query=30)


MUTATIONS = {
    "residual weighted by n, not |S|: unbiased": (_weight_of_all_keys, _unbiased(selected=True)),
    "residual weighted by n, not |S|: oracle": (_weight_of_all_keys, _oracle(PAPER)),
    "own block not excluded from the residual: unbiased": (_overlap_counted, _unbiased(selected=True)),
    "own block not excluded, all keys: unbiased": (_overlap_counted, _unbiased(selected=False)),
    "last key never sampled: unbiased": (_last_key_never_sampled, _unbiased(selected=False, seeds=1200)),
    "stand-in without log count: stand-ins of equal keys": (
        _stand_in_without_its_count,
        check_stand_ins_of_equal_keys,
    ),
    "block reads one key too far: oracle": (_block_one_key_too_far, _oracle(HASHED, is_causal=True)),
    "leaf reads one key ahead: perturb the future": (
        _leaf_sees_one_key_ahead,
        lambda: check_future(HASHED, n_keys=38),
    ),
    "Gray code used as the rank: neighbours differ in one bit": (
        _gray_code_as_rank,
        lambda: check_gray_neighbours(4),
    ),
    "Gray code used as the rank: oracle": (_gray_code_as_rank, _oracle(PAPER)),
    "parts folded with a wrong weight: oracle": (_fold_without_weights, _oracle(HASHED, is_causal=True)),
    "merge by plain average: merge of a split": (_merge_by_average, check_merge_of_split),
    "padding bias dropped: exact attention": (_padding_bias_dropped, _exact_with_padding),
    "gradient under the part's own lse: gradients": (_gradient_of_the_part_alone, _gradients),
    "positions counted from the first slot: left = right padding": (
        _positions_from_the_first_slot,
        lambda: check_padding_sides(HASHED, is_causal=True),
    ),
    "filler of the last block gets mass: oracle": (_block_filler_has_mass, _oracle(PAPER.replace(top_k=11))),
    "wrong block of a query: oracle": (_query_in_the_next_bucket, _oracle(with_lsh(PAPER, alignment="hash"))),
    "chosen leaf keeps its stand-in: routed": (_chosen_leaf_keeps_its_stand_in, _routed()),
    "keys most like the rest are single: routed": (_most_alike_keys_are_single, _routed()),
    "tree cut across another direction: routed": (_tree_without_power_steps, _routed()),
    "one chunk too many behind a query: routed": (_one_chunk_too_many_behind, _routed()),
    "nodes forget the singles they stand for: routed": (_nodes_forget_their_singles, _nodes()),
    "down to the worst child of a node: routed": (_down_to_the_worst_child, _nodes()),
    "node counts the leaf that was read: routed": (_node_keeps_its_whole_weight, _nodes()),
    "no head copies: routed": (_no_head_copies, _copying),
    "other heads give up nothing: routed": (_other_heads_give_up_nothing, _copying),
    "gaps behind queries overlooked: routed": (_gaps_are_overlooked, _routed(kind="holes")),
    "padding is clustered: routed": (_padding_is_clustered, _routed(is_causal=False, kind="right")),
    "large pieces beside their chunks: routed": (
        _large_pieces_beside_their_chunks,
        _routed(is_causal=False, kind="right"),
    ),
    "stand-ins pass no gradient to keys: routed": (_stand_ins_pass_no_gradient_to_keys, _routed()),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_break_is_caught(name, monkeypatch):
    mutate, check = MUTATIONS[name]
    check()
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_the_switches_of_coupling_are_the_same_breaks():
    assert Coupling() == Coupling(mask="exclude", residual_weight="selected", overlap="exclude")
    for artefact in (Coupling(residual_weight="all"), Coupling(overlap="count")):
        with pytest.raises(AssertionError, match="standard errors away"):
            check_unbiased(PAPER.replace(coupling=artefact), seeds=SEEDS, selected=True)
