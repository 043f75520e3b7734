"""From positions in the sequence to the row numbers of attention parts.

Positions count from each sequence's first real token, so a position means the same token whatever the padding.
Keys are never copied or repeated: a tile is a list of row numbers.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prescore import checks
from prescore.call import Call, Generator, Options, first_real, make_call
from prescore.ops.operators import accumulation_dtype, pick_operator
from prescore.ops.parts import Part, attend_parts, mask_bias
from prescore.types import Attended

_LARGEST_BLOCK = 2**21


@dataclass(frozen=True, eq=False)
class Placed:
    """A checked call whose rows can be named by position.

    Nothing is shifted; queries are the last `Nq` positions where positions of queries matter. `valid [B, Nk]`
    marks the real keys, `shift [B]` is the index of each sequence's first one. `generator` is the caller's.
    """

    call: Call
    valid: Tensor
    shift: Tensor
    generator: Generator = None

    @property
    def empty(self) -> bool:
        """Whether there is no query or no key at all."""
        return self.call.query.shape[:3].numel() == 0 or self.call.n_keys == 0

    @property
    def first_position(self) -> int:
        """Smallest position of a query, at least 0."""
        return max(0, self.call.n_keys - self.call.n_query - int(self.shift.max()))

    def arange(self, *bounds: int) -> Tensor:
        """Positions or row numbers, as `torch.arange`."""
        return torch.arange(*bounds, dtype=torch.int64, device=self.shift.device)

    def chunks(self, size: int) -> Tensor:
        """Positions `[n, size]` of the chunks that hold queries."""
        first, last = self.first_position // size, math.ceil(self.call.n_keys / size)
        return self.arange(first * size, last * size).view(-1, size)

    def key_tiles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the keys at `positions`, broadcastable to `[B, Hkv, T, c]`, and whether a real key is there.

        Both are `[B * Hkv * T, c]`.
        """
        batch, heads, length = self.call.key.shape[:3]
        positions = positions.expand(batch, heads, *positions.shape[-2:])
        index = positions + self.shift.view(-1, 1, 1, 1)
        inside = (positions >= 0) & (index < length)
        index = index.clamp(0, length - 1)
        visible = inside & self.valid.gather(1, index.reshape(batch, -1)).view_as(index)
        rows = index + self.arange(batch * heads).view(batch, heads, 1, 1) * length
        return rows.flatten(0, 2), visible.flatten(0, 2)

    def query_tiles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the queries at `positions [T, t]`, and whether one is there: `[B * Hkv * T, G, t]` each."""
        batch, heads, length = self.call.query.shape[:3]
        positions = positions[None, None, :, None, :]
        index = positions + (self.shift - (self.call.n_keys - length)).view(-1, 1, 1, 1, 1)
        inside = (positions >= 0) & (index >= 0) & (index < length)
        head = self.arange(batch * heads).view(batch, -1, 1, self.call.heads_per_kv, 1)
        rows = index.clamp(0, length - 1) + head * length
        return rows.flatten(0, 2), inside.expand_as(rows).flatten(0, 2)

    def part(self, queries: Tensor, keys: Tensor, *, hidden: Tensor | None = None, causal: bool = False) -> Part:
        """Queries at positions `[T, t]` over keys at positions `[.., T, c]`, without those that are `hidden`."""
        query_rows, query_valid = self.query_tiles(queries)
        rows, visible = self.key_tiles(keys)
        if hidden is not None:
            visible = visible & ~hidden.expand(*self.call.key.shape[:2], *hidden.shape[-2:]).flatten(0, 2)
        n_tiles, heads_per_kv, width = query_rows.shape
        bias = mask_bias(visible, self.call.query.dtype)
        return Part((n_tiles, heads_per_kv, width), query_rows, query_valid, rows, bias=bias, causal=causal)

    def part_of_all(self, key_rows: Tensor, visible: Tensor) -> Part:
        """Every query over the key rows `[B * Hkv, c]` that are visible."""
        shape = (key_rows.shape[0], self.call.heads_per_kv, self.call.n_query)
        return Part(shape, key_rows=key_rows, bias=mask_bias(visible, self.call.query.dtype))

    def chunk_parts(self, size: int, choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Part]:
        """Causal parts: every chunk of `size` positions reads itself exactly, and a choice of the keys before it.

        `choose` takes positions `[1, t]` of the chunk and `[1, c]` of the earlier keys, and returns the chosen
        positions `[B, Hkv, s]`, and which of them are not filler.
        """
        chunks = self.chunks(min(size, self.call.n_keys))
        parts = [self.part(chunks, chunks, causal=True)]
        for queries in chunks[:, None]:
            if int(queries[0, 0]):
                places, chosen = choose(queries, self.arange(int(queries[0, 0]))[None])
                parts.append(self.part(queries, places[:, :, None], hidden=~chosen[:, :, None]))
        return parts

    def column_sums(
        self, queries: Tensor, keys: Tensor, *, n_local: int = 0, chosen: Tensor | None = None
    ) -> Tensor:
        """Attention `[B, Hkv, c]` that keys receive from the queries at positions `[1, t]`; -inf = not visible.

        Queries at padded positions do not count; keys that are not `chosen [B, Hkv, c]` are not visible. The last
        `n_local` keys are at the queries' own positions, see `column_sums`.
        """
        dim = self.call.key.shape[-1]
        (query_rows, there), (key_rows, visible) = self.query_tiles(queries), self.key_tiles(keys)
        if chosen is not None:
            visible = visible & chosen.flatten(0, 1)
        sums = column_sums(
            self.call.query.reshape(-1, dim)[query_rows],
            self.call.key.reshape(-1, dim)[key_rows],
            counted=there[:, 0] & self.key_tiles(queries)[1],
            visible=visible,
            scale=self.call.scale,
            n_local=n_local,
        )
        return sums.view(*self.call.key.shape[:2], -1)


def baseline(choose: Callable[..., list[Part] | Attended]) -> Callable[..., Attended]:
    """Decorator: make an attention function of what a `Placed` call with the baseline's settings reads.

    The attention function takes `query [B, Hq, Nq, D]`, `key [B, Hkv, Nk, D]` and `value [B, Hkv, Nk, Dv]`, the
    baseline's own settings, and `is_causal` (queries are the last `Nq` positions and see no later key),
    `key_padding_mask` (`[B, Nk]`, True = a real key), `scale` and `generator`, as `prescored_attention` does.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        scale: float | None = None,
        generator: Generator = None,
        **settings: Any,
    ) -> Attended:
        mask = key_padding_mask
        checks.attention_inputs(query, key, value, is_causal=is_causal, key_padding_mask=mask, scale=scale)
        options = Options(is_causal, mask, scale)
        call = make_call(query, key, value, options, operator=pick_operator(query), aligned=False)
        valid = key.new_ones(key.shape[0], key.shape[2], dtype=torch.bool) if mask is None else mask
        shift = first_real(valid) if key.shape[2] else valid.new_zeros(key.shape[0], dtype=torch.int64)
        read = choose(Placed(call, valid, shift, generator), **settings)
        if isinstance(read, Attended):
            return read
        return attend_parts(call.query, call.key, call.value, read, scale=call.scale, operator=call.operator)

    arguments = list(inspect.signature(attend).parameters.values())
    settings = list(inspect.signature(choose).parameters.values())[1:]
    functools.update_wrapper(attend, choose)
    attend.__signature__ = inspect.Signature([*arguments[:3], *settings, *arguments[3:7]])  # type: ignore[attr-defined]
    return attend


@torch.no_grad()
def column_sums(
    query: Tensor, key: Tensor, *, counted: Tensor, visible: Tensor, scale: float, n_local: int = 0
) -> Tensor:
    """Sums `[b, c]` of softmax weights over the queries `[b, G, t, D]` that are `counted [b, t]`.

    Keys `[b, c, D]` that are not `visible [b, c]` get -inf. The last `n_local` keys are at the positions of the
    queries: query i sees the first i + 1 of them. Runs in blocks of queries.
    """
    wide = accumulation_dtype(query.dtype)
    tiles, heads_per_kv, n_query, _ = query.shape
    n_keys = key.shape[1]
    total = torch.zeros(tiles, n_keys, dtype=wide, device=key.device)
    transposed = key.to(wide).transpose(1, 2)[:, None]  # [b, 1, D, c]
    local = torch.arange(n_keys, dtype=torch.int64, device=key.device) - (n_keys - n_local)
    step = max(1, _LARGEST_BLOCK // max(1, tiles * heads_per_kv * n_keys))
    for start in range(0, n_query, step):
        rows = slice(start, min(start + step, n_query))
        logits = (query[:, :, rows].to(wide) @ transposed) * scale
        logits.masked_fill_(~visible[:, None, None, :], -torch.inf)
        if n_local:
            position = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=key.device)
            logits.masked_fill_(local > position[:, None], -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        # a query that sees nothing gives NaN, and padding may hold anything
        usable = counted[:, None, rows, None] & ~torch.isneginf(logits.amax(-1, keepdim=True))
        total += weights.masked_fill(~usable, 0.0).sum(dim=(1, 2))
    return total.masked_fill(~visible, -torch.inf)


def best_places(scores: Tensor, budget: int, *, latest: bool = False) -> tuple[Tensor, Tensor]:
    """Places of the `budget` highest scores along the last axis, ascending, and whether each is above -inf.

    Equal scores go to the lower place, or to the higher one with `latest`.
    """
    n_scores = scores.shape[-1]
    ranked = scores.flip(-1) if latest else scores
    places = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., : min(budget, n_scores)]
    if latest:
        places = n_scores - 1 - places
    places = places.sort(dim=-1).values
    return places, ~torch.isneginf(scores.gather(-1, places))
