"""A sequence gives the same result alone, in any batch, and padded on either side."""

import math

import pytest
import torch
from attention_checks import assert_equal, attend
from oracles.inputs import attention_tensors, random_mask

import prescore
from prescore import Hyper, Lsh, Routed, Selected

LSH = Lsh(block_size=4, sample_size=5, n_projections=3, alignment="rank")
ROUTED = Routed(min_weight=1 / 8, cluster_size=2, chunk_size=4, sinks=2, exact_until=0)
CONFIGS = {
    "paper": Selected.paper("kmeans", 9, min_seq_len=8, inner=LSH),
    "paper full": Selected.paper("kmeans", 9, min_seq_len=0, inner=LSH),
    "hyper": Hyper(LSH, min_seq_len=8),
    "hyper hash": Hyper(LSH.replace(alignment="hash"), min_seq_len=8),
    "early": Selected.early("key-norm", 9, min_seq_len=8, inner=LSH),
    "selected": Selected(top_k=9, min_seq_len=8),
    "selected by score": Selected("key-diff", min_score=0.0, min_seq_len=8),
    "short is exact": Hyper(LSH, min_seq_len=30),
    "routed": ROUTED,
    "routed, short is exact": ROUTED.replace(min_weight=1 / 4, sinks=1, exact_until=30),
    "share": Selected(top_k=0.4, min_fraction=0.45, min_seq_len=8),
    "sampled": Selected(top_k=9, selector="sample", recent=2, min_seq_len=8),
    "sample fallback": Selected.paper("key-diff", 9, min_fraction=0.35, min_seq_len=0, inner=LSH),
}
LENGTHS = (27, 40, 1, 33)
N_KEYS = 40
SEQUENCES = [attention_tensors(batch=1, heads=4, kv_heads=2, n_keys=length, seed=length) for length in LENGTHS]


def batched(sides):
    """The sequences in one batch, padded with NaN on their sides: tensors, mask, and where each sequence is."""
    mask = torch.zeros(len(LENGTHS), N_KEYS, dtype=torch.bool)
    full = [torch.full((len(LENGTHS), heads, N_KEYS, 4), math.nan, dtype=torch.float64) for heads in (4, 2, 2)]
    full[0][:] = 7.0
    places = []
    for number, (length, side, tensors) in enumerate(zip(LENGTHS, sides, SEQUENCES, strict=True)):
        start = N_KEYS - length if side == "left" else 0
        places.append(slice(start, start + length))
        mask[number, places[-1]] = True
        for target, real in zip(full, tensors, strict=True):
            target[number, :, places[-1]] = real[0]
    return full, mask, places


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_alone_and_padded_in_a_batch(name, is_causal):
    config, options = CONFIGS[name], {"is_causal": is_causal, "generator": 3}
    alone = [attend(tensors, config, **options)[0] for tensors in SEQUENCES]
    for sides in (("left",) * 4, ("right",) * 4, ("left", "right", "left", "right")):
        tensors, mask, places = batched(sides)
        (output, lse), _ = attend(tensors, config, mask, **options)
        for number, place in enumerate(places):
            own = prescore.Attended(output[number : number + 1, :, place], lse[number : number + 1, :, place])
            assert_equal(own, alone[number], f", sequence {number}, padded {sides[number]}")
        assert torch.isfinite(output[mask[:, None].expand(output.shape[:3])]).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_alone_and_beside_another(name, is_causal):
    tensors = attention_tensors(batch=4, heads=4, kv_heads=2, n_keys=35, seed=9)
    both, _ = attend(tensors, CONFIGS[name], is_causal=is_causal)
    for head in range(2):
        group = slice(2 * head, 2 * head + 2)
        own = [tensors[0][:, group], *(t[:, head : head + 1] for t in tensors[1:])]
        alone, _ = attend(own, CONFIGS[name], is_causal=is_causal)
        assert_equal(alone, prescore.Attended(both.output[:, group], both.lse[:, group]), f", KV head {head}")


def test_scores_and_selections_come_back_in_place():
    budget = {"top_k": 7, "sinks": 2, "recent": 1}
    (_, key, _), mask, places = batched(("left", "right", "left", "left"))
    for scorer in prescore.list_scorers():
        scores = prescore.score(key, scorer, key_padding_mask=mask)
        assert torch.isneginf(scores[~mask[:, None].expand_as(scores)]).all()
        chosen = prescore.select(key, scorer, **budget, key_padding_mask=mask)
        for number, (place, (_, alone, _)) in enumerate(zip(places, SEQUENCES, strict=True)):
            flips = (scores[number : number + 1, :, place] - prescore.score(alone, scorer)).abs() > 1e-8
            assert float(flips.double().mean()) <= 0.005
            selected = prescore.select(alone, scorer, **budget)
            for head in range(2):
                here = chosen.indices[number, head][chosen.valid[number, head]] - place.start
                assert here.tolist() == selected.indices[0, head].tolist(), (scorer, number)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_selections_point_at_real_keys_and_their_filler_inside_the_tensor(kind, is_causal):
    for seed in range(8):
        tensors = attention_tensors(batch=3, heads=2, kv_heads=1, n_keys=N_KEYS, seed=seed)
        mask = random_mask(kind, 3, N_KEYS, seed=seed)
        for config in (CONFIGS["paper"].replace(min_seq_len=4), CONFIGS["share"].replace(min_seq_len=4)):
            _, aux = attend(tensors, config, mask, is_causal=is_causal)
            for chosen in aux.selection if is_causal else [aux.selection]:
                real = mask[:, None].expand(3, 1, N_KEYS).gather(2, chosen.indices)
                assert (real | ~chosen.valid).all()
                steps = chosen.indices.diff(dim=-1)
                assert (steps >= 0).all()
                assert (steps[chosen.valid[..., 1:]] > 0).all()
