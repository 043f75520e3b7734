import pytest
import torch

from prescore.bench.planted.model import PlantedSetting
from prescore.rng import Streams
from prescore.scoring.companions import Companions
from prescore.scoring.select import score_keys


def _recall(model, seed, scorer):
    keys = model.keys[None, None]
    scores = score_keys(keys, scorer, valid=None, streams=Streams(seed)).scores[0, 0]
    planted = model.groups > 0
    kept = scores.topk(int(planted.sum())).indices
    return planted[kept].double().mean().item()


@pytest.mark.parametrize("n", [4096, 16384])
@pytest.mark.parametrize("reading", ["normalized", "small-noise"])
def test_recovers_planted_keys_in_both_readings(n, reading):
    for seed in range(2):  # the table of ten seeds is in experiments/planted/README.md
        model = PlantedSetting(n, 32, 0.1).draw(reading, generator=seed)
        assert _recall(model, seed, Companions()) >= 0.95


def test_in_one_window_it_is_the_second_largest_cosine():
    keys = torch.randn(2, 2, 50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = torch.nn.functional.normalize(keys, dim=-1)
    cosines = unit @ unit.transpose(2, 3)
    expected = cosines.topk(3, dim=-1).values[..., 2]  # the largest is the key itself
    scores = Companions(window=64).score(keys, valid=None, streams=Streams(0))
    torch.testing.assert_close(scores, expected)
