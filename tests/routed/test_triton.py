"""The Triton backend: random calls under its interpreter, what it refuses, which backend runs, compilation."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors
from pretend_device import PretendDevice
from routed_checks import attend
from torch.utils._python_dispatch import TorchDispatchMode

from prescore import Exact, Routed, prescored_attention
from prescore.errors import Unsupported
from prescore.routed import reference, triton
from prescore.routed.backends import auto_config, pick_backend
from prescore.routed.layout import make_layout

ROOT = Path(__file__).parents[2]
CONFIG = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=64, sinks=5, exact_until=0)
needs_triton = pytest.mark.skipif(bool(triton.missing()), reason=triton.missing() or "triton is there")


def tensors(**sizes):
    usual = {"n_keys": 160, "heads": 2, "dim": 32, "value_dim": 32, "dtype": torch.float32}
    return attention_tensors(**{**usual, **sizes})


@needs_triton
@pytest.mark.slow
def test_random_calls_are_the_reference(device):
    """Prefill, chunks of a prompt, steps, padding, gradients; groups of 1 to 8 heads, every dtype."""
    command = [sys.executable, "-W", "ignore", ROOT / "tests" / "routed" / "triton_calls.py", "--calls", "36"]
    options = ["--seed", "2", "--device", str(device)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
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
    query = tensors()[0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick_backend("auto", query, 32, 16) != "triton"
    assert pick_backend("plain", query, 32, 16) == "plain"
    if not triton.missing():
        assert pick_backend("triton", query, 32, 16) == "triton"
        assert pick_backend("triton", query, 48, 16) == "plain"


def on_device(n_keys, n_query=None, dim=64):
    """Tensors without numbers on a device that is not the CPU."""
    sizes = (n_query or n_keys, n_keys, n_keys)
    return [torch.empty(1, 2, n, dim, dtype=torch.bfloat16, device="meta") for n in sizes]


@pytest.fixture
def sm_80(monkeypatch):
    """Every device but the CPU is an A100 with Triton, which gains from some length on."""
    monkeypatch.setattr(triton, "missing", lambda: "")
    monkeypatch.setattr(triton, "target_of", lambda device: "" if device.type == "cpu" else "sm_80")
    monkeypatch.setitem(triton.GAINS_FROM, "sm_80", (32768, 16384))
    monkeypatch.setattr("prescore.routed.device_check.disagreement", lambda *_: "")
    return monkeypatch


def test_auto_takes_triton_on_gpus_from_the_predicted_length_on(sm_80):
    least = triton.GAINS_FROM["sm_80"][0]
    assert pick_backend("auto", on_device(64)[0], 64, 128) == "triton"
    assert pick_backend("auto", on_device(64)[0], 48, 128) == "plain"
    assert auto_config(*on_device(2048), Routed(), is_causal=True) == (Routed(), "")
    for config in (Routed(), Routed(exact_until=4096)):
        for n_query, least in ((1, 16384), (5, 32768), (None, 32768)):
            tensors = on_device(least + 2000, n_query)
            assert auto_config(*tensors, config, is_causal=True) == (config.replace(exact_until=least), "")
            ran, reason = auto_config(*on_device(least, n_query), config, is_causal=True)
            assert ran == Exact()
            assert reason == f"triton: up to {least} keys exact attention is faster on sm_80, by a model"
    for config in (CONFIG, Routed(exact_until=2 * least)):  # short texts; more than is predicted
        assert auto_config(*on_device(2 * least + 2000), config, is_causal=True) == (config, "")
    sm_80.setitem(triton.GAINS_FROM, "sm_80", (None, None))
    ran, reason = auto_config(*on_device(2**20), Routed(), is_causal=True)
    assert (ran, reason.endswith("faster than exact attention on sm_80")) == (Exact(), True)
    ran, reason = auto_config(*on_device(2**20, dim=48), Routed(), is_causal=True)
    assert (ran, reason[:31]) == (Exact(), "triton: the head dimension must")


def test_auto_on_a_gpu_gives_chunks_of_a_prompt_the_rows_of_the_full_call(sm_80):
    """Plain torch stands in for the kernels, which need the device."""
    sm_80.setitem(triton.GAINS_FROM, "sm_80", (2400, None))
    sm_80.setattr(triton, "unsupported", lambda *_: [])
    sm_80.setattr("prescore.routed.attention.pick_backend", lambda *_: "plain")
    mode, (query, key, value) = PretendDevice(), tensors(n_keys=3000)
    with mode:
        inputs = [mode.put(t) for t in (query, key, value)]
        full, aux = prescored_attention(*inputs, is_causal=True, return_aux=True)
        chunks = [
            prescored_attention(inputs[0][:, :, a:b], *(t[:, :, :b] for t in inputs[1:]), is_causal=True)
            for a, b in ((0, 2300), (2300, 2700), (2700, 3000))
        ]
    assert aux.stats.exact_queries == 2400
    assert_within(torch.cat([c.numbers for c in chunks], 2), full.numbers, 1e-5, "chunks")
    exact = prescored_attention(query, key, value, Exact(), is_causal=True)
    assert_within(full.numbers[:, :, :2400], exact[:, :, :2400], 1e-5, "the first queries")
    assert (full.numbers - exact)[:, :, 2400:].abs().max() > 1e-4


class NoReads(TorchDispatchMode):
    """Refuses to wait for a device: no number of a tensor is read by Python."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation.name() not in ("aten::_local_scalar_dense", "aten::nonzero"), operation
        return operation(*args, **(kwargs or {}))


def test_the_key_index_reads_no_number_of_a_causal_call():
    _, key, value = tensors(n_keys=300)
    layout = make_layout(300, 300, causal=True, config=CONFIG)
    with NoReads():
        index = reference.build_index(key[0], value[0], layout, layout.sinks, layout.n_chunks)
        reference.covariances_of_spans(index, layout)
    with NoReads(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        bool(index.key_cov.sum() > 0)


# --- compilation for devices that are not there


def triton_table():
    spec = importlib.util.spec_from_file_location("triton_table", ROOT / "tools" / "triton_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded():
    """Rows of the table by configuration."""
    tool = triton_table()
    lines = (ROOT / "experiments" / "gpu" / "compiled.jsonl").read_text().splitlines()
    return {tool.place_of(row): row for row in map(json.loads, lines)}


def test_every_configuration_is_recorded_without_spills():
    tool, rows = triton_table(), recorded()
    assert set(rows) == set(tool.configurations())
    for place, row in rows.items():
        assert tool.launch_of(place)._asdict().items() <= row.items()
        assert row["spill_bytes"] == 0
        assert row["shared_bytes"] <= tool.SHARED[row["target"]] * 1024
    text = (ROOT / "experiments" / "gpu" / "compiled.md").read_text()
    assert tool.table(list(rows.values())) in text


SAMPLE = {
    "sm_80": (("far", 64, "bf16", "step"), ("bound", 128, "bf16", "prompt")),
    "sm_90": (("far", 64, "bf16", "prompt"), ("merge", 64, "bf16", "step")),
    "sm_100": (("far", 64, "bf16", "prompt"), ("bound", 128, "bf16", "step")),
    "gfx942": (("far", 128, "bf16", "step"), ("merge", 128, "bf16", "prompt")),
}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", SAMPLE)
def test_kernels_compile_without_spills_as_recorded(target):
    """Kernels of each architecture; the longest take about ten seconds each."""
    tool, rows = triton_table(), recorded()
    for kernel, dim, dtype, mode in SAMPLE[target]:
        row = tool.compile_kernel(kernel, target, dim, dtype, mode)
        known = rows[tool.place_of(row)]
        assert row["triton"] != known["triton"] or row == known
