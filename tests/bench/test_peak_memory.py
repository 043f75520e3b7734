"""Peak memory since a reset."""

import sys

import pytest
import torch

from prescore.bench.memory import peak_megabytes, reset_peak, resident_megabytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a peak cannot be reset")
def test_the_peak_is_that_since_the_reset():
    reset_peak()
    before = resident_megabytes()
    assert peak_megabytes() == pytest.approx(before, abs=20)
    numbers = torch.ones(25 * 2**20)  # 100 MB
    del numbers
    assert 95 < peak_megabytes() - before < 130
    reset_peak()
    assert peak_megabytes() - before < 30
