"""The choice of the keys to keep: budgets, the best keys, sampling, the delta test."""

import pytest
import torch

import prescore
from prescore import KMeans, Selected, prescored_attention, select
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


def test_ties_go_to_the_lower_position():
    scores = torch.tensor([[[1.0, 2.0, 1.0, 1.0, 2.0]]])
    assert select_top(scores, torch.tensor([3])).indices.tolist() == [[[0, 1, 4]]]
    assert select_top(torch.zeros(1, 1, 5000), torch.tensor([7])).indices.tolist() == [[list(range(7))]]


def test_filler_repeats_the_last_kept_position():
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0]], [[1.0, 2.0, 0.0, 0.0]]])
    selection = select_top(scores, torch.tensor([4, 2]))
    assert selection.indices.tolist() == [[[0, 1, 2, 3]], [[0, 1, 1, 1]]]
    assert selection.valid.tolist() == [[[True] * 4], [[True, True, False, False]]]
    ragged = selection_of(torch.tensor([[[True, False, True, True], [False, True, False, False]]]))
    assert ragged.indices.tolist() == [[[0, 2, 3], [1, 1, 1]]]
    assert ragged.valid.tolist() == [[[True, True, True], [True, False, False]]]


@pytest.mark.parametrize("shape", [(2, 3, 5), (0, 3, 5), (1, 3, 0)])
def test_nothing_kept_and_nothing_there(shape):
    budget = torch.zeros(shape[0], dtype=torch.int64)
    assert select_top(torch.zeros(shape), budget).valid.shape == (*shape[:2], 0)


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


def test_selection_is_the_top_of_the_scores():
    selection = select(KEYS, "key-norm", top_k=10, sinks=0)
    assert torch.equal(selection.indices, KEYS.norm(dim=-1).topk(10).indices.sort().values)
    assert selection.valid.all()
    assert selection.fallback is None


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


def test_sinks_and_recent_keys_are_inside_the_budget():
    selection = select(KEYS, "key-norm", top_k=10, sinks=2, recent=1)
    assert selection.indices.shape[-1] == 10
    for position in (0, 1, 99):
        assert (selection.indices == position).any(-1).all()


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


def test_low_precision_keys_are_scored_in_float32_without_gradients():
    scores = prescore.score(KEYS.to(torch.bfloat16).requires_grad_(), "leverage")
    assert (scores.dtype, scores.requires_grad) == (torch.float32, False)


def test_sampling_differs_from_the_top_and_repeats_with_the_seed():
    sampled, again = (select(KEYS, "key-norm", top_k=10, selector="sample", generator=0).indices for _ in range(2))
    assert torch.equal(sampled, again)
    assert not torch.equal(sampled, select(KEYS, "key-norm", top_k=10).indices)
    assert (sampled.diff(dim=-1) > 0).all()


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
