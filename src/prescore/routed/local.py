"""What routed queries read exactly: nearby chunks in causal mode, the keys behind the last full chunk without.

The operator reads whole blocks of keys even where a causal mask hides them, so a chunk is cut into strips: a
strip of queries reads the keys before it as one full window, and only its own square causally. Windows overlap
in memory and are never copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prescore.ops.backend import Backend, Tile
from prescore.types import Attended

_STRIPS = 2
_SHORTEST_STRIP = 64


class Chunks(NamedTuple):
    """Keys and values `[n + 1, t, D]`: block i of the queries owns chunk i + 1, chunk i is the one before."""

    key: Tensor
    value: Tensor

    def window(self, query: Tensor, rows: slice, scale: float) -> Tile:
        """What a strip of queries sees before its own square: the chunk before, and its own up to the strip."""
        return Tile(query, _window(self.key, rows.start), _window(self.value, rows.start), scale)

    def square(self, query: Tensor, rows: slice, scale: float) -> Tile:
        """The strip's own keys, causally."""
        return Tile(query, self.key[1:, None, rows], self.value[1:, None, rows], scale, causal=True)


def attend_chunks(query: Tensor, chunks: Chunks, scale: float, backend: Backend, into: Attended) -> None:
    """Blocks of queries `[n, G, t, D]` over their own and the chunk before, written to `into`."""
    for rows in _strips(query.shape[2]):
        own = query[:, :, rows]
        window = backend.at(f"window {rows.start}").forward(chunks.window(own, rows, scale))
        square = backend.at(f"square {rows.start}").forward(chunks.square(own, rows, scale))
        lse = torch.logaddexp(window.lse, square.lse)
        weight = torch.exp(window.lse - lse)[..., None]
        output = into.output[:, :, rows]
        output.copy_(torch.lerp(square.output.to(output.dtype), window.output.to(output.dtype), weight))
        into.lse[:, :, rows] = lse


def attend_chunks_backward(
    grad: Tensor,
    query: Tensor,
    chunks: Chunks,
    merged: Attended,
    scale: float,
    backend: Backend,
    sums: tuple[Tensor, Chunks],
) -> None:
    """Add the gradients of query, and of keys and values, under the merged output and lse to `sums`."""
    size, (grad_query, totals) = query.shape[2], sums
    for rows in _strips(size):
        own_grad, own_query, output = (t[:, :, rows].contiguous() for t in (grad, query, merged.output))
        own = Attended(output, merged.lse[:, :, rows].contiguous())
        tile = chunks.window(own_query, rows, scale)
        window = backend.at(f"window {rows.start}").backward(tile, own_grad, own)
        tile = chunks.square(own_query, rows, scale)
        square = backend.at(f"square {rows.start}").backward(tile, own_grad, own)
        grad_query[:, :, rows] += window.query + square.query
        for total, behind, beside in zip(totals, window[1:], square[1:], strict=True):
            total[:-1] += behind[:, 0, :size]
            total[1:, : rows.start] += behind[:, 0, size:]
            total[1:, rows] += beside[:, 0]


def _strips(size: int) -> list[slice]:
    n_strips = _STRIPS if size % _STRIPS == 0 and size >= _STRIPS * _SHORTEST_STRIP else 1
    step = size // n_strips
    return [slice(start, start + step) for start in range(0, size, step)]


def _window(chunks: Tensor, own: int) -> Tensor:
    """`[n + 1, t, D]` -> `[n, 1, t + own, D]`: every chunk but the last, with the next one's first rows."""
    n_chunks, size, dim = chunks.shape
    step, *inner = chunks.stride()
    return chunks.as_strided((n_chunks - 1, 1, size + own, dim), (step, step, *inner), chunks.storage_offset())
