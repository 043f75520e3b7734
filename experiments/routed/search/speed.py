"""Time and error of the searched far part in C, beside exact attention, on saved attention inputs.

    python speed.py HEADS [HEADS ...] [--share 2048] [--reach 3.0] [--exact-until 2048] [--arch native]

Compiles routed.c into a temporary folder. The local part (sinks, own and previous chunk) is computed in plain torch and not
timed: the fused operator takes about 768 / 8192 of exact attention's time for it at 16,384 tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from prescore.clustering.tree import bisection_tree

SINKS, CHUNK, LEAF = 16, 512, 128
_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Tables(ctypes.Structure):
    """What routed.c takes."""

    _fields_ = [  # noqa: RUF012
        *((name, _POINTER) for name in ("query", "key", "value")),
        *((name, _NUMBER) for name in ("key_stride", "value_stride")),
        *((name, _POINTER) for name in ("spread", "drift", "visible", "first", "stop", "rows", "node_keys")),
        *((name, _POINTER) for name in ("node_values", "columns", "codes", "scales")),
        *((name, _NUMBER) for name in ("lanes", "group", "n_query", "n_nodes", "room_nodes", "leaf", "dim")),
        *((name, _NUMBER) for name in ("value_dim", "sinks")),
        *((name, _REAL) for name in ("scale", "reach", "log_share")),
        *((name, _POINTER) for name in ("output", "lse", "search", "choice", "counts")),
    ]


def compiled(arch: str) -> ctypes.CDLL:
    """The library, built here and now."""
    target = Path(tempfile.mkdtemp()) / "routed.so"
    source = Path(__file__).parent / "routed.c"
    flags = ["-O3", f"-march={arch}", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi", "-o", str(target)]
    subprocess.run(["cc", *flags, str(source), "-lm"], check=True)
    return ctypes.CDLL(str(target))


def local_part(query: Tensor, key: Tensor, value: Tensor, exact_until: int) -> tuple[Tensor, Tensor]:
    """Output and lse over sinks, own and previous chunk; queries before `exact_until` read everything."""
    lanes, group, length, dim = query.shape
    output, lse = torch.empty_like(query), torch.empty(lanes, group, length)
    for begin in range(0, length, CHUNK):
        position = torch.arange(begin, min(begin + CHUNK, length))
        chunk = (position - SINKS).div(CHUNK, rounding_mode="floor")
        first = torch.where((position < exact_until) | (chunk < 2), 0, SINKS + (chunk - 1) * CHUNK)
        low = int(first.min())
        column = torch.cat((torch.arange(min(SINKS, low)), torch.arange(low, int(position[-1]) + 1)))
        seen = (column <= position[:, None]) & ((column >= first[:, None]) | (column < SINKS))
        own = query[:, :, position].flatten(1, 2) * dim**-0.5
        logits = (own @ key[:, column].transpose(1, 2)).unflatten(1, (group, -1)).masked_fill(~seen, -math.inf)
        lse[:, :, position] = logits.logsumexp(-1)
        output[:, :, position] = (logits.softmax(-1).flatten(1, 2) @ value[:, column]).unflatten(1, (group, -1))
    return output, lse


def tables(key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Nodes, their codes, and the pooled covariances of every prefix of the chunks."""
    lanes, n_keys, dim = key.shape
    n_chunks, per_chunk = (n_keys - SINKS) // CHUNK, CHUNK // LEAF
    points = key[:, SINKS : SINKS + n_chunks * CHUNK].reshape(-1, CHUNK, dim)
    order = bisection_tree(points, int(math.log2(per_chunk)))
    rows = (order + (torch.arange(n_chunks) * CHUNK + SINKS).repeat(lanes)[:, None]).view(lanes, -1, LEAF)
    members = [t.gather(1, rows.flatten(1)[..., None].expand(-1, -1, t.shape[-1])) for t in (key, value)]
    keys, values = (t.unflatten(1, (-1, LEAF)) for t in members)
    mean_key, mean_value = keys.mean(2), values.mean(2)
    away, beside = keys - mean_key[:, :, None], values - mean_value[:, :, None]
    so_far = torch.arange(1, n_chunks + 1).view(-1, 1, 1)
    covariance, together = (
        (t.transpose(2, 3) @ away / LEAF).unflatten(1, (n_chunks, -1)).mean(2).cumsum(1) / so_far
        for t in (away, beside)
    )
    halves = keys.unflatten(-1, (2, -1))
    scale = halves.abs().amax(-1) / 7.5
    codes = (halves / scale.clamp_min(1e-30)[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8)
    packed = (codes[..., 0, :] | (codes[..., 1, :] << 4)).unflatten(2, (-1, 16)).unflatten(-1, (-1, 4))
    room = -rows.shape[1] % 16
    nodes = {
        "rows": rows.to(torch.int32),
        "node_keys": mean_key,
        "node_values": mean_value,
        "codes": packed.transpose(3, 4).flatten(2),
        "scales": scale.transpose(2, 3).flatten(2),
    }
    made = {name: pad(t, (0, 0, 0, room)).contiguous() for name, t in nodes.items()}
    made["columns"] = made["node_keys"].unflatten(1, (-1, 16)).transpose(2, 3).contiguous()
    return {**made, "covariance": covariance, "together": together}


def spreads(query: Tensor, made: dict[str, Tensor], exact_until: int) -> tuple[Tensor, Tensor, Tensor]:
    """Deviation of the logits within nodes, drift of their values, and nodes behind each query."""
    lanes, group, length, dim = query.shape
    spread = torch.ones(lanes, group, length)
    drift = torch.zeros(lanes, group, length, made["together"].shape[-2])
    chunk = (torch.arange(length) - SINKS).div(CHUNK, rounding_mode="floor")
    behind = torch.where(torch.arange(length) < exact_until, 0, (chunk - 1).clamp_min(0))
    for number in range(1, int(behind.max()) + 1):
        own = (behind == number).nonzero().squeeze(1)
        if len(own):
            scaled = query[:, :, own].flatten(1, 2) * dim**-0.5
            variance = ((scaled @ made["covariance"][:, number - 1]) * scaled).sum(-1)
            spread[:, :, own] = variance.clamp_min(1e-6).sqrt().unflatten(1, (group, -1))
            moved = scaled @ made["together"][:, number - 1].transpose(1, 2)
            drift[:, :, own] = moved.unflatten(1, (group, -1))
    return spread, drift, (behind * (CHUNK // LEAF)).to(torch.int32)


def measure(library: ctypes.CDLL, path: Path, options: argparse.Namespace) -> str:
    """One line about a file."""
    tensors = {name: tensor.float()[0].contiguous() for name, tensor in load_file(path).items()}
    key, value = tensors["key"], tensors["value"]
    lanes, n_keys, dim = key.shape
    query = tensors["query"].unflatten(0, (lanes, -1)).contiguous()
    begin = time.perf_counter()
    exact = scaled_dot_product_attention(
        query.flatten(0, 1)[None], key[None], value[None], is_causal=True, enable_gqa=True
    ).view(query.shape)
    exact_seconds = time.perf_counter() - begin
    output, lse = local_part(query, key, value, options.exact_until)
    begin = time.perf_counter()
    made = tables(key, value)
    spread, drift, visible = spreads(query, made, options.exact_until)
    built = time.perf_counter() - begin
    nothing, counts = torch.zeros(n_keys, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    given = {"query": query, "key": key, "value": value, "spread": spread, "drift": drift, "visible": visible}
    given |= {"first": nothing, "stop": nothing, "output": output, "lse": lse, "counts": counts}
    given |= {name: made[name] for name in ("rows", "node_keys", "node_values", "columns", "codes", "scales")}
    given |= {name: torch.empty_like(lse) for name in ("search", "choice")}
    sizes = {"key_stride": key.stride(0), "value_stride": value.stride(0), "lanes": lanes, "group": query.shape[1]}
    sizes |= {"n_query": n_keys, "n_nodes": (n_keys - SINKS) // CHUNK * (CHUNK // LEAF), "leaf": LEAF, "dim": dim}
    sizes |= {"room_nodes": made["node_keys"].shape[1], "value_dim": value.shape[-1], "sinks": 0}
    reals = {"scale": dim**-0.5, "reach": options.reach, "log_share": -math.log(options.share)}
    call = Tables(**{name: t.data_ptr() for name, t in given.items()}, **sizes, **reals)
    begin = time.perf_counter()
    if library.prescore_routed_forward(ctypes.byref(call)):
        raise MemoryError
    seconds = time.perf_counter() - begin
    error = (output - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2))
    pairs, asked = int(visible.sum()) * lanes * query.shape[1], int((visible > 0).sum()) * lanes * query.shape[1]
    return (
        f"{path.stem}: exact {exact_seconds:.2f} s, tables {built:.2f} s, far part {seconds:.2f} s, "
        f"nodes searched {counts[0] / pairs:.3f}, rows {counts[1] / asked:.0f}, error {error.mean():.5f}, "
        f"worst head {error.max():.4f}"
    )


def main() -> None:
    """Measure the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", type=Path)
    parser.add_argument("--share", type=float, default=2048.0)
    parser.add_argument("--reach", type=float, default=3.0)
    parser.add_argument("--exact-until", type=int, default=2048)
    parser.add_argument("--arch", default="native")
    options = parser.parse_args()
    library = compiled(options.arch)
    for path in options.heads:
        print(measure(library, path, options))


if __name__ == "__main__":
    main()
