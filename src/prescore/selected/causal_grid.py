"""The causal recursion as a dyadic grid counted from the first real token.

Positions are cut into leaves of `leaf` keys. Level `l` has blocks of `W = leaf * 2^l` positions; the queries of
every odd block see the keys of the even block before it. Together with the causal leaves each query sees every
earlier key exactly once, and what a query sees does not depend on how long the sequence goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.ops.parts import Part, mask_bias

FULL = "full"
"""Random stream of the one block pair without causality: `score` and `select` draw from it too, so they agree."""


@dataclass(frozen=True, eq=False)
class Queries:
    """Where the `length` query rows of a call stand: from position `start` on, which is an int or `[B]`.

    There are `heads` KV heads with `heads_per_kv` query heads each; row numbers are made on `device`.
    """

    batch: int
    heads: int
    heads_per_kv: int
    length: int
    start: Tensor | int
    device: torch.device

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions [n, W]` -> rows `[B * n, H, G, W]` and whether a query stands there `[B * n, W]`."""
        start = self.start if isinstance(self.start, int) else self.start[:, None, None]
        index = (positions[None] - start).expand(self.batch, -1, -1)  # [B, n, W]
        there = (index >= 0) & (index < self.length)
        head = self.arange(self.batch * self.heads * self.heads_per_kv) * self.length
        head = head.view(self.batch, 1, self.heads, self.heads_per_kv, 1)
        rows = head + index.clamp(0, self.length - 1)[:, :, None, None, :]
        return rows.flatten(0, 1), there.flatten(0, 1)

    def fill(self, span: tuple[int, int]) -> bool:
        """Whether a query stands at every position of a span in every sequence."""
        return isinstance(self.start, int) and self.start <= span[0] and span[1] <= self.start + self.length

    def span(self) -> tuple[int, int]:
        """First and last-plus-one position over all batch rows."""
        if isinstance(self.start, int):
            return self.start, self.start + self.length
        if self.start.numel() == 0:
            return 0, 0
        return max(0, int(self.start.min())), int(self.start.max()) + self.length

    def arange(self, *bounds: int) -> Tensor:
        """Row numbers or positions, as `torch.arange`."""
        return torch.arange(*bounds, dtype=torch.int64, device=self.device)


@dataclass(frozen=True, eq=False)
class Level:
    """Off-diagonal blocks of one size: queries at `query_positions`, keys at `key_positions`, `[n, W]` each.

    `query_span` is the first and last-plus-one position of the queries; all positions of keys hold a key.
    The `names` of their random streams go by size and place: which levels a call reaches depends on its other
    sequences.
    """

    names: list[str]
    width: int
    key_positions: Tensor
    query_positions: Tensor
    query_span: tuple[int, int]


def levels(leaf: int, queries: Queries) -> list[Level]:
    """All levels that some query reaches, from the smallest blocks up."""
    first, end = queries.span()
    grid, width = [], leaf
    while width < end:
        numbers = range(
            first // width | 1, -(-end // width), 2
        )  # of the odd blocks that end after the first query
        if numbers:
            odd = queries.arange(numbers.start, numbers.stop, 2)[:, None]
            step = queries.arange(width)
            span = numbers[0] * width, (numbers[-1] + 1) * width
            if len(numbers) == 1:  # a single block is not padded to its full width
                span = max(first, span[0]), min(end, span[1])
            positions = queries.arange(*span)[None] if len(numbers) == 1 else odd * width + step
            level = (width // leaf).bit_length() - 1
            names = [f"level {level}, block {number}" for number in numbers]
            grid.append(Level(names, width, (odd - 1) * width + step, positions, span))
        width *= 2
    return grid


def leaf_parts(leaf: int, queries: Queries, n_keys: int, valid: Tensor | None, dtype: torch.dtype) -> list[Part]:
    """Exact causal attention inside the leaves; `valid [B, n_keys]` marks real keys, None = all are."""
    first, end = queries.span()
    if end <= first:
        return []
    n_first, n_end = first // leaf, -(-end // leaf)  # leaves with a query
    if not isinstance(queries.start, int) or valid is not None:
        width = min(leaf, end - n_first * leaf) if n_end - n_first == 1 else leaf
        return [_leaf_tiles(range(n_first * leaf, n_end * leaf, leaf), width, queries, n_keys, valid, dtype)]
    parts = []
    full_first, full_end = -(-first // leaf), end // leaf  # leaves with a query at every position
    if full_first > n_first:
        parts += _leaf_slice(n_first * leaf, first, min(end, full_first * leaf), queries, n_keys)
    if full_end > full_first:
        starts = range(full_first * leaf, full_end * leaf, leaf)
        parts.append(_leaf_tiles(starts, leaf, queries, n_keys, None, dtype))
    if n_end > full_end >= full_first:
        parts += _leaf_slice(full_end * leaf, full_end * leaf, end, queries, n_keys)
    return parts


def _leaf_tiles(
    starts: range, width: int, queries: Queries, n_keys: int, valid: Tensor | None, dtype: torch.dtype
) -> Part:
    """Leaves of one width as tiles, with filler where there is no query or key."""
    positions = queries.arange(starts.start, starts.stop, starts.step)[:, None] + queries.arange(width)
    rows, there = queries.rows(positions)
    shape = (rows.shape[0] * queries.heads, queries.heads_per_kv, width)
    real = key_valid(positions, queries, n_keys, valid)
    bias = None if real is None else mask_bias(real, dtype).repeat_interleave(queries.heads, dim=0)
    query_valid = None
    if not queries.fill((starts[0], starts[-1] + width)):
        query_valid = there[:, None, None, :].expand(rows.shape).reshape(shape)
    keys = key_rows(positions, queries, n_keys).reshape(shape[0], width)
    return Part(shape, rows.reshape(shape), query_valid, keys, bias=bias, causal=True)


def _leaf_slice(leaf_start: int, first: int, end: int, queries: Queries, n_keys: int) -> list[Part]:
    """Queries `first..end` of the leaf that begins at `leaf_start`: a causal square, then the keys before it."""
    shape = (queries.batch * queries.heads, queries.heads_per_kv, end - first)
    rows = queries.rows(queries.arange(first, end)[None])[0].reshape(shape)
    square, before = (
        key_rows(queries.arange(*bounds)[None], queries, n_keys).reshape(shape[0], bounds[1] - bounds[0])
        for bounds in ((first, end), (leaf_start, first))
    )
    parts = [Part(shape, rows, None, square, causal=True)]
    return [*parts, Part(shape, rows, None, before)] if first > leaf_start else parts


def key_rows(positions: Tensor, queries: Queries, n_keys: int) -> Tensor:
    """`positions [n, W]` -> flat key rows `[B * n, H, W]`."""
    head = (queries.arange(queries.batch * queries.heads) * n_keys).view(queries.batch, 1, queries.heads, 1)
    return (head + positions.clamp_max(n_keys - 1)[None, :, None, :]).flatten(0, 1)


def key_valid(positions: Tensor, queries: Queries, n_keys: int, valid: Tensor | None) -> Tensor | None:
    """`[B * n, W]`: which of the positions hold a real key; None = all, where `valid` is None."""
    if valid is None:
        return None
    return ((positions < n_keys) & valid[:, positions.clamp_max(n_keys - 1)]).flatten(0, 1)
