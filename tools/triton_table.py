"""Compile the Triton kernels for GPUs that are not there: registers, shared memory and spills of each.

    python tools/triton_table.py                       # everything, into experiments/gpu
    python tools/triton_table.py --target sm_90 --dim 128 --dtype bf16 --print

Triton compiles for any target; `ptxas` of the triton package, and the metadata of AMD code objects, tell what a
kernel takes. A finished row is not compiled again unless `--again` is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from prescore.config import Routed
from prescore.routed import reference
from prescore.routed import triton as backend
from prescore.routed.layout import make_layout

FOLDER = Path(__file__).parents[1] / "experiments" / "gpu"
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
DIMS = (64, 128)
DTYPES = {"bf16": torch.bfloat16}
"""Float16 is compiled in the same way. No configuration of float32 is known."""
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""KiB of shared memory that a program may take."""
GROUP, CLUSTER_SIZE = 4, 128
_TYPES = {
    **{torch.bfloat16: "bf16", torch.float32: "fp32"},
    **{torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"},
}


def _call(target: str, dim: int, dtype: str, mode: str) -> dict[str, Any]:
    """The arguments of a causal call over 1,024 keys: a prompt or a step, without numbers."""
    layout = make_layout(1024, 1024, causal=True, config=Routed())
    query = torch.empty(1, GROUP, 1 if mode == "step" else 1024, dim, dtype=DTYPES[dtype], device="meta")
    key = torch.empty(1, 1, 1024, dim, dtype=DTYPES[dtype], device="meta")
    index = reference.build_index(key[0], key[0], layout, layout.sinks, layout.n_chunks)
    cache = backend.Cache(key, key, torch.empty(1, dtype=torch.int32, device="meta"))
    numbers = {"chunk_size": 256, "clusters_per_cov": 2, "exact_until": 0, "n_chunks": 2, "scale": 1.0}
    return backend.arguments(query, cache, index, {**numbers, "log_inverse": 1.0}, True, target)


_PRODUCTS = r"\b(IMMA|IGMMA|UTCIMMA)", r"\b(HMMA|HGMMA|UTCHMMA|QGMMA|UTCQMMA)"
"""Products of int8 matrices in the machine code, and of others."""


def compile_kernel(name: str, target: str, dim: int, dtype: str, mode: str) -> dict[str, Any]:
    """What one kernel takes on one target in a `prompt` or a `step`, as `routed/triton.py` launches it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from prescore.routed import triton_kernels

    kernel = getattr(triton_kernels, name)
    own = backend.launch(target, dim, dim, DTYPES[dtype], is_step=mode == "step")
    if own is None:
        raise SystemExit(f"{target} has no configuration for {dtype} and {dim} dimensions")
    values, warps = _call(target, dim, dtype, mode), backend.warps_of(name, own)
    signature, attributes, constants = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        value = values[argument]
        if argument.isupper():
            signature[argument], constants[argument] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[argument] = f"*{_TYPES[value.dtype]}"
        else:
            signature[argument] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or argument.startswith(("query_", "key_", "value_")):
            attributes[(place,)] = [["tt.divisibility", 16]]  # as torch allocates, and as head dimensions are
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    is_cuda = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_cuda else GPUTarget("hip", target, 64)
    compiled = triton.compile(source, target=gpu, options={"num_warps": warps, "num_stages": 1})
    taken = _of_ptx(compiled.asm["ptx"], target) if is_cuda else _of_amd(compiled.asm["amdgcn"])
    columns = {"scan": own.keys, "gate": triton_kernels.GATE.value, "read": own.read, "centroid": backend.CLUSTERS}
    for loop, length in taken.pop("loops", {}).items():
        taken[f"per_{loop}"] = round(length * 32 * warps / (columns[loop] * own.rows), 2)
    return {
        "kernel": name, "target": target, "dim": dim, "dtype": dtype, "mode": mode, **own._asdict(),
        "shared_bytes": compiled.metadata.shared, **taken, "triton": metadata.version("triton"),
    }  # fmt: skip


def _of_ptx(ptx: str, target: str) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills, by the assembler."""
    import triton.backends.nvidia

    folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    assembler = folder / ("ptxas-blackwell" if target in ("sm_100", "sm_120") else "ptxas")
    name = target if target == "sm_80" else f"{target}a"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        cubin = Path(scratch) / "kernel.cubin"
        command = [assembler, "-v", "--gpu-name", name, path, "-o", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [folder / "nvdisasm", "-c", cubin]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = max(int(number) for number in re.findall(r"Used (\d+) registers", text))
    # sm_100 adds functions of its own
    spilled = sum(int(number) for pair in spills for number in pair)
    return {"registers": registers, "spill_bytes": spilled, "loops": _loops(code)}


def _loops(code: str) -> dict[str, int]:
    """Instructions of a thread in the loops of `far`: the scan, the gate, keys read, and the rest of a block.

    All have int8 products, and the read also products in half precision or of TF32; the block holds all others.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    plain, mixed = [], []
    for line in code.splitlines():
        label, instruction = re.match(r"\s*(\.L_\w+):", line), re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = len(instructions)
        if instruction:
            instructions.append(instruction[1])
            jump = re.search(r"BRA.*`\((\.L_\w+)\)", instruction[1])
            if jump and jump[1] in labels:
                body = instructions[labels[jump[1]] :]
                int8, other = (sum(bool(re.search(kind, text)) for text in body) for kind in _PRODUCTS)
                if int8:
                    (mixed if other else plain).append(len(body))
    if not plain or len(mixed) < 2:
        return {}
    scan, read, block = plain[-1], min(mixed), max(mixed)
    gate = plain[-2] if len(plain) > 1 else 0  # of a step it is unrolled, and belongs to the rest
    return {"scan": scan, "gate": gate, "read": read, "centroid": block - scan - gate - read}


def _of_amd(text: str) -> dict[str, int]:
    """Registers of a lane, and registers that it spills, by the code object."""
    numbers = {
        name: int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    }
    return {"registers": numbers["vgpr_count"], "spill_bytes": numbers["private_segment_fixed_size"]}


KERNELS = ("bound", "far", "merge")
COUNTS = ("per_scan", "per_gate", "per_read", "per_centroid")


MODES = ("prompt", "step")


def configurations() -> list[tuple[str, str, int, str, str]]:
    """All that the backend can choose: kernel, target, head dimension, dtype, prompt or step."""
    every = itertools.product(KERNELS, TARGETS, DIMS, DTYPES, MODES)
    return [place for place in every if launch_of(place) is not None]


def launch_of(place: tuple[str, str, int, str, str]) -> backend.Launch | None:
    """How a configuration is compiled."""
    _, target, dim, dtype, mode = place
    return backend.launch(target, dim, dim, DTYPES[dtype], is_step=mode == "step")


def place_of(row: dict[str, Any]) -> tuple[str, str, int, str, str]:
    """Which configuration a row is of."""
    return row["kernel"], row["target"], row["dim"], row["dtype"], row["mode"]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| kernel | target | head dimension | dtype | call | queries | keys at once | warps | registers "
        "| shared memory, bytes | spilled bytes | scan | gate | read | centroid |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        taken = (
            row.get(name, "") for name in ("keys", "warps", "registers", "shared_bytes", "spill_bytes", *COUNTS)
        )
        lines.append("| " + " | ".join(str(cell) for cell in (*place_of(row), *taken)) + " |")
    return "\n".join(lines)


README = """# GPUs: compiled kernels

No GPU was used. The kernels of the Triton backend are compiled ahead of time with every configuration of
`src/prescore/routed/triton.py` (`LAUNCHES`), for groups of {group} query heads and clusters of {size} keys. The
assembler counts the registers of a thread and the bytes that it spills; of AMD code these are the scratch memory
of a lane. The last four columns count instructions of a thread for each logit that it computes in a loop of
`far`, in the machine code that `nvdisasm` shows: int8 keys, centroids of subclusters, keys read, centroids of
clusters with all that a block of sixteen clusters needs once. Command: `python tools/triton_table.py`; record:
`compiled.jsonl`.

{table}
"""


def main() -> int:
    """Compile, record, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--dim", type=int, choices=DIMS)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--kernel", choices=KERNELS)
    parser.add_argument("--print", action="store_true", help="write no file")
    parser.add_argument("--again", action="store_true", help="compile recorded rows again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no compilation after as many")
    options = parser.parse_args()
    path, known, begin = FOLDER / "compiled.jsonl", {}, time.monotonic()
    if path.exists() and not options.print:
        recorded = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        known = {place_of(row): row for row in recorded}
    wanted = (options.kernel, options.target, options.dim, options.dtype)
    everything = configurations()
    for place in everything:
        if any(name not in (None, own) for name, own in zip(wanted, place, strict=False)):
            continue
        own, row = launch_of(place), known.get(place, {})
        if own and not options.again and all(row.get(field) == value for field, value in own._asdict().items()):
            continue
        if time.monotonic() - begin > options.seconds:
            return 1
        known[place] = row = compile_kernel(*place)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if not options.print:
            rows = [known[place] for place in everything if place in known]
            path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
            text = README.format(group=GROUP, size=CLUSTER_SIZE, table=table(rows))
            (FOLDER / "compiled.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
