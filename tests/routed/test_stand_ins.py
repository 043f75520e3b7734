"""Gain and move of a centroid against normal logits that are cut off, integrated numerically."""

import pytest
import torch

from prescore.routed.reference import corrections

LOGITS = torch.linspace(-1.0, 1.0, 20_001, dtype=torch.float64)


def integrated(distance, spread):
    """Log of the mean of exp over normal logits of deviation `spread` below `distance`, and share of the drift.

    A value's mean, given its key's logit, is that logit times `drift / spread ** 2` away from the mean of all.
    """
    x = LOGITS * 12 * spread
    density = torch.exp(-0.5 * (x / spread) ** 2) * (x < distance)
    weight = density * torch.exp(x)
    return float((weight.sum() / density.sum()).log()), float((weight * x).sum() / weight.sum() / spread**2)


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5, 1.0, 1.5, 1.9])
@pytest.mark.parametrize("deviations", [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0])
def test_what_is_left_below_a_limit(spread, deviations):
    distance = deviations * spread
    gain, move = corrections(torch.tensor([[distance]]).double(), torch.tensor([[spread]]).double())
    wanted_gain, wanted_move = integrated(distance, spread)
    # the approximation of the distribution function is off by up to a few hundredths in logs where little is left
    assert float(gain) == pytest.approx(max(-2.0, min(2.0, wanted_gain)), abs=0.03)
    assert float(move) == pytest.approx(max(-1.0, min(1.0, wanted_move)), abs=0.1 + 0.004 / spread)


def test_without_a_limit_all_normal_logits_count():
    for spread in (0.001, 0.3, 1.0, 1.9):
        gain, move = corrections(torch.tensor([[torch.inf]]).double(), torch.tensor([[spread]]).double())
        assert float(gain) == pytest.approx(spread**2 / 2)
        assert float(move) == pytest.approx(1.0)


def test_corrections_are_bounded_and_finite_everywhere():
    distance = torch.tensor([-torch.inf, -1e30, -1e3, -5.0, 0.0, 1e-20, 5.0, 1e3, 1e30, torch.inf])
    for dtype in (torch.float32, torch.float64):
        for spread in (1e-3, 0.1, 2.0, 30.0, 1e8):
            gain, move = corrections(distance[None].to(dtype), torch.tensor([[spread]], dtype=dtype))
            assert torch.isfinite(gain).all()
            assert torch.isfinite(move).all()
            assert float(gain.abs().max()) <= 2
            assert float(move.abs().max()) <= 1


def test_gain_and_move_grow_with_the_limit():
    for spread in (0.2, 1.0, 1.8):
        # down to where the distribution function is cut off
        distance = torch.linspace(-4.0 + spread, 8.0, 200, dtype=torch.float64)[None] * spread
        gain, move = corrections(distance, torch.tensor([[spread]]).double())
        assert float(gain.diff().min()) >= -1e-3
        assert float(move.diff().min()) >= -1e-2
