"""The Triton backend: random calls under its interpreter, what it refuses, which backend runs, compilation."""

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from oracles.inputs import attention_tensors
from routed_checks import attend
from torch.utils._python_dispatch import TorchDispatchMode

from prescore import Exact, Routed
from prescore.errors import Unsupported
from prescore.routed import reference, triton
from prescore.routed.backends import exact_reason, pick_far_backend
from prescore.routed.layout import make_layout

ROOT = Path(__file__).parents[2]
CONFIG = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=64, sinks=5, exact_until=0)
needs_triton = pytest.mark.skipif(bool(triton.missing()), reason=triton.missing() or "triton is there")


def tensors(**sizes):
    usual = {"n_keys": 160, "heads": 2, "dim": 32, "value_dim": 32, "dtype": torch.float32}
    return attention_tensors(**{**usual, **sizes})


@needs_triton
@pytest.mark.slow
def test_random_calls_are_the_reference():
    """Prefill, chunks of a prompt, steps, padding, gradients; groups of 1 to 8 heads, every dtype."""
    command = [sys.executable, "-W", "ignore", ROOT / "tests" / "routed" / "triton_calls.py", "--calls", "36"]
    done = subprocess.run([*command, "--seed", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout


REFUSED = {
    "device": ({}, {}, {}, "CPU tensors under TRITON_INTERPRET=1, got cpu"),
    "float64": ({"dtype": torch.float64}, {}, {}, "it knows torch.float32, .* got torch.float64"),
    "head dimension": ({"dim": 48}, {}, {}, r"the head dimension must be one of \(32, 64, 128, 256\), got 48"),
    "value dimension": ({"value_dim": 80}, {}, {}, r"the value dimension must be one of .* got 80"),
    "cluster size": ({}, {"cluster_size": 48, "chunk_size": 48}, {}, "clusters must have one of .* keys, got 48"),
    "dropout": ({}, {}, {"dropout_p": 0.1}, "it cannot drop attention weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_triton_is_refused_with_its_reasons(name):
    sizes, changes, options, reason = REFUSED[name]
    with pytest.raises(Unsupported, match=f"backend 'triton' cannot run: .*{reason}"):
        attend(tensors(**sizes), CONFIG.replace(**changes), backend="triton", **options)


def test_triton_is_refused_where_it_is_missing_and_for_other_configurations(monkeypatch):
    with pytest.raises(Unsupported, match="backend 'triton' cannot run: it runs Routed only"):
        attend(tensors(), Exact(), backend="triton")
    monkeypatch.setattr(triton, "missing", lambda: "triton must be installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Unsupported, match="backend 'triton' cannot run: triton must be installed"):
        attend(tensors(), CONFIG, backend="triton")


def test_triton_runs_where_it_is_named(monkeypatch):
    query, key, value = tensors(n_keys=3000)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick_far_backend("auto", query, 32, 16) != "triton"
    assert pick_far_backend("plain", query, 32, 16) == "plain"
    if not triton.missing():
        assert pick_far_backend("triton", query, 32, 16) == "triton"
        assert pick_far_backend("triton", query, 48, 16) == "plain"
    device = [torch.empty_like(t, device="meta") for t in (query, key, value)]
    assert exact_reason(*device, Routed(), is_causal=True) == "native code: it runs on CPU tensors, got meta"


class NoReads(TorchDispatchMode):
    """Refuses to wait for a device: no number of a tensor is read by Python."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation.name() not in ("aten::_local_scalar_dense", "aten::nonzero"), operation
        return operation(*args, **(kwargs or {}))


def test_the_key_index_reads_no_number_of_a_causal_call():
    _, key, value = tensors(n_keys=300)
    layout = make_layout(300, 300, causal=True, config=CONFIG)
    with NoReads():
        index = reference.build_clusters(key[0], value[0], layout, layout.sinks, layout.n_chunks)
        reference.mean_of_prefixes(index.key_cov)
    with NoReads(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        bool(index.key_cov.sum() > 0)


# --- compilation for devices that are not there


def triton_table():
    spec = importlib.util.spec_from_file_location("triton_table", ROOT / "tools" / "triton_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile_as_recorded(target):
    """Every architecture has a record of the prefill kernel; it compiles, fits and takes what the record says."""
    tool, lines = triton_table(), (ROOT / "experiments" / "gpu" / "compiled.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if (row["target"], row["kernel"]) == (target, "prefill")]
    assert rows
    for row in rows:
        assert row["shared_bytes"] <= tool.SHARED[target]
        if row["dim"] == 128 and row["dtype"] == "bf16" and row["triton"] == metadata.version("triton"):
            assert tool.compile_kernel("prefill", target, 128, "bf16") == row
