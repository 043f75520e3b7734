"""The check of kernels before `auto` takes them: with right kernels, wrong ones, and in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from prescore import Exact, Routed
from prescore.routed import device_check, plain, triton
from prescore.routed.backends import auto_config

CPU = torch.device("cpu")
SIZES = (CPU, torch.float32, 32, 32, 2, 16)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def asked_anew():
    device_check.disagreement.cache_clear()
    yield
    device_check.disagreement.cache_clear()


@pytest.fixture
def kernels(monkeypatch):
    """Plain torch in place of the kernels; what the test sets changes its result."""
    monkeypatch.setattr(triton, "unsupported", lambda *_: [])
    monkeypatch.setattr(triton, "forward", plain.forward)
    return monkeypatch


def test_right_kernels_pass_without_a_warning(kernels, recwarn):
    assert device_check.disagreement(*SIZES) == ""
    assert not recwarn.list


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a, t, c: (a._replace(output=a.output * 1.01), t, c), "a prompt: the output of"),
        (lambda a, t, c: (a._replace(lse=a.lse + 0.01), t, c), "a prompt: the lse of"),
        (lambda a, t, c: (a._replace(lse=a.lse * torch.nan), t, c), "a prompt: the lse of"),
        (lambda a, t, c: (a, t, c * 2), "a prompt: .* keys read in place of"),
        (
            lambda a, t, c: (a._replace(output=-a.output) if a.lse.shape[-1] == 1 else a, t, c),
            "a step: the output",
        ),
        (
            lambda a, t, c: (a._replace(output=-a.output) if a.lse.shape[-1] == 100 else a, t, c),
            "a chunk of a prompt",
        ),
    ],
)
def test_wrong_kernels_are_found_and_warned_of_once(kernels, change, says):
    kernels.setattr(triton, "forward", lambda *inputs: change(*plain.forward(*inputs)))
    with pytest.warns(RuntimeWarning, match=f"differ from plain torch on cpu in {says}"):
        reason = device_check.disagreement(*SIZES)
    assert reason
    assert device_check.disagreement(*SIZES) == reason  # pytest turns a second warning into an error


def test_kernels_that_cannot_start_are_found(kernels):
    def fail(*inputs):
        raise RuntimeError("ptxas died")

    kernels.setattr(triton, "forward", fail)
    with pytest.warns(RuntimeWarning, match="ptxas died"):
        assert "ptxas died" in device_check.disagreement(*SIZES)


def test_auto_is_exact_where_the_check_fails(kernels):
    kernels.setattr(triton, "target_of", lambda device: "sm_80")
    kernels.setitem(triton.GAINS_FROM, "sm_80", (4096, None))
    query = torch.empty(1, 4, 8192, 32, device="meta")
    key = query[:, :2]
    kernels.setattr(device_check, "disagreement", lambda *sizes: "" if sizes[4] == 2 else "no")
    config, reason = auto_config(query, key, key, Routed(), is_causal=True)
    assert (config, reason) == (Routed(exact_until=4096), "")
    kernels.setattr(device_check, "disagreement", lambda *sizes: "the kernels differ")
    assert auto_config(query, key, key, Routed(), is_causal=True) == (Exact(), "triton: the kernels differ")


INTERPRETED = """
import sys, types, warnings
import torch
from prescore.routed import device_check, triton, triton_kernels

torch.set_num_threads(1)
warnings.simplefilter("ignore")
device_check.N_KEYS = 200
device_check.CALLS = {"a prompt": 40, "a step": 1}
sizes = (torch.device("cpu"), torch.float32, 32, 32, 2, 16)
print(repr(device_check.disagreement(*sizes)))
source = open(triton_kernels.__file__).read()
for old, new in CHANGES:
    assert source.count(old) >= 1, old
    path = sys.argv[1]
    open(path, "w").write(source.replace(old, new, 1))
    spec = __import__("importlib.util").util.spec_from_file_location("prescore.routed.triton_kernels", path)
    changed = __import__("importlib.util").util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    __import__("prescore.routed").routed.triton_kernels = changed
    sys.modules["prescore.routed.triton_kernels"] = changed
    device_check.disagreement.cache_clear()
    print(repr(device_check.disagreement(*sizes)))
"""
CHANGES = [
    ("pending = lowered[:, None] + above", "pending = lowered[:, None] - above"),
    ("tl.store(flags + at, (above >= 0)", "tl.store(flags + at, (above >= 900)"),
    ("SIZE - read_counts", "SIZE - 0 * read_counts"),
    ("moved += tl.sum(", "moved -= tl.sum("),
    ("at, member = row // MEMBERS, row % MEMBERS", "at, member = row // MEMBERS, (row + 1) % MEMBERS"),
]


@needs_triton
@pytest.mark.slow
def test_the_check_passes_in_the_interpreter_and_finds_kernels_with_one_wrong_line(tmp_path):
    script = INTERPRETED.replace("CHANGES", repr(CHANGES))
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "kernels.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    right, *wrong = ran.stdout.splitlines()
    assert right == "''"
    assert len(wrong) == len(CHANGES)
    assert "''" not in wrong, dict(zip(CHANGES, wrong, strict=True))
