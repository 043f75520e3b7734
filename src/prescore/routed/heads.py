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
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Routed
from prescore.ops.backend import accumulation_dtype
from prescore.routed.clusters import place_pieces, take_rows
from prescore.routed.layout import JOINED, JOINED_LEVELS, Layout, make_layout
from prescore.types import Attended

FINE_LEAF = 8
"""Keys of a leaf of such heads, which need no single keys: so small a leaf hides little. Where `leaf_size` is no
larger, no head is one."""
POINTED = 0.25
"""Least share of a piece's mass that lies on keys of more than four times the mean weight: else no leaf is small
enough to help, and nothing more is asked."""
TOO_FAR_OFF = 0.008
"""Relative squared error behind coarse leaves from which on a head may get fine ones."""
HELPFUL = 0.5
"""Share of that error that may be left behind fine leaves."""
SPARE = 0.5
"""Share of their rows that the other heads of a layer give up."""
N_ASKED = 64
"""Queries that are asked."""


class HeadLayout(NamedTuple):
    """The geometry of what some sequences (key heads of the batch) read; `sequences` None = all of them."""

    layout: Layout
    sequences: Tensor | None = None
    fine: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """What belongs to these sequences of `[T, ...]`."""
        return tensor if self.sequences is None else tensor.index_select(0, self.sequences)

    def count(self, n_sequences: int) -> int:
        """How many of all sequences these are."""
        return n_sequences if self.sequences is None else len(self.sequences)


def in_order(parts: list[Tensor], layouts: list[HeadLayout]) -> Tensor:
    """Results of the sequences of each geometry, one after the other, as one `[T, ...]` in their order."""
    whole = torch.cat(parts)
    places = [own.sequences for own in layouts if own.sequences is not None]
    return whole.index_select(0, torch.cat(places).argsort()) if places else whole


def head_layouts(call: Call, seen: Attended | None, layout: Layout, config: Routed) -> list[HeadLayout]:
    """Which sequences read by which geometry; all by `layout` unless some of them need finer leaves.

    Args:
        call: The aligned inputs.
        seen: Output and lse of the first queries, which read exactly; None = no query did.
        layout: The geometry of `config`.
        config: `rows` are kept on average over the heads of a sequence.
    """
    if seen is None or not _can_ask(layout, seen.output.shape[2]):
        return [HeadLayout(layout)]
    finer = _fine(layout, config, config.rows)
    if finer.chunk != layout.chunk or config.leaf_size <= FINE_LEAF:
        return [HeadLayout(layout)]
    with torch.no_grad():
        asked = asked_queries(call, seen, layout)
        needs = _pointed(asked, call.key, layout)
        if needs.any():
            # one coarse leaf against as many keys in fine ones, whatever `rows` are: more make no head less needy
            both = ((layout, 1), (finer, config.leaf_size // FINE_LEAF))
            coarse, fine = (error_of_leaves(asked, call, *one) for one in both)
            needs &= (coarse > TOO_FAR_OFF) & (fine < HELPFUL * coarse)
    if not needs.any():
        return [HeadLayout(layout)]
    return _shared_rows(needs, layout, config)


class Asked(NamedTuple):
    """Queries `[T, Q, D]` times the scale, exact output `[T, Q, Dv]` and lse `[T, Q]`; `group` query heads."""

    query: Tensor
    output: Tensor
    lse: Tensor
    group: int


def asked_queries(call: Call, seen: Attended, layout: Layout) -> Asked:
    """Some queries of the last two chunks before `exact_until`."""
    query, n_kv_heads = call.query, call.key.shape[1]
    wide = accumulation_dtype(query.dtype)
    step = max(1, 2 * layout.chunk // N_ASKED)
    last = layout.exact_until - layout.first
    places = torch.arange(last - 2 * layout.chunk + step - 1, last, step, device=query.device)
    rows = (query, seen.output, seen.lse[..., None])
    own = [part.index_select(2, places).unflatten(1, (n_kv_heads, -1)).flatten(0, 1).to(wide) for part in rows]
    queries, output, lse = (part.flatten(1, 2) for part in own)
    return Asked(queries * call.scale, output, lse.squeeze(-1), own[0].shape[1])


def _pointed(asked: Asked, key: Tensor, layout: Layout) -> Tensor:
    """`[B, Hkv]`: whether some head's weights on the oldest large piece stand out."""
    start = layout.sinks
    keys = key[:, :, start : start + layout.chunk * JOINED].flatten(0, 1).to(asked.query.dtype)
    weights = (asked.query @ keys.transpose(1, 2)).sub_(asked.lse[..., None]).exp_()
    mean = weights.mean(-1, keepdim=True)
    high = torch.where(weights > 4 * mean, weights, 0).sum(-1)
    mass = mean.squeeze(-1) * weights.shape[-1]
    high, mass = (part.unflatten(1, (asked.group, -1)).sum(-1) for part in (high, mass))  # by query head
    pointed: Tensor = (high > POINTED * mass).any(1)
    return pointed.view(key.shape[:2])


def error_of_leaves(asked: Asked, call: Call, layout: Layout, n_read: int) -> Tensor:
    """`[B, Hkv]`: relative squared error of the asked queries with the oldest large piece behind leaves.

    They read `n_read` of its leaves, at least one. Everything else is exact: what it contributes is the exact
    result less what the piece contributes to it. A KV head is as bad as the worst of its query heads.
    """
    queries, output, lse, group = asked
    key, value = call.key, call.value
    wide = queries.dtype
    piece = replace(layout, n_key=layout.sinks + layout.chunk * JOINED, n_query=0, n_pieces=JOINED, n_levels=0)
    members, _ = place_pieces(key[:, :, : piece.n_key], piece, None, JOINED_LEVELS)
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
    wrong, right = (x.unflatten(1, (group, -1)).square().sum((2, 3)) for x in (changed - output, output))
    worst: Tensor = (wrong / right.clamp_min(torch.finfo(wide).tiny)).amax(1)
    return worst.view(key.shape[:2])


def _can_ask(layout: Layout, n_seen: int) -> bool:
    """Whether there is an old piece, enough exact queries behind it, and something to decide."""
    behind = layout.sinks + (JOINED + 2) * layout.chunk
    known = layout.first <= layout.exact_until - 2 * layout.chunk
    return layout.causal and layout.exact_until >= behind and known and n_seen < layout.n_query


def _like(layout: Layout, config: Routed, *, with_singles: bool = True) -> Layout:
    """The geometry of another configuration for the same call."""
    return make_layout(
        layout.n_query, layout.n_key, causal=layout.causal, config=config, padded=layout.padded,
        with_singles=with_singles,
    )  # fmt: skip


def _fine(layout: Layout, config: Routed, rows: int) -> Layout:
    return _like(layout, replace(config, leaf_size=FINE_LEAF, rows=rows), with_singles=False)


def _shared_rows(needs: Tensor, layout: Layout, config: Routed) -> list[HeadLayout]:
    """Heads that need fine leaves get rows that the others of their sequence give up, at most their own again."""
    n_heads = needs.shape[1]
    spare = int(config.rows * SPARE)
    n_fine = needs.sum(1, keepdim=True).expand_as(needs)
    found: list[HeadLayout] = []
    for count in n_fine.unique().tolist():
        more = min(config.rows, spare * (n_heads - count) // count) if count else 0
        one_leaf = min(config.leaf_size, config.rows)
        fewer = replace(config, rows=max(one_leaf, config.rows - (spare if count else 0)))
        for fine in (False, True):
            sequences = ((needs == fine) & (n_fine == count)).flatten().nonzero().squeeze(1)
            if len(sequences):
                own = _fine(layout, config, config.rows + more) if fine else _like(layout, fewer)
                found.append(HeadLayout(own, sequences, fine))
    return found
