"""Random calls of the Triton backend under its interpreter, or on a GPU, against the reference.

    python tests/routed/triton_calls.py --calls 500 --seed 1
    python tests/routed/triton_calls.py --calls 500 --seed 1 --device cuda

Call `k` of seed `s` depends on nothing else, so any one can be run again: `--seed s --first k --calls 1`. Triton
reads TRITON_INTERPRET when it is imported, so tests run this file as a process of its own.
"""

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0" if any("cuda" in argument for argument in sys.argv) else "1"
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from attention_checks import loss_of
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors
from routed_checks import differing_queries
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from prescore import Routed, prescored_attention
from prescore.routed import reference, triton
from prescore.routed.backends import build_index
from prescore.routed.decode import StepAttention
from prescore.routed.index import GrowingIndex
from prescore.routed.layout import make_layout
from prescore.types import Attended

KINDS = (
    "whole",
    "not causal",
    "gradients",
    "chunk",
    "step",
    "steps",
    "left padding",
    "right padding",
    "cache",
    "pages",
)
GROUPS = (1, 1, 2, 4, 7, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BUDGET = 2e-5
"""Sums of float32 in another order, in logits of size 1 to 10."""


def by_reference(query, key, value, config, *, is_causal, n_real):
    """Result of every head; the first `n_real[row]` keys of a sequence are real, and as many queries if causal."""
    heads_per_kv, rows = query.shape[1] // key.shape[1], []
    for row, stop in enumerate(n_real):
        n_query = query.shape[2] - (key.shape[2] - stop if is_causal else 0)
        for head in range(query.shape[1]):
            keys = row, head // heads_per_kv, slice(stop)
            tensors = query[row, head, :n_query], key[keys], value[keys]
            rows.append(reference.reference_attention(*tensors, config, is_causal=is_causal))
    return rows


def check_gradients(inputs, got, config):
    """The gradients are those of the plain backend, whose backward pass runs: of the same choices."""
    output, aux = prescored_attention(*inputs, config, is_causal=True, return_aux=True, backend="plain")
    alike = ~differing_queries(got, Attended(output, aux.lse), 1e-6 + 3 * torch.finfo(output.dtype).eps)
    budget = 5e-6 if output.dtype == torch.float32 else 4 * torch.finfo(output.dtype).eps
    grads = (torch.autograd.grad(loss_of(result, alike), inputs) for result in (got, Attended(output, aux.lse)))
    for name, grad, wanted in zip(("query", "key", "value"), *grads, strict=True):
        size = max(float(wanted.abs().max()), 1e-30)
        assert_within(grad.double() / size, wanted.double() / size, budget, f"gradient of {name}")


class NoHostReads(TorchDispatchMode):
    """Refuses to wait for a device, so that a CUDA graph can record the call."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        names = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
        assert operation.name() not in names, operation
        return operation(*args, **(kwargs or {}))


def with_room(index, n_chunks, layout):
    """The key index of one sequence with room for `n_chunks`; what no query may read is NaN."""
    clusters, tensors = n_chunks * layout.clusters_per_chunk, {}
    lengths = {"sink_key": layout.sinks, "sink_value": layout.sinks, "key_cov": 1, "key_value_cov": 1}
    lengths |= dict.fromkeys(("span_key_cov", "span_key_value_cov"), n_chunks // layout.chunks_per_span)
    for name, tensor in index.tensors().items():
        kept = tensor[:, -1:] if lengths.get(name) == 1 else tensor
        more = (0, 0) * (kept.ndim - 2) + (0, lengths.get(name, clusters) - kept.shape[1])
        tensors[name] = pad(kept, more, value=torch.nan if kept.is_floating_point() else 99)
    return index.having(**tensors)


def run_cache(draw, device, kind):
    """A step of sequences of different lengths in a cache that has room for more keys, which are NaN."""
    dtype, heads_per_kv, kv_heads = (
        draw.choice(DTYPES if device.type == "cpu" else DTYPES[1:]),
        draw.choice(GROUPS),
        draw.choice((1, 2)),
    )
    config = draw_config(draw, device)
    capacity, layout = 4 * config.chunk_size + 600, make_layout(1, 10**6, causal=True, config=config)
    lengths = [capacity, *(draw.randint(layout.sinks + 8, capacity) for _ in range(draw.choice((0, 1, 2))))]
    draw.shuffle(lengths)
    query, key, value = attention_tensors(
        batch=len(lengths), heads=kv_heads * heads_per_kv, kv_heads=kv_heads, n_query=1, n_keys=capacity,
        dim=draw.choice((32, 64, 128)), value_dim=draw.choice((32, 64)), dtype=dtype, seed=draw.randrange(2**31),
    )  # fmt: skip
    n_chunks = make_layout(1, capacity, causal=True, config=config).n_chunks
    parts, wanted = {}, []
    for row, length in enumerate(lengths):
        keys, values = key[row : row + 1, :, :length], value[row : row + 1, :, :length]
        of_length = make_layout(1, length, causal=True, config=config)
        if of_length.n_chunks:
            built = GrowingIndex(build_index).extend(keys, values, of_length, "triton")
            parts[row] = with_room(built, n_chunks, of_length)
        wanted += by_reference(query[row : row + 1], keys, values, config, is_causal=True, n_real=[length])
        key[row, :, length:], value[row, :, length:] = torch.nan, torch.nan
    unused = next(iter(parts.values())).map(
        lambda t: torch.full_like(t, torch.nan if t.is_floating_point() else 99)
    )
    names = unused.tensors()
    index = unused.having(
        **{
            name: torch.cat([getattr(parts.get(row, unused), name) for row in range(len(lengths))])
            for name in names
        }
    )
    pages, size = None, draw.choice((16, 32))
    if kind == "pages":
        n_pages = -(-capacity // size)
        pages = torch.randperm(
            len(lengths) * n_pages, generator=torch.Generator().manual_seed(draw.randrange(2**31))
        )
        pages, in_pages = pages.view(len(lengths), n_pages).int(), []
        for rows in (key, value):
            cut = pad(rows, (0, 0, 0, n_pages * size - capacity), value=torch.nan)
            cut = cut.unflatten(2, (n_pages, size)).permute(0, 2, 3, 1, 4).flatten(0, 1)
            in_pages.append(torch.empty_like(cut).index_copy_(0, pages.flatten().long(), cut))
        key, value = in_pages
    cache = triton.Cache(key, value, torch.tensor(lengths, dtype=torch.int32), pages)
    cache = triton.Cache(*(None if t is None else t.to(device) for t in cache))
    with NoHostReads():
        got, _ = triton.step(
            query.to(device), cache, index.map(lambda t: t.to(device)), config, query.shape[-1] ** -0.5
        )
    budget = BUDGET if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    n_different = 0
    for place, right in enumerate(wanted):
        row, head = divmod(place, query.shape[1])
        parts = [
            Attended(a.output[None, None], a.lse[None, None])
            for a in (Attended(got.output[row, head].cpu(), got.lse[row, head].cpu()), right)
        ]
        n_different += int(differing_queries(*parts, budget * max(1.0, float(right.lse.abs().max()))).sum())
    what = f"{kind}, {dtype}, lengths {lengths}, {heads_per_kv} heads a KV head, dim {query.shape[-1]}, {config}"
    return "triton", n_different, len(wanted), what


def draw_config(draw, device):
    """A random configuration."""
    size = draw.choice((16, 16, 32, 64) if device.type == "cpu" else (16, 32, 64, 128))
    return Routed(
        min_weight=draw.choice((1.0, 0.1, 1 / 32, 1e-3, 1e-5)),
        cluster_size=size,
        chunk_size=size * draw.choice((1, 2)),
        sinks=draw.choice((0, 1, 5, 16, 19)),
        exact_until=draw.choice((0, 0, 100)),
    )


def run(draw, device):
    """One random call: what it was, and how many of its queries differ from the reference."""
    kind = draw.choice(KINDS)
    reference.MASS_KEYS = draw.choice((60, 150, 16384))
    if kind in ("cache", "pages"):
        return run_cache(draw, device, kind)
    dtype, heads_per_kv = draw.choice(DTYPES if device.type == "cpu" else DTYPES[1:]), draw.choice(GROUPS)
    config = draw_config(draw, device)
    kv_heads = draw.choice((1, 2)) if heads_per_kv < 4 else 1
    longest = 600 if kind in ("step", "steps") else 60  # the clusters of a step may be split over programs
    n_keys = draw.randint(2 * config.chunk_size + 2, 4 * config.chunk_size + longest)
    n_query = {"chunk": draw.randint(2, n_keys - 1), "step": 1, "steps": draw.randint(2, 5)}.get(kind, n_keys)
    query, key, value = attention_tensors(
        batch=2 if "padding" in kind else 1,
        heads=kv_heads * heads_per_kv,
        kv_heads=kv_heads,
        n_query=n_query,
        n_keys=n_keys,
        dim=draw.choice((32, 32, 64, 128, 256) if device.type == "cpu" else (64, 128)),
        value_dim=draw.choice((32, 32, 64, 128)),
        dtype=dtype,
        seed=draw.randrange(2**31),
        spread=draw.choice((0.3, 1.0, 1.0, 1.5)),
    )
    is_causal, n_real, mask = kind != "not causal", [n_keys] * len(query), None
    given = query, key, value
    if "padding" in kind:
        n_real = [draw.randint(2, n_keys), n_keys]
        shift = [n_keys - n if kind == "left padding" else 0 for n in n_real]
        mask = torch.stack(
            [torch.arange(n_keys).sub(s).clamp_min(-1).add(1).gt(0) & (torch.arange(n_keys) < s + n)
             for n, s in zip(n_real, shift, strict=True)]
        )  # fmt: skip
        given = [torch.stack([t.roll(s, 1) for t, s in zip(x, shift, strict=True)]) for x in given]
    given = [t.to(device).requires_grad_(kind == "gradients") for t in given]
    mask = None if mask is None else mask.to(device)
    with torch.set_grad_enabled(kind == "gradients"):
        if kind in ("step", "steps"):
            index = StepAttention(config, scale=query.shape[-1] ** -0.5)
            got = index.attend(*given, backend="triton")
            ran = index.stats.get("backend", "nothing is far")
        else:
            output, aux = prescored_attention(
                *given, config, is_causal=is_causal, key_padding_mask=mask, return_aux=True, backend="triton"
            )
            got, ran = Attended(output, aux.lse), aux.stats.backend
    on_cpu = Attended(*(t.detach().cpu() for t in got))
    budget = BUDGET if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    n_different = n_queries = 0
    for place, wanted in enumerate(by_reference(query, key, value, config, is_causal=is_causal, n_real=n_real)):
        row, head = divmod(place, query.shape[1])
        first = n_keys - n_real[row] if kind == "left padding" else 0
        own = slice(first, first + len(wanted.lse))
        size = max(1.0, float(wanted.lse.abs().max()))  # rounding of logits is relative
        differ = differing_queries(
            Attended(on_cpu.output[row, head, own][None, None], on_cpu.lse[row, head, own][None, None]),
            Attended(wanted.output[None, None], wanted.lse[None, None]),
            budget * size,
        )
        n_different, n_queries = n_different + int(differ.sum()), n_queries + differ.numel()
    if kind == "gradients" and not n_different:
        check_gradients(given, got, config)
    what = (
        f"{kind}, {dtype}, {heads_per_kv} heads a KV head, {tuple(query.shape)} over {tuple(key.shape)}, {config}"
    )
    return ran, n_different, n_queries, what


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to is NaN
    ran, wrong, flips, queries = Counter(), 0, 0, 0
    for number in range(options.first, options.first + options.calls):
        backend, n_different, n_queries, what = run(random.Random(f"{options.seed}/{number}"), options.device)
        ran[backend] += 1
        queries, flips = queries + n_queries, flips + n_different
        # rounding may move a key across the threshold
        if n_different > max(2, n_queries // 200):
            wrong += 1
            print(f"call {number}: {n_different} of {n_queries} queries differ: {what}", flush=True)
        if (done := number + 1 - options.first) % 50 == 0:
            print(f"{done} calls, {wrong} wrong", flush=True)
    names = ", ".join(f"{name} {count}" for name, count in sorted(ran.items()))
    print(f"seed {options.seed}: {options.calls} calls ({names}), {wrong} wrong; {flips} of {queries} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
