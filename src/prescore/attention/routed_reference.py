"""Routed attention with dense masks: slow, plain, the oracle of the fast path."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore.attention.kernels import accumulation_dtype
from prescore.attention.routed_layout import Clusters, Layout, TreeBuilder, build_clusters, make_layout
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
    """Exact over sinks, local chunks and chosen leaves; one stand-in for every other visible leaf.

    A leaf's score is `q.mean_key + log(members)`; a query reads the `rows / leaf` leaves of largest score.
    """
    layout = make_layout(query.shape[2], key.shape[2], causal=is_causal, config=config)
    group = query.shape[1] // key.shape[1]
    wide = accumulation_dtype(query.dtype)
    queries = query.unflatten(1, (key.shape[1], group)).to(wide) * scale  # [B, Hkv, G, Nq, D]
    logits = queries @ key.to(wide)[:, :, None].transpose(-1, -2)
    seen = _exact_columns(layout, valid, key)
    values = value.to(wide)
    if layout.n_pieces:
        clusters = build_clusters(key, value, layout, valid, tree_builder)
        scores, visible = _scores(queries, clusters, layout)
        chosen = _choose(scores, visible, layout.n_chosen)
        seen = seen | _members_chosen(chosen, clusters, layout)
        logits = torch.cat((logits, scores.masked_fill(~visible | chosen, -math.inf)), dim=-1)
        seen = torch.cat((seen.expand(*logits.shape[:-1], -1), visible & ~chosen), dim=-1)
        values = torch.cat((values, clusters.mean_value.to(wide).view(*key.shape[:2], -1, value.shape[-1])), dim=2)
    logits = logits.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    output = (weights @ values[:, :, None]).flatten(1, 2).to(query.dtype)
    return Attended(output, lse.flatten(1, 2))


def _exact_columns(layout: Layout, valid: Tensor | None, key: Tensor) -> Tensor:
    """`[B, 1, 1, Nq, Nk]`: what every query reads exactly, whatever it chooses."""
    position = torch.arange(layout.n_query, device=key.device)[:, None] + layout.first
    column = torch.arange(layout.n_key, device=key.device)
    seen = column < layout.sinks
    if layout.causal:
        local = layout.sinks + layout.pieces_seen(position) * layout.chunk
        seen = (seen | (column >= local)) & (column <= position)
    seen = seen.expand(key.shape[0], 1, 1, layout.n_query, layout.n_key)
    return seen if valid is None else seen & valid[:, None, None, None, :]


def _scores(queries: Tensor, clusters: Clusters, layout: Layout) -> tuple[Tensor, Tensor]:
    """Scores and visibility of the leaves, `[B, Hkv, G, Nq, M]`."""
    batch, n_kv_heads = queries.shape[:2]
    means = clusters.mean_key.to(queries.dtype).view(batch, n_kv_heads, 1, layout.n_leaves, -1)
    scores = queries @ means.transpose(-1, -2)
    position = torch.arange(layout.n_query, device=queries.device)[:, None] + layout.first
    piece = torch.arange(layout.n_leaves, device=queries.device) // layout.leaves_per_piece
    visible = (piece < layout.pieces_seen(position)).expand(scores.shape)
    if clusters.log_count is None:
        return scores + math.log(layout.leaf), visible
    count = clusters.log_count.to(queries.dtype).view(batch, n_kv_heads, 1, 1, layout.n_leaves)
    return scores + count, visible & ~torch.isneginf(count)


def _choose(scores: Tensor, visible: Tensor, n_chosen: int) -> Tensor:
    best = scores.detach().masked_fill(~visible, -math.inf).topk(n_chosen, dim=-1).indices
    return torch.zeros_like(visible).scatter(-1, best, True) & visible


def _members_chosen(chosen: Tensor, clusters: Clusters, layout: Layout) -> Tensor:
    """Which keys lie in a chosen leaf, `[B, Hkv, G, Nq, Nk]`."""
    columns = chosen.repeat_interleave(layout.leaf, dim=-1)
    rows = clusters.rows.reshape(*chosen.shape[:2], 1, 1, -1).expand(columns.shape)
    if clusters.alive is not None:
        columns = columns & clusters.alive.reshape(*chosen.shape[:2], 1, 1, -1)
    seen = torch.zeros(*chosen.shape[:-1], layout.n_key, dtype=torch.int64, device=chosen.device)
    return seen.scatter_add(-1, rows, columns.to(torch.int64)) > 0
