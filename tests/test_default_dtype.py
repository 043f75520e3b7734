"""torch's default dtype must not reach the buffers that compiled code writes into."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch, prescore
from prescore import Routed

def calls():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 900, 64, generator=generator, dtype=torch.float32)
    key, value = (torch.randn(1, 2, 900, 64, generator=generator, dtype=torch.float32) for _ in range(2))
    small = Routed(chunk_size=64, exact_until=128, **{sys.argv[2]: 32})
    yield prescore.prescored_attention(query, key, value, small, is_causal=True)
    yield prescore.prescored_attention(query[:, :, -1:], key, value, small, is_causal=True)
    yield prescore.prescored_attention(query, key, value, small.replace(tolerance=0.1), is_causal=True)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    prescore.prescored_attention(*leaves, small, is_causal=True).square().sum().backward()
    yield from (leaf.grad for leaf in leaves)

expected = list(calls())
torch.set_default_dtype(getattr(torch, sys.argv[1]))
for wanted, found in zip(expected, calls(), strict=True):
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_results_do_not_depend_on_the_default_dtype(dtype):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtype, "cluster_size"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
