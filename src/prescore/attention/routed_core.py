"""One softmax over local chunks, columns and chosen leaves, with exact gradients.

Queries come in blocks; a block sees a prefix of the pieces. Forward merges the sources by log-sum-exp; backward
runs each source under the merged output and lse, so nothing is stored but the inputs and the choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prescore.attention.kernels import accumulation_dtype
from prescore.attention.parts import fold_lse_gradient
from prescore.attention.routed_columns import attend_columns, attend_columns_backward
from prescore.attention.routed_levels import Descent
from prescore.attention.routed_local import Strip, attend_local, attend_local_backward
from prescore.attention.routed_pairs import (
    TILES,
    Leaves,
    Pairs,
    attend_pairs,
    attend_pairs_backward,
    dispatch,
    sum_pairs,
)  # fmt: skip
from prescore.attention.routed_plan import Plan


@dataclass(frozen=True, eq=False)
class Sources:
    """Everything a query can see.

    `T = B * Hkv` sequences, `n` blocks of `t` queries, `M` leaves, `A` stand-ins, `S` singles.

    Attributes:
        local: Keys and values `[T, n + 1, t, D]` of the chunk before each block and of its own, contiguous;
            None = no local part.
        means: Keys and values `[T, A, D]` of the stand-ins.
        singles: Keys and values `[T, S, D]`.
        leaves: Keys and values `[T, M, L, D]`.
        log_count: `[T, A]`.
        single_bias: `[T, S]`.
        leaf_bias: `[T, M, L]`, or None.
    """

    local: tuple[Tensor, Tensor] | None
    means: tuple[Tensor, Tensor]
    singles: tuple[Tensor, Tensor]
    leaves: tuple[Tensor, Tensor]
    log_count: Tensor
    single_bias: Tensor
    leaf_bias: Tensor | None


def attend_routed(query: Tensor, sources: Sources, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to all sources at once.

    Args:
        query: `[T, n, G, t, D]`: blocks of `t` positions, `G` query heads per key head.
        sources: What can be seen.
        plan: What each block sees of it.

    Returns:
        Output `[T, n, G, t, Dv]`, lse `[T, n, G, t]`, and the leaves read `[T, n, G * t, J]`, -1 for none.
    """
    local = sources.local or (None, None)
    result: tuple[Tensor, Tensor, Tensor] = _Routed.apply(  # type: ignore[no-untyped-call]
        query, *local, *sources.means, *sources.singles, *sources.leaves,
        sources.log_count, sources.single_bias, sources.leaf_bias, plan,
    )  # fmt: skip
    return result


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        tensors, plan = rest[:-1], rest[-1]
        shape, wide = query.shape, accumulation_dtype(query.dtype)
        output = query.new_empty((*shape[:-1], tensors[7].shape[-1]))
        lse = query.new_empty(shape[:-1], dtype=wide)
        read = torch.full((*shape[:2], shape[2] * shape[3], plan.n_chosen), -1, device=query.device)
        dispatched: list[tuple[range, list[Tensor], Pairs | None]] = []
        room = _new_room(query, tensors[6], tensors[7], plan)
        descent = Descent(tensors[2].split(plan.layout.level_sizes, dim=1))
        for run in plan.groups():
            state = _Group(query[:, run.start : run.stop], tensors, plan, run)
            own = output[:, run.start : run.stop]
            target = own if own.dtype == wide else torch.empty_like(own, dtype=wide)
            lse[:, run.start : run.stop] = state.forward(target, room, descent)
            if target is not own:
                own.copy_(target)
            if state.read is not None:
                read[:, run.start : run.stop, :, : plan.chosen(run[0])] = state.read
            dispatched.append((run, state.chosen, state.pairs))
        ctx.save_for_backward(query, *tensors, output, lse)
        ctx.plan, ctx.dispatched = plan, dispatched
        ctx.mark_non_differentiable(read)
        ctx.set_materialize_grads(False)
        return output, lse, read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        query, *tensors, output, lse = ctx.saved_tensors  # once: gradient checkpointing forbids a second look
        dtype = query.dtype
        none = (None,) * 4
        if grad is None and grad_lse is None:
            return (None,) * 9 + none
        if grad is None:
            grad = torch.zeros_like(output)
        if grad_lse is not None:
            wide = accumulation_dtype(query.dtype)
            flat, moved = fold_lse_gradient(
                grad.reshape(-1, grad.shape[-1]).to(wide),
                output.reshape(-1, output.shape[-1]).to(wide),
                grad_lse.reshape(-1),
            )
            grad, output = flat.view(grad.shape), moved.view(output.shape)
            query, tensors = query.to(wide), [t if t is None else t.to(wide) for t in tensors]
        wide = accumulation_dtype(query.dtype)
        sums = [None if t is None else torch.zeros_like(t, dtype=wide) for t in (query, *tensors[:8])]
        for run, chosen, pairs in ctx.dispatched:
            blocks = slice(run.start, run.stop)
            state = _Group(query[:, blocks], tensors, ctx.plan, run)
            state.chosen, state.pairs = chosen, pairs
            state.backward(grad[:, blocks], output[:, blocks], lse[:, blocks], sums)
        return (*(None if t is None else t.to(dtype) for t in sums), *none)


def _new_room(query: Tensor, leaf_key: Tensor, leaf_value: Tensor, plan: Plan) -> Tensor:
    """Memory for the results of all pairs of one dispatch, to be used again by the next."""
    longest = max(len(run) for run in plan.groups())
    n_pairs = query[:, :longest].shape[:-1].numel() * plan.n_chosen
    most = n_pairs + TILES[1] * leaf_key.shape[:2].numel()
    return query.new_empty((most, leaf_value.shape[-1]), dtype=accumulation_dtype(query.dtype))


class _Group:
    """The blocks of one dispatch; `chosen` and `pairs` are set by `forward`, or from outside for `backward`."""

    def __init__(self, query: Tensor, tensors: Any, plan: Plan, run: range) -> None:
        self.query, self.plan, self.run = query, plan, run
        self.backend = plan.backend.at(f"run {run.start}")
        key, value = tensors[:2]
        chunks = slice(run.start, run.stop + 1)
        self.local = None if key is None else (key[:, chunks], value[:, chunks])
        mean_key, mean_value, single_key, single_value, leaf_key, leaf_value = tensors[2:8]
        log_count, single_bias, leaf_bias = tensors[8:11]
        self.column_tensors = (mean_key, mean_value, log_count, single_key, single_value, single_bias)
        bias = None if leaf_bias is None else leaf_bias.flatten(0, 1)
        self.leaves = Leaves(leaf_key.flatten(0, 1), leaf_value.flatten(0, 1), bias)
        self.n_trees, self.n_leaves = leaf_key.shape[:2]
        self.chosen: list[Tensor] = []
        self.read: Tensor | None = None
        self.pairs: Pairs | None = None

    def forward(self, output: Tensor, room: Tensor, descent: Descent) -> Tensor:
        """Fill the blocks' `output`, in the accumulation dtype, and return their lse; `room` is overwritten."""
        plan, query = self.plan, self.query
        lead = query.shape[:-1]
        lses = [self._columns_forward(output)[..., None]]
        strips: list[list[Strip]] = []
        if self.local is not None:
            strips = list(attend_local(query, *self.local, plan.scale, self.backend))
            lses += [torch.cat([strip.lse for strip in part], dim=-1)[..., None] for part in strips]
        if self.chosen[0].shape[-1]:
            total_leaves = self.n_trees * self.n_leaves
            first = torch.arange(0, total_leaves, self.n_leaves, device=query.device)[:, None, None, None]
            self.read = self._leaf_numbers(descent)
            self.pairs = dispatch((self.read + first).flatten(0, 2), total_leaves)
            rows = query.reshape(-1, query.shape[-1])
            pair_output, pair_lse = attend_pairs(rows, self.leaves, self.pairs, plan.scale, self.backend, room)
            lses.append(pair_lse.view(*lead, -1))
        stacked = torch.cat(lses, dim=-1)
        total = torch.logsumexp(stacked, dim=-1)
        weights = stacked.sub_(total.masked_fill(torch.isneginf(total), 0.0)[..., None]).exp_()
        output.mul_(weights[..., :1])
        for place, part in enumerate(strips, start=1):
            for strip in part:
                share = weights[:, :, :, strip.rows, place : place + 1]
                output[:, :, :, strip.rows].addcmul_(strip.output.to(output.dtype), share)
        if self.pairs is not None:
            share = weights[..., 1 + len(strips) :].reshape(self.pairs.slots.shape)
            output += sum_pairs(pair_output, share, self.pairs).view(output.shape)
        return total

    def backward(self, grad: Tensor, output: Tensor, lse: Tensor, sums: list[Tensor | None]) -> None:
        """Add the gradients of these blocks to `sums`."""
        plan = self.plan
        blocks = slice(self.run.start, self.run.stop)
        safe = lse.masked_fill(torch.isneginf(lse), torch.inf)  # saw nothing: every weight is 0
        grad_query = sums[0][:, blocks]  # type: ignore[index]
        if self.local is not None:
            chunks = slice(self.run.start, self.run.stop + 1)
            local = (grad_query, sums[1][:, chunks], sums[2][:, chunks])  # type: ignore[index]
            attend_local_backward(grad, self.query, *self.local, output, lse, plan.scale, self.backend, local)
        self._columns_backward(grad, output, safe, sums)
        if self.pairs is None:
            return
        flat = [t.reshape(-1, t.shape[-1]) for t in (grad, self.query, output)]
        grads = attend_pairs_backward(
            flat[0], flat[1], self.leaves, self.pairs, flat[2], lse.reshape(-1), plan.scale, self.backend
        )
        grad_query += grads[0].view_as(grad_query)
        for place in (1, 2):
            sums[6 + place] += grads[place].view_as(sums[6 + place])  # type: ignore[operator,arg-type]

    def _block(self, tensor: Tensor, place: int) -> Tensor:
        return tensor[:, place].flatten(1, 2)  # [T, G * t, ...]

    def _columns_forward(self, outputs: Tensor) -> Tensor:
        """Fill `outputs` and return the lse of the columns."""
        lses = []
        for place, block in enumerate(self.run):
            columns = self.plan.columns(self.column_tensors, block)
            output, lse, chosen = attend_columns(
                self._block(self.query, place), columns, self.plan.chosen(block), self.plan.scale,
                self.backend.at(f"columns {block}").dropout,
            )  # fmt: skip
            outputs[:, place] = output.view(outputs[:, place].shape)
            lses.append(lse)
            self.chosen.append(chosen)
        return torch.stack(lses, dim=1).view(self.query.shape[:-1])

    def _columns_backward(self, grad: Tensor, output: Tensor, lse: Tensor, sums: list[Tensor | None]) -> None:
        product = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
        for place, block in enumerate(self.run):
            columns = self.plan.columns(self.column_tensors, block)
            grads = attend_columns_backward(
                self._block(grad, place), self._block(self.query, place), columns, self.chosen[place],
                self._block(product, place), self._block(lse, place), self.plan.scale,
                self.backend.at(f"columns {block}").dropout,
            )  # fmt: skip
            query_sum = sums[0][:, self.run.start + place]  # type: ignore[index]
            query_sum += grads[0].view_as(query_sum)
            ranges = [*self.plan.leaves[block], *self.plan.singles[block]]
            sizes = [part.stop - part.start for part in ranges]
            for offset in (0, 1):
                shares = grads[1 + offset].split(sizes, dim=1)
                for number, (part, share) in enumerate(zip(ranges, shares, strict=True)):
                    place_in_sums = 3 if number < len(self.plan.leaves[block]) else 5
                    sums[place_in_sums + offset][:, part] += share  # type: ignore[index]

    def _leaf_numbers(self, descent: Descent) -> Tensor:
        """`[T, n, G * t, J]`: the leaves read, numbered within their tree."""
        numbers = [
            self.plan.leaf_numbers(chosen, block, self._block(self.query, place), descent)
            for place, (chosen, block) in enumerate(zip(self.chosen, self.run, strict=True))
        ]
        return torch.stack(numbers, dim=1)
