"""The choice of the keys to keep: budgets, the best keys, sampling, the delta test, `min_score`."""

import pytest
import torch
from attention_checks import assert_equal, attend
from oracles.dense import dense_attention, without_centroids
from oracles.inputs import attention_tensors, random_mask

import prescore
from prescore import Exact, KMeans, Lsh, Selected, prescored_attention, select
from prescore.rng import Streams
from prescore.scoring.select import budget_counts, race_scores, select_keys, select_top, selection_of

KEYS = torch.randn(2, 3, 100, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASK = torch.arange(100) < torch.tensor([[100], [6]])


def counts(selection):
    return selection.valid.sum(-1).tolist()


def kept_by_sorting(scores, count, valid, protected):
    """One head: protected first by position, then by score, ties by position."""
    real = [i for i in range(len(scores)) if valid[i]]
    safe = [i for i in real if protected[i]][:count]
    others = sorted((i for i in real if not protected[i]), key=lambda i: (-scores[i], i))
    return sorted(safe + others[: count - len(safe)])


@pytest.mark.parametrize("seed", range(20))
def test_the_best_keys_against_a_plain_sort(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(4, (3, 2, 12), generator=generator).double()  # few values: many ties
    valid = torch.rand(3, 12, generator=generator) < 0.8
    protected = torch.rand(3, 12, generator=generator) < 0.2
    budget = torch.minimum(torch.randint(0, 9, (3,), generator=generator), valid.sum(1))
    selection = select_top(scores, budget, valid=valid, protected=protected)
    assert selection.indices.shape == (3, 2, int(budget.max()))
    assert selection.indices.dtype == torch.int64
    for row in range(3):
        for head in range(2):
            kept = selection.indices[row, head][selection.valid[row, head]].tolist()
            wanted = kept_by_sorting(scores[row, head].tolist(), int(budget[row]), valid[row], protected[row])
            assert kept == wanted


def test_filler_repeats_the_last_kept_position():
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0]], [[1.0, 2.0, 0.0, 0.0]]])
    selection = select_top(scores, torch.tensor([4, 2]))
    assert selection.indices.tolist() == [[[0, 1, 2, 3]], [[0, 1, 1, 1]]]
    assert selection.valid.tolist() == [[[True] * 4], [[True, True, False, False]]]
    ragged = selection_of(torch.tensor([[[True, False, True, True], [False, True, False, False]]]))
    assert ragged.indices.tolist() == [[[0, 2, 3], [1, 1, 1]]]
    assert ragged.valid.tolist() == [[[True, True, True], [True, False, False]]]


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [
        (1, [1, 1, 0]),
        (10, [10, 7, 0]),
        (100, [30, 7, 0]),
        (0.1, [3, 1, 0]),  # a tenth of 30 is 3 although 0.1 * 30 > 3 in floats
        (0.5, [15, 4, 0]),
        (1.0, [30, 7, 0]),
    ],
)
def test_budgets(top_k, expected):
    assert budget_counts(top_k, torch.tensor([30, 7, 0])).tolist() == expected


@pytest.mark.parametrize("top_k", [100, 1000, 1.0])
def test_nothing_is_scored_when_everything_is_kept(top_k):
    chosen = select_keys(KEYS, Selected("key-norm", top_k), valid=None, streams=Streams(0))
    assert (chosen.everything, chosen.scored) == (True, None)
    assert torch.equal(chosen.selection.indices, torch.arange(100).expand(2, 3, 100))


def test_rows_of_different_length():
    selection = select(KEYS, "key-norm", top_k=10, key_padding_mask=MASK)
    assert counts(selection) == [[10] * 3, [6] * 3]
    assert selection.indices[1].max() == 5
    assert counts(select(KEYS, "key-norm", top_k=0.25, key_padding_mask=MASK)) == [[25] * 3, [2] * 3]


def test_sinks_and_recent_keys_are_real_and_inside_the_budget():
    mask = torch.arange(100) >= torch.tensor([[7], [0]])
    selection = select(KEYS, "key-norm", top_k=10, sinks=2, recent=1, key_padding_mask=mask)
    assert selection.indices.shape[-1] == 10
    for row, positions in enumerate(([7, 8, 99], [0, 1, 99])):
        for position in positions:
            assert (selection.indices[row] == position).any(-1).all()


def test_the_delta_test_falls_back_row_by_row():
    options = {"top_k": 10, "key_padding_mask": torch.arange(100) < torch.tensor([[100], [30]])}
    selection = select(KEYS, "key-norm", min_fraction=0.2, **options)
    assert selection.fallback.tolist() == [True, False]
    assert counts(selection) == [[100] * 3, [10] * 3]
    assert select(KEYS, "key-norm", min_fraction=0.1, **options).fallback.tolist() == [False, False]
    assert select(KEYS, "key-norm", min_fraction=0.5, **options).fallback.tolist() == [True, True]


@pytest.mark.parametrize(("is_causal", "per_cluster"), [(False, 32), (True, 16)], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [4, 80])
def test_centroids_of_a_scorer_without_clusters_are_fitted_on_a_sample(is_causal, per_cluster, dim):
    """These clusters score nothing, so a sample is enough: so many keys for each of at least 64 clusters."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, n, dim, generator=generator) for n in (1500, 5300, 5300))
    config = Selected("key-norm", 64, min_seq_len=1300)
    sampled = config.replace(remainder=KMeans(fit_size=per_cluster * max(dim + 1, 64)))
    options = {"is_causal": is_causal, "generator": 3}
    found, wanted, other = (
        prescored_attention(query, key, value, each, **options)
        for each in (config, sampled, config.replace(remainder=KMeans(max_iter=2)))
    )
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


def test_sampling_uses_the_same_draws_for_rows_heads_and_paddings():
    scores = torch.rand(1, 1, 20).expand(2, 3, 20)
    raced = race_scores(scores, valid=None, streams=Streams(0))
    assert (raced == raced[:1, :1]).all()
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


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("budget", [{"top_k": 9}, {"top_k": 0.4, "min_fraction": 0.45}], ids=str)
def test_selections_point_at_real_keys_and_their_filler_inside_the_tensor(budget, kind, is_causal):
    for seed in range(8):
        tensors = attention_tensors(batch=3, heads=2, kv_heads=1, n_keys=40, seed=seed)
        mask = random_mask(kind, 3, 40, seed=seed)
        _, aux = attend(tensors, Selected("kmeans", **budget, min_seq_len=4), mask, is_causal=is_causal)
        for chosen in aux.selection if is_causal else [aux.selection]:
            real = mask[:, None].expand(3, 1, 40).gather(2, chosen.indices)
            assert (real | ~chosen.valid).all()
            steps = chosen.indices.diff(dim=-1)
            assert (steps >= 0).all()
            assert (steps[chosen.valid[..., 1:]] > 0).all()


# `Selected(min_score=...)`, the universal set: every key that scores at least this is kept.

LEAF = 16
SCORES = {"key-norm": 3.0, "key-diff": 0.1, "leverage": 0.05}
"""Scorers without randomness, and a score that about half of the keys of a block reach."""
INPUTS = attention_tensors(batch=2, heads=4, kv_heads=2, n_keys=80, seed=3)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def kept_by_definition(key, config, *, sinks):
    """`[B, H, n]`: one block of keys without padding."""
    kept = prescore.score(key, config.scorer) >= config.min_score
    kept[:, :, :sinks] = True
    kept[:, :, key.shape[2] - config.recent :] = True
    return kept | (kept.sum(2, keepdim=True) < config.min_fraction * key.shape[2])


def visible_by_definition(key, config, is_causal):
    """`[B, H, N, N]`: what a query sees: its own leaf, and what every earlier block of the grid keeps."""
    n_keys = key.shape[2]
    if not is_causal:
        return kept_by_definition(key, config, sinks=config.sinks)[:, :, None].expand(-1, -1, n_keys, -1)
    position = torch.arange(n_keys)
    own_leaf = (position[:, None] // LEAF == position // LEAF) & (position <= position[:, None])
    visible = own_leaf.expand(*key.shape[:2], n_keys, n_keys).clone()
    width = LEAF
    while width < n_keys:
        for begin in range(0, n_keys - width, 2 * width):
            keys, queries = slice(begin, begin + width), slice(begin + width, begin + 2 * width)
            kept = kept_by_definition(key[:, :, keys], config, sinks=max(0, config.sinks - begin))
            visible[:, :, queries, keys] = kept[:, :, None]
        width *= 2
    return visible


@causal_or_not
@pytest.mark.parametrize("name", ["plain", "protected", "fallback", "none above"])
@pytest.mark.parametrize("scorer", SCORES)
def test_min_score_against_its_definition(scorer, name, is_causal):
    shares = (prescore.score(INPUTS[1], scorer) >= SCORES[scorer]).double().mean(-1)
    fields = {
        "plain": {},
        "protected": {"sinks": 5, "recent": 3},
        "fallback": {"min_fraction": float(shares.min() + shares.max()) / 2},  # for some heads
        "none above": {"min_score": 1e6},
    }[name]
    fields = {"min_score": SCORES[scorer], "sinks": 0, "remainder": "none", "min_seq_len": LEAF, **fields}
    config = Selected(scorer, **fields)
    visible = visible_by_definition(INPUTS[1], config, is_causal)
    # heads keep different numbers of keys
    assert name == "none above" or len(visible[:, :, -1].sum(-1).unique()) > 1
    weights = torch.zeros(2, 4, 80, 80, dtype=torch.float64)
    weights.masked_fill_(~visible.repeat_interleave(2, dim=1), -torch.inf)
    result, aux = attend(INPUTS, config, is_causal=is_causal)
    assert_equal(result, dense_attention(*INPUTS, without_centroids(weights), scale=0.5))
    if not is_causal:
        wanted = selection_of(visible[:, :, 0])
        assert torch.equal(aux.selection.indices, wanted.indices)
        assert torch.equal(aux.selection.valid, wanted.valid)
        assert aux.stats.keys_selected == pytest.approx(float(visible[:, :, 0].sum(-1).double().mean()))
    if scorer != "leverage":  # whose scores are higher in the blocks, which have fewer keys
        assert (aux.stats.fallbacks > 0) == (name == "fallback")


@causal_or_not
@pytest.mark.parametrize("inner", [Exact(), Lsh(8, 8), Lsh(8, 8, alignment="rank")], ids=["exact", "hash", "rank"])
@pytest.mark.parametrize("remainder", ["none", "centroids"])
def test_every_key_above_is_no_filter(inner, remainder, is_causal):
    options = {"sinks": 0, "inner": inner, "min_seq_len": LEAF, "remainder": remainder}
    all_above, all_kept = (
        prescored_attention(*INPUTS, Selected("key-norm", **budget, **options), is_causal=is_causal)
        for budget in ({"min_score": 0}, {"top_k": 1.0})
    )
    assert torch.equal(all_above, all_kept)


@pytest.mark.parametrize("inner", [Exact(), Lsh(8, 8), Lsh(0, 8)], ids=["exact", "hash", "residual"])
def test_a_head_without_keys_beside_one_with_all(inner):
    query, key, value = (t.clone() for t in INPUTS)
    key[:, 0] *= 1e-3
    config = Selected("key-norm", min_score=0.1, sinks=0, remainder="none", min_seq_len=LEAF, inner=inner)
    (output, lse), aux = attend((query, key, value), config)
    assert aux.selection.valid.sum(-1).tolist() == [[0, 80], [0, 80]]
    assert (output[:, :2] == 0).all()
    assert (lse[:, :2] == -torch.inf).all()
    assert torch.isfinite(lse[:, 2:]).all()


def test_a_key_of_exactly_the_score_is_kept():
    key = torch.tensor([3.0, 1.0, 2.0, 4.0])[None, None, :, None]
    config = Selected("key-norm", min_score=2, sinks=0, remainder="none")
    assert attend((key, key, key), config)[1].selection.indices.tolist() == [[[0, 2, 3]]]


def test_leverage_keeps_at_most_rank_over_epsilon_keys():
    """The universal set of the paper: scores sum to the rank, so that few keys reach epsilon."""
    for epsilon in (0.01, 0.05, 0.2):
        config = Selected("leverage", min_score=epsilon, sinks=0, remainder="none")
        kept = attend(INPUTS, config)[1].selection.valid.sum(-1)
        assert (kept <= INPUTS[1].shape[3] / epsilon).all()
