"""The local half of causal routed attention: own chunk up to the query, and the chunk before.

The operator reads whole blocks of keys even where a causal mask hides them, so a chunk is cut into strips: a
strip of queries reads the keys before it as one full window, and only its own square causally. Windows overlap
in memory and are never copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from prescore.attention.kernels import Backend

_STRIPS = 2
_SHORTEST_STRIP = 64


@dataclass(frozen=True, eq=False)
class Strip:
    """Queries `rows` of every block against one set of keys: `output [T, n, G, s, Dv]`, `lse [T, n, G, s]`."""

    rows: slice
    output: Tensor
    lse: Tensor


def attend_local(
    query: Tensor, key: Tensor, value: Tensor, scale: float, backend: Backend
) -> tuple[list[Strip], list[Strip]]:
    """Windows and squares.

    Args:
        query: `[T, n, G, t, D]` blocks of queries.
        key: `[T, n + 1, t, D]` chunks: block i owns chunk i + 1, and chunk i is the one before.
        value: `[T, n + 1, t, Dv]`.
        scale: Factor of the logits.
        backend: The operator.

    Returns:
        Strips of the windows, strips of the squares; each covers all queries once.
    """
    windows, squares = [], []
    for rows in _strips(query.shape[3]):
        heads = _heads(query[:, :, :, rows])
        output, lse = backend.at(f"window {rows.start}").forward(
            heads, _window(key, rows.start), _window(value, rows.start), None, False, scale
        )
        windows.append(_strip(rows, output, lse, query))
        square = backend.at(f"square {rows.start}")
        output, lse = square.forward(heads, key[:, 1:, rows], value[:, 1:, rows], None, True, scale)
        squares.append(_strip(rows, output, lse, query))
    return windows, squares


def attend_local_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float,
    backend: Backend, sums: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Add the gradients of query, key and value under the merged `output` and `lse` to `sums`."""
    size = query.shape[3]
    for rows in _strips(size):
        tensors = [_heads(t[:, :, :, rows]) for t in (grad, query, output)]
        own_lse = lse[:, :, :, rows].flatten(1, 2)
        keys = (_window(key, rows.start), key[:, 1:, rows])
        values = (_window(value, rows.start), value[:, 1:, rows])
        for causal in (False, True):
            grads = backend.at(f"{'square' if causal else 'window'} {rows.start}").backward(
                tensors[0], tensors[1], keys[causal], values[causal], None, tensors[2], own_lse, causal, scale
            )
            sums[0][:, :, :, rows] += grads[0].view(*query.shape[:3], -1, query.shape[-1])
            for total, part in zip(sums[1:], grads[1:], strict=True):
                if causal:
                    total[:, 1:, rows] += part
                else:
                    total[:, :-1] += part[:, :, :size]
                    total[:, 1:, : rows.start] += part[:, :, size:]


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


def _strip(rows: slice, output: Tensor, lse: Tensor, query: Tensor) -> Strip:
    lead = query.shape[:3]
    return Strip(rows, output.unflatten(1, lead[1:]), lse.unflatten(1, lead[1:]))
