import subprocess
import sys

import pytest

from prescore.evaluation import freed_memory


def test_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="memory must be one of 'kept', 'system', got 'mine'"):
        freed_memory.choose_freed_memory("mine")


def test_system_changes_nothing():
    assert freed_memory.choose_freed_memory("system") == "system"


def test_without_the_c_librarys_switch_it_says_so(monkeypatch):
    monkeypatch.setattr(freed_memory, "_c_library", lambda: None)
    assert freed_memory.choose_freed_memory("kept") == "system"


@pytest.mark.skipif(not hasattr(freed_memory._c_library(), "mallopt"), reason="the C library has no mallopt")
def test_kept_memory_is_not_faulted_in_again():
    """A block that is freed and taken again costs no page fault; in a process of its own, since it stays so."""
    script = """
import resource, torch
from prescore.evaluation.freed_memory import choose_freed_memory
assert choose_freed_memory("kept") == "kept"
faults = []
for _ in range(6):  # a machine short of memory may take some back in between
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(printed) < 2**24 * 4 // 4096 // 10
