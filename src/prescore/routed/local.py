"""What routed queries read exactly: nearby chunks in causal mode, the keys behind the last full chunk without.

The operator reads whole blocks of keys even where a causal mask hides them, so a chunk is cut into strips: a
strip of queries reads the keys before it as one full window, and only its own square causally. Windows overlap
in memory and are never copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.ops.backend import Tile
from prescore.routed.sources import View
from prescore.types import Attended

_STRIPS = 2
_SHORTEST_STRIP = 64


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


def attend_chunks(query: Tensor, chunks: Chunks, view: View, into: Attended) -> None:
    """Blocks of queries `[n, G, t, D]` over their own and the chunk before, written to `into`.

    Strips of nothing but filler are left out.
    """
    scale, backend = view.scale, view.backend
    for blocks, rows in _strips(view):
        own, near = query[blocks, :, rows], chunks.of(blocks)
        window = backend.at(f"window {rows.start}").forward(near.window(own, rows, scale))
        square = backend.at(f"square {rows.start}").forward(near.square(own, rows, scale))
        lse = torch.logaddexp(window.lse, square.lse)
        weight = torch.exp(window.lse - lse)[..., None]
        output = into.output[blocks, :, rows]
        output.copy_(torch.lerp(square.output.to(output.dtype), window.output.to(output.dtype), weight))
        into.lse[blocks, :, rows] = lse


def attend_chunks_backward(
    grad: Tensor,
    query: Tensor,
    chunks: Chunks,
    merged: Attended,
    view: View,
    sums: tuple[Tensor, Chunks],
) -> None:
    """Add the gradients of query, and of keys and values, under the merged output and lse to `sums`."""
    scale, backend, size, (grad_query, totals) = view.scale, view.backend, view.size, sums
    for blocks, rows in _strips(view):
        own_grad, own_query, output = (t[blocks, :, rows].contiguous() for t in (grad, query, merged.output))
        own, near = Attended(output, merged.lse[blocks, :, rows].contiguous()), chunks.of(blocks)
        tile = near.window(own_query, rows, scale)
        window = backend.at(f"window {rows.start}").backward(tile, own_grad, own)
        tile = near.square(own_query, rows, scale)
        square = backend.at(f"square {rows.start}").backward(tile, own_grad, own)
        grad_query[blocks, :, rows] += window.query + square.query
        for total, behind, beside in zip(totals.of(blocks), window[1:], square[1:], strict=True):
            total[:-1] += behind[:, 0, :size]
            total[1:, : rows.start] += behind[:, 0, size:]
            total[1:, rows] += beside[:, 0]


def _strips(view: View) -> Iterator[tuple[slice, slice]]:
    """The blocks in which some rows of a strip are real, and those rows."""
    size, real = view.size, view.real
    n_strips = _STRIPS if size % _STRIPS == 0 and size >= _STRIPS * _SHORTEST_STRIP else 1
    step = size // n_strips
    for start in range(0, size, step):
        first = max(0, (real.start - start - step) // size + 1)
        stop = (real.stop - 1 - start) // size + 1
        if first < stop:
            yield slice(first, stop), slice(start, start + step)


def _window(chunks: Tensor, own: int) -> Tensor:
    """`[n + 1, t, D]` -> `[n, 1, t + own, D]`: every chunk but the last, with the next one's first rows."""
    n_chunks, size, dim = chunks.shape
    step, *inner = chunks.stride()
    return chunks.as_strided((n_chunks - 1, 1, size + own, dim), (step, step, *inner), chunks.storage_offset())
