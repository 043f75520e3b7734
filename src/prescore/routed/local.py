"""The local half of causal routed attention: own chunk up to the query, and the chunk before.

The operator reads whole blocks of keys even where a causal mask hides them, so a chunk is cut into strips: a
strip of queries reads the keys before it as one full window, and only its own square causally. Windows overlap
in memory and are never copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from prescore.ops.backend import Backend, Tile
from prescore.types import Attended

_STRIPS = 2
_SHORTEST_STRIP = 64


@dataclass(frozen=True, eq=False)
class Strip:
    """Queries `rows` of every block against one set of keys: `output [T, n, G, s, Dv]`, `lse [T, n, G, s]`."""

    rows: slice
    output: Tensor
    lse: Tensor


class Chunks(NamedTuple):
    """Keys and values `[T, n + 1, t, D]`: block i of the queries owns chunk i + 1, chunk i is the one before."""

    key: Tensor
    value: Tensor

    def window(self, query: Tensor, rows: slice, scale: float) -> Tile:
        """What a strip of queries sees before its own square: the chunk before, and its own up to the strip."""
        return Tile(query, _window(self.key, rows.start), _window(self.value, rows.start), scale)

    def square(self, query: Tensor, rows: slice, scale: float) -> Tile:
        """The strip's own keys, causally."""
        return Tile(query, self.key[:, 1:, rows], self.value[:, 1:, rows], scale, causal=True)


def attend_local(query: Tensor, chunks: Chunks, scale: float, backend: Backend) -> tuple[list[Strip], list[Strip]]:
    """Windows and squares of blocks of queries `[T, n, G, t, D]`.

    Returns:
        Strips of the windows, strips of the squares; each covers all queries once.
    """
    windows, squares = [], []
    for rows in _strips(query.shape[3]):
        heads = _heads(query[:, :, :, rows])
        found = backend.at(f"window {rows.start}").forward(chunks.window(heads, rows, scale))
        windows.append(_strip(rows, found, query))
        found = backend.at(f"square {rows.start}").forward(chunks.square(heads, rows, scale))
        squares.append(_strip(rows, found, query))
    return windows, squares


def attend_local_backward(
    grad: Tensor,
    query: Tensor,
    chunks: Chunks,
    merged: Attended,
    scale: float,
    backend: Backend,
    sums: tuple[Tensor, Chunks],
) -> None:
    """Add the gradients of query, and of keys and values, under the merged output and lse to `sums`."""
    size, (grad_query, totals) = query.shape[3], sums
    for rows in _strips(size):
        own_grad, own_query, output = (_heads(t[:, :, :, rows]) for t in (grad, query, merged.output))
        own = Attended(output, merged.lse[:, :, :, rows].flatten(1, 2))
        tile = chunks.window(own_query, rows, scale)
        window = backend.at(f"window {rows.start}").backward(tile, own_grad, own)
        tile = chunks.square(own_query, rows, scale)
        square = backend.at(f"square {rows.start}").backward(tile, own_grad, own)
        grad_query[:, :, :, rows] += (window.query + square.query).view(*query.shape[:3], -1, query.shape[-1])
        for total, behind, beside in zip(totals, window[1:], square[1:], strict=True):
            total[:, :-1] += behind[:, :, :size]
            total[:, 1:, : rows.start] += behind[:, :, size:]
            total[:, 1:, rows] += beside


def _strips(size: int) -> list[slice]:
    n_strips = _STRIPS if size % _STRIPS == 0 and size >= _STRIPS * _SHORTEST_STRIP else 1
    step = size // n_strips
    return [slice(start, start + step) for start in range(0, size, step)]


def _heads(blocks: Tensor) -> Tensor:
    """`[T, n, G, s, D]` -> `[T, n * G, s, D]`: blocks become heads, which share keys in groups of `G`."""
    return blocks.flatten(1, 2)


def _window(chunks: Tensor, own: int) -> Tensor:
    """`[T, n + 1, t, D]` -> `[T, n, t + own, D]`: every chunk but the last, with the next one's first rows."""
    n_trees, n_chunks, size, dim = chunks.shape
    flat = chunks.stride()
    return chunks.as_strided((n_trees, n_chunks - 1, size + own, dim), flat, chunks.storage_offset())


def _strip(rows: slice, found: Attended, query: Tensor) -> Strip:
    lead = query.shape[1:3]
    return Strip(rows, found.output.unflatten(1, lead), found.lse.unflatten(1, lead))
