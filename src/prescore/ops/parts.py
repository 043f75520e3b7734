"""Attention as a sum of parts.

Exact attention and the engine of `Selected` and `Hyper` compute one softmax per query over a union of key sets:
leaves, LSH blocks, sampled residuals, sinks, centroids. A `Part` names, by row numbers, which queries read which
keys. `attend_parts` runs the fused operator once per part, merges the results by log-sum-exp, and differentiates
each part under the merged output and lse, so that no part's probabilities are ever stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prescore import checks
from prescore.autograd import records_gradients
from prescore.ops.operators import (
    Operator,
    Tile,
    accumulation_dtype,
    pick_operator,
    rounds_weights,
    softmax_with_lse,
)
from prescore.types import Attended

_TINY_GRADIENT = 1e-15

ROWS_AT_ONCE = 32768
"""Query rows gathered at once: the allocator reuses temporaries of a few megabytes, and maps and clears larger
ones anew each time."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some query rows, each reading the key rows of its tile.

    Row numbers count in the flattened `[B * H * N]` rows of the whole tensors.

    Attributes:
        shape: `(b, h, t)`: tiles, query heads that share a tile's keys, query rows.
        query_rows: `[b, h, t]`; None = all query rows in order, viewed in that shape.
        query_valid: `[b, h, t]`, False on filler; None = no filler. Each query row occurs at most once.
        key_rows: `[b, c]`; None = all key rows in order, viewed as `[b, c]`.
        bias: `[b, c]` added to the logits (-inf = not read), or anything that broadcasts to `[b, h, t, c]`.
        causal: Row i of a tile sees its first i + 1 columns only.
        residual: Range of columns that are the sampled residual, for reporting its share.
        n_centroids: How many of the last columns are centroids, for reporting.
    """

    shape: tuple[int, int, int]
    query_rows: Tensor | None = None
    query_valid: Tensor | None = None
    key_rows: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    residual: tuple[int, int] = (0, 0)
    n_centroids: int = 0

    def bias4(self) -> Tensor | None:
        """The bias with the four dimensions that the operator wants."""
        if self.bias is None or self.bias.ndim == 4:
            return self.bias
        return self.bias[:, None, None, :]

    def split(self, n_rows: int) -> list[Part]:
        """The same part as several of at most `n_rows` query rows (or one tile); views, not copies."""
        n_tiles, heads, rows = self.shape
        at_once = max(1, n_rows // max(1, heads * rows))
        if self.query_rows is None or self.key_rows is None or at_once >= n_tiles:
            return [self]
        fields = ("query_rows", "query_valid", "key_rows", "bias")
        parts = []
        for begin in range(0, n_tiles, at_once):
            tiles = slice(begin, min(begin + at_once, n_tiles))
            cut: dict[str, Any] = {name: getattr(self, name) for name in fields}
            # a bias of one tile broadcasts
            cut = {name: t if t is None or t.shape[0] == 1 else t[tiles] for name, t in cut.items()}
            parts.append(dataclasses.replace(self, shape=(tiles.stop - begin, heads, rows), **cut))
        return parts

    def occupied(self) -> tuple[Tensor | None, Tensor | None]:
        """(`slots`, `rows`): slots of the tiles that hold queries, and their query rows; None = all, in order.

        On CPUs alone: how many there are is data. Elsewhere all slots are returned, those of filler too.
        """
        if self.query_rows is None:
            return None, None
        rows = self.query_rows.reshape(-1)
        if self.query_valid is None or rows.device.type != "cpu":
            return None, rows
        slots = self.query_valid.reshape(-1).nonzero().squeeze(1)
        return slots, rows.index_select(0, slots)


def attend_parts(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], *, scale: float, operator: Operator
) -> Attended:
    """One softmax over the union of the parts; in float64 where logits are too large for the lse of float32.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, or flat rows `[k, D]`.
        value: `[B, Hkv, Nk, Dv]`, or flat rows `[k, Dv]`.
        parts: What each query reads. A key row that occurs in several parts (or twice) counts that often.
        scale: Factor of the logits.
        operator: The operator.
    """
    rows, dim, value_dim = query.shape[:3], query.shape[-1], value.shape[-1]
    split = tuple(piece for part in parts for piece in part.split(ROWS_AT_ONCE))
    flat = query.reshape(-1, dim), key.reshape(-1, dim), value.reshape(-1, value_dim)
    output, lse = _AttendParts.apply((split, scale, operator), *flat)  # type: ignore[no-untyped-call]
    is_merged = len(split) > 1
    if (is_merged or records_gradients(*flat)) and rounds_weights(lse, query.dtype, backward=not is_merged):
        tables = [table.to(torch.float64) for table in flat]
        wide = pick_operator(tables[0]) if operator.unsupported(tables[0]) else operator
        output, lse = _AttendParts.apply((split, scale, wide), *tables)  # type: ignore[no-untyped-call]
        output, lse = output.to(query.dtype), lse.to(accumulation_dtype(query.dtype))
    return Attended(output.view(*rows, value_dim), lse.view(rows))


class _Tables(NamedTuple):
    """Flat rows: `query [q, D]`, `key [k, D]`, `value [k, Dv]`."""

    query: Tensor
    key: Tensor
    value: Tensor

    def tile(self, part: Part, scale: float) -> Tile:
        """The operator call of a part."""
        query, key, value = _queries(self.query, part), _columns(self.key, part), _columns(self.value, part)
        return Tile(query, key, value, scale, part.bias4(), part.causal)


class _AttendParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: tuple[tuple[Part, ...], float, Operator], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        tables, (parts, scale, operator) = _Tables(*tensors), plan
        merged = None
        for number, part in enumerate(parts):
            attended = operator.at(f"part {number}").forward(tables.tile(part, scale))
            merged = _fold_in(merged, part, attended, tables.query.shape[0])
        if merged is None:
            wide = accumulation_dtype(tables.query.dtype)
            merged = _nothing_read(tables.query.shape[0], tables.value, wide)
        output, lse = (t[: len(tables.query)] for t in merged)
        output = output.to(tables.query.dtype)
        ctx.save_for_backward(*tables, output, lse)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, output, lse = ctx.saved_tensors
        tables, (parts, scale, operator) = _Tables(*tensors), ctx.plan
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
        for number, part in enumerate(parts):
            part_grad, part_output = _queries(grad, part), _queries(output, part)
            part_lse = _queries(lse[:, None], part).squeeze(-1)
            if part.query_valid is not None:
                part_grad = part_grad * part.query_valid[..., None]
                # filler borrows a query that does not read these keys: exp(logit - lse) may be inf, 0 * inf is NaN
                part_lse = part_lse.masked_fill(~part.query_valid, torch.finfo(lse.dtype).max / 2)
            tile = tables.tile(part, scale)
            grads = operator.at(f"part {number}").backward(tile, part_grad, Attended(part_output, part_lse))
            slots, rows = part.occupied()
            _add_rows(sums.query, rows, grads.query, slots)  # gradients of filler are 0
            _add_rows(sums.key, part.key_rows, grads.key)
            _add_rows(sums.value, part.key_rows, grads.value)
        return None, *(t.to(dtype) for t in sums)


def _queries(flat: Tensor, part: Part) -> Tensor:
    if part.query_rows is None:
        return flat.view(*part.shape, flat.shape[-1])
    return flat.index_select(0, part.query_rows.reshape(-1)).view(*part.shape, flat.shape[-1])


def _columns(flat: Tensor, part: Part) -> Tensor:
    tiles, dim = part.shape[0], flat.shape[-1]
    if part.key_rows is None:
        return flat.view(tiles, 1, -1, dim)
    return flat.index_select(0, part.key_rows.reshape(-1)).view(tiles, 1, part.key_rows.shape[1], dim)


def _nothing_read(rows: int, value: Tensor, wide: torch.dtype) -> Attended:
    output = value.new_zeros(rows, value.shape[-1], dtype=wide)
    return Attended(output, output.new_full((rows,), -torch.inf))


def _fold_in(merged: Attended | None, part: Part, attended: Attended, n_rows: int) -> Attended:
    """Merge a part's result `[rows, Dv]` and `[rows]` into its query rows, in place where possible.

    Where the filler of a part is not left out, it goes to a row after the last.
    """
    slots, rows = part.occupied()
    if rows is not None and slots is None and part.query_valid is not None:
        rows = rows.masked_fill(~part.query_valid.reshape(-1), n_rows)
    output, lse = attended.output.reshape(-1, attended.output.shape[-1]), attended.lse.reshape(-1)
    if slots is not None:
        output, lse = output.index_select(0, slots), lse.index_select(0, slots)
    output = output.to(lse.dtype)
    if merged is not None:
        old = Attended(*(t[:n_rows] if rows is None else t.index_select(0, rows) for t in merged))
        (old_weight, weight), lse = softmax_with_lse(torch.stack((old.lse, lse)), 0)
        output = output.mul(weight[:, None]).addcmul_(old.output, old_weight[:, None])
    if rows is None:
        return Attended(output, lse)
    if merged is None:
        merged = _nothing_read(n_rows + 1, output, lse.dtype)
    for table, rows_of_part in zip(merged, (output, lse), strict=True):
        table.index_copy_(0, rows, rows_of_part)
    return merged


def fold_lse_gradient(grad: Tensor, output: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Express a gradient of lse `[...]` through the output `[..., Dv]`.

    The operator's backward uses `grad . output` per row, and nothing else of `output`. A gradient `g` of lse only
    lowers that number by `g`, so `output` moves along `grad`. Rows without a gradient get a direction that is too
    small to change anything else.
    """
    grad = grad.clone(memory_format=torch.contiguous_format)
    faint = (grad.abs().amax(-1) < _TINY_GRADIENT) & (grad_lse != 0)
    grad[..., 0].masked_fill_(faint, _TINY_GRADIENT)
    peak = grad.abs().amax(-1, keepdim=True).clamp_min(_TINY_GRADIENT)
    direction = grad / peak  # normalised first, or its square underflows
    length = (direction * direction).sum(-1, keepdim=True)
    step = grad_lse[..., None] / peak / length.masked_fill(length == 0, 1.0)
    return grad, output - step * direction


def _add_rows(total: Tensor, rows: Tensor | None, grad: Tensor, slots: Tensor | None = None) -> None:
    flat = grad.reshape(-1, grad.shape[-1]).to(total.dtype)
    if slots is not None:
        flat = flat.index_select(0, slots)
    if rows is None:
        total.add_(flat)
    else:
        total.index_add_(0, rows.reshape(-1), flat)


def merge(*parts: Attended) -> Attended:
    """Merge attention over disjoint key sets into attention over their union.

    `lse = log sum exp(lse_i)`, `output = sum exp(lse_i - lse) output_i`. Associative and order-free; a part that
    read no key (lse -inf) changes nothing; differentiable in every output and lse.
    """
    if not parts:
        raise ValueError("parts must hold at least one Attended, got none")
    for number, part in enumerate(parts):
        if not isinstance(part, Attended):
            raise TypeError(f"parts must be Attended, got {type(part).__name__} at {number}")
        checks.floating(f"the output of part {number}", part.output)
        checks.floating(f"the lse of part {number}", part.lse)
        if part.output.device != parts[0].output.device or part.lse.device != part.output.device:
            devices = f"{part.output.device} and {part.lse.device}"
            raise ValueError(f"parts must lie on one device, {parts[0].output.device}, got {devices} at {number}")
        for what, shape, expected in (
            ("outputs of one shape", part.output.shape, parts[0].output.shape),
            ("an lse of shape", part.lse.shape, part.output.shape[:-1]),
        ):
            if shape != expected:
                raise ValueError(f"parts must have {what} {tuple(expected)}, got {tuple(shape)} at {number}")
    if len(parts) == 1:
        return parts[0]
    weights, lse = softmax_with_lse(torch.stack([part.lse for part in parts]), 0)
    outputs = torch.stack([part.output for part in parts]).to(lse.dtype)
    return Attended((outputs * weights[..., None]).sum(0).to(parts[0].output.dtype), lse)


def exact_parts(query: Tensor, key: Tensor, *, is_causal: bool, valid: Tensor | None) -> list[Part]:
    """Parts of exact attention: all keys at once, or the earlier keys plus a causal square."""
    batch, n_heads, n_query, _ = query.shape
    n_kv_heads, n_keys = key.shape[1:3]
    tiles = batch * n_kv_heads
    shape = (tiles, n_heads // n_kv_heads, n_query)
    if 0 in (tiles, n_heads, n_query, n_keys):
        return []
    bias = None if valid is None else mask_bias(valid, query.dtype).repeat_interleave(n_kv_heads, dim=0)
    if not is_causal or n_query == n_keys:
        return [Part(shape, bias=bias, causal=is_causal)]
    # the operator aligns a causal triangle to the first key: split off the keys that all queries see
    rows = torch.arange(tiles * n_keys, dtype=torch.int64, device=query.device).view(tiles, n_keys)
    cut = n_keys - n_query
    before, square = (None, None) if bias is None else bias.split([cut, n_query], dim=1)
    return [
        Part(shape, key_rows=rows[:, :cut], bias=before),
        Part(shape, key_rows=rows[:, cut:], bias=square, causal=True),
    ]


def mask_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
