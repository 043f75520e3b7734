"""The causal recursion as a dyadic grid counted from the first real token.

Positions are cut into leaves of `leaf` keys. Level `l` has blocks of `W = leaf * 2^l` positions; the queries of
every odd block see the keys of the even block before it. Together with the causal leaves each query meets every
earlier key exactly once, and what a query meets does not depend on how long the sequence goes on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Selected
from prescore.ops.parts import Part
from prescore.scoring.select import protected_positions


@dataclass(frozen=True, eq=False)
class Queries:
    """Where the query rows of a call stand.

    Attributes:
        batch, heads, group: Sizes; `heads` KV heads with `group` query heads each.
        length: Query rows.
        start: Position of the first of them, an int or `[B]`.
        device: Where row numbers live.
    """

    batch: int
    heads: int
    group: int
    length: int
    start: Tensor | int
    device: torch.device

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions [n, W]` -> rows `[B * n, H, G, W]` and whether a query stands there `[B * n, W]`."""
        start = torch.as_tensor(self.start, device=self.device).expand(self.batch)
        index = positions[None] - start[:, None, None]  # [B, n, W]
        there = (index >= 0) & (index < self.length)
        head = torch.arange(self.batch * self.heads * self.group, device=self.device) * self.length
        head = head.view(self.batch, 1, self.heads, self.group, 1)
        rows = head + index.clamp(0, self.length - 1)[:, :, None, None, :]
        return rows.flatten(0, 1), there.flatten(0, 1)

    def span(self) -> tuple[int, int]:
        """First and last-plus-one position over all batch rows."""
        if isinstance(self.start, int):
            return self.start, self.start + self.length
        if self.start.numel() == 0:
            return 0, 0
        return max(0, int(self.start.min())), int(self.start.max()) + self.length


@dataclass(frozen=True)
class Level:
    """Off-diagonal blocks of one size: queries at `query_positions`, keys at `key_positions`, `[n, W]` each."""

    width: int
    key_positions: Tensor
    query_positions: Tensor


def levels(leaf: int, queries: Queries) -> list[Level]:
    """All levels that some query reaches, from the smallest blocks up."""
    first, end = queries.span()
    found = []
    width = leaf
    while width < end:
        odd = torch.arange(1, -(-end // width), 2, device=queries.device)
        odd = odd[(odd + 1) * width > first]
        if odd.numel():
            step = torch.arange(width, device=queries.device)
            query_step = step
            if odd.numel() == 1:
                # a lone block need not be padded to its full width
                begin = int(odd) * width
                query_step = step[max(0, first - begin) : end - begin]
            found.append(Level(width, (odd[:, None] - 1) * width + step, odd[:, None] * width + query_step))
        width *= 2
    return found


def leaf_parts(leaf: int, queries: Queries, n_keys: int, valid: Tensor | None, dtype: torch.dtype) -> list[Part]:
    """Exact causal attention inside the leaves.

    Args:
        leaf: Positions in a leaf.
        queries: Where the queries stand.
        n_keys: Keys per row.
        valid: `[B, n_keys]`, True = a real key; None = all.
        dtype: Of the bias.
    """
    first, end = queries.span()
    if end <= first:
        return []
    if not isinstance(queries.start, int) or valid is not None:
        numbers = torch.arange(first // leaf, -(-end // leaf), device=queries.device)
        width = min(leaf, end - first // leaf * leaf) if numbers.numel() == 1 else leaf
        return [_leaf_tiles(numbers * leaf, width, queries, n_keys, valid, dtype)]
    parts = []
    whole = -(-first // leaf), end // leaf  # leaves whose every position has a query
    if whole[0] > first // leaf:
        parts += _leaf_slice(first // leaf * leaf, first, min(end, whole[0] * leaf), queries, n_keys)
    if whole[1] > whole[0]:
        starts = torch.arange(whole[0], whole[1], device=queries.device) * leaf
        if queries.group == 1 and first == 0 and end == whole[1] * leaf and n_keys == end:
            parts.append(Part((queries.batch * queries.heads * len(starts), 1, leaf), causal=True))
        else:
            parts.append(_leaf_tiles(starts, leaf, queries, n_keys, None, dtype))
    if whole[1] * leaf < end and whole[1] >= whole[0]:
        parts += _leaf_slice(whole[1] * leaf, whole[1] * leaf, end, queries, n_keys)
    return parts


def _leaf_tiles(
    starts: Tensor, width: int, queries: Queries, n_keys: int, valid: Tensor | None, dtype: torch.dtype
) -> Part:
    """Leaves of one width as tiles, filler where no query or key stands."""
    positions = starts[:, None] + torch.arange(width, device=queries.device)
    rows, there = queries.rows(positions)
    tiles = rows.shape[0] * queries.heads
    keys = key_rows(positions, queries, n_keys).reshape(tiles, width)
    bias = None
    if valid is not None or bool((positions >= n_keys).any()):
        real = _real(positions, queries, n_keys, valid)
        bias = torch.zeros(real.shape, dtype=dtype, device=real.device).masked_fill_(~real, -torch.inf)
        bias = bias.repeat_interleave(queries.heads, dim=0)
    filled = None
    if not bool(there.all()):
        filled = there[:, None, None, :].expand(rows.shape).reshape(tiles, queries.group, width)
    shape = (tiles, queries.group, width)
    return Part(shape, rows.reshape(shape), filled, keys, bias=bias, causal=True)


def _leaf_slice(leaf_start: int, first: int, end: int, queries: Queries, n_keys: int) -> list[Part]:
    """Queries `first..end` of the leaf that begins at `leaf_start`: keys before them, then a causal square."""
    own = torch.arange(first, end, device=queries.device)[None]
    rows, _ = queries.rows(own)
    tiles = queries.batch * queries.heads
    shape = (tiles, queries.group, end - first)
    square = key_rows(own, queries, n_keys).reshape(tiles, end - first)
    parts = [Part(shape, rows.reshape(shape), None, square, causal=True)]
    if first > leaf_start:
        past = torch.arange(leaf_start, first, device=queries.device)[None]
        keys = key_rows(past, queries, n_keys).reshape(tiles, first - leaf_start)
        parts.append(Part(shape, rows.reshape(shape), None, keys))
    return parts


def key_rows(positions: Tensor, queries: Queries, n_keys: int) -> Tensor:
    """`positions [n, W]` -> flat key rows `[B * n, H, W]`."""
    head = torch.arange(queries.batch * queries.heads, device=queries.device) * n_keys
    head = head.view(queries.batch, 1, queries.heads, 1)
    return (head + positions.clamp_max(n_keys - 1)[None, :, None, :]).flatten(0, 1)


def _real(positions: Tensor, queries: Queries, n_keys: int, valid: Tensor | None) -> Tensor:
    real = (positions < n_keys)[None].expand(queries.batch, *positions.shape)
    if valid is not None:
        real = real & valid[:, positions.clamp_max(n_keys - 1)]
    return real.flatten(0, 1)


def key_valid(positions: Tensor, queries: Queries, n_keys: int, valid: Tensor | None) -> Tensor | None:
    """`[B * n, W]`: which of the positions hold a real key; None = all."""
    if valid is None and not bool((positions >= n_keys).any()):
        return None
    return _real(positions, queries, n_keys, valid)


# Cut a call into problems: one per batch row, or the off-diagonal blocks of the causal grid.

FULL = "full"
"""Name of the random stream of a non-causal problem: `score` and `select` draw from it too, so they agree."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Queries and candidate keys of equal-sized problems, `P = B * n` for `n` blocks of each batch row.

    Attributes:
        name: Of its random streams.
        n_blocks: `n`.
        query_rows: `[P, H, G, W]` flat rows of the queries.
        query_valid: `[P, W]`, False = filler; None = none.
        query_real: `[P, W]`, False = filler or padding; None = none.
        key: `[P, H, N, D]` candidates.
        value: Their values, where centroids need them.
        rows: `[P, H, N]` flat rows of the candidates.
        valid: `[P, N]`, False = padding; None = none.
        protect: `[P, N]`, keys to be kept and seen exactly; None = none.
        exact: `[P]`, problems with so few queries that they are exact over their selection.
        given: `[P, H, N]`, the caller's selection; None = make one.
    """

    name: str
    n_blocks: int
    query_rows: Tensor
    query_valid: Tensor | None
    query_real: Tensor | None
    key: Tensor
    value: Tensor
    rows: Tensor
    valid: Tensor | None
    protect: Tensor | None
    exact: Tensor
    given: Tensor | None

    def any_valid(self) -> bool:
        """Whether some problem has a real key."""
        return self.valid is None or bool(self.valid.any())

    def n_keys(self) -> Tensor:
        """`[P]` real keys of each problem."""
        if self.valid is not None:
            return self.valid.sum(1)
        return torch.full((self.rows.shape[0],), self.rows.shape[-1], device=self.rows.device)


@dataclass(frozen=True, eq=False)
class BlockPairs:
    """The problems of one call; `given [B, Hkv, Nk]` is the caller's selection, in aligned positions."""

    call: Call
    config: Selected
    queries: Queries
    given: Tensor | None

    def full(self) -> Candidates:
        """One problem per batch row; rows with few queries are exact over their selection, the others not."""
        call, config = self.call, self.config
        positions = torch.arange(call.n_keys, device=call.key.device)[None]
        everywhere = dataclasses.replace(self.queries, start=0)
        query_rows, _ = everywhere.rows(torch.arange(self.queries.length, device=call.key.device)[None])
        n_query = torch.full((self.queries.batch,), self.queries.length, device=call.key.device)
        if call.query_valid is not None:
            n_query = call.query_valid.sum(1)
        few = n_query <= config.min_seq_len if config.leaf_inclusive else n_query < config.min_seq_len
        return Candidates(
            name=FULL,
            n_blocks=1,
            query_rows=query_rows,
            query_valid=None,
            query_real=call.query_valid,
            key=call.key,
            value=call.value,
            rows=key_rows(positions, self.queries, call.n_keys),
            valid=call.valid,
            protect=protected_positions(call.valid, call.key, config.sinks, config.recent),
            exact=few,
            given=self.given,
        )

    def level(self, level: Level) -> Candidates:
        """All off-diagonal blocks of one level as one batch of problems."""
        call, config, queries = self.call, self.config, self.queries
        width, key_positions, query_positions = level.width, level.key_positions, level.query_positions
        inside = key_positions.clamp_max(call.n_keys - 1)
        query_rows, there = queries.rows(query_positions)
        valid = key_valid(key_positions, queries, call.n_keys, call.valid)
        rows = key_rows(key_positions, queries, call.n_keys)
        key, value = self._gathered(rows, valid)
        protect = None
        if config.sinks or config.recent:
            protect = protected_positions(call.valid, call.key, config.sinks, 0)[:, inside].flatten(0, 1)
            protect = protect | protected_positions(valid, key, 0, config.recent)
        real = there
        if call.query_valid is not None:
            real = there & call.query_valid[:, query_positions.clamp_max(call.n_keys - 1)].flatten(0, 1)
        return Candidates(
            # named by size, not by rank in the list: which levels a call reaches depends on its other rows
            name=f"level{(width // max(1, config.min_seq_len)).bit_length() - 1}",
            n_blocks=key_positions.shape[0],
            query_rows=query_rows,
            query_valid=None if bool(there.all()) else there,
            query_real=None if bool(real.all()) else real,
            key=key,
            value=value,
            rows=rows,
            valid=valid,
            protect=protect,
            exact=torch.full((rows.shape[0],), config.leaf_inclusive and width <= config.min_seq_len),
            given=None if self.given is None else self.given[:, :, inside].transpose(1, 2).flatten(0, 1),
        )

    def _gathered(self, rows: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of a level's blocks; values only where centroids need them."""
        shape = (*rows.shape, -1)
        flat = rows.reshape(-1)
        key = self.call.key.reshape(-1, self.call.key.shape[-1]).index_select(0, flat).view(shape)
        value = self.call.value
        if self.config.remainder != "none":
            value = value.reshape(-1, value.shape[-1]).index_select(0, flat).view(shape)
        if valid is not None:
            key = key * valid[:, None, :, None]
        return key, value
