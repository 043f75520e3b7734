"""Routed attention: queries choose clusters of keys; exact inside them, stand-ins for all others.

Why each part is there, with figures in docs/default.md: *local chunks*, because nearby tokens are read by
almost every head; *sinks and single keys*, because a few keys unlike all others draw mass from every query and
drown in any mean; *leaves chosen per query*, because what else matters depends on the query, and a choice shared
with later queries would leak the future; *stand-ins*, because many small weights add up. The ideas come from
tree and multipole methods (one mean for a far cluster), from cluster attention, and from mixture-of-experts
dispatch (tiles of queries that read one leaf).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.attention.exact import exact_parts
from prescore.attention.kernels import Backend, Call, pick_backend
from prescore.attention.parts import attend_parts
from prescore.attention.routed_core import Plan, Sources, attend_routed
from prescore.attention.routed_layout import Clusters, Layout, TreeBuilder, build_clusters, make_layout
from prescore.config import PrescoreConfig
from prescore.types import Attended

QUERY_BLOCK = 512
PAIRS_AT_ONCE = 2**20


def routed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    valid: Tensor | None = None,
    config: PrescoreConfig,
    scale: float,
    tree_builder: TreeBuilder,
    backend: str = "auto",
) -> tuple[Attended, dict[str, Any]]:
    """Attention over local chunks, single keys, chosen leaves and stand-ins.

    Args:
        query: `[B, Hq, Nq, D]`; with `is_causal` the last `Nq` positions.
        key: `[B, Hkv, Nk, D]`, left-aligned: each sequence's first real token at position 0, padding zeroed.
        value: `[B, Hkv, Nk, Dv]`, likewise.
        is_causal: No query sees a later key, nor anything that depends on a later query.
        valid: `[B, Nk]`, True = a real key, or None.
        config: `rows`, `leaf_size`, `chunk_size`, `sinks`.
        scale: Factor of the logits.
        tree_builder: See `TreeBuilder`.
        backend: Name of an operator backend, or `auto`.

    Returns:
        Output with lse, and what was read: rows of each kind per query at most, number of queries read exactly.
    """
    layout = make_layout(query.shape[2], key.shape[2], causal=is_causal, config=config)
    chosen = pick_backend(Call(query.device.type, query.dtype, query.shape[-1]), backend)
    n_exact = layout.n_query if not layout.n_pieces else max(0, min(layout.head - layout.first, layout.n_query))
    if query.numel() == 0 or key.numel() == 0:
        n_exact = layout.n_query
    results = []
    if n_exact or not layout.n_query:
        results.append(_exact(query[:, :, :n_exact], key, value, layout, valid, scale, chosen))
    if n_exact < layout.n_query:
        clusters = build_clusters(key, value, layout, valid, tree_builder)
        rest = query[:, :, n_exact:]
        results.append(_routed(rest, key, value, layout, clusters, n_exact, scale, chosen))
    stats = _stats(layout, n_exact)
    if len(results) == 1:
        return results[0], stats
    outputs, lses = zip(*results, strict=True)
    return Attended(torch.cat(outputs, dim=2), torch.cat(lses, dim=2)), stats


def _exact(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, valid: Tensor | None, scale: float, backend: Backend
) -> Attended:
    if layout.causal:
        stop = layout.first + query.shape[2]
        key, value = key[:, :, :stop], value[:, :, :stop]
        valid = None if valid is None else valid[:, :stop]
    parts = exact_parts(query, key, is_causal=layout.causal, valid=valid)
    return attend_parts(query, key, value, parts, scale=scale, backend=backend.name)


def _routed(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, clusters: Clusters, skipped: int, scale: float,
    backend: Backend,
) -> Attended:  # fmt: skip
    """Attend for the queries behind the first `skipped`."""
    batch, n_heads, n_query, _ = query.shape
    n_kv_heads = key.shape[1]
    group = n_heads // n_kv_heads
    size = layout.chunk if layout.causal else min(QUERY_BLOCK, n_query)
    # causal blocks lie on the grid of chunks: fill up before the first query and behind the last
    behind = layout.first + skipped - layout.sinks
    first_chunk, before = divmod(behind, size) if layout.causal else (0, 0)
    n_blocks = -(-(before + n_query) // size)
    after = n_blocks * size - before - n_query
    blocks = pad(query, (0, 0, before, after)).view(batch * n_kv_heads, group, n_blocks, size, -1).transpose(1, 2)
    local = None
    pieces = [layout.n_pieces] * n_blocks
    if layout.causal:
        local = _local(key, value, layout, first_chunk, n_blocks)
        pieces = list(range(first_chunk - 1, first_chunk - 1 + n_blocks))
    leaf_bias = None
    if clusters.alive is not None:
        leaf_bias = torch.zeros(clusters.alive.shape, dtype=query.dtype, device=query.device)
        leaf_bias.masked_fill_(~clusters.alive, -torch.inf)
    sources = Sources(
        local, (clusters.mean_key, clusters.mean_value), (clusters.single_key, clusters.single_value),
        (clusters.leaf_key, clusters.leaf_value), clusters.log_count, clusters.single_bias, leaf_bias,
    )  # fmt: skip
    plan = Plan(
        tuple(layout.ranges(seen, layout.leaves) for seen in pieces),
        tuple(layout.ranges(seen, layout.singles, layout.sinks) for seen in pieces),
        layout.n_chosen, scale, backend,
        max(1, PAIRS_AT_ONCE // (blocks.shape[0] * group * size * max(1, layout.n_chosen))),
    )  # fmt: skip
    output, lse, _ = attend_routed(blocks, sources, plan)
    output = output.transpose(1, 2).reshape(batch, n_heads, n_blocks * size, -1)[:, :, before : before + n_query]
    lse = lse.transpose(1, 2).reshape(batch, n_heads, n_blocks * size)[:, :, before : before + n_query]
    return Attended(output, lse)


def _local(key: Tensor, value: Tensor, layout: Layout, first_chunk: int, n_blocks: int) -> tuple[Tensor, Tensor]:
    """Chunks before and of every block, `[T, n + 1, chunk, D]` of keys and values."""
    start = layout.sinks + (first_chunk - 1) * layout.chunk
    length = (n_blocks + 1) * layout.chunk
    grids = []
    for tensor in (key, value):
        tail = tensor[:, :, start : start + length]
        tail = pad(tail, (0, 0, 0, length - tail.shape[2])).contiguous()
        grids.append(tail.view(-1, n_blocks + 1, layout.chunk, tensor.shape[-1]))
    return grids[0], grids[1]


def _stats(layout: Layout, n_exact: int) -> dict[str, Any]:
    routed = n_exact < layout.n_query
    figures = dataclasses.asdict(layout)
    figures.update(
        exact_queries=n_exact,
        far_rows=layout.n_chosen * layout.leaf if routed else 0,
        single_rows=layout.sinks + layout.n_pieces * layout.singles if routed else 0,
        stand_in_rows=layout.n_pieces * layout.leaves if routed else 0,
        local_rows=2 * layout.chunk if layout.causal else 0,
    )
    return figures
