"""What routed queries read exactly, by the fused operator: nearby chunks in causal mode, else the last keys.

Compiled code reads it by itself (ops/native/near.c); this is for all that it cannot run, and for gradients.

Causal queries are laid on the grid of chunks, filled up at both ends. The operator reads whole blocks of keys even
where a causal mask hides them, so a chunk is cut into strips: a strip of queries reads the keys before it as one
full window, and only its own square causally. Windows overlap in memory and are never copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.ops.backend import Backend, Tile, accumulation_dtype
from prescore.routed.sources import Sources, View
from prescore.types import Attended

_STRIPS = 2
_SHORTEST_STRIP = 64


def attend_near(query: Tensor, sources: Sources, view: View) -> Attended:
    """Queries `[T, G, n, D]` over what they read in any case, beside the sinks; in the accumulation dtype."""
    wide = accumulation_dtype(query.dtype)
    if not view.causal:
        tail = _Tail.of(sources, view)
        if not tail.key.shape[1]:
            empty = query.new_zeros((*query.shape[:3], sources.value.shape[-1]), dtype=wide)
            return Attended(empty, query.new_full(query.shape[:3], -torch.inf, dtype=wide))
        found = view.backend.at("tail").forward(tail.tile(query, view))
        return Attended(found.output.to(wide), found.lse.to(wide))
    grid = ChunkGrid.of(view)
    blocks = grid.cut(query)
    shape = blocks.shape[:4]  # [T, n_blocks, G, size]
    output = query.new_empty((*shape, sources.value.shape[-1]), dtype=wide)
    into = Attended(output, query.new_empty(shape, dtype=wide))
    for lane in range(query.shape[0]):
        chunks = Chunks(*(grid.chunks(t[lane]) for t in (sources.key, sources.value)))
        backend = view.backend.at(f"near {lane}")
        _attend_chunks(
            blocks[lane], chunks, Attended(*(t[lane] for t in into)), _Strips(grid, view.scale, backend)
        )
    return Attended(grid.joined(into.output), grid.joined(into.lse[..., None]).squeeze(-1))


def attend_near_backward(
    grad: Tensor, query: Tensor, sources: Sources, view: View, merged: Attended, sums: list[Tensor]
) -> None:
    """Add the gradients of what lies near, under the merged result, to `sums`: of queries, keys and values."""
    grad_query, grad_key, grad_value = sums
    dtype = merged.output.dtype
    if dtype != query.dtype:  # a gradient of lse is folded in, which half precision would round away
        query = query.to(dtype)
        sources = sources._replace(key=sources.key.to(dtype), value=sources.value.to(dtype))
    grad = grad.to(dtype)
    if not view.causal:
        tail = _Tail.of(sources, view)
        if tail.key.shape[1]:
            whole = Attended(*(t.contiguous() for t in merged))
            found = view.backend.at("tail").backward(tail.tile(query, view), grad.contiguous(), whole)
            grad_query += found.query
            tail.add(grad_key, found.key[:, 0])
            tail.add(grad_value, found.value[:, 0])
        return
    grid = ChunkGrid.of(view)
    cut = [grid.cut(t) for t in (grad, query, merged.output, merged.lse[..., None])]
    for lane in range(query.shape[0]):
        chunks = Chunks(*(grid.chunks(t[lane]) for t in (sources.key, sources.value)))
        backend = view.backend.at(f"near {lane}")
        own_grad, own_query, output, lse = (t[lane] for t in cut)
        own = Attended(output, lse.squeeze(-1))
        strips = _Strips(grid, view.scale, backend)
        by_query, totals = _attend_chunks_backward(own_grad, own_query, chunks, own, strips)
        grad_query[lane] += grid.joined(by_query[None])[0]
        for rows, total in zip((grad_key, grad_value), totals, strict=True):
            grid.add(rows[lane], total)


@dataclass(frozen=True)
class ChunkGrid:
    """How causal queries lie in blocks of a chunk each.

    Attributes:
        size: Queries of a block, keys of a chunk.
        n_blocks: Of all queries.
        before: Filler before the first query.
        n_query: Queries that are none.
        start: The row where the chunk before the first block begins.
    """

    size: int
    n_blocks: int
    before: int
    n_query: int
    start: int

    @classmethod
    def of(cls, view: View) -> ChunkGrid:
        """The grid of a causal view."""
        start, size, n_query = int(view.first[0, 0]), view.chunk, view.stop.shape[1]
        before = int(view.stop[0, 0]) - 1 - start - size
        return cls(size, -(-(before + n_query) // size), before, n_query, start)

    def cut(self, rows: Tensor) -> Tensor:
        """`[T, G, n, D]` -> `[T, n_blocks, G, size, D]`, filler is 0."""
        after = self.n_blocks * self.size - self.before - self.n_query
        blocks: Tensor = pad(rows, (0, 0, self.before, after)).unflatten(2, (self.n_blocks, self.size))
        return blocks.transpose(1, 2)

    def joined(self, blocks: Tensor) -> Tensor:
        """The way back, without the filler."""
        rows: Tensor = blocks.transpose(1, 2).flatten(2, 3)
        return rows[:, :, self.before : self.before + self.n_query]

    def chunks(self, rows: Tensor) -> Tensor:
        """`[N, D]` of a lane -> `[n_blocks + 1, size, D]`: block i owns chunk i + 1, chunk i is the one before."""
        length = (self.n_blocks + 1) * self.size
        some = rows[self.start : self.start + length]
        if some.shape[0] < length:
            some = pad(some, (0, 0, 0, length - some.shape[0]))
        return some.contiguous().view(-1, self.size, rows.shape[-1])

    def add(self, rows: Tensor, chunks: Tensor) -> None:
        """Add what was made of `chunks` to the rows they are of."""
        own = rows[self.start : self.start + chunks.shape[0] * self.size]
        own += chunks.flatten(0, 1)[: own.shape[0]]


class Chunks(NamedTuple):
    """Keys and values `[n + 1, t, D]`: block i of the queries owns chunk i + 1, chunk i is the one before."""

    key: Tensor
    value: Tensor

    def of(self, blocks: slice) -> Chunks:
        """Those of some blocks."""
        return Chunks(self.key[blocks.start : blocks.stop + 1], self.value[blocks.start : blocks.stop + 1])

    def window(self, query: Tensor, rows: slice, scale: float) -> Tile:
        """What a strip of queries sees before its own square: the chunk before, and its own up to the strip."""
        return Tile(query, _window(self.key, rows.start), _window(self.value, rows.start), scale)

    def square(self, query: Tensor, rows: slice, scale: float) -> Tile:
        """The strip's own keys, causally."""
        return Tile(query, self.key[1:, None, rows], self.value[1:, None, rows], scale, causal=True)


@dataclass(frozen=True)
class _Strips:
    """Strips of the blocks of a lane, and how they are attended."""

    grid: ChunkGrid
    scale: float
    backend: Backend

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """The blocks in which some rows of a strip are no filler, and those rows."""
        grid = self.grid
        n_strips = _STRIPS if grid.size % _STRIPS == 0 and grid.size >= _STRIPS * _SHORTEST_STRIP else 1
        step, stop = grid.size // n_strips, grid.before + grid.n_query
        for start in range(0, grid.size, step):
            first = max(0, (grid.before - start - step) // grid.size + 1)
            last = (stop - 1 - start) // grid.size + 1
            if first < last:
                yield slice(first, last), slice(start, start + step)


def _attend_chunks(query: Tensor, chunks: Chunks, into: Attended, strips: _Strips) -> None:
    """Blocks of queries `[n, G, t, D]` over their own and the chunk before, written to `into`."""
    for blocks, rows in strips:
        own, near = query[blocks, :, rows], chunks.of(blocks)
        window = strips.backend.at(f"window {rows.start}").forward(near.window(own, rows, strips.scale))
        square = strips.backend.at(f"square {rows.start}").forward(near.square(own, rows, strips.scale))
        lse = torch.logaddexp(window.lse, square.lse)
        weight = torch.exp(window.lse - lse)[..., None]
        output = into.output[blocks, :, rows]
        output.copy_(torch.lerp(square.output.to(output.dtype), window.output.to(output.dtype), weight))
        into.lse[blocks, :, rows] = lse


def _attend_chunks_backward(
    grad: Tensor, query: Tensor, chunks: Chunks, merged: Attended, strips: _Strips
) -> tuple[Tensor, Chunks]:
    """Gradients of the queries, and of keys and values, under the merged output and lse."""
    size, wide = strips.grid.size, accumulation_dtype(query.dtype)
    grad_query = torch.zeros(query.shape, dtype=wide, device=query.device)
    totals = Chunks(*(torch.zeros(t.shape, dtype=wide, device=t.device) for t in chunks))
    for blocks, rows in strips:
        own_grad, own_query, output = (t[blocks, :, rows].contiguous() for t in (grad, query, merged.output))
        own, near = Attended(output, merged.lse[blocks, :, rows].contiguous()), chunks.of(blocks)
        tile = near.window(own_query, rows, strips.scale)
        window = strips.backend.at(f"window {rows.start}").backward(tile, own_grad, own)
        tile = near.square(own_query, rows, strips.scale)
        square = strips.backend.at(f"square {rows.start}").backward(tile, own_grad, own)
        grad_query[blocks, :, rows] += window.query + square.query
        for total, behind, beside in zip(totals.of(blocks), window[1:], square[1:], strict=True):
            total[:-1] += behind[:, 0, :size]
            total[1:, : rows.start] += behind[:, 0, size:]
            total[1:, rows] += beside[:, 0]
    return grad_query, totals


def _window(chunks: Tensor, own: int) -> Tensor:
    """`[n + 1, t, D]` -> `[n, 1, t + own, D]`: every chunk but the last, with the next one's first rows."""
    n_chunks, size, dim = chunks.shape
    step, *inner = chunks.stride()
    return chunks.as_strided((n_chunks - 1, 1, size + own, dim), (step, step, *inner), chunks.storage_offset())


class _Tail(NamedTuple):
    """Keys and values `[T, c, D]` behind the last full chunk of each lane.

    Attributes:
        place: `[T, c]` their rows.
        bias: `[T, c]` of 0, or -inf where a lane has fewer; None = all have as many.
    """

    key: Tensor
    value: Tensor
    place: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, sources: Sources, view: View) -> _Tail:
        """Those of a view without a causal mask, whose queries all read the same."""
        device = sources.key.device
        first, stop = (t[:, 0].long().to(device) for t in (view.first, view.stop))
        longest = int((stop - first).max())
        place = first[:, None] + torch.arange(longest, device=device)
        inside = place < stop[:, None]
        place = place.clamp_max(sources.key.shape[1] - 1)
        key, value = (t.gather(1, place[..., None].expand(-1, -1, t.shape[-1])) for t in sources[:2])
        hidden = torch.zeros(inside.shape, dtype=key.dtype, device=device).masked_fill(~inside, -torch.inf)
        return cls(key, value, place, None if bool(inside.all()) else hidden)

    def tile(self, query: Tensor, view: View) -> Tile:
        """All queries over them."""
        bias = None if self.bias is None else self.bias[:, None, None].to(query.dtype)
        return Tile(query, self.key[:, None], self.value[:, None], view.scale, bias)

    def add(self, rows: Tensor, grads: Tensor) -> None:
        """Add what belongs to them to `rows [T, N, D]`; rows of filler have gradients of 0."""
        rows.scatter_add_(1, self.place[..., None].expand(-1, -1, rows.shape[-1]), grads.to(rows.dtype))
