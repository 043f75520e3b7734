"""What the clusters of routed attention are: single keys, trees over the others, stand-ins of their leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from prescore.clustering.tree import bisection_tree
from prescore.ops.backend import accumulation_dtype
from prescore.routed.layout import JOINED, JOINED_LEVELS, Layout
from prescore.routed.levels import coarser, level_counts


@dataclass(frozen=True, eq=False)
class Clusters:
    """What queries see of the pieces; `T = B * Hkv` trees, `M` leaves of `L` keys, `A` stand-ins, `S` single keys.

    Attributes:
        rows: `[T, M, L]` positions of the leaves' members in their sequence.
        alive: `[T, M, L]`, False on filler; None = no filler.
        leaf_key: `[T, M, R, D]` members, then filler up to `leaf_room`; gradients reach the keys.
        leaf_value: `[T, M, R, Dv]`.
        mean_key: `[T, A, D]` stand-ins of the leaves, then of the nodes of level 1, 2, ...; gradients reach the
            members.
        mean_value: `[T, A, Dv]`.
        log_count: `[T, A]` log of the members, -inf for none.
        single_rows: `[T, S]` positions: the sinks, then the singles of the large pieces and of the chunks, and
            again those of the large pieces that are kept in level 1.
        single_key: `[T, S, D]`.
        single_value: `[T, S, Dv]`.
        single_bias: `[T, S]` of 0, or -inf on filler.
    """

    rows: Tensor
    alive: Tensor | None
    leaf_key: Tensor
    leaf_value: Tensor
    mean_key: Tensor
    mean_value: Tensor
    log_count: Tensor
    single_rows: Tensor
    single_key: Tensor
    single_value: Tensor
    single_bias: Tensor


def build_clusters(key: Tensor, value: Tensor, layout: Layout, valid: Tensor | None) -> Clusters:
    """Singles, trees over the other keys of each piece, and the stand-ins of their leaves.

    Args:
        key: `[B, Hkv, Nk, D]`, left-aligned.
        value: `[B, Hkv, Nk, Dv]`.
        layout: The geometry.
        valid: `[B, Nk]`, or None. Causal calls need none: what lies behind a real query is real.
    """
    with torch.no_grad():
        alive = None if layout.causal else _alive(layout, valid, key)
        joined = place_pieces(key, layout, alive, JOINED_LEVELS)
        chunks = place_pieces(key, layout, alive, 0)
        sinks = torch.arange(layout.sinks, device=key.device).expand(joined[0].shape[0], -1)
        rows = torch.cat((joined[0], chunks[0]), dim=1)
        kept = joined[1].unflatten(1, (layout.n_joined, layout.large_singles))[:, :, : layout.kept].flatten(1)
        single_rows = torch.cat((sinks, joined[1], chunks[1], *([kept] if layout.n_levels else [])), dim=1)
        alive_leaf = None
        single_bias = torch.zeros(single_rows.shape, dtype=accumulation_dtype(key.dtype), device=key.device)
        if alive is not None:
            # a sequence that ends inside a large piece sees the chunks instead
            place = torch.cat((rows.flatten(1), single_rows), dim=1)
            seen = _seen(alive, layout) & alive.gather(1, place)
            alive_leaf = seen[:, : rows[0].numel()].view(rows.shape)
            single_bias.masked_fill_(~seen[:, rows[0].numel() :], -torch.inf)
            rows, single_rows = rows.clamp_max(layout.n_key - 1), single_rows.clamp_max(layout.n_key - 1)
    filler = rows[..., -1:].expand(-1, -1, layout.leaf_room - layout.leaf)
    room = torch.cat((rows, filler), dim=-1)
    leaf_key, leaf_value = take_rows(key, room), take_rows(value, room)
    members = leaf_key[:, :, : layout.leaf], leaf_value[:, :, : layout.leaf]
    means, log_count = _stand_ins(*members, alive_leaf)
    singles = take_rows(key, single_rows), take_rows(value, single_rows)
    tables = [with_nodes(layout, *pair) for pair in zip(means, singles, strict=True)]
    log_count = torch.cat((log_count, node_log_count(layout, log_count)), dim=1)
    return Clusters(
        rows=rows,
        alive=alive_leaf,
        leaf_key=leaf_key,
        leaf_value=leaf_value,
        mean_key=tables[0],
        mean_value=tables[1],
        log_count=log_count,
        single_rows=single_rows,
        single_key=singles[0],
        single_value=singles[1],
        single_bias=single_bias,
    )


def with_nodes(layout: Layout, means: Tensor, singles: Tensor) -> Tensor:
    """Stand-ins of all levels: `means [T, M, D]` of the leaves, then those of nodes over large pieces' leaves."""
    if not layout.n_levels:
        return means
    large, first = layout.n_joined * layout.large_leaves, layout.sinks
    own = singles[:, first : first + layout.n_joined * layout.large_singles]
    return torch.cat((means, *coarser(layout, means[:, :large], own)), dim=1)


def node_log_count(layout: Layout, like: Tensor) -> Tensor:
    """`[T, nodes]`: log of the keys behind each node, level by level."""
    counts = [torch.full((size,), float(count)) for size, count in _nodes(layout)]
    whole = torch.cat([torch.empty(0), *counts]).to(like).log()
    return whole.expand(like.shape[0], -1)


def _nodes(layout: Layout) -> list[tuple[int, int]]:
    return list(zip(layout.level_sizes, level_counts(layout), strict=True))[1:]


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """`[B, H, N, D]` and positions `[B * H, ...]` -> `[B * H, ..., D]`."""
    length, dim = tensor.shape[2:]
    if not tensor.is_contiguous() and not tensor.requires_grad:
        # a part of a growing buffer: flattening it would copy all of it for a few rows
        heads = [head for sequence in tensor.unbind() for head in sequence.unbind()]
        some = [head.index_select(0, own.reshape(-1)) for head, own in zip(heads, rows, strict=True)]
        return torch.stack(some).view(*rows.shape, dim)
    start = torch.arange(0, rows.shape[0] * length, length, device=rows.device)
    flat = rows + start.view(-1, *[1] * (rows.ndim - 1))
    return tensor.reshape(-1, dim).index_select(0, flat.reshape(-1)).view(*rows.shape, dim)


def unlikeness(points: Tensor) -> Tensor:
    """`[P, N, D] -> [P, N]`: how little a key resembles the mean of its piece, minus their cosine."""
    return -(normalize(points, dim=-1) @ normalize(points.mean(1), dim=-1)[..., None]).squeeze(-1)


def _alive(layout: Layout, valid: Tensor | None, key: Tensor) -> Tensor:
    """`[T, sinks + pieces * chunk]`: which places hold a real key."""
    if valid is None:
        valid = torch.ones(key.shape[0], layout.n_key, dtype=torch.bool, device=key.device)
    filler = layout.sinks + layout.n_pieces * layout.chunk - layout.n_key
    return pad(valid, (0, filler)).repeat_interleave(key.shape[1], dim=0)


def place_pieces(key: Tensor, layout: Layout, alive: Tensor | None, joined: int) -> tuple[Tensor, Tensor]:
    """Positions of leaf members `[T, M, L]` and of singles `[T, S]` in pieces of `2 ** joined` chunks."""
    n_trees, size = key.shape[0] * key.shape[1], layout.chunk << joined
    n_pieces = layout.n_pieces >> joined
    span, shape = n_pieces * size, (n_trees * n_pieces, size)
    keys = key[:, :, layout.sinks : layout.sinks + span]
    points = pad(keys, (0, 0, 0, span - keys.shape[2])).reshape(*shape, key.shape[-1])
    points = points.to(accumulation_dtype(key.dtype))
    score = unlikeness(points)
    if alive is not None:
        alive = alive[:, layout.sinks : layout.sinks + span].reshape(shape)
        points = points.masked_fill(~alive[..., None], 0)
        score = unlikeness(points).masked_fill(~alive, -torch.inf)
    n_singles = layout.singles << joined
    single = score.topk(n_singles, dim=1).indices
    rest = _others(single, size)
    flat = rest + torch.arange(0, n_trees * span, size, device=key.device)[:, None]
    points = points.reshape(-1, points.shape[-1]).index_select(0, flat.view(-1)).view(*rest.shape, key.shape[-1])
    own = None if alive is None else alive.gather(1, rest)
    order = bisection_tree(points, layout.levels + joined, valid=own)
    start = (torch.arange(n_pieces, device=key.device) * size + layout.sinks)[None, :, None]
    rows = rest.gather(1, order).view(n_trees, n_pieces, size - n_singles) + start
    singles = single.view(n_trees, n_pieces, n_singles) + start
    return rows.view(n_trees, n_pieces * layout.leaves << joined, layout.leaf), singles.flatten(1)


def _others(single: Tensor, size: int) -> Tensor:
    """`[P, S]` -> `[P, size - S]`: the places that are not single, ascending."""
    taken = torch.zeros(single.shape[0], size, dtype=torch.bool, device=single.device)
    taken.scatter_(1, single, True)
    return (~taken).nonzero()[:, 1].view(single.shape[0], size - single.shape[1])


def _seen(alive: Tensor, layout: Layout) -> Tensor:
    """`[T, leaf members + singles]`: whether a sequence sees a large piece, or the chunks it would replace."""
    length = alive.sum(1) - layout.sinks  # left-aligned
    whole = length // (layout.chunk * JOINED)  # large pieces of each sequence
    large = torch.arange(layout.n_joined, device=alive.device) < whole[:, None]
    small = torch.arange(layout.n_pieces, device=alive.device) >= whole[:, None] * JOINED

    def spread(per_chunk: int) -> list[Tensor]:
        return [large.repeat_interleave(per_chunk * JOINED, dim=1), small.repeat_interleave(per_chunk, dim=1)]

    sinks = torch.ones(alive.shape[0], layout.sinks, dtype=torch.bool, device=alive.device)
    return torch.cat((*spread(layout.leaves * layout.leaf), sinks, *spread(layout.singles)), dim=1)


def _stand_ins(key: Tensor, value: Tensor, alive: Tensor | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    wide = accumulation_dtype(key.dtype)
    if alive is None:
        count = torch.full(key.shape[:2], key.shape[2], dtype=wide, device=key.device)
        return (key.mean(2), value.mean(2)), count.log()
    count = alive.sum(-1)
    safe = count.clamp_min(1)[..., None]
    dead = ~alive[..., None]  # filler repeats some other row: it must not count
    # a sum of half-precision rows may leave their range, the mean does not
    mean_key, mean_value = (tensor.masked_fill(dead, 0).sum(2, dtype=wide) / safe for tensor in (key, value))
    return (mean_key.to(key.dtype), mean_value.to(value.dtype)), count.to(wide).log()
