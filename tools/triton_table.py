"""Compile the Triton kernels for GPUs that are not there: registers, shared memory and spills of each.

    python tools/triton_table.py                       # everything, into experiments/gpu
    python tools/triton_table.py --target sm_90 --dim 128 --dtype bf16 --print

Triton compiles for any target; `ptxas` of the triton package, and the metadata of AMD code objects, tell what a
kernel takes. A finished row is not compiled again unless `--again` is given.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
import tempfile
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
GROUP, CLUSTER_SIZE, DECODE_ROWS = 4, 128, 16
_FLOATS = ("scale", "log_inverse", "margin", "exact_margin")
_INTEGERS = (
    *("query_head", "query_member", "query_step", "key_head", "key_step", "value_head", "value_step"),
    *("n_query", "n_tables", "n_covs", "clusters_per_cov", "n_sinks", "n_dim", "clusters_per_split", "splits"),
)
_POINTERS = {
    **dict.fromkeys(("query", "key", "value", "sink_key", "sink_value", "result"), "input"),
    **dict.fromkeys(("visible", "local_start", "local_stop", "counts"), "i32"),
    **{"positions": "i64", "int8": "i8", "sub_int8": "i8"},
}
"""Types of what is not float32."""


def compile_kernel(name: str, target: str, dim: int, dtype: str) -> dict[str, Any]:
    """What one kernel takes on one target, with the configuration of `routed/triton.py`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from prescore.routed import triton_kernels

    kernel, own = getattr(triton_kernels, name), backend.launch(target, dim, dim)
    constants = {
        "GROUP": GROUP, "ROWS": DECODE_ROWS if name.startswith("decode") else own.rows, "D": dim, "DV": dim,
        "SIZE": CLUSTER_SIZE, "LOCAL": own.local, "KEYS": own.keys, "PRECISION": backend.precision(target),
        "INTERPRETED": False, **backend.constants(CLUSTER_SIZE),
    }  # fmt: skip
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
    compiled = triton.compile(source, target=gpu, options={"num_warps": own.warps, "num_stages": 1})
    taken = _of_ptx(compiled.asm["ptx"], target) if is_cuda else _of_amd(compiled.asm["amdgcn"])
    return {
        "kernel": name, "target": target, "dim": dim, "dtype": dtype, **own._asdict(), "tile": constants["ROWS"],
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
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)[-1]
    registers = int(re.findall(r"Used (\d+) registers", text)[-1])
    return {"registers": registers, "spill_bytes": int(stores) + int(loads)}


def _of_amd(text: str) -> dict[str, int]:
    """Registers of a lane, and registers that it spills, by the code object."""
    numbers = {
        name: int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    }
    return {"registers": numbers["vgpr_count"], "spill_bytes": numbers["private_segment_fixed_size"]}


KERNELS = ("prefill", "decode_local", "decode_far", "decode_merge")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| kernel | target | head dimension | dtype | tile of queries | keys at once | warps | registers "
        "| shared memory, bytes | spilled bytes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        names = ("kernel", "target", "dim", "dtype", "tile", "keys", "warps")
        taken = ("registers", "shared_bytes", "spill_bytes")
        lines.append("| " + " | ".join(str(row[name]) for name in (*names, *taken)) + " |")
    return "\n".join(lines)


README = """# GPUs: compiled kernels

No GPU was used. The kernels of the Triton backend are compiled ahead of time with the
configurations of `src/prescore/routed/triton.py` (`LAUNCHES`), for groups of {group} query heads and clusters of
{size} keys. The assembler counts the registers of a thread and the bytes that it spills; of AMD code the last
column is the scratch memory of a lane. Command: `python tools/triton_table.py`; record: `compiled.jsonl`.

{table}
"""


def main() -> int:
    """Compile, record, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--dim", type=int, choices=DIMS, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--kernel", choices=KERNELS, action="append")
    parser.add_argument("--print", action="store_true", help="write no file")
    parser.add_argument("--again", action="store_true", help="compile recorded rows again")
    options = parser.parse_args()
    path, known = FOLDER / "compiled.jsonl", {}
    if path.exists() and not options.print:
        recorded = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        known = {(row["kernel"], row["target"], row["dim"], row["dtype"]): row for row in recorded}
    for target in options.target or TARGETS:
        for dim in [d for d in options.dim or DIMS if d <= max(backend.LAUNCHES[target])]:
            for dtype in options.dtype or DTYPES:
                for name in options.kernel or KERNELS:
                    wanted = backend.launch(target, dim, dim)._asdict()
                    row = known.get((name, target, dim, dtype), {})
                    if options.again or any(row.get(field) != value for field, value in wanted.items()):
                        row = compile_kernel(name, target, dim, dtype)
                        known[(name, target, dim, dtype)] = row
                    sys.stdout.write(json.dumps(row) + "\n")
                    sys.stdout.flush()
                    if not options.print:
                        order = sorted(known, key=lambda k: (k[0], TARGETS.index(k[1]), k[2], k[3]))
                        rows = [known[place] for place in order]
                        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
                        text = README.format(group=GROUP, size=CLUSTER_SIZE, table=table(rows))
                        (FOLDER / "compiled.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
