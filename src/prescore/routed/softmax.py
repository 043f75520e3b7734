"""One softmax over local chunks, columns and chosen leaves, with exact gradients.

Queries come in blocks; a block sees a prefix of the pieces. Forward merges the sources by log-sum-exp; backward
runs each source under the merged output and lse, so nothing is stored but the inputs and the choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prescore.ops.backend import accumulation_dtype
from prescore.ops.parts import fold_lse_gradient
from prescore.routed.columns import Columns, attend_columns, attend_columns_backward
from prescore.routed.levels import Descent
from prescore.routed.local import Chunks, Strip, attend_local, attend_local_backward
from prescore.routed.pairs import (
    TILES,
    Leaves,
    Pairs,
    attend_pairs,
    attend_pairs_backward,
    dispatch,
    sum_pairs,
)
from prescore.routed.view import View
from prescore.types import Attended


class Sources(NamedTuple):
    """Everything a query can see.

    `T = B * Hkv` sequences, `n` blocks of `t` queries, `M` leaves, `A` stand-ins, `S` singles.

    Attributes:
        mean_key, mean_value: `[T, A, D]` of the stand-ins.
        single_key, single_value: `[T, S, D]`.
        leaf_key, leaf_value: `[T, M, L, D]`.
        log_count: `[T, A]`.
        single_bias: `[T, S]`.
        leaf_bias: `[T, M, L]`, or None.
        local_key, local_value: `[T, n + 1, t, D]` of the chunk before each block and of its own, contiguous;
            None = no local part.
    """

    mean_key: Tensor
    mean_value: Tensor
    single_key: Tensor
    single_value: Tensor
    leaf_key: Tensor
    leaf_value: Tensor
    log_count: Tensor
    single_bias: Tensor
    leaf_bias: Tensor | None = None
    local_key: Tensor | None = None
    local_value: Tensor | None = None

    def columns(self, view: View, block: int) -> Columns:
        """Stand-ins and singles that a block of queries sees."""
        leaves, singles = view.leaves[block], view.singles[block]

        def seen(stand_ins: Tensor, single: Tensor) -> Tensor:
            return torch.cat([*(stand_ins[:, part] for part in leaves), *(single[:, part] for part in singles)], 1)

        bias = seen(self.log_count, self.single_bias)
        return Columns(
            key=seen(self.mean_key, self.single_key),
            value=seen(self.mean_value, self.single_value),
            bias=bias[:, None],
            n_leaves=view.n_seen(block),
            gains=view.gains(block, bias),
        )

    def leaves(self) -> Leaves:
        """The leaves of all sequences, one after the other."""
        bias = None if self.leaf_bias is None else self.leaf_bias.flatten(0, 1)
        return Leaves(self.leaf_key.flatten(0, 1), self.leaf_value.flatten(0, 1), bias)

    def chunks(self, run: range) -> Chunks | None:
        """The local keys and values of some blocks."""
        if self.local_key is None or self.local_value is None:
            return None
        some = slice(run.start, run.stop + 1)
        return Chunks(self.local_key[:, some], self.local_value[:, some])


_BIASES = ("log_count", "single_bias", "leaf_bias")
"""Fields of `Sources` that no gradient reaches."""


class Merged(NamedTuple):
    """Output `[T, n, G, t, Dv]`, lse `[T, n, G, t]`, and the leaves read `[T, n, G * t, J]`, -1 for none."""

    output: Tensor
    lse: Tensor
    read: Tensor


def attend_sources(query: Tensor, sources: Sources, view: View) -> Merged:
    """Attend to all sources at once.

    Args:
        query: `[T, n, G, t, D]`: blocks of `t` positions, `G` query heads per key head.
        sources: What can be seen.
        view: What each block sees of it.
    """
    return Merged(*_AttendSources.apply(view, query, *sources))  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class _Choice:
    """What the blocks of one dispatch chose: stand-ins block by block, and the pairs that follow from them."""

    run: range
    chosen: list[Tensor] = field(default_factory=list)
    pairs: Pairs | None = None


class _AttendSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: View, query: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        sources, shape = Sources(*tensors), query.shape
        wide = accumulation_dtype(query.dtype)
        output = query.new_empty((*shape[:-1], sources.leaf_value.shape[-1]))
        lse = query.new_empty(shape[:-1], dtype=wide)
        read = torch.full((*shape[:2], shape[2] * shape[3], view.n_chosen), -1, device=query.device)
        room = _new_room(query, sources, view)
        descent = Descent(sources.mean_key.split(view.layout.level_sizes, dim=1))
        choices = []
        for run in view.groups():
            group = _Group(query[:, run.start : run.stop], sources, view, _Choice(run))
            own = output[:, run.start : run.stop]
            target = own if own.dtype == wide else torch.empty_like(own, dtype=wide)
            lse[:, run.start : run.stop] = group.forward(target, room, descent)
            if target is not own:
                own.copy_(target)
            if group.read is not None:
                read[:, run.start : run.stop, :, : view.chosen(run[0])] = group.read
            choices.append(group.choice)
        ctx.save_for_backward(query, *tensors, output, lse)
        ctx.view, ctx.choices = view, choices
        ctx.mark_non_differentiable(read)
        ctx.set_materialize_grads(False)
        return output, lse, read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        query, *tensors, output, lse = ctx.saved_tensors  # once: gradient checkpointing forbids a second look
        sources, dtype = Sources(*tensors), query.dtype
        wide = accumulation_dtype(dtype)
        if grad is None and grad_lse is None:
            return (None,) * (2 + len(sources))
        if grad is None:
            grad = torch.zeros_like(output)
        if grad_lse is not None:
            flat, moved = fold_lse_gradient(
                grad.reshape(-1, grad.shape[-1]).to(wide),
                output.reshape(-1, output.shape[-1]).to(wide),
                grad_lse.reshape(-1),
            )
            grad, output = flat.view(grad.shape), moved.view(output.shape)
            query, sources = query.to(wide), Sources(*(None if t is None else t.to(wide) for t in sources))  # type: ignore[arg-type]
        grad_query = torch.zeros_like(query, dtype=wide)
        sums = Sources(*(None if t is None else torch.zeros_like(t, dtype=wide) for t in sources))  # type: ignore[arg-type]
        for choice in ctx.choices:
            blocks = slice(choice.run.start, choice.run.stop)
            group = _Group(query[:, blocks], sources, ctx.view, choice)
            merged = Attended(output[:, blocks], lse[:, blocks])
            group.backward(grad[:, blocks], merged, grad_query[:, blocks], sums)
        found = (
            None if total is None or name in _BIASES else total.to(dtype) for name, total in sums._asdict().items()
        )
        return None, grad_query.to(dtype), *found


def _new_room(query: Tensor, sources: Sources, view: View) -> Tensor:
    """Memory for the results of all pairs of one dispatch, to be used again by the next."""
    longest = max(len(run) for run in view.groups())
    n_pairs = query[:, :longest].shape[:-1].numel() * view.n_chosen
    most = n_pairs + TILES[1] * sources.leaf_key.shape[:2].numel()
    return query.new_empty((most, sources.leaf_value.shape[-1]), dtype=accumulation_dtype(query.dtype))


class _Group:
    """The blocks of one dispatch; its choice is made by `forward`, and read by `backward`."""

    def __init__(self, query: Tensor, sources: Sources, view: View, choice: _Choice) -> None:
        self.query, self.sources, self.view, self.choice = query, sources, view, choice
        self.backend = view.backend.at(f"run {choice.run.start}")
        self.local = sources.chunks(choice.run)
        self.read: Tensor | None = None

    def forward(self, output: Tensor, room: Tensor, descent: Descent) -> Tensor:
        """Fill the blocks' `output`, in the accumulation dtype, and return their lse; `room` is overwritten."""
        view, query, choice = self.view, self.query, self.choice
        lead = query.shape[:-1]
        lses = [self._columns_forward(output)[..., None]]
        strips: list[list[Strip]] = []
        if self.local is not None:
            strips = list(attend_local(query, self.local, view.scale, self.backend))
            lses += [torch.cat([strip.lse for strip in part], dim=-1)[..., None] for part in strips]
        if choice.chosen[0].shape[-1]:
            n_trees, n_leaves = self.sources.leaf_key.shape[:2]
            first = torch.arange(0, n_trees * n_leaves, n_leaves, device=query.device)[:, None, None, None]
            self.read = self._leaf_numbers(descent)
            choice.pairs = dispatch((self.read + first).flatten(0, 2), n_trees * n_leaves)
            rows = query.reshape(-1, query.shape[-1])
            leaves = self.sources.leaves()
            found = attend_pairs(rows, leaves, choice.pairs, view.scale, self.backend, room)
            lses.append(found.lse.view(*lead, -1))
        stacked = torch.cat(lses, dim=-1)
        total = torch.logsumexp(stacked, dim=-1)
        weights = stacked.sub_(total.masked_fill(torch.isneginf(total), 0.0)[..., None]).exp_()
        output.mul_(weights[..., :1])
        for place, part in enumerate(strips, start=1):
            for strip in part:
                share = weights[:, :, :, strip.rows, place : place + 1]
                output[:, :, :, strip.rows].addcmul_(strip.output.to(output.dtype), share)
        if choice.pairs is not None:
            share = weights[..., 1 + len(strips) :].reshape(choice.pairs.slots.shape)
            output += sum_pairs(found.output, share, choice.pairs).view(output.shape)
        return total

    def backward(self, grad: Tensor, merged: Attended, grad_query: Tensor, sums: Sources) -> None:
        """Add the gradients of these blocks to `grad_query` (theirs) and to `sums` (of all)."""
        view, choice = self.view, self.choice
        local_sums = sums.chunks(choice.run)
        if self.local is not None and local_sums is not None:
            attend_local_backward(
                grad, self.query, self.local, merged, view.scale, self.backend, (grad_query, local_sums)
            )
        self._columns_backward(grad, merged, grad_query, sums)
        if choice.pairs is None:
            return
        flat_grad, rows = grad.reshape(-1, grad.shape[-1]), self.query.reshape(-1, self.query.shape[-1])
        whole = Attended(merged.output.reshape(-1, grad.shape[-1]), merged.lse.reshape(-1))
        leaves = self.sources.leaves()
        grads = attend_pairs_backward(flat_grad, rows, leaves, choice.pairs, whole, view.scale, self.backend)
        grad_query += grads.query.view_as(grad_query)
        sums.leaf_key.add_(grads.key.view_as(sums.leaf_key))
        sums.leaf_value.add_(grads.value.view_as(sums.leaf_value))

    def _block(self, tensor: Tensor, place: int) -> Tensor:
        return tensor[:, place].flatten(1, 2)  # [T, G * t, ...]

    def _columns_forward(self, outputs: Tensor) -> Tensor:
        """Fill `outputs` and return the lse of the columns."""
        lses = []
        for place, block in enumerate(self.choice.run):
            columns, query = self.sources.columns(self.view, block), self._block(self.query, place)
            dropout = self.backend.at(f"columns {block}").dropout
            found = attend_columns(query, columns, self.view.chosen(block), self.view.scale, dropout)
            outputs[:, place] = found.output.view(outputs[:, place].shape)
            lses.append(found.lse)
            self.choice.chosen.append(found.chosen)
        return torch.stack(lses, dim=1).view(self.query.shape[:-1])

    def _columns_backward(self, grad: Tensor, merged: Attended, grad_query: Tensor, sums: Sources) -> None:
        lse = merged.lse.masked_fill(torch.isneginf(merged.lse), torch.inf)  # saw nothing: every weight is 0
        product = (grad.to(lse.dtype) * merged.output.to(lse.dtype)).sum(-1)
        for place, block in enumerate(self.choice.run):
            columns = self.sources.columns(self.view, block)
            query, own_grad = self._block(self.query, place), self._block(grad, place)
            own = Attended(self._block(product, place), self._block(lse, place))
            dropout = self.backend.at(f"columns {block}").dropout
            chosen = self.choice.chosen[place]
            grads = attend_columns_backward(own_grad, query, columns, chosen, own, self.view.scale, dropout)
            grad_query[:, place].add_(grads.query.view_as(grad_query[:, place]))
            leaves, singles = self.view.leaves[block], self.view.singles[block]
            sizes = [part.stop - part.start for part in (*leaves, *singles)]
            for shares, stand_ins, single in (
                (grads.key.split(sizes, dim=1), sums.mean_key, sums.single_key),
                (grads.value.split(sizes, dim=1), sums.mean_value, sums.single_value),
            ):
                for part, share in zip(leaves, shares, strict=False):
                    stand_ins[:, part] += share
                for part, share in zip(singles, shares[len(leaves) :], strict=True):
                    single[:, part] += share

    def _leaf_numbers(self, descent: Descent) -> Tensor:
        """`[T, n, G * t, J]`: the leaves read, numbered within their tree."""
        numbers = [
            self.view.leaf_numbers(chosen, block, self._block(self.query, place), descent)
            for place, (chosen, block) in enumerate(zip(self.choice.chosen, self.choice.run, strict=True))
        ]
        return torch.stack(numbers, dim=1)
