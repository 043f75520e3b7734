"""Memory of the process: its peak since a moment, and what happens to freed blocks."""

import subprocess
import sys

import pytest
import torch

from prescore.bench import memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can reset the peak")
def test_the_peak_is_that_since_the_reset():
    memory.reset_peak()
    before = memory.resident_megabytes()
    assert memory.peak_megabytes() == pytest.approx(before, abs=20)
    numbers = torch.ones(25 * 2**20)  # 100 MB
    del numbers
    assert 95 < memory.peak_megabytes() - before < 130
    memory.reset_peak()
    assert memory.peak_megabytes() - before < 30


def test_what_holds_is_returned(monkeypatch):
    with pytest.raises(ValueError, match="memory must be one of 'kept', 'system', got 'mine'"):
        memory.choose_freed_memory("mine")
    assert memory.choose_freed_memory("system") == "system"
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: None)
    assert memory.choose_freed_memory("kept") == "system"


@pytest.mark.skipif(not hasattr(memory.ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
@pytest.mark.parametrize("choice", ["kept", "system"])
def test_freed_memory_stays_or_goes(choice):
    """A freed tensor of 64 MiB still counts as memory of the process, or not."""
    script = f"""
import torch
from prescore.bench.memory import choose_freed_memory, resident_megabytes

assert choose_freed_memory("{choice}") == "{choice}"
torch.ones(16)
before = resident_megabytes()
torch.ones(2**24)
print(resident_megabytes() - before)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert (float(printed) > 32) == (choice == "kept")
