"""Routed attention one token at a time: score stored stand-ins, read only the chosen leaves.

The caller owns keys and values and passes all of them; the index holds what was derived from them. New tokens
stay in the exactly read local part until their chunk is far enough behind, then it becomes a piece with a tree
of its own, and every few pieces are joined into a larger one. A step costs stand-ins, singles and chosen rows,
not the length of the sequence.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from prescore import checks
from prescore.config import Routed
from prescore.errors import Unsupported
from prescore.ops.backend import Backend, Needs, Tile, accumulation_dtype, pick_backend
from prescore.ops.merge import merge
from prescore.routed.clusters import place_pieces, take_rows
from prescore.routed.columns import Columns, attend_columns
from prescore.routed.layout import JOINED, JOINED_LEVELS, Layout, make_layout
from prescore.routed.levels import Descent, Seen, coarser, level_counts, read_shares, seen_behind
from prescore.types import Attended


class RoutedIndex:
    """Clusters of a growing sequence, for decoding.

    One step equals `attend_routed` of a causal call with the last query over all keys so far, where that lies
    behind `exact_until` and no head copies; without gradients.

    Args:
        config: `rows`, `leaf_size`, `chunk_size`, `sinks`; no `tolerance`, for a step has no error bar.
        scale: Factor of the logits.
        start: `[B]` index of each sequence's first real token (left padding), or None = all 0.
    """

    def __init__(self, config: Routed, *, scale: float, start: Tensor | None = None) -> None:
        if config.tolerance is not None:
            raise Unsupported("tolerance", [f"a decode step is not certified, got tolerance={config.tolerance}"])
        self._config, self._scale = config, scale
        self._start = start
        self._groups: list[tuple[slice, _Lockstep]] = []

    def extend(self, key: Tensor, value: Tensor) -> None:
        """Take in all keys and values so far, `[B, Hkv, N, D]`; only new pieces are built."""
        if not self._groups:
            self._groups = self._split()
        for rows, group in self._groups:
            with torch.no_grad():
                group.extend(key[rows], value[rows])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> Attended:
        """Attend for the newest position, `query [B, Hq, 1, D]`; extends itself to the keys given."""
        if query.shape[2] != 1:
            raise ValueError(f"query must hold one position in a decoding step, got {query.shape[2]}")
        chosen = pick_backend(Needs.of(query), backend)
        self.extend(key, value)
        results = [group.attend(query[rows], key[rows], value[rows], chosen) for rows, group in self._groups]
        if len(results) == 1:
            return results[0]
        outputs, lses = zip(*results, strict=True)
        return Attended(torch.cat(outputs), torch.cat(lses))

    @property
    def rows_read(self) -> float:
        """Keys and stand-ins that a query met in the last step, on average over the sequences."""
        sizes = [1 if rows.stop is None else rows.stop - rows.start for rows, _ in self._groups]
        met = sum(size * group.n_read for size, (_, group) in zip(sizes, self._groups, strict=True))
        return met / max(1, sum(sizes))

    def reorder(self, rows: Tensor) -> None:
        """Beam search: sequence i becomes a copy of sequence `rows[i]`."""
        moves = [(group, rows[own] - own.start) for own, group in self._groups]
        inside = all(bool(((place >= 0) & (place < place.shape[0])).all()) for _, place in moves)
        if self._start is None or (moves and inside):
            for group, place in moves:
                group.reorder(place)
        else:
            # which sequences move in step changes with the rows: build anew
            self._start, self._groups = self._start.index_select(0, rows), []

    def _split(self) -> list[tuple[slice, _Lockstep]]:
        """Neighbours in the batch that start together, as slices: a copy of all keys costs more than a step."""
        if self._start is None:
            return [(slice(0, None), _Lockstep(self._config, self._scale, 0))]
        checks.integer("start", int(self._start.min()), minimum=0)
        starts, counts = (t.tolist() for t in torch.unique_consecutive(self._start, return_counts=True))
        groups, end = [], 0
        for start, count in zip(starts, counts, strict=True):
            groups.append((slice(end, end + count), _Lockstep(self._config, self._scale, start)))
            end += count
        return groups


@dataclasses.dataclass(eq=False)
class _Pieces:
    """Leaves `[T, M, L]` and singles `[T, S]` by row number, stand-ins `[T, M, D]`."""

    rows: Tensor
    singles: Tensor
    mean_key: Tensor
    mean_value: Tensor

    def joined_with(self, other: _Pieces) -> _Pieces:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return _Pieces(*(torch.cat(pair, dim=1) for pair in pairs))


@dataclasses.dataclass(frozen=True, eq=False)
class _Far:
    """What a step sees of the pieces; the same until a chunk becomes one.

    Attributes:
        columns: Stand-ins and single keys.
        numbers: `[stand-ins]` their places among all levels, leaves first.
        descent: From nodes to leaves.
        rows: `[T, M, L]` positions of the leaves' members.
    """

    columns: Columns
    numbers: Tensor
    descent: Descent
    rows: Tensor


class _Lockstep:
    """Sequences that start at the same index, hence gain pieces at the same time."""

    def __init__(self, config: Routed, scale: float, start: int) -> None:
        self._config, self._scale, self._start = config, scale, start
        self._n_pieces = 0
        self._large: _Pieces | None = None
        self._small: _Pieces | None = None
        self._far: _Far | None = None  # made by the first step after pieces have changed
        self.n_read = 0  # rows of the last step

    def extend(self, key: Tensor, value: Tensor) -> None:
        layout = self._layout(key)
        n_large, old_large = layout.n_pieces // JOINED, self._n_pieces // JOINED
        if layout.n_pieces <= self._n_pieces:
            return
        self._far = None
        if n_large > old_large:
            new = self._build(key, value, layout, old_large * JOINED, n_large * JOINED, JOINED_LEVELS)
            self._large = new if self._large is None else self._large.joined_with(new)
            self._small = None
        first = n_large * JOINED if self._small is None else self._n_pieces
        if layout.n_pieces > first:
            new = self._build(key, value, layout, first, layout.n_pieces, 0)
            self._small = new if self._small is None else self._small.joined_with(new)
        self._n_pieces = layout.n_pieces

    def attend(self, query: Tensor, key: Tensor, value: Tensor, backend: Backend) -> Attended:
        batch, n_heads, _, dim = query.shape
        n_trees, group = batch * key.shape[1], n_heads // key.shape[1]
        layout = self._layout(key)
        near = self._start + (layout.sinks + layout.n_pieces * layout.chunk if layout.n_pieces else 0)
        grouped = query.reshape(n_trees, group, 1, dim)
        near_key, near_value = (t[:, :, near:].reshape(n_trees, 1, key.shape[2] - near, -1) for t in (key, value))
        parts = [backend.forward(Tile(grouped, near_key, near_value, self._scale))]
        self.n_read = near_key.shape[2]
        if layout.n_pieces:
            if self._far is None:
                with torch.no_grad():
                    self._far = self._build_far(key, value, layout)
            columns = self._far.columns
            self.n_read += columns.key.shape[1] + min(layout.n_chosen, columns.n_leaves) * layout.leaf
            parts += self._attend_far(self._far, grouped, key, value, layout, backend)
        shape = (batch, n_heads, 1)
        whole = merge(*parts)
        return Attended(whole.output.reshape(*shape, -1), whole.lse.reshape(shape))

    def reorder(self, rows: Tensor) -> None:
        self._far = None
        for pieces in (self._large, self._small):
            if pieces is not None:
                for field in dataclasses.fields(pieces):
                    tensor = getattr(pieces, field.name)
                    apart = tensor.unflatten(0, (rows.shape[0], -1)).index_select(0, rows)
                    setattr(pieces, field.name, apart.flatten(0, 1))

    def _layout(self, key: Tensor) -> Layout:
        return make_layout(1, key.shape[2] - self._start, causal=True, config=self._config)

    def _build(self, key: Tensor, value: Tensor, layout: Layout, first: int, last: int, joined: int) -> _Pieces:
        """Pieces over chunks `first` to `last - 1`."""
        begin = self._start + layout.sinks + first * layout.chunk
        some = dataclasses.replace(layout, sinks=0, n_pieces=last - first)
        slab = key[:, :, begin : begin + (last - first) * layout.chunk]
        rows, singles = place_pieces(slab, some, None, joined)
        rows, singles = rows + begin, singles + begin
        return _Pieces(rows, singles, take_rows(key, rows).mean(2), take_rows(value, rows).mean(2))

    def _build_far(self, key: Tensor, value: Tensor, layout: Layout) -> _Far:
        """All that steps need of the pieces."""
        seen = seen_behind(layout, layout.n_pieces)
        present = [part for part in (self._large, self._small) if part is not None]
        leaves = present[0] if len(present) == 1 else present[0].joined_with(present[1])
        keys, values = [leaves.mean_key], [leaves.mean_value]
        if layout.n_levels and self._large is not None:
            n_large = self._large.rows.shape[1]
            for tensor, tables in ((key, keys), (value, values)):
                singles = take_rows(tensor, self._large.singles)
                tables.extend(coarser(layout, tables[0][:, :n_large], singles))
        # coarsest first; the small pieces' leaves lie right behind those of the large
        shown = [slice(start, stop) for start, stop in seen.cuts[1:]]
        ranges = list(enumerate([slice(seen.cuts[0][0], leaves.rows.shape[1]), *shown]))[::-1]
        offsets = [sum(table.shape[1] for table in keys[:level]) for level in range(len(keys))]
        counts, shares = level_counts(layout), read_shares(layout)
        single = self._single_rows(leaves, layout, seen)
        wide = accumulation_dtype(key.dtype)
        sizes = torch.tensor([part.stop - part.start for _, part in ranges])
        bias, gains = (
            torch.repeat_interleave(torch.tensor([figures[level] for level, _ in ranges], dtype=wide), sizes)
            for figures in ([math.log(count) for count in counts], shares)
        )
        bias = torch.cat((bias, torch.zeros(single.shape[1], dtype=wide))).to(key.device)
        columns = Columns(
            torch.cat([keys[level][:, part] for level, part in ranges] + [take_rows(key, single)], dim=1),
            torch.cat([values[level][:, part] for level, part in ranges] + [take_rows(value, single)], dim=1),
            bias.expand(key.shape[0] * key.shape[1], 1, -1),
            int(sizes.sum()),
            gains.to(key.device) if layout.n_levels else None,
        )
        numbers = torch.cat([torch.arange(part.start, part.stop) + offsets[level] for level, part in ranges])
        return _Far(columns, numbers.to(key.device), Descent(keys), leaves.rows)

    def _single_rows(self, leaves: _Pieces, layout: Layout, seen: Seen) -> Tensor:
        """`[T, S]`: the sinks, kept singles of pieces shown as nodes, all singles of the other pieces."""
        n_trees, n_large = leaves.singles.shape[0], seen.large * layout.large_singles
        sinks = torch.arange(self._start, self._start + layout.sinks, device=leaves.singles.device)
        parts = [sinks.expand(n_trees, -1)]
        if seen.leaves_from > seen.nodes_from:
            by_piece = leaves.singles[:, :n_large].unflatten(1, (seen.large, layout.large_singles))
            parts.append(by_piece[:, seen.nodes_from : seen.leaves_from, : layout.kept].flatten(1))
        parts.append(leaves.singles[:, seen.leaves_from * layout.large_singles :])
        return torch.cat(parts, dim=1)

    def _attend_far(
        self, far: _Far, query: Tensor, key: Tensor, value: Tensor, layout: Layout, backend: Backend
    ) -> list[Attended]:
        """Stand-ins with singles, and the chosen leaves; each output `[T, G, 1, Dv]`, lse `[T, G, 1]`."""
        n_trees, group, _, dim = query.shape
        flat = query.reshape(n_trees, group, dim)
        output, lse, chosen = attend_columns(
            flat, far.columns, min(layout.n_chosen, far.columns.n_leaves), self._scale
        )
        parts = [Attended(output[:, :, None].to(value.dtype), lse[..., None])]
        if chosen.shape[-1]:
            leaves = far.numbers.index_select(0, chosen.reshape(-1)).view(chosen.shape)
            if far.columns.gains is not None:
                leaves = far.descent.to_leaves(flat, leaves)
            rows = far.rows.gather(1, leaves.reshape(n_trees, -1, 1).expand(-1, -1, layout.leaf))
            own_key, own_value = (
                take_rows(t, rows).view(n_trees * group, 1, -1, t.shape[-1]) for t in (key, value)
            )
            each = flat.reshape(-1, 1, 1, dim)
            output, lse = backend.forward(Tile(each, own_key, own_value, self._scale))
            parts.append(Attended(output.view(n_trees, group, 1, -1), lse.view(n_trees, group, 1)))
        return parts
