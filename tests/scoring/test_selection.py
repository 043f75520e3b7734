"""The choice of the keys to keep: budgets, the best keys, sampling, the delta test, `min_score`."""

import math
import random
from fractions import Fraction

import pytest
import torch
from attention_checks import attend
from oracles.inputs import MASKS, attention_tensors, random_mask

import prescore
from prescore import Exact, KMeans, Lsh, Selected, prescored_attention, select
from prescore.rng import Streams
from prescore.scoring.select import race_scores, select_keys


def kept_by_sorting(scores, real, top_k, sinks=4, recent=0, min_fraction=0.0):
    """One head: protected keys by position, then by score, ties by position; and whether the delta test failed."""
    share = top_k if isinstance(top_k, int) else math.ceil(Fraction(str(top_k)) * len(real))
    count = min(share, len(real))
    if count < min_fraction * len(real):
        return real, True
    protected = [i for place, i in enumerate(real) if place < sinks or place >= len(real) - recent][:count]
    others = sorted((i for i in real if i not in protected), key=lambda i: (-scores[i], i))
    return sorted(protected + others[: count - len(protected)]), False


@pytest.mark.parametrize("seed", range(60))
def test_a_selection_against_a_plain_sort(seed):
    draw = random.Random(seed)
    key = torch.randint(-3, 4, (3, 2, 30, 1), generator=torch.Generator().manual_seed(seed)).double()  # many ties
    mask = random_mask(draw.choice(MASKS), 3, 30, seed=seed)
    if mask is not None and seed % 3 == 0:
        mask[1] = False
    # a tenth of 30 is 3, although 0.1 * 30 > 3 in floats
    options = {"top_k": draw.choice([1, 5, 10, 29, 30, 100, 0.1, 0.25, 0.5, 1.0])}
    options |= {"sinks": draw.choice([0, 2, 4]), "recent": draw.choice([0, 1, 3])}
    options["min_fraction"] = draw.choice([0.0, 0.0, 0.1, 0.3])
    chosen = select(key, "key-norm", key_padding_mask=mask, **options)
    real = [list(range(30)) if mask is None else mask[row].nonzero()[:, 0].tolist() for row in range(3)]
    for row in range(3):
        for head in range(2):
            scores = key[row, head, :, 0].abs().tolist()
            kept, fallback = kept_by_sorting(scores, real[row], **options)
            places = chosen.indices[row, head].tolist()
            assert places[: len(kept)] == kept
            assert chosen.valid[row, head].tolist() == [place < len(kept) for place in range(len(places))]
            assert set(places[len(kept) :]) <= ({kept[-1]} if kept else set(range(30)))  # filler
            assert (chosen.fallback is not None and bool(chosen.fallback[row])) == fallback
    assert chosen.indices.shape[2] == int(chosen.valid.sum(-1).max())
    assert chosen.indices.dtype == torch.int64


@pytest.mark.parametrize("top_k", [100, 1000, 1.0])
def test_nothing_is_scored_when_everything_is_kept(top_k):
    chosen = select_keys(torch.randn(2, 3, 100, 8), Selected("key-norm", top_k), valid=None, streams=Streams(0))
    assert (chosen.everything, chosen.scored) == (True, None)


@pytest.mark.parametrize(("is_causal", "per_cluster"), [(False, 32), (True, 16)], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [4, 80])
def test_centroids_of_a_scorer_without_clusters_are_fitted_on_a_sample(is_causal, per_cluster, dim):
    """These clusters score nothing, so a sample is enough: so many keys for each of at least 64 clusters."""
    tensors = attention_tensors(n_query=1500, n_keys=5300, dim=dim, dtype=torch.float32, seed=1, spread=1.0)
    config = Selected("key-norm", 64, min_seq_len=1300)
    remainders = ("centroids", KMeans(fit_size=per_cluster * max(dim + 1, 64)), KMeans(max_iter=2))
    configs = [config.replace(remainder=remainder) for remainder in remainders]
    options = {"is_causal": is_causal, "generator": 3}
    found, wanted, other = (prescored_attention(*tensors, each, **options) for each in configs)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, other)


def test_sampling_follows_the_scores():
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0]).double()
    first, second_after_three = torch.zeros(4), torch.zeros(4)
    for seed in range(4000):
        order = race_scores(weights[None, None], valid=None, streams=Streams(seed))[0, 0].argsort(descending=True)
        first[order[0]] += 1
        if order[0] == 3:
            second_after_three[order[1]] += 1
    # five standard errors of a share of 4000 draws
    assert (first / 4000 - weights / 8).abs().max() < 0.04
    assert (second_after_three / first[3] - torch.tensor([0, 1 / 3, 2 / 3, 0])).abs().max() < 0.05


def test_sampling_shifts_negative_scores_and_skips_padding():
    scores, valid = torch.tensor([[[-3.0, -1.0, -2.0, 100.0]]]), torch.tensor([[True, True, True, False]])
    firsts = [int(race_scores(scores, valid=valid, streams=Streams(seed)).argmax()) for seed in range(300)]
    assert set(firsts) == {1, 2}
    assert firsts.count(1) > firsts.count(2)


def test_sampling_draws_for_every_head_and_the_same_for_rows_and_paddings():
    scores = torch.rand(1, 1, 20).expand(2, 3, 20)
    raced = race_scores(scores, valid=None, streams=Streams(0))
    assert (raced == raced[:1]).all()
    assert len({tuple(head.tolist()) for head in raced[0]}) == 3
    assert torch.equal(race_scores(scores[:, 1:], valid=None, streams=Streams(0, first_head=1)), raced[:, 1:])
    of_rows = race_scores(scores, valid=None, streams=Streams(9, rows=(0, 5)))
    assert torch.equal(of_rows[0], raced[0])
    assert torch.equal(of_rows[1:], race_scores(scores[1:], valid=None, streams=Streams(5)))
    longer = torch.cat([scores, torch.ones(2, 3, 9)], dim=2)
    padded = race_scores(longer, valid=(torch.arange(29) < 20).expand(2, -1), streams=Streams(0))
    assert torch.equal(padded[..., :20], raced)


@pytest.mark.parametrize("scorer", prescore.list_scorers())
def test_scores_and_selections_of_padded_sequences_come_back_in_place(scorer):
    spans, budget = ((13, 40), (0, 40), (0, 27), (39, 40)), {"top_k": 7, "sinks": 2, "recent": 1}
    key, position = attention_tensors(batch=4, kv_heads=2, n_keys=40)[1], torch.arange(40)
    mask = torch.stack([(position >= first) & (position < end) for first, end in spans])
    padded = key.masked_fill(~mask[:, None, :, None], torch.nan)
    scores = prescore.score(padded, scorer, key_padding_mask=mask)
    chosen = select(padded, scorer, **budget, key_padding_mask=mask)
    assert torch.isneginf(scores[~mask[:, None].expand_as(scores)]).all()
    for row, (first, end) in enumerate(spans):
        alone = key[row : row + 1, :, first:end]
        flips = (scores[row : row + 1, :, first:end] - prescore.score(alone, scorer)).abs() > 1e-8
        assert float(flips.double().mean()) <= 0.005
        selected = select(alone, scorer, **budget)
        for head in range(2):
            here = chosen.indices[row, head][chosen.valid[row, head]] - first
            assert here.tolist() == selected.indices[0, head].tolist()


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("budget", [{"top_k": 9}, {"top_k": 0.4, "min_fraction": 0.45}], ids=str)
def test_causal_selections_point_at_real_keys_and_their_filler_inside_the_tensor(budget, kind):
    for seed in range(8):
        tensors = attention_tensors(batch=3, heads=2, kv_heads=1, n_keys=40, seed=seed)
        mask = random_mask(kind, 3, 40, seed=seed)
        _, aux = attend(tensors, Selected("kmeans", **budget, min_seq_len=4), mask, is_causal=True)
        for chosen in aux.selection:
            real = mask[:, None].expand(3, 1, 40).gather(2, chosen.indices)
            assert (real | ~chosen.valid).all()
            steps = chosen.indices.diff(dim=-1)
            assert (steps >= 0).all()
            assert (steps[chosen.valid[..., 1:]] > 0).all()


# `Selected(min_score=...)`, the universal set: every key that scores at least this is kept. The fuzzer's
# `definition` has the blocks of causal calls.

INPUTS = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=80, seed=3)
BY_SCORE = {
    "plain": {},
    "protected": {"sinks": 5, "recent": 3},
    "fallback": {"min_fraction": 0.5},
    "none above": {"min_score": 1e6},
}
causal_or_not = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.mark.parametrize("name", BY_SCORE)
@pytest.mark.parametrize("scorer", ["key-norm", "key-diff", "leverage"])  # without randomness
def test_min_score_against_its_definition(scorer, name):
    scores = prescore.score(INPUTS[1], scorer)
    # the score of a key, which is kept
    fields = {"min_score": float(scores.flatten().median()), "sinks": 0, "remainder": "none", **BY_SCORE[name]}
    config = Selected(scorer, **fields)
    kept, position = scores >= config.min_score, torch.arange(80)
    kept |= (position < config.sinks) | (position >= 80 - config.recent)
    fallback = kept.sum(2, keepdim=True) < config.min_fraction * 80
    assert bool(fallback.any()) == (name == "fallback")
    assert not fallback.all()
    kept |= fallback
    assert name == "none above" or len(kept.sum(-1).unique()) > 1  # heads keep different numbers of keys
    _, aux = attend(INPUTS, config)
    member = torch.zeros(2, 2, 81, dtype=torch.bool)
    member.scatter_(2, aux.selection.indices.masked_fill(~aux.selection.valid, 80), value=True)
    assert torch.equal(member[..., :80], kept)
    assert aux.stats.keys_selected == pytest.approx(float(kept.sum(-1).double().mean()))
    assert (aux.stats.fallbacks > 0) == (name == "fallback")


@causal_or_not
@pytest.mark.parametrize("inner", [Exact(), Lsh(8, 8), Lsh(8, 8, alignment="rank")], ids=["exact", "hash", "rank"])
@pytest.mark.parametrize("remainder", ["none", "centroids"])
def test_every_key_above_is_no_filter(inner, remainder, is_causal):
    config = Selected("key-norm", 1.0, sinks=0, inner=inner, min_seq_len=16, remainder=remainder)
    configs = (config, config.replace(top_k=None, min_score=0))
    all_kept, all_above = (prescored_attention(*INPUTS, each, is_causal=is_causal) for each in configs)
    assert torch.equal(all_above, all_kept)


@pytest.mark.parametrize("inner", [Exact(), Lsh(8, 8), Lsh(0, 8)], ids=["exact", "hash", "residual"])
def test_a_head_without_keys_beside_one_with_all(inner):
    query, key, value = (t.clone() for t in INPUTS)
    key[:, 0] *= 1e-3
    config = Selected("key-norm", min_score=0.1, sinks=0, remainder="none", min_seq_len=16, inner=inner)
    (output, lse), aux = attend((query, key, value), config)
    assert aux.selection.valid.sum(-1).tolist() == [[0, 80], [0, 80]]
    assert (output[:, :2] == 0).all()
    assert (lse[:, :2] == -torch.inf).all()
    assert torch.isfinite(lse[:, 2:]).all()
