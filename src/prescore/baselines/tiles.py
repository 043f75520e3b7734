"""From positions in the sequence to the row numbers of attention parts.

Positions count from each sequence's first real token, so tiles named by position mean the same tokens whatever
the padding. Keys are never copied or repeated: a tile is a list of row numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.attention.exact import resolve_scale
from prescore.attention.parts import Part
from prescore.layout import first_real


@dataclass(frozen=True, eq=False)
class Call:
    """A checked attention call.

    Attributes:
        query: `[B, Hkv * G, Nq, D]`; as the last `Nq` positions where positions of queries matter.
        key: `[B, Hkv, Nk, D]`, zero where padded.
        value: `[B, Hkv, Nk, Dv]`, zero where padded.
        valid: `[B, Nk]`, True = a real key.
        shift: `[B]` index of each sequence's first real key.
        scale: Factor of the logits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor
    shift: Tensor
    scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def empty(self) -> bool:
        """Whether there is no query or no key at all."""
        return self.query.shape[:3].numel() == 0 or self.key.shape[2] == 0

    @property
    def first_position(self) -> int:
        """Smallest position any query has, at least 0."""
        return max(0, self.key.shape[2] - self.query.shape[2] - int(self.shift.max()))

    def key_tiles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Key rows at `positions`, broadcastable to `[B, Hkv, T, c]`.

        Returns:
            Row numbers and whether a real key is there, both `[B * Hkv * T, c]`.
        """
        batch, heads, length = self.key.shape[:3]
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
        batch, heads, length = self.query.shape[:3]
        positions = positions[None, None, :, None, :]
        index = positions + (self.shift - (self.key.shape[2] - length)).view(-1, 1, 1, 1, 1)
        inside = (positions >= 0) & (index >= 0) & (index < length)
        tile_heads = torch.arange(batch * heads, device=index.device).view(batch, -1, 1, self.group, 1)
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
            seen = seen & ~hidden.expand(*self.key.shape[:2], *hidden.shape[-2:]).flatten(0, 2)
        shape = (query_rows.shape[0], query_rows.shape[1], query_rows.shape[2])
        bias = zero_or_hidden(seen, self.query.dtype)
        return Part(shape, query_rows, query_valid, key_rows, bias=bias, causal=causal)

    def part_of_all(self, key_rows: Tensor, seen: Tensor) -> Part:
        """Every query of a group meeting the key rows `[B * Hkv, c]` where seen."""
        shape = (self.key.shape[0] * self.key.shape[1], self.group, self.query.shape[2])
        return Part(shape, key_rows=key_rows, bias=zero_or_hidden(seen, self.query.dtype))


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    scale: float | None,
) -> Call:
    """Check the arguments every baseline shares, and empty the padding."""
    checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale)
    factor = resolve_scale(scale, query)
    if key_padding_mask is None or key.shape[2] == 0:
        valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
        return Call(query, key, value, valid, valid.new_zeros(key.shape[0], dtype=torch.int64), factor)
    # padding may hold anything, and 0 * NaN is NaN
    hidden = ~key_padding_mask[:, None, :, None]
    key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    return Call(query, key, value, key_padding_mask, first_real(key_padding_mask), factor)


def zero_or_hidden(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def chunk_positions(first: int, last: int, size: int, like: Tensor) -> Tensor:
    """Positions of the chunks `first..last - 1`, `[last - first, size]`."""
    return torch.arange(first * size, last * size, device=like.device).view(-1, size)
