"""How wrong routed attention can be, from what it read: certified bounds, and a sampled estimate.

Inside an unread leaf the logits are `x_i` around their mean, with `|x_i| <= s = scale |q| r` (`r` the leaf's
radius) and a mean square of at most `v = (scale |q|)^2 d` (`d` its mean squared distance). The stand-in counts
`exp(mean)` per member. The true mass is at least that (Jensen) and at most `grow` times it, the smaller of
`cosh s` (convexity) and `1 + v (e^s - 1 - s) / s^2` (Bennett); and a share of at most
`move = min(2 (1 - e^-s), sqrt v)` lies on other members than the stand-in says.

A node of a coarser level may have lost a leaf to exact reading, so its stand-in is no mean of what is left; all
that holds is `|x_i| <= s`, so its keys' weights are off by at most `e^s - 1` times the stand-in's in sum. Added
to both numerator and total this moves at most twice as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.call import Call
from prescore.ops.backend import accumulation_dtype
from prescore.ops.exact import padding_bias
from prescore.ops.parts import Part, attend_parts
from prescore.routed.clusters import Clusters
from prescore.routed.layout import FAN, Layout
from prescore.routed.levels import new_singles, shares_of, singles_of_nodes
from prescore.routed.view import View
from prescore.types import Attended

ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class ErrorBar:
    """Bounds per query, `[B, Hq, Nq]`, 0 for queries that read everything exactly.

    Attributes:
        lost: Share of the true attention mass that the result does not count, at most.
        misplaced: Share of the attention that lies on other keys than it should, at most: half the sum over all
            keys of |true weight - weight given|. The output is off by at most this times the largest distance of
            a value from the output, hence by twice this times the largest value. 1 or more says nothing.
    """

    lost: Tensor
    misplaced: Tensor


def bound_figures(bar: ErrorBar, real: Tensor) -> dict[str, float]:
    """Mean and largest bound over the queries in `real [B, Hq, Nq]`; 0 where there is none."""
    figures = {}
    for name, bounds in (("misplaced", bar.misplaced[real]), ("lost", bar.lost[real])):
        figures[f"{name}_bound_mean"] = float(bounds.mean()) if bounds.numel() else 0.0
        figures[f"{name}_bound_max"] = float(bounds.max()) if bounds.numel() else 0.0
    return figures


def leaf_extent(clusters: Clusters) -> tuple[Tensor, Tensor]:
    """Radius and mean squared distance of every leaf's members from their mean, `[T, M]` each."""
    wide = accumulation_dtype(clusters.leaf_key.dtype)
    members = clusters.leaf_key.detach()[:, :, : clusters.rows.shape[-1]]
    away = members.to(wide) - clusters.mean_key.detach().to(wide)[:, : members.shape[1], None]
    square = (away * away).sum(-1)
    if clusters.alive is None:
        return square.amax(-1).sqrt(), square.mean(-1)
    square = square.masked_fill(~clusters.alive, 0.0)
    return square.amax(-1).sqrt(), square.sum(-1) / clusters.alive.sum(-1).clamp_min(1)


def unread_bounds(
    query: Tensor, lse: Tensor, read: Tensor, clusters: Clusters, view: View
) -> tuple[Tensor, Tensor]:
    """Lost and misplaced mass.

    Args:
        query: `[T, n, G, t, D]` blocks of queries.
        lse: `[T, n, G, t]` of the merged result.
        read: `[T, n, G * t, J]` leaves read, -1 for none.
        clusters: The leaves.
        view: What each block sees.

    Returns:
        Two of `[T, n, G, t]`, see `ErrorBar`.
    """
    layout, n_leaves = view.layout, view.layout.level_sizes[0]
    radius, spread = leaf_extent(clusters)
    radius = torch.cat((radius, *node_radii(layout, clusters, radius)), dim=1)
    wide = radius.dtype
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    for block, ranges in enumerate(view.leaves):
        some = query[:, block].detach().flatten(1, 2).to(wide) * view.scale  # [T, G * t, D]
        whole = lse[:, block].detach().flatten(1)
        whole = whole.masked_fill(torch.isneginf(whole), 0.0)  # saw nothing: its counts are -inf too
        numbers = torch.cat([torch.arange(part.start, part.stop, device=query.device) for part in ranges])
        mean, count, r = (
            t.detach().index_select(1, numbers).to(wide) for t in (clusters.mean_key, clusters.log_count, radius)
        )
        # logarithms: a stand-in too light to be a number may stand for a key that outweighs everything
        weight = torch.baddbmm(count[:, None], some, mean.transpose(1, 2)) - whole[..., None]
        was_read = _stand_ins_read(read[:, block], layout).index_select(2, numbers)
        gains = shares_of(layout, ranges, count)
        weight = torch.where(was_read, weight + (-math.inf if gains is None else gains), weight)
        norm = torch.linalg.vector_norm(some, dim=-1, keepdim=True)
        reach, leaf = norm * r[:, None], numbers < n_leaves  # nodes come first
        n_nodes = int((~leaf).sum())
        doubt = torch.exp(weight + _log_expm1(reach))[..., :n_nodes].sum(-1)
        weight, reach = weight[..., n_nodes:], reach[..., n_nodes:]
        d = spread.index_select(1, numbers[n_nodes:])
        grow, move = _leaf_factors(reach, (norm * norm) * d[:, None])
        more = torch.exp(weight + grow).sum(-1)
        moved = (weight.exp() * move).sum(-1)
        results[0].append(_share(more + doubt, torch.zeros_like(more)))
        results[1].append((_share(more, moved) + 2 * doubt).clamp_max(2.0))
    lead = query.shape[:-1]
    lost, misplaced = (torch.stack(parts, dim=1).view(lead) for parts in results)
    return lost, misplaced


def node_radii(layout: Layout, clusters: Clusters, radius: Tensor) -> list[Tensor]:
    """How far the keys behind the nodes of each level lie from their mean, at most; `[T, nodes]` each.

    Args:
        layout: The geometry.
        clusters: The leaves, singles and nodes.
        radius: `[T, M]` of the leaves.
    """
    below, *levels = clusters.mean_key.detach().to(radius.dtype).split(layout.level_sizes, dim=1)
    first, n_singles = layout.sinks, layout.n_joined * layout.large_singles
    singles = clusters.single_key.detach()[:, first : first + n_singles].to(radius.dtype)
    radii = []
    for level, means in enumerate(levels, start=1):
        n_nodes = means.shape[1]
        children = below[:, : n_nodes * FAN].unflatten(1, (n_nodes, FAN))
        away = torch.linalg.vector_norm(children - means[:, :, None], dim=-1)
        radius = (away + radius[:, : n_nodes * FAN].unflatten(1, (n_nodes, FAN))).amax(-1)
        if new_singles(layout, level):
            own = singles_of_nodes(layout, level, singles, n_nodes)
            radius = torch.maximum(radius, torch.linalg.vector_norm(own - means[:, :, None], dim=-1).amax(-1))
        radii.append(radius)
        below = means
    return radii


def _stand_ins_read(read: Tensor, layout: Layout) -> Tensor:
    """`[T, t, A]`: leaves that were read, and nodes below which a leaf was read, from `read [T, t, J]`."""
    n_leaves = layout.level_sizes[0]
    leaves = torch.zeros(*read.shape[:2], n_leaves + 1, dtype=torch.bool, device=read.device)
    leaves.scatter_(2, read % (n_leaves + 1), True)  # -1 for none goes to the extra place
    levels = [leaves[..., :n_leaves]]
    for level, size in enumerate(layout.level_sizes[1:], start=1):
        span = FAN**level
        levels.append(leaves[..., : size * span].unflatten(2, (size, span)).any(-1))
    return torch.cat(levels, dim=2)


def _leaf_factors(reach: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Log of what a leaf's mass may exceed its stand-in by, and the share of it that may lie elsewhere."""
    small, large = reach < 1e-2, reach > 30
    safe = reach.masked_fill(small | large, 1.0)
    # (e^s - 1 - s) / s^2 is about 1/2 + s/6 near 0, where the quotient loses its digits, and below e^s / s^2
    bennett = torch.where(small, 0.5 + reach / 5, (torch.expm1(safe) - safe) / (safe * safe)).log()
    bennett = torch.where(large, reach - 2 * reach.log(), bennett)
    cosh = 2 * _log_expm1(reach) - reach - math.log(2)  # cosh s - 1 = (e^s - 1)^2 / (2 e^s)
    grow = torch.minimum(cosh, variance.log() + bennett)
    move = torch.minimum(-2 * torch.expm1(-reach), variance.sqrt())
    return grow, move


def _log_expm1(reach: Tensor) -> Tensor:
    """Log of `e^s - 1`, for any `s` from 0 on."""
    return reach + torch.log(-torch.expm1(-reach))


def _share(more: Tensor, moved: Tensor) -> Tensor:
    """The largest `(x + moved) / (1 + x)` for any true excess `x` from 0 to `more`; never above 2."""
    at_most = torch.where(torch.isinf(more), torch.ones_like(more), (more + moved) / (1 + more))
    return torch.maximum(at_most, moved).clamp_max(2.0)


def exact_for(call: Call, wanted: Tensor) -> Attended:
    """Exact attention for the `wanted [B, Hq, Nq]` queries only; all others have output 0 and lse -inf."""
    n_query, n_key, n_kv_heads = call.n_query, call.n_keys, call.key.shape[1]
    n_trees, device = call.key.shape[0] * n_kv_heads, call.query.device
    keys = torch.arange(n_trees * n_key, device=device).view(n_trees, 1, n_key)
    padding = None if call.valid is None else padding_bias(call.valid, n_kv_heads, call.query.dtype)[:, None]
    parts = []
    for tree, own in enumerate(wanted.reshape(n_trees, call.group, n_query)):
        # by position, so that rows of one part see almost the same keys, and masks stay small
        position, head = own.t().nonzero(as_tuple=True)
        for rows in (slice(start, start + ROWS_AT_ONCE) for start in range(0, len(position), ROWS_AT_ONCE)):
            query_rows = ((tree * call.group + head[rows]) * n_query + position[rows])[None, None]
            last = position[rows] + (n_key - n_query)
            if not call.is_causal:
                last = torch.full_like(position[rows], n_key - 1)
            cut, stop = int(last[0]) + 1, int(last[-1]) + 1
            bias = None if padding is None else padding[tree, :, :cut]
            parts.append(Part(query_rows.shape, query_rows, key_rows=keys[tree, :, :cut], bias=bias))
            if stop > cut:
                later = torch.arange(cut, stop, device=device) > last[:, None]
                mask = torch.zeros(later.shape, dtype=call.query.dtype, device=device)
                mask = mask.masked_fill_(later, -math.inf)[None, None]
                if padding is not None:
                    mask = mask + padding[tree, :, cut:stop]
                parts.append(Part(query_rows.shape, query_rows, key_rows=keys[tree, :, cut:stop], bias=mask))
    return attend_parts(call.query, call.key, call.value, parts, scale=call.scale, backend=call.backend)


def sampled_error(call: Call, attended: Attended, real: Tensor, samples: int = 32) -> dict[str, float]:
    """Relative output error at evenly spaced positions, computed exactly there: mean and standard error.

    Only queries in `real [B, Hq, Nq]` count.
    """
    if call.query.numel() == 0:
        return {"sampled_error": 0.0, "sampled_error_se": 0.0}
    steps = torch.linspace(0, call.n_query - 1, min(samples, call.n_query), device=real.device)
    place = steps.round().long().unique()
    wanted = torch.zeros_like(real)
    wanted[:, :, place] = real[:, :, place]
    with torch.no_grad():
        exact = exact_for(call, wanted).output[:, :, place]
        off = torch.linalg.vector_norm((attended.output[:, :, place] - exact).float(), dim=-1)
        size = torch.linalg.vector_norm(exact.float(), dim=-1)
        seen = (size > 0) & real[:, :, place]
        error = off[seen] / size[seen]
    spread = float(error.std()) / math.sqrt(error.numel()) if error.numel() > 1 else 0.0
    return {"sampled_error": float(error.mean()) if error.numel() else 0.0, "sampled_error_se": spread}
