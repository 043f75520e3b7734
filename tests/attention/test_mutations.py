"""The mutation table: break the code on purpose, and a named check must fail.

Each row patches one line of meaning. The check passes on the code as it is and raises under the break.
"""

import dataclasses

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
    check_stand_ins_of_equal_keys,
    check_unbiased,
)

from prescore import Coupling, PrescoreConfig
from prescore.attention import exact, grid, hyper, kernels_cpu, lsh, parts
from prescore.testing.inputs import attention_tensors, padding_mask

HYPER = {"min_seq_len": 0, "block_size": 4, "sample_size": 3, "n_projections": 3}
PAPER = PrescoreConfig.paper("key-norm", 12, **HYPER)
HASHED = PrescoreConfig.paper("key-norm", 3, **{**HYPER, "min_seq_len": 4, "alignment": "hash"})
SEEDS = 400


def _residual(change):
    """Patch the residual: `change(coupling, draws, count)` -> what the original is called with."""

    def patch(monkeypatch):
        original = hyper._residual_columns

        def broken(problems, order, count, draws, block_size, most, coupling, dtype):
            coupling, draws = change(coupling, draws, count)
            return original(problems, order, count, draws, block_size, most, coupling, dtype)

        monkeypatch.setattr(hyper, "_residual_columns", broken)

    return patch


def _weight_of_all_keys(monkeypatch):
    _residual(lambda c, draws, _: (dataclasses.replace(c, residual_weight="all"), draws))(monkeypatch)


def _overlap_counted(monkeypatch):
    _residual(lambda c, draws, _: (dataclasses.replace(c, overlap="count"), draws))(monkeypatch)


def _last_key_never_sampled(monkeypatch):
    _residual(lambda c, draws, n: (c, draws * float(n.max() - 1) / float(n.max())))(monkeypatch)


def _stand_in_without_its_count(monkeypatch):
    from prescore import plan

    original = plan.centroid_stand_ins

    def broken(*arguments):
        made, columns = original(*arguments)
        return made, dataclasses.replace(columns, bias=columns.bias.clamp_max(0.0))

    monkeypatch.setattr(plan, "centroid_stand_ins", broken)


def _block_one_key_too_far(monkeypatch):
    from prescore import plan

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
    monkeypatch.setattr(lsh, "gray_rank", lambda code, n_bits: code ^ (code >> 1))


def _fold_without_weights(monkeypatch):
    original = parts._fold_in

    def broken(total, part, output, lse, n_rows):
        if total is not None:
            lse = lse + 0.1
        return original(total, part, output, lse, n_rows)

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
    original = kernels_cpu.CpuFlash.backward

    def broken(self, grad, query, key, value, bias, output, lse, causal, scale):
        output, lse = self.forward(query, key, value, bias, causal, scale)
        return original(self, grad, query, key, value, bias, output, lse, causal, scale)

    monkeypatch.setattr(kernels_cpu.CpuFlash, "backward", broken)


def _positions_from_the_first_slot(monkeypatch):
    from prescore import layout

    monkeypatch.setattr(layout, "first_real", lambda mask: mask.new_zeros(mask.shape[0], dtype=torch.int64))


def _block_filler_has_mass(monkeypatch):
    original = hyper._block_columns

    def broken(*arguments):
        columns = original(*arguments)
        return dataclasses.replace(columns, bias=torch.zeros_like(columns.bias))

    monkeypatch.setattr(hyper, "_block_columns", broken)


def _query_in_the_next_bucket(monkeypatch):
    original = hyper.hash_tiles

    def broken(ranks, *others):
        return original(ranks + 1, *others)

    monkeypatch.setattr(hyper, "hash_tiles", broken)


def _unbiased(selected, seeds=SEEDS):
    return lambda: check_unbiased(PAPER, seeds=seeds, selected=selected)


def _oracle(config, is_causal=False, kind="none"):
    tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=31, seed=6)
    return lambda: check_oracle(config, tensors, is_causal=is_causal, mask=padding_mask(kind, 2, 31, seed=1))


def _exact_with_padding():
    check_exact(attention_tensors(batch=2, n_keys=13), mask=padding_mask("right", 2, 13, seed=3))


def _gradients():
    check_gradients(HASHED, attention_tensors(heads=2, kv_heads=1, n_keys=21, seed=2), is_causal=True)


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
    "wrong block of a query: oracle": (_query_in_the_next_bucket, _oracle(PAPER.replace(alignment="hash"))),
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
