"""Routed attention with dense masks: slow, plain, the oracle of the fast path."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from prescore.attention.kernels import accumulation_dtype
from prescore.attention.routed_clusters import Clusters, TreeBuilder, build_clusters
from prescore.attention.routed_heads import head_layouts, in_order
from prescore.attention.routed_layout import FAN, Layout, make_layout
from prescore.attention.routed_levels import read_shares, single_ranges, stand_in_ranges
from prescore.config import PrescoreConfig
from prescore.types import Attended


def routed_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    valid: Tensor | None = None,
    config: PrescoreConfig,
    scale: float,
    tree_builder: TreeBuilder,
) -> Attended:
    """Exact over sinks, local chunks, single keys and chosen leaves; a stand-in for every other visible leaf.

    A stand-in's score is `q.mean_key + log(members)`; a query takes the `rows / leaf` of largest score and reads
    that leaf, or the best leaf below that node, whose stand-in then stands for as many keys fewer.
    """
    layout = make_layout(query.shape[2], key.shape[2], causal=is_causal, config=config, padded=valid is not None)
    whole = _attend(query, key, value, layout, valid, scale, tree_builder)
    seen = Attended(*(part[:, :, : layout.n_exact] for part in whole)) if layout.n_exact else None
    layouts = head_layouts(
        query, key, value, seen,
        layout=layout, config=config, scale=scale, tree_builder=tree_builder,
    )  # fmt: skip
    if layouts[0].sequences is None:
        return whole
    # every (sequence, key head) for itself, each by its own geometry
    n_heads = key.shape[1]
    queries = query.unflatten(1, (n_heads, -1)).flatten(0, 1)
    keys, values = key.flatten(0, 1)[:, None], value.flatten(0, 1)[:, None]
    valids = None if valid is None else valid.repeat_interleave(n_heads, dim=0)
    parts = []
    for own in layouts:
        some = None if valids is None else own.of(valids)
        parts.append(_attend(own.of(queries), own.of(keys), own.of(values), own.layout, some, scale, tree_builder))
    output, lse = (
        in_order(list(part), layouts).unflatten(0, (-1, n_heads)).flatten(1, 2)
        for part in zip(*parts, strict=True)
    )
    return Attended(output, lse)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, valid: Tensor | None, scale: float,
    tree_builder: TreeBuilder,
) -> Attended:  # fmt: skip
    """All sequences by one geometry, every logit of keys and stand-ins at once."""
    group = query.shape[1] // key.shape[1]
    wide = accumulation_dtype(query.dtype)
    queries = query.unflatten(1, (key.shape[1], group)).to(wide) * scale  # [B, Hkv, G, Nq, D]
    logits = queries @ key.to(wide)[:, :, None].transpose(-1, -2)
    seen = _exact_columns(layout, valid, key)
    values = value.to(wide)
    if layout.n_pieces:
        clusters = build_clusters(key, value, layout, valid, tree_builder)
        scores, visible = _scores(queries, clusters, layout)
        chosen, leaves = _choose(scores, visible, layout)
        seen = (seen | _read_members(leaves, clusters, layout)) & _real(seen, valid, key)
        gains = torch.repeat_interleave(
            torch.tensor(read_shares(layout), dtype=wide, device=key.device),
            torch.tensor(layout.level_sizes, device=key.device),
        )
        logits = torch.cat((logits, torch.where(chosen, scores + gains, scores)), dim=-1)
        seen = torch.cat((seen, visible & ~(chosen & torch.isneginf(gains))), dim=-1)
        means = clusters.mean_value.to(wide).view(*key.shape[:2], -1, value.shape[-1])
        values = torch.cat((values, means), dim=2)
    logits = logits.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    output = (weights @ values[:, :, None]).flatten(1, 2).to(query.dtype)
    return Attended(output, lse.flatten(1, 2))


def _real(seen: Tensor, valid: Tensor | None, key: Tensor) -> Tensor:
    return torch.ones_like(seen) if valid is None else valid[:, None, None, None, :].expand(seen.shape)


def _exact_columns(layout: Layout, valid: Tensor | None, key: Tensor) -> Tensor:
    """`[B, 1, 1, Nq, Nk]`: what every query reads exactly, whatever it chooses and whatever is single."""
    position = torch.arange(layout.n_query, device=key.device)[:, None] + layout.first
    column = torch.arange(layout.n_key, device=key.device)
    seen = (column < layout.sinks).expand(layout.n_query, -1)
    if layout.causal:
        pieces = layout.pieces_seen(position)
        local = torch.where(pieces > 0, layout.sinks + pieces * layout.chunk, 0)
        seen = (seen | (column >= local)) & (column <= position)
    seen = seen.expand(key.shape[0], 1, 1, layout.n_query, layout.n_key)
    return seen & _real(seen, valid, key)


def _scores(queries: Tensor, clusters: Clusters, layout: Layout) -> tuple[Tensor, Tensor]:
    """Scores and visibility of the stand-ins, `[B, Hkv, G, Nq, A]`."""
    batch, n_kv_heads = queries.shape[:2]
    n_columns = clusters.mean_key.shape[1]
    means = clusters.mean_key.to(queries.dtype).view(batch, n_kv_heads, 1, n_columns, -1)
    count = clusters.log_count.to(queries.dtype).view(batch, n_kv_heads, 1, 1, n_columns)
    scores = queries @ means.transpose(-1, -2) + count
    visible = _visible(layout, stand_in_ranges, n_columns, queries.device).expand(scores.shape)
    return scores, visible & ~torch.isneginf(count)


def _visible(
    layout: Layout, ranges: Callable[[Layout, int], tuple[slice, ...]], n_columns: int, device: torch.device
) -> Tensor:
    """`[Nq, columns]`: which stand-ins (or singles) a query may see at all."""
    pieces = layout.pieces_seen(torch.arange(layout.n_query, device=device) + layout.first)
    table = torch.zeros(layout.n_pieces + 1, n_columns, dtype=torch.bool, device=device)
    for seen in range(1, layout.n_pieces + 1):
        for part in ranges(layout, seen):
            table[seen, part] = True
    return table[pieces]


def _choose(scores: Tensor, visible: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Chosen stand-ins `[..., A]`, and the leaves they lead to `[..., M]`."""
    scores = scores.detach()
    best = scores.masked_fill(~visible, -math.inf).topk(layout.n_chosen, dim=-1).indices
    real = visible.gather(-1, best)
    chosen = torch.zeros_like(visible).scatter(-1, best, True) & visible
    for level in range(layout.n_levels, 0, -1):
        here = best - layout.level_offsets[level]
        children = here.clamp_min(0)[..., None] * FAN + torch.arange(FAN, device=scores.device)
        children = (children + layout.level_offsets[level - 1]).clamp_max(scores.shape[-1] - 1)
        values = scores.gather(-1, children.flatten(-2)).view(children.shape)
        below = children.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1)
        best = torch.where((here >= 0) & (here < layout.level_sizes[level]), below, best)
    leaves = torch.zeros_like(visible, dtype=torch.int64).scatter_add(-1, best, real.to(torch.int64)) > 0
    return chosen, leaves[..., : layout.level_sizes[0]]


def _read_members(leaves: Tensor, clusters: Clusters, layout: Layout) -> Tensor:
    """Which keys are single, or lie in a leaf that is read, `[B, Hkv, G, Nq, Nk]`."""
    columns = leaves.repeat_interleave(layout.leaf, dim=-1)
    rows = clusters.rows.reshape(*leaves.shape[:2], 1, 1, -1).expand(columns.shape)
    if clusters.alive is not None:
        columns = columns & clusters.alive.reshape(*leaves.shape[:2], 1, 1, -1)
    counted = torch.zeros(*leaves.shape[:-1], layout.n_key, dtype=torch.int64, device=leaves.device)
    counted = counted.scatter_add(-1, rows, columns.to(torch.int64))
    own = clusters.single_rows
    seen = _visible(layout, single_ranges, own.shape[1], leaves.device).expand(*leaves.shape[:-1], -1)
    seen = seen & ~torch.isneginf(clusters.single_bias).view(*leaves.shape[:2], 1, 1, -1)
    rows = own.view(*leaves.shape[:2], 1, 1, -1).expand(seen.shape)
    return counted.scatter_add(-1, rows, seen.to(torch.int64)) > 0
