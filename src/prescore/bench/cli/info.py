"""`prescore info`: what is installed and what is missing."""

from __future__ import annotations

import json as jsonlib
import os
import re
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from prescore.bench.cli.options import Json
from prescore.bench.records import Values, versions

_LENGTHS = (2304, 3072, 4096, 6144, 8192, 16_384)
_GPU_LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072)
_EXACT = "runs exactly: no native code"


def command(
    json: Json = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Find the length from which the default is faster than exact attention."),
    ] = False,
    check_gpu: Annotated[
        bool,
        typer.Option("--check-gpu", help="Compare the kernels with plain torch on the GPU, and time them."),
    ] = False,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Remove the models that were converted here, and stop.")
    ] = False,
) -> None:
    """Show versions, device, threads, native operators, scorers, optional packages and the cache of models.

    Example: prescore info --measure
    """
    from prescore.integrations import offline

    if clear_cache:
        megabytes, directory = offline.cache_megabytes(), offline.cache_directory()
        offline.clear_cache()
        print(f"removed {megabytes:.0f} MB in {directory}")
        return
    facts = collect()
    if measure and facts["routing"] != _EXACT:  # exact attention beside itself would give chance
        facts["routing"] = _pays_from()
    if check_gpu:
        if not facts["device"].startswith("cuda"):
            raise typer.BadParameter(f"--check-gpu needs a GPU, got {facts['device']}")
        facts["gpu"] = _check_gpu("cuda")
    if json:
        print(jsonlib.dumps(facts))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        **facts["versions"],
        "device": facts["device"],
        "threads": describe_threads(facts["threads"], facts["cores"], facts["sockets"]),
        "flash attention op": "present" if facts["flash_op"] else "missing (slower exact attention)",
        "native operators": ", compiled by ".join(filter(None, (facts["native"], facts["native_compiler"]))),
        "kernels for GPUs": facts["triton"],
        "levels that can run": ", ".join(facts["native_levels"]),
        "the default": facts["routing"],
        "scorers": ", ".join(facts["scorers"]),
        "models kept": f"{facts['cache']} ({facts['cache_megabytes']:.0f} MB; --clear-cache removes them)",
    }
    rows |= {f"GPU, {name}": result for name, result in facts.get("gpu", {}).items()}
    for name, extra in facts["extras"].items():
        missing = ", ".join(extra["missing"])
        rows[f"extra {name}"] = f"missing {missing}{_line(name)}" if missing else "present"
    for name, value in rows.items():
        table.add_row(name, escape(value))
    Console(soft_wrap=True).print(table)


def collect() -> Values:
    """All facts as JSON values."""
    import torch

    from prescore.config import Routed
    from prescore.integrations import offline
    from prescore.registry import list_scorers
    from prescore.routed import triton
    from prescore.routed.native.library import (
        NO_LEVEL,
        describe_compiler,
        describe_native,
        levels_of_processor,
        loaded_level,
    )

    native, most = loaded_level() != NO_LEVEL, Routed.exact_until
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability()
    return {
        "versions": versions(),
        "device": f"{'cuda' if cuda else 'cpu'} ({name})",
        "threads": torch.get_num_threads(),
        **physical_cores(),
        "flash_op": hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
        "native": describe_native(),
        "native_compiler": describe_compiler(),
        "triton": f"none ({triton.missing()})" if triton.missing() else f"triton {metadata.version('triton')}",
        "routing": f"routes prompts of more than {most} tokens on CPUs" if native else _EXACT,
        "native_levels": list(levels_of_processor()),
        "scorers": list_scorers(),
        "cache": str(offline.cache_directory()),
        "cache_megabytes": round(offline.cache_megabytes(), 1),
        "extras": _extras(),
    }


def physical_cores(cpuinfo: Path = Path("/proc/cpuinfo")) -> Values:
    """Physical `cores` that this process may use, and their `sockets`; None where the system does not tell."""
    try:
        text, usable = cpuinfo.read_text(encoding="utf-8"), os.sched_getaffinity(0)
    except (OSError, AttributeError):  # macOS has neither
        return {"cores": None, "sockets": None}
    cores = set()
    for entry in text.strip().split("\n\n"):
        fields = {
            name.strip(): value.strip() for name, _, value in (line.partition(":") for line in entry.split("\n"))
        }
        if {"processor", "physical id", "core id"} <= set(fields) and int(fields["processor"]) in usable:
            cores.add((fields["physical id"], fields["core id"]))
    sockets = {socket for socket, _ in cores}
    return {"cores": len(cores) or None, "sockets": len(sockets) or None}


def describe_threads(threads: int, cores: int | None, sockets: int | None) -> str:
    """The number of threads, with a warning where they share cores or reach over sockets."""
    if cores is not None and threads > cores:
        return f"{threads}, more than the {cores} physical cores, which they share: set OMP_NUM_THREADS={cores}"
    if sockets is not None and sockets > 1:
        return f"{threads} on {sockets} sockets: numactl --cpunodebind=0 --membind=0 keeps memory near its threads"
    return str(threads)


def _pays_from() -> str:
    """From which length the default is faster than exact attention here: causal, forward, random tensors."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from prescore import prescored_attention
    from prescore.bench.speed.timing import EXACT, random_inputs, time_calls

    for length in _LENGTHS:
        inputs = random_inputs(length, heads=4, dim=64)
        exact = partial(scaled_dot_product_attention, *inputs, is_causal=True)
        default = partial(prescored_attention, *inputs, is_causal=True)
        times = time_calls({EXACT: exact, "default": default}, repeats=3)
        if times["default"]["speedup"] > 1:
            conditions = f"4 heads of 64, random, causal, {torch.get_num_threads()} threads"
            return f"faster than exact attention from {length} tokens on ({conditions})"
    return f"not faster than exact attention up to {_LENGTHS[-1]} tokens"


def _check_gpu(name: str) -> dict[str, str]:
    """Whether the kernels agree with plain torch on a device, and from which length on they were faster there."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from prescore import Routed, prescored_attention
    from prescore.bench.speed.timing import EXACT, random_inputs, time_calls
    from prescore.routed.decode import StepAttention
    from prescore.routed.device_check import disagreement

    results = {}
    for dim in (64, 128):
        error = disagreement(torch.device(name), torch.bfloat16, dim, dim, 4, Routed().cluster_size)
        results[f"{dim} dimensions"] = error or "the kernels agree with plain torch"
        gains: dict[str, list[str]] = {"prompts": [], "steps": []}
        for length in () if error else _GPU_LENGTHS:
            inputs = random_inputs(length, heads=8, dim=dim, kv_heads=2, dtype="bfloat16")
            query, key, value = (tensor.to(name) for tensor in inputs)
            steps, newest = StepAttention(Routed(), scale=dim**-0.5), query[:, :, -1:]
            exact = partial(scaled_dot_product_attention, enable_gqa=True)
            calls: dict[str, tuple[Any, Any, torch.Tensor]] = {
                "prompts": (partial(exact, is_causal=True), partial(prescored_attention, is_causal=True), query),
                "steps": (exact, steps.attend, newest),
            }
            for kind, (rival, kernels, queries) in calls.items():
                tensors = (queries, key, value)
                both = {EXACT: partial(rival, *tensors), "kernels": partial(kernels, *tensors, backend="triton")}
                gains[kind].append(f"{length}: {time_calls(both, repeats=3)['kernels']['speedup']:.2f}x")
        for kind, cells in gains.items():
            if cells:
                results[f"{dim} dimensions, {kind}"] = ", ".join(cells)
    return results


def installation(module: str, prefer: str) -> str:
    """How to install a missing module, for the end of a sentence; empty = no extra has it.

    Of several extras with it the preferred one is named. Without the metadata of this package (on PYTHONPATH, or
    copied into another one) no extra is known, and the missing package itself is named.
    """
    package, extras = {"sklearn": "scikit-learn", "PIL": "pillow"}.get(module, module), _extras()
    if not extras:
        return f": pip install {package}"
    with_it = [name for name, group in extras.items() if package in (*group["present"], *group["missing"])]
    return _line(prefer if prefer in with_it else with_it[0]) if with_it else ""


def _line(extra: str) -> str:
    return f': pip install ".[{extra}]" in a clone of prescore'


def _extras() -> dict[str, dict[str, list[str]]]:
    """Packages of each optional group, read from this package's metadata; none where it is not installed."""
    extras: dict[str, dict[str, list[str]]] = {}
    for requirement in metadata.requires("prescore") or [] if _installed("prescore") else []:
        match = re.match(r"([A-Za-z0-9._-]+).*extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if match:
            package, extra = match.groups()
            group = extras.setdefault(extra, {"present": [], "missing": []})
            group["present" if _installed(package) else "missing"].append(package)
    return extras


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
