"""Compile the Triton kernels for GPUs that are not there: registers, shared memory and spills of each.

    python tools/triton_table.py                       # everything, into experiments/gpu
    python tools/triton_table.py --target sm_90 --dim 128 --dtype bf16 --print

Triton compiles for any target; `ptxas` of the triton package, and the metadata of AMD code objects, tell what a
kernel takes. A finished row is not compiled again unless `--again` is given.
"""

from __future__ import annotations

import argparse
import inspect
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

from prescore.routed import triton as backend

FOLDER = Path(__file__).parents[1] / "experiments" / "gpu"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
DIMS = (64, 128, 256)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that a program may take."""
GROUP, CLUSTER_SIZE = 4, 128
_FLOATS = ("scale", "log_inverse", "margin", "exact_margin")
_INTEGERS = (
    *("query_head", "query_member", "query_step", "key_head", "key_step", "value_head", "value_step"),
    *("n_heads", "n_tiles", "splits", "n_query", "n_rows", "n_tables", "n_covs", "n_spans", "spans"),
    *("spans_per_split", "clusters_per_span", "clusters_per_cov", "clusters_per_split", "n_sinks", "n_dim"),
)
_POINTERS = {
    **dict.fromkeys(("query", "key", "value", "sink_key", "sink_value", "result"), "input"),
    **dict.fromkeys(("visible", "local_start", "local_stop", "counts"), "i32"),
    **{"positions": "i64", "hits": "i64", "int8": "i8", "sub_int8": "i8", "query_int8": "i8"},
}
"""Types of what is not float32."""


def compile_kernel(name: str, target: str, dim: int, dtype: str, rows: int) -> dict[str, Any]:
    """What one kernel takes on one target for tiles of `rows`, with the configuration of `routed/triton.py`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from prescore.routed import triton_kernels

    kernel, own = getattr(triton_kernels, name), backend.launch(target, dim, dim, DTYPES[dtype])
    if own is None:
        raise SystemExit(f"{target} has no configuration for {dtype} and {dim} dimensions")
    constants = {
        "GROUP": GROUP, "ROWS": rows, "D": dim, "DV": dim, "SIZE": CLUSTER_SIZE, "LOCAL": own.local,
        "KEYS": min(own.keys, CLUSTER_SIZE), "WIDTH": min(own.width, dim),
        "PRECISION": backend.precision(target), "INTERPRETED": False, **backend.constants(),
    }  # fmt: skip
    warps = backend.LIGHT_WARPS.get(name, own.warps)
    signature, attributes, parameters = {}, {}, inspect.signature(kernel.fn).parameters
    constants = {argument: value for argument, value in constants.items() if argument in parameters}
    for place, argument in enumerate(parameters):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        if argument in _FLOATS:
            signature[argument] = "fp32"
        elif argument in _INTEGERS:
            signature[argument] = "i32"
        else:
            kind = _POINTERS.get(argument, "fp32")
            signature[argument] = f"*{dtype if kind == 'input' else kind}"
        if signature[argument].startswith("*") or argument.endswith(("_head", "_member", "_step")):
            attributes[(place,)] = [["tt.divisibility", 16]]  # as torch allocates, and as head dimensions are
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    is_cuda = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_cuda else GPUTarget("hip", target, 64)
    compiled = triton.compile(source, target=gpu, options={"num_warps": warps, "num_stages": 1})
    taken = _of_ptx(compiled.asm["ptx"], target) if is_cuda else _of_amd(compiled.asm["amdgcn"])
    return {
        "kernel": name, "target": target, "dim": dim, "dtype": dtype, "tile": rows, **own._asdict(),
        "shared_bytes": compiled.metadata.shared, **taken, "triton": metadata.version("triton"),
    }  # fmt: skip


def _of_ptx(ptx: str, target: str) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills, by the assembler."""
    import triton.backends.nvidia

    folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    assembler = folder / ("ptxas-blackwell" if target == "sm_100" else "ptxas")
    name = target if target == "sm_80" else f"{target}a"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [assembler, "-v", "--gpu-name", name, path, "-o", Path(scratch) / "kernel.cubin"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = max(int(number) for number in re.findall(r"Used (\d+) registers", text))
    # sm_100 adds functions of its own
    return {"registers": registers, "spill_bytes": sum(int(number) for pair in spills for number in pair)}


def _of_amd(text: str) -> dict[str, int]:
    """Registers of a lane, and registers that it spills, by the code object."""
    numbers = {
        name: int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    }
    return {"registers": numbers["vgpr_count"], "spill_bytes": numbers["private_segment_fixed_size"]}


KERNELS = ("local_part", "far_part", "merge")


def configurations() -> list[tuple[str, str, int, str, int]]:
    """All that the backend can choose: kernel, target, head dimension, dtype, rows of a tile (prompts, steps)."""
    found = []
    for kernel, target, dim, dtype in itertools.product(KERNELS, TARGETS, DIMS, DTYPES):
        own = backend.launch(target, dim, dim, DTYPES[dtype])
        if own is not None:
            found += [(kernel, target, dim, dtype, rows) for rows in sorted({own.rows, backend.STEP_ROWS})]
    return found


def place_of(row: dict[str, Any]) -> tuple[str, str, int, str, int]:
    """Which configuration a row is of."""
    return row["kernel"], row["target"], row["dim"], row["dtype"], row["tile"]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| kernel | target | head dimension | dtype | tile of queries | keys at once | warps | registers "
        "| shared memory, bytes | spilled bytes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        taken = (row[name] for name in ("keys", "warps", "registers", "shared_bytes", "spill_bytes"))
        lines.append("| " + " | ".join(str(cell) for cell in (*place_of(row), *taken)) + " |")
    return "\n".join(lines)


README = """# GPUs: compiled kernels

No GPU was used. The kernels of the Triton backend are compiled ahead of time with every configuration of
`src/prescore/routed/triton.py` (`LAUNCHES`), for groups of {group} query heads and clusters of {size} keys. The
assembler counts the registers of a thread and the bytes that it spills; of AMD code the last column is the scratch
memory of a lane. Single steps have tiles of {step} queries. Command: `python tools/triton_table.py`; record:
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
        own, row = backend.launch(place[1], place[2], place[2], DTYPES[place[3]]), known.get(place, {})
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
            text = README.format(group=GROUP, size=CLUSTER_SIZE, step=backend.STEP_ROWS, table=table(rows))
            (FOLDER / "compiled.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
