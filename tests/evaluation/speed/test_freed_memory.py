import subprocess
import sys

import pytest

from prescore.bench import memory as freed_memory


def test_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="memory must be one of 'kept', 'system', got 'mine'"):
        freed_memory.choose_freed_memory("mine")


def test_system_changes_nothing():
    assert freed_memory.choose_freed_memory("system") == "system"


def test_without_the_c_librarys_switch_it_says_so(monkeypatch):
    monkeypatch.setattr(freed_memory, "_c_library", lambda: None)
    assert freed_memory.choose_freed_memory("kept") == "system"


@pytest.mark.skipif(not hasattr(freed_memory._c_library(), "mallopt"), reason="the C library has no mallopt")
@pytest.mark.parametrize("choice", ["kept", "system"])
def test_freed_memory_stays_or_goes(choice):
    """A freed tensor of 64 MiB still counts as the process's memory, or not; in a process of its own."""
    script = f"""
import os, torch
from prescore.bench.memory import choose_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

assert choose_freed_memory("{choice}") == "{choice}"
torch.ones(16)
before = resident()
torch.ones(2**24)
print(resident() - before)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert (int(printed) > 2**25) == (choice == "kept")
