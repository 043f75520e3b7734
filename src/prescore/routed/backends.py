"""Which backend runs the far keys of a `Routed`, and builds their key index: `native`, `triton` or `plain`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from prescore.config import Exact, Routed
from prescore.routed import native, plain, reference, triton
from prescore.routed.index import KeyIndex
from prescore.routed.layout import Layout, make_layout, why_exact
from prescore.routed.native import library

BACKENDS = {"native": native, "triton": triton, "plain": plain}


def pick_backend(name: str, query: Tensor, value_dim: int, cluster_size: int) -> str:
    """What runs under `backend=name` with such queries (or keys); `auto` takes what is made for the device."""
    on_cpu = query.device.type == "cpu"
    if (name == "native" or (name == "auto" and on_cpu)) and native.can_run(query, value_dim, cluster_size):
        return "native"
    named = name == "triton" or (name == "auto" and not on_cpu)
    if named and not triton.unsupported(query, value_dim, cluster_size):
        return "triton"
    return "plain"


def unsupported(name: str, query: Tensor, value_dim: int, config: Routed) -> list[str]:
    """Reasons why the backend of this name, `native` or `triton`, cannot run a call; empty means it can."""
    if name == "native":
        return native.unsupported(query, value_dim, config)
    return triton.unsupported(query, value_dim, make_layout(1, 1, causal=True, config=config).cluster_size)


def auto_config(
    query: Tensor, key: Tensor, value: Tensor, config: Routed, *, is_causal: bool, ranks: int = 1
) -> tuple[Routed | Exact, str]:
    """What `auto` runs in place of a `Routed` without dropout, and why that is exact where the `Routed` routes.

    Plain torch routes more slowly than exact attention. It runs where it is named, with dropout, where exact
    attention is slower still, and for configurations that route short texts, where time does not matter. On GPUs
    `exact_until` is at least the length from which `triton.GAINS_FROM` expects a gain, for prompts and steps each.
    Each of the `ranks` has as many queries and keys.
    """
    sizes = query.shape[2] * ranks, key.shape[2] * ranks
    if config.exact_until < Routed.exact_until or why_exact(config, *sizes, is_causal=is_causal):
        return config, ""
    if query.device.type == "cpu":
        reasons = native.unsupported(query, value.shape[-1], config)
        if not reasons:
            return config, ""
        return Exact(), f"native code: {reasons[-1] if library.loaded_level() == library.NO_LEVEL else reasons[0]}"
    reasons = unsupported("triton", query, value.shape[-1], config)
    if reasons:
        return Exact(), f"triton: {reasons[0]}"
    target = triton.target_of(query.device)
    least = triton.GAINS_FROM[target][query.shape[2] <= triton.STEP_QUERIES]
    if least is None:
        return Exact(), f"triton: no length is known from which it is faster than exact attention on {target}"
    config = config.replace(exact_until=max(config.exact_until, least))
    if not why_exact(config, *sizes, is_causal=is_causal):
        from prescore.routed.device_check import disagreement  # it runs the engine, which imports this module

        heads_per_kv = query.shape[1] // key.shape[1]
        cluster_size = make_layout(1, 1, causal=True, config=config).cluster_size
        sizes_of_head = query.shape[-1], value.shape[-1], heads_per_kv, cluster_size
        reason = disagreement(query.device, query.dtype, *sizes_of_head)
        return (Exact(), f"triton: {reason}") if reason else (config, "")
    return Exact(), f"triton: up to {config.exact_until} keys exact attention is faster on {target}, by a model"


def build_index(key: Tensor, value: Tensor, layout: Layout, n_done: int, backend: str) -> KeyIndex:
    """The key index of the far chunks after the first `n_done`, of keys `[T, N, D]` or `[B, Hkv, N, D]`."""
    begin, n_chunks = layout.sinks + n_done * layout.chunk_size, layout.n_chunks - n_done
    if backend == "native" and native.can_build(key, value, layout):
        return native.build_index(key, value, layout, begin, n_chunks)
    if key.ndim == 3:
        return reference.build_index(key, value, layout, begin, n_chunks)
    # keys outside of these chunks are not copied
    chunks, sinks = slice(begin, begin + n_chunks * layout.chunk_size), slice(layout.sinks)
    cut = [t[:, :, some].flatten(0, 1) for some in (chunks, sinks) for t in (key, value)]
    index = reference.build_index(cut[0], cut[1], layout, 0, n_chunks)
    return replace(index, positions=index.positions + begin, sink_key=cut[2], sink_value=cut[3])
