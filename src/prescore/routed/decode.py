"""Routed attention one token at a time: the key index of earlier chunks is kept, and grows chunk by chunk.

The caller owns keys and values and passes all of them; the key index holds what was derived from them. New tokens
are local keys until their chunk is far; then the chunk joins the key index. A step computes the logits of the
centroids, searches, and reads sinks, local keys and the far keys that it finds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prescore import checks
from prescore.config import Routed
from prescore.errors import Unsupported
from prescore.ops.backend import Backend, Tile, accumulation_dtype, pick_backend, readable
from prescore.ops.native.library import loaded_level
from prescore.routed import native, plain, reference
from prescore.routed.layout import Layout, RoutedKeys, View, make_layout
from prescore.routed.reference import Clusters, Int8Keys, log_inverse_weight
from prescore.types import Attended, Reads, Values


class RoutedIndex:
    """The key index of a growing sequence, for decoding.

    Each step gives the row that one full causal call would give; without gradients.

    Args:
        config: The configuration.
        scale: Factor of the logits.
        start: `[B]` index of each sequence's first real token (left padding), or None = all 0.
    """

    def __init__(self, config: Routed, *, scale: float, start: Tensor | None = None) -> None:
        self._config, self._scale, self._start = config, scale, start
        self._groups: list[tuple[slice, _SameStart]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> Attended:
        """Attend for the newest positions, `query [B, Hq, n, D]`, over all keys and values so far."""
        reasons = native.unsupported(query, value.shape[-1], self._config) if backend == "native" else []
        if reasons:
            raise Unsupported("backend 'native'", reasons)
        operator = pick_backend(query, backend)
        may_run_native = backend in ("auto", "native")
        if not self._groups:
            self._groups = self._split()
        n_query, steps = query.shape[2], []
        if n_query == 1 and len(self._groups) == 1:
            return self._groups[0][1].attend(query, key, value, operator, may_run_native)
        for place in range(n_query):  # each sees the keys before it, and the key index as it was then
            stop = key.shape[2] - n_query + place + 1
            one, keys, values = query[:, :, place : place + 1], key[:, :, :stop], value[:, :, :stop]
            parts = []
            for rows, group in self._groups:
                parts.append(group.attend(one[rows], keys[rows], values[rows], operator, may_run_native))
            steps.append(parts)
        joined = [[torch.cat(tensors) for tensors in zip(*parts, strict=True)] for parts in steps]
        return Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*joined, strict=True)))

    @property
    def reads(self) -> Reads:
        """Keys and centroids that a query read in the last step, on average over the sequences."""
        sizes = [1 if rows.stop is None else rows.stop - rows.start for rows, _ in self._groups]
        groups = [group.reads for _, group in self._groups]
        totals = (
            sum(size * read[part] for size, read in zip(sizes, groups, strict=True)) / max(1, sum(sizes))
            for part in range(2)
        )
        return Reads(*totals)

    @property
    def stats(self) -> Values:
        """Of the last step: which backend ran; empty where nothing was far."""
        ran = [group.runs_native for _, group in self._groups if group.runs_native is not None]
        if not ran:
            return {}
        return {"backend": "native", "native_level": loaded_level()} if ran[0] else {"backend": "plain"}

    def crop(self, n_keys: int) -> None:
        """Drop the key index if a chunk in it loses keys; the next step builds it again."""
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
            # sequences with other starts become neighbours: build anew
            self._start, self._groups = self._start.index_select(0, rows), []

    def _split(self) -> list[tuple[slice, _SameStart]]:
        """Neighbours in the batch with the same start, as slices: a copy of all keys costs more than a step."""
        if self._start is None:
            return [(slice(0, None), _SameStart(self._config, self._scale, 0))]
        checks.integer("start", int(self._start.min()), minimum=0)
        starts, counts = (t.tolist() for t in torch.unique_consecutive(self._start, return_counts=True))
        groups, end = [], 0
        for start, count in zip(starts, counts, strict=True):
            groups.append((slice(end, end + count), _SameStart(self._config, self._scale, start)))
            end += count
        return groups


@dataclass(frozen=True, eq=False)
class _Index:
    """The key index of the first chunks.

    Attributes:
        n_chunks: How many there are.
        clusters: Of all of them; the covariances are sums over chunks, `[T, 1, ...]`.
        means: Mean covariances over all chunks.
        means_before: Mean covariances without the last chunk, used after a crop.
        built_by: Operator, and whether native code built it.
        step: Prepared native steps over all chunks; None = not prepared.
    """

    n_chunks: int
    clusters: Clusters
    means: tuple[Tensor, Tensor]
    means_before: tuple[Tensor, Tensor]
    built_by: tuple[str, bool]
    step: native.PreparedStep | None = None


class _SameStart:
    """Sequences that start at the same index: their chunks end at the same time."""

    def __init__(self, config: Routed, scale: float, start: int) -> None:
        self._config, self._scale, self._start = config, scale, start
        self._index: _Index | None = None
        self.reads = Reads(0.0)  # of the last step
        self.runs_native: bool | None = None  # in the last step; None = nothing was far

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, backend: Backend, may_run_native: bool
    ) -> Attended:
        """The newest query `[B, Hq, 1, D]` of these sequences."""
        layout = make_layout(1, key.shape[2] - self._start, causal=True, config=self._config)
        query, key, value = (readable(t) for t in (query, key, value))
        grouped = query.reshape(-1, query.shape[1] // key.shape[1], 1, query.shape[-1])
        self.runs_native, n_read = None, 0.0
        if layout.n_chunks:
            self.runs_native = may_run_native and native.can_run(grouped, value.shape[-1], layout.cluster_size)
            with torch.no_grad():
                self._index = self._extended(key, value, layout, backend)
                attended, n_read = self._attend_far(self._index, grouped, key, value, layout, backend)
        else:
            local_key, local_value = (t[:, :, self._start :].flatten(0, 1)[:, None] for t in (key, value))
            attended = backend.forward(Tile(grouped, local_key, local_value, self._scale))
        always = layout.n_keys - layout.n_chunks * layout.chunk_size
        self.reads = Reads(always + n_read, float(layout.n_chunks * layout.clusters_per_chunk))
        shape = query.shape[:3]
        return Attended(attended.output.reshape(*shape, -1), attended.lse.reshape(shape))

    def crop(self, n_keys: int) -> None:
        """Drop the key index if a chunk in it loses keys; the next step builds it again."""
        if self._index is None:
            return
        layout = make_layout(1, max(1, n_keys - self._start), causal=True, config=self._config)
        if n_keys < self._start + layout.sinks + self._index.n_chunks * layout.chunk_size:
            self._index = None

    def reorder(self, rows: Tensor) -> None:
        """Sequence i becomes a copy of sequence `rows[i]`."""
        if self._index is None:
            return

        def moved(tensor: Tensor) -> Tensor:
            apart: Tensor = tensor.unflatten(0, (rows.shape[0], -1)).index_select(0, rows)
            return apart.flatten(0, 1)

        index, clusters = self._index, self._index.clusters
        covs = (moved(clusters.key_cov), moved(clusters.key_value_cov))
        own = _clusters([moved(part) for part in _tensors(clusters)], *covs)
        means, before = ((moved(key), moved(both)) for key, both in (index.means, index.means_before))
        self._index = _Index(index.n_chunks, own, means, before, index.built_by)

    def _extended(self, key: Tensor, value: Tensor, layout: Layout, backend: Backend) -> _Index:
        """The key index with all chunks that are far by now."""
        index, built_by = self._index, (backend.name, bool(self.runs_native))
        if index is not None and (layout.n_chunks < index.n_chunks - 1 or index.built_by != built_by):
            index = None
        done = 0 if index is None else index.n_chunks
        if index is not None and layout.n_chunks <= done:
            return index
        begin = self._start + layout.sinks + done * layout.chunk_size
        new = self._build(key, value, layout, begin, layout.n_chunks - done)
        sums = [part.sum(1, keepdim=True) for part in (new.key_cov, new.key_value_cov)]
        last = [part[:, -1:] for part in (new.key_cov, new.key_value_cov)]
        parts = _tensors(new)
        if index is not None:
            old = index.clusters
            sums = [before + more for before, more in zip((old.key_cov, old.key_value_cov), sums, strict=True)]
            parts = [torch.cat(pair, dim=1) for pair in zip(_tensors(old), parts, strict=True)]
        clusters = _clusters(parts, *sums)
        count = layout.n_chunks
        means = (sums[0] / count, sums[1] / count)
        before = ((sums[0] - last[0]) / max(1, count - 1), (sums[1] - last[1]) / max(1, count - 1))
        return _Index(count, clusters, means, before, built_by)

    def _build(self, key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int) -> Clusters:
        """The key index of chunks of keys `[B, Hkv, N, D]`, which are not copied."""
        if self.runs_native and native.can_build(key, value, layout):
            return native.build_clusters(key, value, layout, begin, n_chunks)
        span = slice(begin, begin + n_chunks * layout.chunk_size)
        keys, values = (t[:, :, span].flatten(0, 1) for t in (key, value))
        new = reference.build_clusters(keys, values, layout, 0, n_chunks)
        return replace(new, positions=new.positions + begin)

    def _attend_far(
        self, index: _Index, query: Tensor, key: Tensor, value: Tensor, layout: Layout, backend: Backend
    ) -> tuple[Attended, float]:
        """The step of `query [T, G, 1, D]`, and the far keys that each query read on average."""
        n_clusters = layout.n_chunks * layout.clusters_per_chunk
        is_latest = layout.n_chunks == index.n_chunks  # else a step was taken back
        means = index.means if is_latest else index.means_before
        local_start = self._start + layout.sinks + layout.n_chunks * layout.chunk_size
        log_inverse = log_inverse_weight(self._config.min_weight)
        if self.runs_native:
            step = index.step if is_latest else None
            if step is None:
                keys = self._routed_keys(key, value, index.clusters, layout, means)
                step = native.PreparedStep(native.Tables.of(keys), log_inverse, self._scale)
                if is_latest:
                    self._index = replace(index, step=step)
            return step.attend(query, key, value, n_clusters, local_start)
        counts, start, stop = (
            torch.full((query.shape[0], 1), n, dtype=torch.int32, device="cpu")
            for n in (n_clusters, local_start, key.shape[2])
        )
        options = (True, layout.chunk_size, n_clusters, log_inverse, self._scale, backend, False)
        view = View(counts, start, stop, *options)
        keys = self._routed_keys(key, value, index.clusters, layout, means)
        local_key, local_value = (t[:, None, local_start:] for t in (keys.key, keys.value))
        wide = accumulation_dtype(query.dtype)
        tile = Tile(query, local_key, local_value, self._scale)
        local = Attended(*(t.to(wide) for t in backend.forward(tile)))
        merged, _, counts = plain.add_far(query, keys, view, local)
        return Attended(merged.output.to(value.dtype), merged.lse), float(counts[1]) / merged.lse.numel()

    def _routed_keys(
        self, key: Tensor, value: Tensor, clusters: Clusters, layout: Layout, means: tuple[Tensor, Tensor]
    ) -> RoutedKeys:
        keys, values = key.flatten(0, 1), value.flatten(0, 1)
        sinks = slice(self._start, self._start + layout.sinks)
        centroids = (clusters.key, clusters.value, *means)
        return RoutedKeys(
            *(keys, values, keys[:, sinks], values[:, sinks], *centroids, clusters.positions),
            *(*clusters.int8, *clusters.sub_int8, clusters.spread, clusters.radius),
        )


def _tensors(clusters: Clusters) -> list[Tensor]:
    """All that grows with the clusters, in the order of the fields; `_clusters` puts them together."""
    own = (clusters.positions, clusters.key, clusters.value)
    return [*own, *clusters.int8, *clusters.sub_int8, clusters.spread, clusters.radius]


def _clusters(parts: list[Tensor], key_cov: Tensor, key_value_cov: Tensor) -> Clusters:
    positions, key, value, numbers, scales, sub_numbers, sub_scales, spread, radius = parts
    int8, sub_int8 = Int8Keys(numbers, scales), Int8Keys(sub_numbers, sub_scales)
    return Clusters(positions, key, value, int8, sub_int8, spread, radius, key_cov, key_value_cov)
