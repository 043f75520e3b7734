"""Which heads need fine leaves: a look back at the queries that were read exactly.

Most heads lose nothing when the mean of 128 keys hides one of them. A few do, those that look for one particular
key to copy what follows it, and on text that repeats itself the model lives on them. Causal queries before
`exact_until` read every key, so the last of them can tell: how far off would they have been with the oldest large
piece behind coarse leaves, and how far behind fine ones at equal rows? Where coarse leaves fail and fine ones
help, the head gets fine leaves, and rows that the other heads of its layer give up. Only later queries are read
by what earlier ones show, so nothing leaks, and the cost does not depend on the length.

A call without those queries (some new tokens behind a cache) cannot tell, and reads by coarse leaves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prescore.attention.kernels import accumulation_dtype
from prescore.attention.routed_clusters import TreeBuilder, place_pieces, take_rows
from prescore.attention.routed_layout import JOINED, JOINED_LEVELS, Layout, make_layout
from prescore.config import PrescoreConfig
from prescore.types import Attended

FINE_LEAF = 8
"""Keys of a leaf of such heads, which need no single keys: so small a leaf hides little. Where `leaf_size` is no
larger, no head is one."""
TOO_FAR_OFF = 0.008
"""Relative squared error behind coarse leaves from which on a head may get fine ones."""
HELPFUL = 0.5
"""Share of that error that may be left behind fine leaves."""
SPARE = 0.5
"""Share of their rows that the other heads of a layer give up."""
N_ASKED = 64
"""Queries that are asked."""

HeadLayout = tuple[Tensor | None, Layout]
"""Sequences (key heads of the batch), None = all, and the geometry of what they read."""


def head_layouts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Attended | None,
    *,
    layout: Layout,
    config: PrescoreConfig,
    scale: float,
    tree_builder: TreeBuilder,
) -> list[HeadLayout]:
    """Which sequences read by which geometry; all by `layout` unless some of them need finer leaves.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, left-aligned.
        value: `[B, Hkv, Nk, Dv]`.
        seen: Output and lse of the first queries, which read exactly; None = no query did.
        layout: The geometry of `config`.
        config: `rows` are kept on average over the heads of a sequence.
        scale: Factor of the logits.
        tree_builder: See `TreeBuilder`.
    """
    if seen is None or not _can_ask(layout, seen.output.shape[2]):
        return [(None, layout)]
    finer = _fine(layout, config, config.rows)
    if finer.chunk != layout.chunk or config.leaf_size <= FINE_LEAF:
        return [(None, layout)]
    with torch.no_grad():
        # one coarse leaf against as many keys in fine ones, whatever `rows` are: more rows make no head less needy
        asked = ((layout, 1), (finer, config.leaf_size // FINE_LEAF))
        coarse, fine = (error_of_leaves(query, key, value, seen, *one, scale, tree_builder) for one in asked)
        needs = (coarse > TOO_FAR_OFF) & (fine < HELPFUL * coarse)  # [B, Hkv]
    if not needs.any():
        return [(None, layout)]
    return _shared_rows(needs, layout, config)


def error_of_leaves(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Attended,
    layout: Layout,
    n_read: int,
    scale: float,
    tree_builder: TreeBuilder,
) -> Tensor:
    """`[B, Hkv]`: relative squared error of the asked queries with the oldest large piece behind leaves.

    They read `n_read` of its leaves, at least one. Everything else is exact: what it contributes is the exact
    result less what the piece contributes to it. A KV head is as bad as the worst of its query heads.
    """
    wide = accumulation_dtype(query.dtype)
    batch, n_kv_heads = key.shape[:2]
    asked = _asked(layout, query.device) - layout.first
    queries, output = (t.index_select(2, asked).to(wide) for t in (query, seen.output))
    lse = seen.lse.index_select(2, asked).to(wide)
    group, n_asked = query.shape[1] // n_kv_heads, len(asked)
    queries = queries.reshape(batch * n_kv_heads, group * n_asked, -1) * scale  # [T, Q, D]
    output, lse = output.reshape(*queries.shape[:2], -1), lse.reshape(queries.shape[:2])
    piece = replace(layout, n_key=layout.sinks + layout.chunk * JOINED, n_query=0, n_pieces=JOINED, n_levels=0)
    members, _ = place_pieces(key[:, :, : piece.n_key], piece, None, tree_builder, JOINED_LEVELS)
    keys, values = (take_rows(tensor, members).to(wide) for tensor in (key, value))  # [T, M, L, D]
    weights = (queries @ keys.flatten(1, 2).transpose(1, 2)).sub_(lse[..., None]).exp_()  # [T, Q, M * L]
    means = keys.mean(2), values.mean(2)
    stand_ins = (queries @ means[0].transpose(1, 2)).sub_(lse[..., None]).exp_().mul_(layout.leaf)  # [T, Q, M]
    best = stand_ins.topk(min(max(1, n_read), stand_ins.shape[-1]), dim=-1).indices
    read = torch.zeros_like(stand_ins).scatter_(2, best, 1.0)
    unread = weights.unflatten(2, members.shape[1:]).mul_(1 - read[..., None]).flatten(2)
    stand_ins.mul_(1 - read)
    # single keys are read, as is all else: only what is unread changes
    mass = 1 - unread.sum(-1, keepdim=True) + stand_ins.sum(-1, keepdim=True)
    changed = (output - unread @ values.flatten(1, 2) + stand_ins @ means[1]) / mass
    wrong, right = (x.unflatten(1, (group, n_asked)).square().sum((2, 3)) for x in (changed - output, output))
    worst: Tensor = (wrong / right.clamp_min(torch.finfo(wide).tiny)).amax(1)
    return worst.view(batch, n_kv_heads)


def _can_ask(layout: Layout, n_seen: int) -> bool:
    """Whether there is an old piece, enough exact queries behind it, and something to decide."""
    behind = layout.sinks + (JOINED + 2) * layout.chunk
    known = layout.first <= layout.exact_until - 2 * layout.chunk
    return layout.causal and layout.exact_until >= behind and known and n_seen < layout.n_query


def _asked(layout: Layout, device: torch.device) -> Tensor:
    """Positions of the queries that are asked: the last two chunks before `exact_until`."""
    step = max(1, 2 * layout.chunk // N_ASKED)
    return torch.arange(layout.exact_until - 2 * layout.chunk + step - 1, layout.exact_until, step, device=device)


def _like(layout: Layout, config: PrescoreConfig, *, with_singles: bool = True) -> Layout:
    """The geometry of another configuration for the same call."""
    return make_layout(
        layout.n_query, layout.n_key, causal=layout.causal, config=config, padded=layout.padded,
        with_singles=with_singles,
    )  # fmt: skip


def _fine(layout: Layout, config: PrescoreConfig, rows: int) -> Layout:
    return _like(layout, replace(config, leaf_size=FINE_LEAF, rows=rows), with_singles=False)


def _shared_rows(needs: Tensor, layout: Layout, config: PrescoreConfig) -> list[HeadLayout]:
    """Heads that need fine leaves get rows that the others of their sequence give up, at most their own again."""
    n_heads = needs.shape[1]
    spare = int(config.rows * SPARE)
    n_fine = needs.sum(1, keepdim=True).expand_as(needs)
    found: list[HeadLayout] = []
    for count in n_fine.unique().tolist():
        more = min(config.rows, spare * (n_heads - count) // count) if count else 0
        fewer = replace(config, rows=max(config.leaf_size, config.rows - (spare if count else 0)))
        for fine in (False, True):
            sequences = ((needs == fine) & (n_fine == count)).flatten().nonzero().squeeze(1)
            if len(sequences):
                own = _fine(layout, config, config.rows + more) if fine else _like(layout, fewer)
                found.append((sequences, own))
    return found
