"""From positions in the sequence to the row numbers of attention parts.

Positions count from each sequence's first real token, so tiles named by position mean the same tokens whatever
the padding. Keys are never copied or repeated: a tile is a list of row numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.call import Call, first_real, make_call
from prescore.ops.backend import Needs, accumulation_dtype, pick_backend
from prescore.ops.parts import Part, attend_parts
from prescore.types import Attended


@dataclass(frozen=True, eq=False)
class Placed:
    """A checked call whose rows can be named by position.

    Attributes:
        call: Nothing is shifted; queries are the last `Nq` positions where positions of queries matter.
        valid: `[B, Nk]`, True = a real key.
        shift: `[B]` index of each sequence's first real key.
    """

    call: Call
    valid: Tensor
    shift: Tensor

    @property
    def empty(self) -> bool:
        """Whether there is no query or no key at all."""
        return self.call.query.shape[:3].numel() == 0 or self.call.n_keys == 0

    @property
    def first_position(self) -> int:
        """Smallest position any query has, at least 0."""
        return max(0, self.call.n_keys - self.call.n_query - int(self.shift.max()))

    def key_tiles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Key rows at `positions`, broadcastable to `[B, Hkv, T, c]`.

        Returns:
            Row numbers and whether a real key is there, both `[B * Hkv * T, c]`.
        """
        batch, heads, length = self.call.key.shape[:3]
        positions = positions.expand(batch, heads, *positions.shape[-2:])
        index = positions + self.shift.view(-1, 1, 1, 1)
        inside = (positions >= 0) & (index < length)
        index = index.clamp(0, length - 1)
        seen = inside & self.valid.gather(1, index.reshape(batch, -1)).view_as(index)
        tile_heads = torch.arange(batch * heads, device=index.device).view(batch, heads, 1, 1)
        return (index + tile_heads * length).flatten(0, 2), seen.flatten(0, 2)

    def query_tiles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Query rows at `positions [T, t]`.

        Returns:
            Row numbers and whether a query is there, both `[B * Hkv * T, G, t]`.
        """
        batch, heads, length = self.call.query.shape[:3]
        positions = positions[None, None, :, None, :]
        index = positions + (self.shift - (self.call.n_keys - length)).view(-1, 1, 1, 1, 1)
        inside = (positions >= 0) & (index >= 0) & (index < length)
        tile_heads = torch.arange(batch * heads, device=index.device).view(batch, -1, 1, self.call.group, 1)
        rows = index.clamp(0, length - 1) + tile_heads * length
        return rows.flatten(0, 2), inside.expand_as(rows).flatten(0, 2)

    def voting(self, positions: Tensor) -> Tensor:
        """Whether a real query is at `positions [T, t]`, `[B * Hkv * T, t]`: padding has no say in choices."""
        _, present = self.query_tiles(positions)
        _, real = self.key_tiles(positions)
        return present[:, 0] & real

    def part(self, queries: Tensor, keys: Tensor, *, hidden: Tensor | None = None, causal: bool = False) -> Part:
        """Queries at positions `[T, t]` meeting keys at positions `[.., T, c]`, save `hidden` positions."""
        query_rows, query_valid = self.query_tiles(queries)
        key_rows, seen = self.key_tiles(keys)
        if hidden is not None:
            seen = seen & ~hidden.expand(*self.call.key.shape[:2], *hidden.shape[-2:]).flatten(0, 2)
        shape = (query_rows.shape[0], query_rows.shape[1], query_rows.shape[2])
        bias = zero_or_hidden(seen, self.call.query.dtype)
        return Part(shape, query_rows, query_valid, key_rows, bias=bias, causal=causal)

    def part_of_all(self, key_rows: Tensor, seen: Tensor) -> Part:
        """Every query of a group meeting the key rows `[B * Hkv, c]` where seen."""
        shape = (key_rows.shape[0], self.call.group, self.call.n_query)
        return Part(shape, key_rows=key_rows, bias=zero_or_hidden(seen, self.call.query.dtype))

    def attend(self, parts: Sequence[Part]) -> Attended:
        """One softmax over the union of the parts."""
        call = self.call
        return attend_parts(call.query, call.key, call.value, parts, scale=call.scale, backend=call.backend)


def place(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    scale: float | None,
) -> Placed:
    """Check the arguments every baseline shares, and empty the padding."""
    mask = key_padding_mask
    checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=mask, scale=scale)
    backend = pick_backend(Needs.of(query))
    call = make_call(query, key, value, mask, is_causal=is_causal, scale=scale, backend=backend, aligned=False)
    valid = key.new_ones(key.shape[0], key.shape[2], dtype=torch.bool) if mask is None else mask
    shift = first_real(valid) if key.shape[2] else valid.new_zeros(key.shape[0], dtype=torch.int64)
    return Placed(call, valid, shift)


def zero_or_hidden(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def chunk_positions(first: int, last: int, size: int, like: Tensor) -> Tensor:
    """Positions of the chunks `first..last - 1`, `[last - first, size]`."""
    return torch.arange(first * size, last * size, device=like.device).view(-1, size)


# How much attention each key receives, and the keys that receive most.

_LARGEST_BLOCK = 2**21


@torch.no_grad()
def column_sums(query: Tensor, key: Tensor, *, voting: Tensor, seen: Tensor, scale: float, own: int = 0) -> Tensor:
    """Sum over the queries of their softmax weights, in blocks of queries.

    Args:
        query: `[b, G, t, D]`.
        key: `[b, c, D]`.
        voting: `[b, t]`, False on queries that do not count.
        seen: `[b, c]`, False on keys nobody sees.
        scale: Factor of the logits.
        own: The last `own` keys are those of the queries: query i sees the first i + 1 of them.

    Returns:
        `[b, c]`, -inf where not seen.
    """
    wide = accumulation_dtype(query.dtype)
    tiles, group, n_query, _ = query.shape
    n_keys = key.shape[1]
    total = torch.zeros(tiles, n_keys, dtype=wide, device=key.device)
    transposed = key.to(wide).transpose(1, 2)[:, None]  # [b, 1, D, c]
    rank = torch.arange(n_keys, device=key.device) - (n_keys - own)
    step = max(1, _LARGEST_BLOCK // max(1, tiles * group * n_keys))
    for start in range(0, n_query, step):
        rows = slice(start, min(start + step, n_query))
        logits = (query[:, :, rows].to(wide) @ transposed) * scale
        logits.masked_fill_(~seen[:, None, None, :], -torch.inf)
        if own:
            later = rank > torch.arange(rows.start, rows.stop, device=key.device)[:, None]
            logits.masked_fill_(later, -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        # a query that sees nothing gives NaN, and one that is padding may hold anything
        counted = voting[:, None, rows, None] & ~torch.isneginf(logits.amax(-1, keepdim=True))
        total += torch.where(counted, weights, 0.0).sum(dim=(1, 2))
    return total.masked_fill(~seen, -torch.inf)


def all_column_sums(placed: Placed) -> Tensor:
    """Column sums over all queries and keys without causality, `[B, Hkv, Nk]`.

    With as many queries as keys, queries at padded positions are taken for padding and do not vote.
    """
    batch, heads, length, dim = placed.call.key.shape
    n_query = placed.call.n_query
    voting = placed.valid if n_query == length else placed.valid.new_ones(batch, n_query)
    sums = column_sums(
        placed.call.query.reshape(batch * heads, placed.call.group, n_query, dim),
        placed.call.key.reshape(batch * heads, length, dim),
        voting=voting.repeat_interleave(heads, 0),
        seen=placed.valid.repeat_interleave(heads, 0),
        scale=placed.call.scale,
    )
    return sums.view(batch, heads, length)


def best_places(scores: Tensor, budget: int, *, latest: bool = False) -> tuple[Tensor, Tensor]:
    """The `budget` highest scores along the last axis.

    Equal scores go to the lower place, or to the higher one with `latest`.

    Returns:
        Places in ascending order, and whether each holds a score above -inf; both `[..., min(budget, n)]`.
    """
    n_scores = scores.shape[-1]
    ranked = scores.flip(-1) if latest else scores
    places = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., : min(budget, n_scores)]
    if latest:
        places = n_scores - 1 - places
    places = places.sort(dim=-1).values
    return places, ~torch.isneginf(scores.gather(-1, places))
