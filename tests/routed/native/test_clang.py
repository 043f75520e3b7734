"""clang compiles the same sources, without OpenMP: what macOS and Windows run."""

import os
import shutil
import subprocess
import sys

import pytest

from prescore.routed.native import build

pytestmark = pytest.mark.skipif(
    shutil.which("clang") is None, reason="there is no clang here (Debian: apt-get install clang)"
)
CALL = """
import os, signal, sys, torch
from pathlib import Path
from prescore import Routed, prescored_attention
from prescore.routed.native import library
library._FOLDER = Path(sys.argv[1])
config = Routed(min_weight=1 / 32, cluster_size=32, chunk_size=64, sinks=3, exact_until=0)
generator = torch.Generator().manual_seed(1)
tensors = [torch.randn(2, heads, 700, 32, generator=generator) for heads in (4, 2, 2)]

def call(backend):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = prescored_attention(*leaves, config, is_causal=True, backend=backend)
    output.square().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]

truth = call("plain")
for threads in (1, 2, 4):
    torch.set_num_threads(threads)
    assert library.load().prescore_native_threads() == threads
    for _ in range(3):
        for got, wanted in zip(call("native"), truth):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=2e-4)
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that waits for threads that are gone would wait for ever
    os._exit(library.load().prescore_native_threads())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), library.describe_compiler())
"""


def test_a_call_without_openmp_equals_plain_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "clang")
    monkeypatch.setattr(build, "levels_of_machine", lambda: {"baseline": ()})
    (made,) = build.build(tmp_path)
    assert b"omp_get" not in made.read_bytes()
    assert b"kmpc" not in made.read_bytes()
    environment = {**os.environ, "PRESCORE_NATIVE": "baseline"}
    command = [sys.executable, "-c", CALL, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    child, _, compiler = done.stdout.strip().partition(" ")
    assert child == "1"  # a forked child goes on with one thread
    assert "clang" in compiler.lower()
    assert compiler.endswith("own threads")
