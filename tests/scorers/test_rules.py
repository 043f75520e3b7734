import pytest
import torch

from prescore.scoring.rules import apply_rule, cluster_sums

# Two clusters: {0, 2, 4} at distances 1, 3, 4 and {1, 3} at 2, 0; point 5 is padding in cluster 0.
DISTANCES = torch.tensor([[1.0, 2.0, 3.0, 0.0, 4.0, 9.0]], dtype=torch.float64)
LABELS = torch.tensor([[0, 1, 0, 1, 0, 0]])
VALID = torch.tensor([[True] * 5 + [False]])


def _scores(rule):
    return apply_rule(rule, DISTANCES, LABELS, n_clusters=3, valid=VALID)[0, :5]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("nearest", [-1.0, -2.0, -3.0, 0.0, -4.0]),
        ("farthest", [1.0, 2.0, 3.0, 0.0, 4.0]),
        ("cluster-share", [1 / 8, 1.0, 3 / 8, 0.0, 4 / 8]),
        ("sensitivity", [1 / 26 + 1 / 3, 1 + 1 / 2, 9 / 26 + 1 / 3, 1 / 2, 16 / 26 + 1 / 3]),
        # rank within the cluster, and half the distance over the largest to order equal ranks
        ("balanced", [-1 / 8, -1 - 2 / 8, -1 - 3 / 8, 0.0, -2 - 4 / 8]),
    ],
)
def test_toy_solved_by_hand(rule, expected):
    torch.testing.assert_close(_scores(rule), torch.tensor(expected, dtype=torch.float64))


def test_balanced_takes_turns_and_passes_on_what_a_cluster_lacks():
    order = _scores("balanced").argsort(descending=True).tolist()
    assert order == [3, 0, 1, 2, 4]  # one of each, one of each, then cluster 0 alone


def test_balanced_is_an_equal_share_at_any_budget():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (1, 400), generator=generator)
    distances = torch.rand(1, 400, generator=generator)
    top = apply_rule("balanced", distances, labels, n_clusters=4).topk(40).indices
    assert torch.bincount(labels[0][top[0]], minlength=4).tolist() == [10] * 4
    for cluster in range(4):
        mine = distances[0][labels[0] == cluster]
        kept = distances[0][top[0]][labels[0][top[0]] == cluster]
        torch.testing.assert_close(kept.sort().values, mine.sort().values[:10])


@pytest.mark.parametrize("rule", ["nearest", "farthest", "cluster-share", "sensitivity", "balanced"])
def test_coinciding_points_have_finite_scores(rule):
    scores = apply_rule(rule, torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.int64), n_clusters=2)
    assert torch.isfinite(scores).all()


def test_cluster_sums_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (3, 50), generator=generator)
    values = torch.rand(3, 50, generator=generator, dtype=torch.float64)
    present = torch.rand(3, 50, generator=generator) < 0.7
    (sums,) = cluster_sums(labels, 8, present, values)
    for problem in range(3):
        for cluster in range(8):
            expected = values[problem][present[problem] & (labels[problem] == cluster)].sum()
            torch.testing.assert_close(sums[problem, cluster], expected)


def test_unknown_rule_is_named():
    with pytest.raises(ValueError, match=r"rule must be one of .*got 'best'"):
        apply_rule("best", DISTANCES, LABELS, n_clusters=3)
