"""Attention as a sum of parts.

Everything this package computes is one softmax per query over a union of key sets: leaves, LSH blocks, sampled
residuals, sinks, centroids. A `Part` names, by row numbers, which queries meet which keys; `attend_parts` runs
the fused operator once per part, merges the results in place by log-sum-exp, and differentiates each part
under the merged output and lse, so that no part's probabilities are ever stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prescore.ops.backend import Backend, Tile, accumulation_dtype, readable
from prescore.types import Attended

_TINY_GRADIENT = 1e-15

ROWS_AT_ONCE = 32768
"""Query rows gathered at once: temporaries of a few megabytes are reused by the allocator, larger ones are mapped
and cleared anew each time."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some query rows, each meeting the key rows of its tile.

    Row numbers count in the flattened `[B * H * N]` rows of the whole tensors.

    Attributes:
        shape: `(b, h, t)`: tiles, query heads that share a tile's keys, query rows.
        query_rows: `[b, h, t]`; None = all query rows in order, viewed in that shape.
        query_valid: `[b, h, t]`, False on filler; None = no filler. Each query row occurs at most once.
        key_rows: `[b, c]`; None = all key rows in order, viewed as `[b, c]`.
        extra_rows: `[b, e]` rows of the centroids, appended as further columns.
        bias: `[b, c + e]` added to the logits (-inf = not seen), or anything that broadcasts to
            `[b, h, t, c + e]`.
        causal: Row i of a tile sees its first i + 1 columns only.
        residual: Range of columns that are the sampled residual, for reporting its share.
    """

    shape: tuple[int, int, int]
    query_rows: Tensor | None = None
    query_valid: Tensor | None = None
    key_rows: Tensor | None = None
    extra_rows: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    residual: tuple[int, int] = (0, 0)

    def bias4(self) -> Tensor | None:
        """The bias as the operator wants it."""
        if self.bias is None or self.bias.ndim == 4:
            return self.bias
        return self.bias[:, None, None, :]

    def split(self, n_rows: int) -> list[Part]:
        """The same part as several of at most `n_rows` query rows (or one tile); views, not copies."""
        tiles, heads, rows = self.shape
        at_once = max(1, n_rows // max(1, heads * rows))
        if self.query_rows is None or self.key_rows is None or at_once >= tiles:
            return [self]
        pieces = []
        for begin in range(0, tiles, at_once):
            own = slice(begin, min(begin + at_once, tiles))
            bias = self.bias if self.bias is None or self.bias.shape[0] == 1 else self.bias[own]
            pieces.append(
                dataclasses.replace(
                    self,
                    shape=(own.stop - own.start, heads, rows),
                    query_rows=self.query_rows[own],
                    query_valid=None if self.query_valid is None else self.query_valid[own],
                    key_rows=self.key_rows[own],
                    extra_rows=None if self.extra_rows is None else self.extra_rows[own],
                    bias=bias,
                )
            )
        return pieces

    def occupied(self) -> tuple[Tensor | None, Tensor | None]:
        """(`slots`, `rows`): filled slots of the tiles and their query rows; None = all, in order."""
        if self.query_rows is None:
            return None, None
        rows = self.query_rows.reshape(-1)
        if self.query_valid is None:
            return None, rows
        slots = self.query_valid.reshape(-1).nonzero().squeeze(1)
        return slots, rows.index_select(0, slots)


@dataclass(frozen=True, eq=False)
class Centroids:
    """Keys and values that stand for others, `[rows, D]` and `[rows, Dv]`; gradients reach what they came from."""

    key: Tensor
    value: Tensor


def attend_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Part],
    *,
    scale: float,
    backend: Backend,
    centroids: Centroids | None = None,
) -> Attended:
    """One softmax over the union of the parts.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        parts: What each query sees. A key row that occurs in several parts (or twice) counts that often.
        scale: Factor of the logits.
        backend: The operator.
        centroids: Rows that `extra_rows` refer to.
    """
    rows, dim, value_dim = query.shape[:3], query.shape[-1], value.shape[-1]
    if centroids is None:
        centroids = Centroids(key.new_empty(0, dim), value.new_empty(0, value_dim))
    pieces = tuple(piece for part in parts for piece in part.split(ROWS_AT_ONCE))
    flat = query.reshape(-1, dim), key.reshape(-1, dim), value.reshape(-1, value_dim)
    plan = _Plan(pieces, scale, backend)
    output, lse = _AttendParts.apply(plan, *flat, centroids.key, centroids.value)  # type: ignore[no-untyped-call]
    return Attended(output.view(*rows, value_dim), lse.view(rows))


class _Plan(NamedTuple):
    parts: tuple[Part, ...]
    scale: float
    backend: Backend


class _Tables(NamedTuple):
    """Flat rows: `query [q, D]`, `key [k, D]`, `value [k, Dv]`, and the centroids' keys and values."""

    query: Tensor
    key: Tensor
    value: Tensor
    extra_key: Tensor
    extra_value: Tensor

    def tile(self, part: Part, scale: float) -> Tile:
        """What the operator is called with for a part."""
        key, value = _columns(self.key, self.extra_key, part), _columns(self.value, self.extra_value, part)
        return Tile(_queries(self.query, part), key, value, scale, part.bias4(), part.causal)


class _AttendParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        tables = _Tables(*tensors)
        total: Attended | None = None
        for number, part in enumerate(plan.parts):
            found = plan.backend.at(f"part {number}").forward(tables.tile(part, plan.scale))
            total = _fold_in(total, part, found, tables.query.shape[0])
        if total is None:
            total = _unseen(tables.query.shape[0], tables.value, accumulation_dtype(tables.query.dtype))
        result = total.output.to(tables.query.dtype)
        ctx.save_for_backward(*tables, result, total.lse)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return result, total.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, output, lse = ctx.saved_tensors
        tables, plan = _Tables(*tensors), ctx.plan
        dtype = tables.query.dtype
        wide = accumulation_dtype(dtype)
        if grad is None and grad_lse is None:
            return (None,) * (1 + len(tables))
        if grad is None:
            grad = torch.zeros_like(output)
        if grad_lse is not None:
            # half precision cannot hold the folded gradient; this path is rare, so it may cost memory
            tables = _Tables(*(t.to(wide) for t in tables))
            grad, output = fold_lse_gradient(grad.to(wide), output.to(wide), grad_lse)
        sums = _Tables(*(torch.zeros_like(t, dtype=wide) for t in tables))
        for number, part in enumerate(plan.parts):
            g, o = _queries(grad, part), _queries(output, part)
            weights_lse = _queries(lse[:, None], part).squeeze(-1)
            if part.query_valid is not None:
                g = g * part.query_valid[..., None]
                # filler borrows a query that never met these keys: exp(logit - lse) may overflow, 0 * inf is NaN
                weights_lse = weights_lse.masked_fill(~part.query_valid, torch.finfo(lse.dtype).max / 2)
            tile = tables.tile(part, plan.scale)
            found = plan.backend.at(f"part {number}").backward(tile, g, Attended(o, weights_lse))
            _add_queries(sums.query, part, found.query)
            _add_columns(sums.key, sums.extra_key, part, found.key)
            _add_columns(sums.value, sums.extra_value, part, found.value)
        return None, *(t.to(dtype) for t in sums)


def _queries(flat: Tensor, part: Part) -> Tensor:
    if part.query_rows is None:
        return flat.view(*part.shape, flat.shape[-1])
    return flat.index_select(0, part.query_rows.reshape(-1)).view(*part.shape, flat.shape[-1])


def _columns(flat: Tensor, extra: Tensor, part: Part) -> Tensor:
    tiles, dim = part.shape[0], flat.shape[-1]
    if part.key_rows is None:
        columns = flat.view(tiles, 1, -1, dim)
    else:
        columns = flat.index_select(0, part.key_rows.reshape(-1)).view(tiles, 1, part.key_rows.shape[1], dim)
    if part.extra_rows is None:
        return columns
    more = extra.index_select(0, part.extra_rows.reshape(-1)).view(tiles, 1, -1, dim)
    return torch.cat((columns, more), dim=2)


def _unseen(rows: int, value: Tensor, wide: torch.dtype) -> Attended:
    output = value.new_zeros(rows, value.shape[-1], dtype=wide)
    return Attended(output, output.new_full((rows,), -torch.inf))


def _fold_in(total: Attended | None, part: Part, found: Attended, n_rows: int) -> Attended:
    """Add a part's result to the rows it belongs to, in place where there is something to add to."""
    slots, rows = part.occupied()
    output, lse = found.output.reshape(-1, found.output.shape[-1]), found.lse.reshape(-1)
    if slots is not None:
        output, lse = output.index_select(0, slots), lse.index_select(0, slots)
    output = output.to(lse.dtype)
    if total is None:
        if rows is None:
            return Attended(output, lse)
        total = Attended(torch.empty_like(output), torch.empty_like(lse))
        if rows.numel() < n_rows:
            total = _unseen(n_rows, output, lse.dtype)
    else:
        old = total if rows is None else Attended(*(t.index_select(0, rows) for t in total))
        merged = torch.logaddexp(old.lse, lse)
        anchor = merged.masked_fill(torch.isneginf(merged), 0.0)
        output = output.mul(torch.exp(lse - anchor)[:, None])
        output.addcmul_(old.output, torch.exp(old.lse - anchor)[:, None])
        lse = merged
        if rows is None:
            return Attended(output, lse)
    total.output.index_copy_(0, rows, output)
    total.lse.index_copy_(0, rows, lse)
    return total


def fold_lse_gradient(grad: Tensor, output: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Express a gradient of lse through the output.

    The operator's backward uses `grad . output` per row, and nothing else of `output`; a gradient `g` of lse
    only lowers that number by `g`. So move `output` along `grad`. Rows without a gradient get a direction too
    small to be felt elsewhere.
    """
    grad = grad.clone()
    faint = (grad.abs().amax(-1) < _TINY_GRADIENT) & (grad_lse != 0)
    grad[:, 0].masked_fill_(faint, _TINY_GRADIENT)
    peak = grad.abs().amax(-1, keepdim=True).clamp_min(_TINY_GRADIENT)
    direction = grad / peak  # normalised first, or its square underflows
    length = (direction * direction).sum(-1, keepdim=True)
    step = grad_lse[:, None] / peak / length.masked_fill(length == 0, 1.0)
    return grad, output - step * direction


def _add_queries(total: Tensor, part: Part, grad: Tensor) -> None:
    slots, rows = part.occupied()
    flat = grad.reshape(-1, grad.shape[-1]).to(total.dtype)
    if slots is not None:
        flat = flat.index_select(0, slots)
    if rows is None:
        total.add_(flat)
    else:
        total.index_add_(0, rows, flat)


def _add_columns(total: Tensor, extra: Tensor, part: Part, grad: Tensor) -> None:
    grad = grad.to(total.dtype)
    if part.extra_rows is not None:
        n_extra = part.extra_rows.shape[1]
        grad, more = grad.split([grad.shape[2] - n_extra, n_extra], dim=2)
        extra.index_add_(0, part.extra_rows.reshape(-1), more.reshape(-1, more.shape[-1]))
    flat = grad.reshape(-1, grad.shape[-1])
    if part.key_rows is None:
        total.add_(flat)
    else:
        total.index_add_(0, part.key_rows.reshape(-1), flat)


# Combine attention over disjoint key sets into attention over their union.


def merge(*parts: Attended) -> Attended:
    """Merge by log-sum-exp: `lse = log sum exp(lse_i)`, `output = sum exp(lse_i - lse) output_i`.

    Associative and order-free; a part that saw nothing (lse -inf) changes nothing; differentiable in every
    output and lse.
    """
    if not parts:
        raise ValueError("parts must hold at least one Attended, got none")
    for place, part in enumerate(parts):
        if not isinstance(part, Attended):
            raise TypeError(f"parts must be Attended, got {type(part).__name__} at {place}")
        if not (isinstance(part.output, Tensor) and isinstance(part.lse, Tensor)):
            kinds = f"{type(part.output).__name__} and {type(part.lse).__name__}"
            raise TypeError(f"parts must hold an output and an lse, both tensors, got {kinds} at {place}")
        if part.output.device != parts[0].output.device or part.lse.device != part.output.device:
            places = f"{part.output.device} and {part.lse.device}"
            raise ValueError(f"parts must lie on one device, {parts[0].output.device}, got {places} at {place}")
        if part.output.shape != parts[0].output.shape:
            expected, got = tuple(parts[0].output.shape), tuple(part.output.shape)
            raise ValueError(f"parts must have outputs of one shape {expected}, got {got} at {place}")
        if part.lse.shape != part.output.shape[:-1]:
            expected, got = tuple(part.output.shape[:-1]), tuple(part.lse.shape)
            raise ValueError(f"parts must have an lse of shape {expected}, got {got} at {place}")
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([part.lse for part in parts])
    # the maximum only shifts the exponents: no gradient through it, and 0 where nothing was seen
    shift = lses.detach().amax(0)
    shift = shift.masked_fill(torch.isneginf(shift), 0.0)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    seen = total > 0
    safe = total.masked_fill(~seen, 1.0)
    wide = torch.stack([part.output for part in parts]).to(lses.dtype)
    output = (wide * (weights / safe)[..., None]).sum(0)
    lse = torch.where(seen, torch.log(safe) + shift, -torch.inf)
    return Attended(output.to(parts[0].output.dtype), lse)


# Exact softmax attention as parts, or straight from the operator.


def exact_output(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, backend: Backend
) -> Tensor:
    """Output of exact attention without padding, where nobody asks for lse.

    Straight from the operator, with its own backward, where it can run as it is: short inputs feel every copy.
    """
    aligned = not is_causal or query.shape[2] == key.shape[2]
    same_width = value.shape[3] == query.shape[3]
    if backend.name == "cpu-flash" and aligned and same_width and query.numel() and key.numel():
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            readable(query), readable(key), readable(value), 0.0, is_causal, scale=scale
        )[0]
        return output
    parts = exact_parts(query, key, is_causal=is_causal, valid=None)
    return attend_parts(query, key, value, parts, scale=scale, backend=backend).output


def exact_parts(query: Tensor, key: Tensor, *, is_causal: bool, valid: Tensor | None) -> list[Part]:
    """Parts of exact attention: everything at once, or past keys plus a causal square."""
    batch, n_heads, n_query, _ = query.shape
    n_kv_heads, n_keys = key.shape[1:3]
    tiles = batch * n_kv_heads
    shape = (tiles, n_heads // n_kv_heads, n_query)
    bias = None if valid is None else padding_bias(valid, n_kv_heads, query.dtype)
    if 0 in (tiles, n_heads, n_query, n_keys):
        return []
    if not is_causal or n_query == n_keys:
        return [Part(shape, bias=bias, causal=is_causal)]
    # the operator aligns a causal triangle to the first key: split off the keys all queries see
    rows = torch.arange(tiles * n_keys, device=query.device).view(tiles, n_keys)
    cut = n_keys - n_query
    past_bias, own_bias = (None, None) if bias is None else bias.split([cut, n_query], dim=1)
    past = Part(shape, key_rows=rows[:, :cut], bias=past_bias)
    return [past, Part(shape, key_rows=rows[:, cut:], bias=own_bias, causal=True)]


def padding_bias(valid: Tensor, n_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """`[B, N]` bool -> `[B * Hkv, N]` of 0 and -inf."""
    bias = torch.zeros(valid.shape, dtype=dtype, device=valid.device).masked_fill_(~valid, -torch.inf)
    return bias.repeat_interleave(n_kv_heads, dim=0)
