"""The most memory that was held since a moment."""

import sys

import pytest
import torch

from prescore.bench.memory import forget_peak, held_megabytes, peak_megabytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a peak cannot be forgotten")
def test_a_peak_is_that_since_it_was_forgotten():
    forget_peak()
    before = held_megabytes()
    assert peak_megabytes() == pytest.approx(before, abs=20)
    numbers = torch.ones(25 * 2**20)  # 100 MB
    del numbers
    assert 95 < peak_megabytes() - before < 130
    forget_peak()
    assert peak_megabytes() - before < 30
