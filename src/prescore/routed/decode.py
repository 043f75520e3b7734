"""Routed attention one token at a time: nodes of the past are kept, only what a step looks for is read.

The caller owns keys and values and passes all of them; the index holds what was derived from them. New tokens stay
in the exactly read local part until their chunk is far enough behind, then it becomes nodes. A step costs
centroids, codes of outlier keys and of the nodes it searches, and the rows it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from prescore import checks
from prescore.config import Routed
from prescore.ops.backend import Backend, Needs, Tile, accumulation_dtype, pick_backend, readable
from prescore.ops.native.library import NO_LEVEL
from prescore.rng import DEFAULT_SEED, Streams
from prescore.routed.attention import error_figures, search_of
from prescore.routed.error_bound import attend_within, is_over, read_all
from prescore.routed.index import Nodes, build_nodes
from prescore.routed.layout import Layout, make_layout
from prescore.routed.native import PreparedStep, build_nodes_compiled, can_build, level_for, make_tables
from prescore.routed.plain import attend_plain
from prescore.routed.sources import Sources, View
from prescore.types import Attended, Values


class RoutedIndex:
    """Nodes of a growing sequence, for decoding.

    A step equals the row of a whole causal call (contract, identity 10); without gradients.

    Args:
        config: The geometry, how many rows are looked for, and the tolerance.
        scale: Factor of the logits.
        start: `[B]` index of each sequence's first real token (left padding), or None = all 0.
        seed: Of the draws that a tolerance needs.
    """

    def __init__(
        self, config: Routed, *, scale: float, start: Tensor | None = None, seed: int = DEFAULT_SEED
    ) -> None:
        self._config, self._scale, self._seed = config, scale, Streams(seed).child("samples").seed
        self._start = start
        self._groups: list[tuple[slice, _Lockstep]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> Attended:
        """Attend for the newest positions, `query [B, Hq, n, D]`, over all keys and values so far."""
        chosen = pick_backend(Needs.of(query), backend)
        if not self._groups:
            self._groups = self._split()
        n_query, steps = query.shape[2], []
        for place in range(n_query):  # each sees the keys before it, and nodes as they were then
            stop = key.shape[2] - n_query + place + 1
            asked, keys, values = query[:, :, place : place + 1], key[:, :, :stop], value[:, :, :stop]
            steps.append([own.attend(asked[rows], keys[rows], values[rows], chosen) for rows, own in self._groups])
        if len(steps) == 1 and len(steps[0]) == 1:
            return steps[0][0]
        wholes = [[torch.cat(tensors) for tensors in zip(*parts, strict=True)] for parts in steps]
        return Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*wholes, strict=True)))

    @property
    def keys_read(self) -> float:
        """Keys and centroids that a query met in the last step, on average over the sequences."""
        sizes = [1 if rows.stop is None else rows.stop - rows.start for rows, _ in self._groups]
        met = sum(size * group.n_read for size, (_, group) in zip(sizes, self._groups, strict=True))
        return met / max(1, sum(sizes))

    @property
    def figures(self) -> Values:
        """Of the last step: which compiled code ran; with a tolerance, its error bars and who read on."""
        levels = [group.native for _, group in self._groups if group.native is not None]
        figures: Values = {"native_level": levels[0]} if levels else {}
        bars = [group.bars for _, group in self._groups if group.bars is not None]
        if bars:
            parts = zip(*bars, strict=True)
            figures.update(error_figures(*(torch.cat([each.flatten() for each in part]) for part in parts)))
        return figures

    def crop(self, n_keys: int) -> None:
        """Forget what was made of keys after the first `n_keys`."""
        for _, group in self._groups:
            group.crop(n_keys)

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
            return [(slice(0, None), _Lockstep(self._config, self._scale, 0, self._seed))]
        checks.integer("start", int(self._start.min()), minimum=0)
        starts, counts = (t.tolist() for t in torch.unique_consecutive(self._start, return_counts=True))
        groups, end = [], 0
        for start, count in zip(starts, counts, strict=True):
            groups.append((slice(end, end + count), _Lockstep(self._config, self._scale, start, self._seed)))
            end += count
        return groups


@dataclass(frozen=True, eq=False)
class _Past:
    """What was made of the first chunks.

    Attributes:
        nodes: Of all of them; the covariances are sums over chunks, `[T, 1, ...]`.
        means: The covariances' means over all chunks.
        means_before: Those without the last one: a step that was taken back sees one chunk less.
        made_by: The backend's name and the level of compiled code.
        steps: Over all of them, in compiled code; None = not prepared.
    """

    n_chunks: int
    nodes: Nodes
    means: tuple[Tensor, Tensor]
    means_before: tuple[Tensor, Tensor]
    made_by: tuple[str, str]
    steps: PreparedStep | None = None


class _Lockstep:
    """Sequences that start at the same index, hence gain nodes at the same time."""

    def __init__(self, config: Routed, scale: float, start: int, seed: int) -> None:
        self._config, self._scale, self._start, self._seed = config, scale, start, seed
        self._past: _Past | None = None
        self.n_read = 0.0  # rows of the last step
        self.native: str | None = None  # the level of compiled code in it; None = nothing was far
        self.bars: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # see `error_figures`

    def attend(self, query: Tensor, key: Tensor, value: Tensor, backend: Backend) -> Attended:
        """The newest query `[B, Hq, 1, D]` of these sequences."""
        layout = make_layout(1, key.shape[2] - self._start, causal=True, config=self._config)
        query, key, value = (readable(t) for t in (query, key, value))
        grouped = query.reshape(-1, query.shape[1] // key.shape[1], 1, query.shape[-1])
        self.bars = None
        self.native = level_for(grouped, value.shape[-1], layout.leaf, backend) if layout.n_chunks else None
        if layout.n_chunks:
            with torch.no_grad():
                self._past = self._extended(key, value, layout, backend)
                attended, found = self._attend_far(self._past, grouped, key, value, layout, backend)
        else:
            near_key, near_value = (t[:, :, self._start :].flatten(0, 1)[:, None] for t in (key, value))
            attended, found = backend.forward(Tile(grouped, near_key, near_value, self._scale)), 0.0
        self.n_read = layout.last_rows_in_any_case + found
        shape = query.shape[:3]
        return Attended(attended.output.reshape(*shape, -1), attended.lse.reshape(shape))

    def crop(self, n_keys: int) -> None:
        """Forget nodes of keys after the first `n_keys`."""
        if self._past is None:
            return
        layout = make_layout(1, max(1, n_keys - self._start), causal=True, config=self._config)
        if n_keys < self._start + layout.sinks + self._past.n_chunks * layout.chunk:
            self._past = None

    def reorder(self, rows: Tensor) -> None:
        """Sequence i becomes a copy of sequence `rows[i]`."""
        if self._past is None:
            return

        def moved(tensor: Tensor) -> Tensor:
            apart: Tensor = tensor.unflatten(0, (rows.shape[0], -1)).index_select(0, rows)
            return apart.flatten(0, 1)

        past, nodes = self._past, self._past.nodes
        codes = type(nodes.codes)(*(moved(part) for part in nodes.codes))
        own = {f.name: moved(getattr(nodes, f.name)) for f in fields(nodes) if f.name != "codes"}
        means, before = ((moved(spread), moved(drift)) for spread, drift in (past.means, past.means_before))
        self._past = _Past(past.n_chunks, Nodes(**own, codes=codes), means, before, past.made_by)

    def _extended(self, key: Tensor, value: Tensor, layout: Layout, backend: Backend) -> _Past:
        """With nodes of all chunks that are far enough behind by now."""
        past, made_by = self._past, (backend.name, self.native or NO_LEVEL)
        if past is not None and (layout.n_chunks < past.n_chunks - 1 or past.made_by != made_by):
            past = None
        done = 0 if past is None else past.n_chunks
        if past is not None and layout.n_chunks <= done:
            return past
        begin = self._start + layout.sinks + done * layout.chunk
        new = _new_nodes(key, value, layout, begin, layout.n_chunks - done, backend)
        sums = [part.sum(1, keepdim=True) for part in (new.spread, new.drift)]
        last = [part[:, -1:] for part in (new.spread, new.drift)]
        if past is not None:
            sums = [old + own for old, own in zip((past.nodes.spread, past.nodes.drift), sums, strict=True)]
            parts = [torch.cat(pair, dim=1) for pair in zip(_tensors(past.nodes), _tensors(new), strict=True)]
        else:
            parts = _tensors(new)
        rows, keys, values, *codes = parts
        nodes = Nodes(rows, keys, values, type(new.codes)(*codes), sums[0], sums[1])
        count = layout.n_chunks
        means = (sums[0] / count, sums[1] / count)
        before = ((sums[0] - last[0]) / max(1, count - 1), (sums[1] - last[1]) / max(1, count - 1))
        return _Past(count, nodes, means, before, made_by)

    def _attend_far(
        self, past: _Past, query: Tensor, key: Tensor, value: Tensor, layout: Layout, backend: Backend
    ) -> tuple[Attended, float]:
        """The step of `query [T, G, 1, D]`, and the rows that each query found on average."""
        n_nodes = layout.n_chunks * layout.nodes_per_chunk
        spread, drift = past.means if layout.n_chunks == past.n_chunks else past.means_before
        near = self._start + layout.sinks + layout.n_chunks * layout.chunk
        tolerant, search = self._config.tolerance is not None, search_of(self._config)
        if not tolerant and self.native != NO_LEVEL:
            steps = past.steps
            if steps is None or spread is not past.means[0]:  # a step that was taken back sees one chunk less
                tables = make_tables(self._sources(key, value, past.nodes, layout, spread, drift))
                steps = PreparedStep(tables, search, self._scale)
                if spread is past.means[0]:
                    self._past = replace(past, steps=steps)
            return steps.attend(query, (key, value), n_nodes, near)
        shape = (query.shape[0], 1)
        visible, first, stop = (torch.full(shape, n, dtype=torch.int32) for n in (n_nodes, near, key.shape[2]))
        # one pool whatever the nodes: these are the means over all that is seen
        view = View(visible, first, stop, True, layout.chunk, n_nodes, search, self._scale, backend)
        sources = self._sources(key, value, past.nodes, layout, spread, drift)
        tile = Tile(query, sources.key[:, None, near:], sources.value[:, None, near:], self._scale)
        wide = accumulation_dtype(query.dtype)
        found = Attended(*(t.to(wide) for t in backend.forward(tile)))
        if tolerant:
            return self._within(query, sources, view, found)
        whole, _, counts = attend_plain(query, sources, view, found)
        return Attended(whole.output.to(value.dtype), whole.lse), float(counts[1]) / whole.lse.numel()

    def _within(self, query: Tensor, sources: Sources, view: View, near: Attended) -> tuple[Attended, float]:
        """The step to the configuration's tolerance; where no search is enough, everything is read."""
        bars = attend_within(query, sources, view, near, self._config, self._seed)
        whole, over = Attended(bars.output, bars.lse), is_over(bars.limit, self._config)
        read_all(query, sources, view, near, over, whole, self._start)
        self.bars = bars.limit, bars.error, bars.further, over
        n_read = float(bars.counts[1]) + float(over.sum()) * (sources.key.shape[1] - self._start)
        return Attended(whole.output.to(query.dtype), whole.lse), n_read / over.numel()

    def _sources(
        self, key: Tensor, value: Tensor, nodes: Nodes, layout: Layout, spread: Tensor, drift: Tensor
    ) -> Sources:
        keys, values = key.flatten(0, 1), value.flatten(0, 1)
        sinks = slice(self._start, self._start + layout.sinks)
        return Sources(
            key=keys,
            value=values,
            sink_key=keys[:, sinks],
            sink_value=values[:, sinks],
            node_key=nodes.key,
            node_value=nodes.value,
            spread=spread,
            drift=drift,
            rows=nodes.rows,
            packed=nodes.codes.packed,
            scales=nodes.codes.scales,
        )


def _new_nodes(key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int, backend: Backend) -> Nodes:
    """Nodes of chunks of keys `[B, Hkv, N, D]`, which are not copied."""
    if can_build(key, value, layout, backend):
        return build_nodes_compiled(key, value, layout, begin, n_chunks)
    span = slice(begin, begin + n_chunks * layout.chunk)
    some_keys, some_values = (t[:, :, span].flatten(0, 1) for t in (key, value))
    new = build_nodes(some_keys, some_values, layout, 0, n_chunks)
    return replace(new, rows=new.rows + begin)


def _tensors(nodes: Nodes) -> list[Tensor]:
    return [nodes.rows, nodes.key, nodes.value, *nodes.codes]
