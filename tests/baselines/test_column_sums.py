import pytest
import torch
from baseline_reference import inputs

from prescore.baselines import tiles as module
from prescore.baselines.tiles import best_places, column_sums


@pytest.mark.parametrize("block", [1, 50, 2**21])
@pytest.mark.parametrize("own", [0, 9])
def test_sums_of_softmax_columns(monkeypatch, block, own):
    monkeypatch.setattr(module, "_LARGEST_BLOCK", block)
    query, key, _ = inputs(heads=2, kv_heads=1, n_query=9, n_keys=14)
    seen = torch.ones(2, 14, dtype=torch.bool)
    seen[0, :3] = False
    voting = torch.ones(2, 9, dtype=torch.bool)
    voting[1, 4] = False
    query[1, :, 4] = torch.nan
    got = column_sums(query, key[:, 0], voting=voting, seen=seen, scale=0.3, own=own)
    logits = (query @ key.transpose(-1, -2) * 0.3).masked_fill(~seen[:, None, None], -torch.inf)
    if own:
        logits = logits.masked_fill(torch.ones(9, 14, dtype=torch.bool).triu(6), -torch.inf)
    weights = logits.softmax(-1)
    weights[1, :, 4] = 0
    torch.testing.assert_close(got, weights.sum((1, 2)).masked_fill(~seen, -torch.inf))
    assert got[1].sum().item() == pytest.approx(16)


def test_best_places_breaks_ties_by_place():
    scores = torch.tensor([[2.0, 1.0, 2.0, -torch.inf, 2.0]])
    assert best_places(scores, 2)[0].tolist() == [[0, 2]]
    assert best_places(scores, 2, latest=True)[0].tolist() == [[2, 4]]
    places, there = best_places(scores, 9)
    assert places.tolist() == [[0, 1, 2, 3, 4]]
    assert there.tolist() == [[True, True, True, False, True]]
