"""A sequence gives the same result alone, in any batch, and padded on either side."""

import math

import pytest
import torch
from oracles.inputs import attention_tensors, random_mask

import prescore
from prescore import Hyper, Lsh, Routed, Selected

CLOSE = 1e-10
LSH = Lsh(block_size=4, sample_size=5, n_projections=3, alignment="rank")
CONFIGS = {
    "paper": Selected.paper("kmeans", 9, min_seq_len=8, inner=LSH),
    "paper full": Selected.paper("kmeans", 9, min_seq_len=0, inner=LSH),
    "hyper": Hyper(LSH, min_seq_len=8),
    "hyper hash": Hyper(LSH.replace(alignment="hash"), min_seq_len=8),
    "early": Selected.early("key-norm", 9, min_seq_len=8, inner=LSH),
    "selected": Selected(top_k=9, min_seq_len=8),
    "short is exact": Hyper(LSH, min_seq_len=30),
    "routed": Routed(min_weight=1 / 8, cluster_size=2, chunk_size=4, sinks=2, exact_until=0),
    "routed, short is exact": Routed(min_weight=1 / 4, cluster_size=2, chunk_size=4, sinks=1, exact_until=30),
    "share": Selected(top_k=0.4, min_fraction=0.45, min_seq_len=8),
    "sampled": Selected(top_k=9, selector="sample", recent=2, min_seq_len=8),
    "sample fallback": Selected.paper("key-diff", 9, min_fraction=0.35, min_seq_len=0, inner=LSH),
}
LENGTHS = (27, 40, 1, 33)
N_KEYS = 40


def _sequences(dtype=torch.float64):
    return [
        attention_tensors(batch=1, heads=4, kv_heads=2, n_keys=length, dtype=dtype, seed=length)
        for length in LENGTHS
    ]


def _batch(sides, *, junk, n_query=None):
    """The sequences in one batch, each padded on its side with junk: tensors, mask, and where each one sits."""
    rows, mask, places = [], torch.zeros(len(LENGTHS), N_KEYS, dtype=torch.bool), []
    for number, (tensors, side) in enumerate(zip(_sequences(), sides, strict=True)):
        length = tensors[1].shape[2]
        start = N_KEYS - length if side == "left" else 0
        places.append(slice(start, start + length))
        mask[number, places[-1]] = True
        padded = [t.new_full((1, t.shape[1], N_KEYS, t.shape[3]), junk) for t in tensors]
        padded[0] = torch.full_like(padded[0], 7.0)
        for target, real in zip(padded, tensors, strict=True):
            target[:, :, places[-1]] = real
        rows.append(padded)
    query, key, value = (torch.cat(parts) for parts in zip(*rows, strict=True))
    if n_query is not None:
        query = query[:, :, -n_query:]
    return (query, key, value), mask, places


@pytest.mark.parametrize("sides", [("left",) * 4, ("right",) * 4, ("left", "right", "left", "right")])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_alone_and_padded_in_a_batch(name, is_causal, sides):
    config = CONFIGS[name]
    tensors, mask, places = _batch(sides, junk=math.nan)
    parallel_group, aux = prescore.prescored_attention(
        *tensors, config=config, is_causal=is_causal, key_padding_mask=mask, generator=3, return_aux=True
    )
    for number, (own, place) in enumerate(zip(_sequences(), places, strict=True)):
        alone, alone_aux = prescore.prescored_attention(
            *own, config=config, is_causal=is_causal, generator=3, return_aux=True
        )
        assert float((parallel_group[number : number + 1, :, place] - alone).abs().max()) <= CLOSE, f"row {number}"
        assert float((aux.lse[number : number + 1, :, place] - alone_aux.lse).abs().max()) <= CLOSE, (
            f"row {number}"
        )
    assert torch.isfinite(parallel_group[mask[:, None].expand(parallel_group.shape[:3])]).all()


@pytest.mark.parametrize("n_query", [1, 6])
@pytest.mark.parametrize("name", CONFIGS)
def test_last_queries_of_left_padded_sequences(name, n_query):
    config = CONFIGS[name]
    tensors, mask, _ = _batch(("left",) * 4, junk=math.nan, n_query=n_query)
    parallel_group = prescore.prescored_attention(*tensors, config=config, is_causal=True, key_padding_mask=mask)
    for number, (query, key, value) in enumerate(_sequences()):
        count = min(n_query, key.shape[2])
        alone = prescore.prescored_attention(query[:, :, -count:], key, value, config=config, is_causal=True)
        assert float((parallel_group[number : number + 1, :, -count:] - alone).abs().max()) <= CLOSE, (
            f"row {number}"
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_place_in_the_batch_does_not_matter(name):
    query, key, value = attention_tensors(batch=4, heads=4, kv_heads=2, n_keys=35, seed=9)
    order = torch.tensor([2, 0, 3, 1])
    for is_causal in (False, True):
        straight = prescore.prescored_attention(query, key, value, config=CONFIGS[name], is_causal=is_causal)
        mixed = prescore.prescored_attention(
            query[order], key[order], value[order], config=CONFIGS[name], is_causal=is_causal
        )
        assert float((straight[order] - mixed).abs().max()) <= CLOSE


@pytest.mark.parametrize("name", CONFIGS)
def test_heads_do_not_matter_to_each_other(name):
    query, key, value = attention_tensors(batch=1, heads=4, kv_heads=2, n_keys=35, seed=9)
    parallel_group = prescore.prescored_attention(query, key, value, config=CONFIGS[name], is_causal=True)
    for head in range(2):
        alone = prescore.prescored_attention(
            query[:, 2 * head : 2 * head + 2],
            key[:, head : head + 1],
            value[:, head : head + 1],
            config=CONFIGS[name],
            is_causal=True,
        )
        assert float((parallel_group[:, 2 * head : 2 * head + 2] - alone).abs().max()) <= CLOSE


@pytest.mark.parametrize("scorer", prescore.list_scorers())
def test_scores_and_selections_come_back_in_place(scorer):
    budget = {"top_k": 7, "sinks": 2, "recent": 1}
    (_, key, _), mask, places = _batch(("left", "right", "left", "left"), junk=math.nan)
    scores = prescore.score(key, scorer, key_padding_mask=mask)
    assert torch.isneginf(scores[~mask[:, None].expand_as(scores)]).all()
    chosen = prescore.select(key, scorer, **budget, key_padding_mask=mask)
    for number, (place, (_, own, _)) in enumerate(zip(places, _sequences(), strict=True)):
        alone = prescore.score(own, scorer)
        flips = (scores[number : number + 1, :, place] - alone).abs() > 1e-8
        assert float(flips.double().mean()) <= 0.005
        kept = prescore.select(own, scorer, **budget)
        for head in range(2):
            mine = chosen.indices[number, head][chosen.valid[number, head]] - place.start
            assert mine.tolist() == kept.indices[0, head].tolist()


def test_a_row_of_nothing_but_padding_gives_zero():
    for is_causal in (False, True):
        for config in CONFIGS.values():
            tensors = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=20, seed=3)
            mask = torch.ones(2, 20, dtype=torch.bool)
            mask[1] = False
            output, aux = prescore.prescored_attention(
                *tensors, config=config, is_causal=is_causal, key_padding_mask=mask, return_aux=True
            )
            assert not output[1].any()
            assert torch.isneginf(aux.lse[1]).all()
            assert torch.isfinite(aux.lse[0]).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_selections_point_at_real_keys_and_their_filler_inside_the_tensor(kind, is_causal):
    n_keys = 40
    for seed in range(8):
        query, key, value = attention_tensors(batch=3, heads=2, kv_heads=1, n_keys=n_keys, seed=seed)
        mask = random_mask(kind, 3, n_keys, seed=seed)
        for config in (CONFIGS["paper"].replace(min_seq_len=4), CONFIGS["share"].replace(min_seq_len=4)):
            _, aux = prescore.prescored_attention(
                query, key, value, config=config, is_causal=is_causal, key_padding_mask=mask, return_aux=True
            )
            for chosen in aux.selection if is_causal else [aux.selection]:
                real = mask[:, None].expand(3, 1, n_keys).gather(2, chosen.indices)
                assert (real | ~chosen.valid).all()
                steps = chosen.indices.diff(dim=-1)
                assert (steps >= 0).all()
                assert (steps[chosen.valid[..., 1:]] > 0).all()
