import pytest
import torch

from prescore.rng import Streams
from prescore.scoring.select import budget_counts, fallback_rows, race_scores, select_top, selection_of


def _naive(scores, count, valid, protected):
    """One head: protected first by position, then by score, ties by position."""
    real = [i for i in range(len(scores)) if valid[i]]
    safe = [i for i in real if protected[i]][:count]
    rest = sorted((i for i in real if i not in safe and not protected[i]), key=lambda i: (-scores[i], i))
    return sorted(safe + rest[: count - len(safe)])


@pytest.mark.parametrize("seed", range(20))
def test_against_a_plain_sort(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(4, (3, 2, 12), generator=generator).double()  # few values: many ties
    valid = torch.rand(3, 12, generator=generator) < 0.8
    protected = torch.rand(3, 12, generator=generator) < 0.2
    counts = torch.minimum(torch.randint(0, 9, (3,), generator=generator), valid.sum(1))
    selection = select_top(scores, counts, valid=valid, protected=protected)
    assert selection.indices.shape == (3, 2, int(counts.max()))
    assert selection.indices.dtype == torch.int64
    for row in range(3):
        for head in range(2):
            kept = selection.indices[row, head][selection.valid[row, head]].tolist()
            assert kept == _naive(scores[row, head].tolist(), int(counts[row]), valid[row], protected[row])


def test_ties_go_to_the_lower_position():
    scores = torch.tensor([[[1.0, 2.0, 1.0, 1.0, 2.0]]])
    assert select_top(scores, torch.tensor([3])).indices.tolist() == [[[0, 1, 4]]]
    assert select_top(torch.zeros(1, 1, 5000), torch.tensor([7])).indices.tolist() == [[list(range(7))]]


def test_filler_repeats_the_last_kept_position():
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0]], [[1.0, 2.0, 0.0, 0.0]]])
    selection = select_top(scores, torch.tensor([4, 2]))
    assert selection.indices.tolist() == [[[0, 1, 2, 3]], [[0, 1, 1, 1]]]
    assert selection.valid.tolist() == [[[True] * 4], [[True, True, False, False]]]


def test_real_keys_of_infinitely_low_score_come_before_padding():
    scores = torch.full((1, 1, 4), -torch.inf)
    valid = torch.tensor([[False, True, True, True]])
    assert select_top(scores, torch.tensor([2]), valid=valid).indices.tolist() == [[[1, 2]]]


def test_nothing_kept_and_nothing_there():
    assert select_top(torch.zeros(2, 3, 5), torch.tensor([0, 0])).indices.shape == (2, 3, 0)
    assert select_top(torch.zeros(0, 3, 5), torch.zeros(0, dtype=torch.int64)).indices.shape == (0, 3, 0)
    assert select_top(torch.zeros(1, 3, 0), torch.tensor([0])).valid.shape == (1, 3, 0)


def test_packing_heads_of_different_size():
    kept = torch.tensor([[[True, False, True, True], [False, True, False, False]]])
    selection = selection_of(kept)
    assert selection.indices.tolist() == [[[0, 2, 3], [1, 1, 1]]]
    assert selection.valid.tolist() == [[[True, True, True], [True, False, False]]]
    assert selection.fallback is None


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


@pytest.mark.parametrize(
    ("top_k", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, ValueError), (None, TypeError), (True, TypeError), ("3", TypeError)],
)
def test_bad_budgets_are_named(top_k, error):
    with pytest.raises(error, match=f"top_k must be .*got .*{top_k}"):
        budget_counts(top_k, torch.tensor([3]))


def test_delta_test():
    counts, n_valid = torch.tensor([4, 5, 6]), torch.tensor([10, 10, 10])
    assert fallback_rows(counts, n_valid, 0.5).tolist() == [True, False, False]
    assert fallback_rows(counts, n_valid, 0.0) is None
    with pytest.raises(ValueError, match=r"min_fraction must be .*got -0.1"):
        fallback_rows(counts, n_valid, -0.1)


def test_sampling_follows_the_scores():
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0]).double()
    first = torch.zeros(4)
    second_after_three = torch.zeros(4)
    for seed in range(4000):
        order = race_scores(weights[None, None], valid=None, streams=Streams(seed))[0, 0].argsort(descending=True)
        first[order[0]] += 1
        if order[0] == 3:
            second_after_three[order[1]] += 1
    # five standard errors of a share of 4000 draws
    assert (first / 4000 - weights / 8).abs().max() < 0.04
    assert (second_after_three / first[3] - torch.tensor([0, 1 / 3, 2 / 3, 0])).abs().max() < 0.05


def test_sampling_shifts_negative_scores_and_skips_padding():
    scores = torch.tensor([[[-3.0, -1.0, -2.0, 100.0]]])
    valid = torch.tensor([[True, True, True, False]])
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
