"""Cost does not come from Python: no loop over batch or heads, and memory stays near the inputs' size."""

import json
import subprocess
import sys

import pytest
from oracles.inputs import attention_tensors
from torch.utils._python_dispatch import TorchDispatchMode

import prescore
from prescore import Hyper, Lsh, Selected
from prescore.ops.cpu import CpuFlash

LSH = Lsh(block_size=8, sample_size=8, alignment="rank")
CONFIGS = {
    "paper": Selected.paper(top_k=24, min_seq_len=16, inner=LSH),
    "hyper": Hyper(LSH, min_seq_len=16),
    "hyper hash": Hyper(LSH.replace(alignment="hash"), min_seq_len=16),
    "early": Selected.early(top_k=24, min_seq_len=16, inner=LSH),
    "selected": Selected(top_k=24, min_seq_len=16),
}


class _Counter(TorchDispatchMode):
    """Counts every operator that reaches the dispatcher."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _operators(config, batch, heads, kv_heads, *, is_causal, backward=False):
    tensors = attention_tensors(batch=batch, heads=heads, kv_heads=kv_heads, n_keys=128, seed=1)
    if backward:
        tensors = [t.requires_grad_() for t in tensors]
    with _Counter() as counter:
        output = prescore.prescored_attention(*tensors, config=config, is_causal=is_causal)
        if backward:
            output.sum().backward()
    return counter.calls


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_operators_do_not_grow_with_batch_and_heads(name, is_causal, backward):
    small = _operators(CONFIGS[name], 1, 2, 1, is_causal=is_causal, backward=backward)
    large = _operators(CONFIGS[name], 5, 12, 6, is_causal=is_causal, backward=backward)
    # 30 times the problems; a few operators more where clustering needs another iteration
    assert large <= 1.5 * small, f"{large} operators for 5 x 6 heads, {small} for one"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_attention_calls_do_not_grow_with_batch_and_heads(name, is_causal, monkeypatch):
    calls = []
    original = CpuFlash.forward
    monkeypatch.setattr(CpuFlash, "forward", lambda *a: calls.append(1) or original(*a))

    def count(batch, heads, kv_heads):
        calls.clear()
        tensors = attention_tensors(batch=batch, heads=heads, kv_heads=kv_heads, n_keys=128, seed=1)
        prescore.prescored_attention(*tensors, config=CONFIGS[name], is_causal=is_causal)
        return len(calls)

    # one part per recursion level (16, 32, 64) and one for the leaves
    assert count(1, 2, 1) == count(5, 12, 6) == (4 if is_causal else 1)


MEASURE = """
import json, resource, sys
from pathlib import Path
import torch
import prescore
from prescore import Hyper, Routed, Selected

torch.set_num_threads(1)
preset, is_causal, n = sys.argv[1], sys.argv[2] == "True", 65536
config = {"paper": Selected.paper, "hyper": Hyper.published, "default": Routed}[preset]()
generator = torch.Generator().manual_seed(0)
tensors = [torch.randn(1, 1, n, 64, generator=generator) for _ in range(3)]
# imports and thread pools are not attention's memory
prescore.prescored_attention(*(t[:, :, :5000] for t in tensors), config=config, is_causal=is_causal)
pages = int(Path("/proc/self/statm").read_text().split()[1])
before = pages * resource.getpagesize()
prescore.prescored_attention(*tensors, config=config, is_causal=is_causal)
# VmHWM, because ru_maxrss of a child begins with its parent's peak
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps((peak - before) / sum(t.nbytes for t in tensors)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("preset", ["paper", "hyper", "default"])
def test_peak_memory_is_below_twelve_times_the_inputs(preset, is_causal):
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, preset, str(is_causal)], capture_output=True, text=True, check=True
    )
    times = json.loads(run.stdout)
    assert 0.3 < times < 12, f"{preset}: {times:.2f} times the size of q, k and v"  # the output alone is a third
