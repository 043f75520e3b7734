"""Routed attention with dense masks: slow, plain, the oracle of the fast path."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prescore.attention.kernels import accumulation_dtype
from prescore.attention.routed_layout import JOINED, Clusters, Layout, TreeBuilder, build_clusters, make_layout
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
        seen = (seen | _read_members(chosen, visible, clusters, layout)) & _real(seen, valid, key)
        logits = torch.cat((logits, scores), dim=-1)
        seen = torch.cat((seen, visible & ~chosen), dim=-1)
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
    """Scores and visibility of the leaves, `[B, Hkv, G, Nq, M]`."""
    batch, n_kv_heads = queries.shape[:2]
    means = clusters.mean_key.to(queries.dtype).view(batch, n_kv_heads, 1, layout.n_leaves, -1)
    count = clusters.log_count.to(queries.dtype).view(batch, n_kv_heads, 1, 1, layout.n_leaves)
    scores = queries @ means.transpose(-1, -2) + count
    visible = _visible(layout, layout.leaves, queries.device).expand(scores.shape)
    return scores, visible & ~torch.isneginf(count)


def _visible(layout: Layout, per_chunk: int, device: torch.device) -> Tensor:
    """`[Nq, columns]`: which leaves (or singles) of large pieces and of chunks a query may see at all."""
    position = torch.arange(layout.n_query, device=device)[:, None] + layout.first
    seen = layout.pieces_seen(position)
    large = torch.arange(layout.n_joined * per_chunk * JOINED, device=device) // (per_chunk * JOINED)
    small = torch.arange(layout.n_pieces * per_chunk, device=device) // per_chunk
    if not layout.causal:  # what a sequence sees is its own affair
        return torch.ones(layout.n_query, len(large) + len(small), dtype=torch.bool, device=device)
    whole = seen // JOINED
    return torch.cat((large < whole, (small >= whole * JOINED) & (small < seen)), dim=1)


def _choose(scores: Tensor, visible: Tensor, n_chosen: int) -> Tensor:
    best = scores.detach().masked_fill(~visible, -math.inf).topk(n_chosen, dim=-1).indices
    return torch.zeros_like(visible).scatter(-1, best, True) & visible


def _read_members(chosen: Tensor, visible: Tensor, clusters: Clusters, layout: Layout) -> Tensor:
    """Which keys are single, or lie in a chosen leaf, `[B, Hkv, G, Nq, Nk]`."""
    columns = chosen.repeat_interleave(layout.leaf, dim=-1)
    rows = clusters.rows.reshape(*chosen.shape[:2], 1, 1, -1).expand(columns.shape)
    if clusters.alive is not None:
        columns = columns & clusters.alive.reshape(*chosen.shape[:2], 1, 1, -1)
    counted = torch.zeros(*chosen.shape[:-1], layout.n_key, dtype=torch.int64, device=chosen.device)
    counted = counted.scatter_add(-1, rows, columns.to(torch.int64))
    own = clusters.single_rows[:, layout.sinks :]
    seen = _visible(layout, layout.singles, chosen.device).expand(*chosen.shape[:-1], -1)
    real = ~torch.isneginf(clusters.single_bias[:, layout.sinks :])
    seen = seen & real.view(*chosen.shape[:2], 1, 1, -1)
    rows = own.view(*chosen.shape[:2], 1, 1, -1).expand(seen.shape)
    return counted.scatter_add(-1, rows, seen.to(torch.int64)) > 0
