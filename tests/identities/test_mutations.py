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
from oracles.inputs import attention_tensors, random_mask

from prescore import Coupling, Lsh, Routed, Selected
from prescore.ops import cpu, parts
from prescore.ops import parts as exact
from prescore.routed import attention as engine
from prescore.routed import attention as lanes
from prescore.routed import index as codes
from prescore.routed import index as tables
from prescore.routed import local, plain, softmax
from prescore.routed import reference as centroids
from prescore.routed import reference as far
from prescore.scoring import hashing
from prescore.selected import blocks
from prescore.selected import causal_grid as grid

LSH = Lsh(block_size=4, sample_size=3, n_projections=3, alignment="rank")
PAPER = Selected.paper("key-norm", 12, min_seq_len=0, inner=LSH)
HASHED = Selected.paper("key-norm", 3, min_seq_len=4, inner=LSH.replace(alignment="hash"))
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=16, sinks=3, exact_until=0)
WIDE = ROUTED.replace(cluster_size=32, chunk_size=32)
"""Half of a node's keys are odd, the others are compared where its logits reach."""
SEEDS = 400


def _residual(change):
    """Patch the residual: `change(coupling, draws, count)` -> what the original is called with."""

    def patch(monkeypatch):
        original = blocks._residual_columns

        def broken(pair, keys, draws, coupling, dtype):
            coupling, draws = change(coupling, draws, keys.count)
            return original(pair, keys, draws, coupling, dtype)

        monkeypatch.setattr(blocks, "_residual_columns", broken)

    return patch


def _weight_of_all_keys(monkeypatch):
    _residual(lambda c, draws, _: (dataclasses.replace(c, residual_weight="all"), draws))(monkeypatch)


def _overlap_counted(monkeypatch):
    _residual(lambda c, draws, _: (dataclasses.replace(c, overlap="count"), draws))(monkeypatch)


def _last_key_never_sampled(monkeypatch):
    _residual(lambda c, draws, n: (c, draws * float(n.max() - 1) / float(n.max())))(monkeypatch)


def _stand_in_without_its_count(monkeypatch):
    from prescore.selected import plan

    original = plan.cluster_centroids

    def broken(*arguments):
        made, columns = original(*arguments)
        return made, dataclasses.replace(columns, bias=columns.bias.clamp_max(0.0))

    monkeypatch.setattr(plan, "cluster_centroids", broken)


def _block_one_key_too_far(monkeypatch):
    from prescore.selected import plan

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


def _tree_without_power_steps(monkeypatch):
    original = tables.bisection_tree

    def broken(points, levels, **options):
        return original(points, levels, power_iterations=0, **options)

    monkeypatch.setattr(tables, "bisection_tree", broken)


def _codes_of_whole_keys(monkeypatch):
    original = tables.build_nodes

    def broken(key, value, *others):
        nodes = original(key, value, *others)
        whole = codes.encode_keys(tables.take_rows(key.detach(), nodes.rows).to(nodes.key.dtype))
        return dataclasses.replace(nodes, codes=whole)

    monkeypatch.setattr(lanes, "build_nodes", broken)


def _one_scale_for_both_halves(monkeypatch):
    original = tables.encode_keys

    def broken(keys):
        found = original(keys)
        return found._replace(scales=found.scales.amax(-1, keepdim=True).expand_as(found.scales))

    monkeypatch.setattr(tables, "encode_keys", broken)


def _high_and_low_numbers_swapped(monkeypatch):
    original = tables.encode_keys

    def broken(keys):
        found = original(keys)
        return found._replace(packed=(found.packed >> 4) | (found.packed << 4))

    monkeypatch.setattr(tables, "encode_keys", broken)


def _spread_of_the_last_chunk_alone(monkeypatch):
    monkeypatch.setattr(lanes, "pooled", lambda parts: parts)


def _read_rows_stay_in_their_stand_in(monkeypatch):
    original = plain.weigh

    def broken(query, seen, scores, limit, found, row_key):
        return original(query, seen, scores, limit, found._replace(hits=torch.zeros_like(found.hits)), row_key)

    monkeypatch.setattr(plain, "weigh", broken)


def _nodes_searched_within_two_deviations(monkeypatch):
    original = plain.find_rows

    def broken(query, seen, search, *others):
        return original(query, seen, dataclasses.replace(search, reach=2.0), *others)

    monkeypatch.setattr(plain, "find_rows", broken)


def _no_odd_keys(monkeypatch):
    monkeypatch.setattr(far, "ODD", 0)


def _nearest_keys_as_odd_ones(monkeypatch):
    original = tables._odd_first
    monkeypatch.setattr(tables, "_odd_first", lambda rows, keys: original(rows, keys).flip(2))


def _sinks_count_in_full(monkeypatch):
    monkeypatch.setattr(far, "SINK_PART", 1.0)


def _twice_as_many_rows(monkeypatch):
    monkeypatch.setattr(lanes, "SHARE_PER_ROW", 4)


def _known_without_the_nodes_gain(monkeypatch):
    monkeypatch.setattr(far, "MOST_KNOWN_GAIN", 0.0)


def _gain_without_a_bound(monkeypatch):
    monkeypatch.setattr(centroids, "MOST_GAIN", math.inf)


def _no_gain(monkeypatch):
    original = far.corrections

    def broken(*arguments):
        gain, move = original(*arguments)
        return torch.zeros_like(gain), move

    monkeypatch.setattr(far, "corrections", broken)


def _values_do_not_move(monkeypatch):
    original = far.corrections

    def broken(*arguments):
        gain, move = original(*arguments)
        return gain, torch.zeros_like(move)

    monkeypatch.setattr(far, "corrections", broken)


def _one_chunk_too_many_behind(monkeypatch):
    original = lanes.view_of

    def broken(lane, layout, *others):
        view, most = original(lane, layout, *others), layout.n_chunks * layout.nodes_per_chunk
        return dataclasses.replace(view, visible=(view.visible + layout.nodes_per_chunk).clamp_max(most))

    monkeypatch.setattr(lanes, "view_of", broken)


def _own_square_is_not_causal(monkeypatch):
    original = local.Chunks.square

    def broken(*arguments):
        return original(*arguments)._replace(causal=False)

    monkeypatch.setattr(local.Chunks, "square", broken)


def _gaps_are_overlooked(monkeypatch):
    monkeypatch.setattr(engine, "_with_gaps", lambda call: None)


def _filler_of_a_tail_has_mass(monkeypatch):
    original = local._Tail.of

    def broken(*arguments):
        return original(*arguments)._replace(bias=None)

    monkeypatch.setattr(local._Tail, "of", broken)


def _far_backward(change):
    """Patch the far part's backward pass: `change(original, limit, sums)` -> the gradient of the limit."""

    def patch(monkeypatch):
        original = softmax.attend_plain_backward

        def broken(grad, query, sources, view, merged, limit, sums):
            def run(limit):
                return original(grad, query, sources, view, merged, limit, sums)

            return change(run, limit, sums)

        monkeypatch.setattr(softmax, "attend_plain_backward", broken)

    return patch


def _dropped(number):
    """The far part's gradient of one input or source comes to nothing."""

    def change(run, limit, sums):
        found = run(limit)
        sums[number].zero_()
        return found

    return _far_backward(change)


_stand_ins_pass_no_gradient_to_keys = _dropped(5)
_spread_passes_no_gradient = _dropped(7)
_drift_passes_no_gradient = _dropped(8)
_rows_found_again_by_another_limit = _far_backward(lambda run, limit, _: run(limit + 0.5))
_limit_passes_nothing_to_what_lies_near = _far_backward(lambda run, limit, _: torch.zeros_like(run(limit)))


def _limit_passes_nothing_to_nodes(monkeypatch):
    monkeypatch.setattr(plain, "followed_limit", lambda limit, *_: limit)


def _unbiased(selected, seeds=SEEDS):
    return lambda: check_unbiased(PAPER, seeds=seeds, selected=selected)


def _oracle(config, is_causal=False, kind="none"):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=31, seed=6)
    return lambda: check_oracle(config, tensors, is_causal=is_causal, mask=random_mask(kind, 2, 31, seed=1))


def _exact_with_padding():
    check_exact(attention_tensors(batch=2, n_keys=13), mask=random_mask("right", 2, 13, seed=3))


def _gradients():
    check_gradients(HASHED, attention_tensors(heads=2, kv_heads=1, n_keys=21, seed=2), is_causal=True)


def _routed(is_causal=True, kind="none", dim=8, mask_seed=1, config=ROUTED, lone=1.0):
    """`lone`: how many times as long one key of every node is."""
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "dim": dim, "value_dim": 5}
    tensors = attention_tensors(n_keys=130, seed=6, **sizes)
    tensors[1][:, :, 10::32] *= lone
    mask = random_mask(kind, 2, 130, seed=mask_seed)
    return lambda: check_routed(config, tensors, is_causal=is_causal, mask=mask)


MUTATIONS = {
    "residual weighted by n, not |S|: unbiased": (_weight_of_all_keys, _unbiased(selected=True)),
    "residual weighted by n, not |S|: oracle": (_weight_of_all_keys, _oracle(PAPER)),
    "own block not excluded from the residual: unbiased": (_overlap_counted, _unbiased(selected=True)),
    "own block not excluded, all keys: unbiased": (_overlap_counted, _unbiased(selected=False)),
    "last key never sampled: unbiased": (_last_key_never_sampled, _unbiased(selected=False, seeds=1200)),
    "centroid without log count: centroids of equal keys": (
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
    "tree cut across another direction: routed": (_tree_without_power_steps, _routed()),
    "codes of whole keys, not of what they differ: routed": (_codes_of_whole_keys, _routed()),
    "one scale for both halves of a code: routed": (_one_scale_for_both_halves, _routed(dim=20)),
    "numbers of both halves swapped: routed": (_high_and_low_numbers_swapped, _routed()),
    "spread of one chunk, not of all: routed": (_spread_of_the_last_chunk_alone, _routed()),
    "rows that were read stay in their centroid: routed": (_read_rows_stay_in_their_stand_in, _routed()),
    "nodes searched within two deviations: routed": (_nodes_searched_within_two_deviations, _routed(config=WIDE)),
    "outlier keys compared no more than others: routed": (_no_odd_keys, _routed(config=WIDE, lone=4.0)),
    "the keys nearest to the mean are odd: routed": (
        _nearest_keys_as_odd_ones,
        _routed(config=WIDE, lone=4.0),
    ),
    "sinks count in full in the limit: routed": (_sinks_count_in_full, _routed()),
    "limit of twice as many rows: routed": (_twice_as_many_rows, _routed()),
    "limit without what nodes gain: routed": (_known_without_the_nodes_gain, _routed()),
    "gain of a centroid unbounded: routed": (_gain_without_a_bound, _routed()),
    "no gain of a centroid: routed": (_no_gain, _routed()),
    "values of centroids do not move: routed": (_values_do_not_move, _routed()),
    "own chunk read beyond the query: routed": (_own_square_is_not_causal, _routed()),
    "one chunk too many behind a query: routed": (_one_chunk_too_many_behind, _routed()),
    "gaps behind queries overlooked: routed": (_gaps_are_overlooked, _routed(kind="holes")),
    "gaps between keys overlooked, no causal mask: routed": (
        _gaps_are_overlooked,
        _routed(is_causal=False, kind="holes"),
    ),
    "filler behind a short sequence gets mass: routed": (
        _filler_of_a_tail_has_mass,
        _routed(is_causal=False, kind="right", mask_seed=0),
    ),
    "centroids pass no gradient to keys: routed": (_stand_ins_pass_no_gradient_to_keys, _routed()),
    "rows found again by another limit: routed": (_rows_found_again_by_another_limit, _routed()),
    "spread passes no gradient: routed": (_spread_passes_no_gradient, _routed()),
    "drift passes no gradient: routed": (_drift_passes_no_gradient, _routed()),
    "limit passes no gradient to what lies near: routed": (_limit_passes_nothing_to_what_lies_near, _routed()),
    "limit passes no gradient to nodes: routed": (_limit_passes_nothing_to_nodes, _routed()),
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
