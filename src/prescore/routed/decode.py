"""Routed attention of a growing sequence: the key index of earlier chunks is kept, and grows chunk by chunk.

The caller owns keys and values and passes all of them; the key index holds what was derived from them. New tokens
are local keys until their chunk is far; then the chunk joins the key index. A step computes the logits of the
centroids, searches, and reads sinks, local keys and the far keys that it finds. A chunk of a prompt runs as one
call of native code or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore import checks
from prescore.config import Routed
from prescore.errors import Unsupported
from prescore.ops.operators import Operator, Tile, accumulation_dtype, pick_operator, readable
from prescore.routed import native, plain, reference, triton
from prescore.routed.backends import pick_backend, unsupported
from prescore.routed.layout import Layout, RoutedKeys, View, make_layout
from prescore.routed.native.library import loaded_level
from prescore.routed.reference import Clusters, Int8Keys, log_inverse_weight
from prescore.types import Attended, Reads, Values

MANY = 16
"""New tokens from which on one native call is faster than steps, which keep their tables."""


class Chunks(Protocol):
    """The key index of single chunks, by their number."""

    def __contains__(self, number: int, /) -> bool: ...

    def __getitem__(self, number: int, /) -> Clusters: ...

    def __setitem__(self, number: int, clusters: Clusters, /) -> None: ...


class GrowingClusters:
    """The key index of a sequence that is read in several calls: each call builds only the chunks that are new.

    For native code and kernels, without gradients and padding. Its owner drops it when keys change.
    """

    def __init__(self) -> None:
        self._made_for: tuple[object, ...] = ()
        self._clusters: Clusters | None = None

    def extended(self, key: Tensor, value: Tensor, layout: Layout, backend: str) -> Clusters:
        """The key index of all far chunks of keys `[B, Hkv, N, D]`."""
        geometry = (layout.sinks, layout.chunk_size, layout.cluster_size, backend, loaded_level())
        made_for = (*geometry, key.shape[:2], key.shape[-1], value.shape[-1], key.dtype)
        clusters = self._clusters if self._made_for == made_for else None
        n_done = 0 if clusters is None else clusters.key_cov.shape[1]
        if clusters is None or n_done > layout.n_chunks:
            clusters, n_done = None, 0
        if clusters is None or n_done < layout.n_chunks:
            begin = layout.sinks + n_done * layout.chunk_size
            new = _build(key, value, layout, begin, layout.n_chunks - n_done, backend)
            clusters = new if clusters is None else _joined(clusters, new)
        self._made_for, self._clusters = made_for, clusters
        return clusters


class RoutedIndex:
    """The key index of a growing sequence, for decoding.

    Each step gives the row that one full causal call would give; without gradients.

    Args:
        config: The configuration.
        scale: Factor of the logits.
        start: `[B]` index of each sequence's first real token (left padding), or None = all 0.
        grown: The key index of the prompt, where there is one; with it `start` is None.
        chunks: The key index of chunks that are known already, by their number; those built are added. Only for
            sequences without left padding.
    """

    def __init__(
        self,
        config: Routed,
        *,
        scale: float,
        start: Tensor | None = None,
        grown: GrowingClusters | None = None,
        chunks: Chunks | None = None,
    ) -> None:
        self._config, self._scale, self._start = config, scale, start
        self._grown, self._chunks = grown, chunks
        self._groups: list[tuple[slice, _SameStart]] = []
        self._kind: tuple[object, ...] = ()
        self._runners: tuple[Operator, str]  # of calls of this kind

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> Attended:
        """Attend for the newest positions, `query [B, Hq, n, D]`, over all keys and values so far."""
        kind = (backend, query.dtype, query.device, query.shape[-1], value.shape[-1], loaded_level())
        if self._kind != kind:
            self._kind, self._runners = kind, self._pick_runners(query, value.shape[-1], backend)
        operator, backend = self._runners
        if not self._groups:
            self._groups = self._split()
        n_query, steps = query.shape[2], []
        if n_query == 1 and len(self._groups) == 1:
            return self._groups[0][1].attend(query, key, value, operator, backend)
        if (n_query >= MANY or backend == "triton") and backend != "plain" and len(self._groups) == 1:
            attended = self._groups[0][1].attend_many(query, key, value, operator, backend)
            if attended is not None:
                return attended
        for place in range(n_query):  # each sees the keys before it, and the key index as it was then
            stop = key.shape[2] - n_query + place + 1
            one, keys, values = query[:, :, place : place + 1], key[:, :, :stop], value[:, :, :stop]
            parts = []
            for rows, group in self._groups:
                parts.append(group.attend(one[rows], keys[rows], values[rows], operator, backend))
            steps.append(parts)
        joined = [[torch.cat(tensors) for tensors in zip(*parts, strict=True)] for parts in steps]
        return Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*joined, strict=True)))

    def _pick_runners(self, query: Tensor, value_dim: int, backend: str) -> tuple[Operator, str]:
        """The operator for local keys, and what runs the far keys."""
        is_named = backend in ("native", "triton")
        reasons = unsupported(backend, query, value_dim, self._config) if is_named else []
        if reasons:
            raise Unsupported(f"backend {backend!r}", reasons)
        size = make_layout(1, 1, causal=True, config=self._config).cluster_size
        return pick_operator(query, backend), pick_backend(backend, query, value_dim, size)

    @property
    def reads(self) -> Reads:
        """Keys and centroids that a query read in the last step, on average over the sequences."""
        if len(self._groups) == 1:
            return self._groups[0][1].reads
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
        ran = [group.ran for _, group in self._groups if group.ran is not None]
        if not ran:
            return {}
        return {"backend": ran[0], **({"native_level": loaded_level()} if ran[0] == "native" else {})}

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
            known, self._grown = (self._grown, self._chunks), None
            return [(slice(0, None), _SameStart(self._config, self._scale, 0, *known))]
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
        means: Mean covariances over the first `n_chunks - R + 1`, ..., `n_chunks` chunks, `[T, R, ...]`.
        built_by: Operator and backend.
        step: Prepared native steps over all chunks; None = not prepared.
    """

    n_chunks: int
    clusters: Clusters
    means: tuple[Tensor, Tensor]
    built_by: tuple[str, str]
    step: native.PreparedStep | None = None

    @property
    def fewest(self) -> int:
        """The smallest number of chunks whose mean covariances are known."""
        return self.n_chunks - self.means[0].shape[1] + 1

    def trimmed(self) -> _Index:
        """Without the means that only earlier queries needed; a step may still be taken back."""
        if self.means[0].shape[1] <= 2:
            return self
        return replace(self, means=(self.means[0][:, -2:].clone(), self.means[1][:, -2:].clone()))


class _SameStart:
    """Sequences that start at the same index: their chunks end at the same time."""

    def __init__(
        self,
        config: Routed,
        scale: float,
        start: int,
        grown: GrowingClusters | None = None,
        chunks: Chunks | None = None,
    ) -> None:
        self._config, self._scale, self._start = config, scale, start
        self._grown, self._chunks = grown, chunks
        self._index: _Index | None = None
        self.reads = Reads(0.0)  # of the last step
        self.ran: str | None = None  # the backend of the last step; None = nothing was far

    def attend(self, query: Tensor, key: Tensor, value: Tensor, operator: Operator, backend: str) -> Attended:
        """The newest query `[B, Hq, 1, D]` of these sequences."""
        layout = make_layout(1, key.shape[2] - self._start, causal=True, config=self._config)
        query, key, value = (readable(t) for t in (query, key, value))
        grouped = query.reshape(-1, query.shape[1] // key.shape[1], 1, query.shape[-1])
        self.ran, n_read = None, 0.0
        if layout.n_chunks:
            self.ran = backend
            with torch.no_grad():
                self._index = self._extended(key, value, layout, operator, layout.n_chunks).trimmed()
                attended, n_read = self._attend_far(self._index, grouped, key, value, layout, operator)
        else:
            local_key, local_value = (t[:, :, self._start :].flatten(0, 1)[:, None] for t in (key, value))
            attended = operator.forward(Tile(grouped, local_key, local_value, self._scale))
        always = layout.n_keys - layout.n_chunks * layout.chunk_size
        self.reads = Reads(always + n_read, float(layout.n_chunks * layout.clusters_per_chunk))
        shape = query.shape[:3]
        return Attended(attended.output.reshape(*shape, -1), attended.lse.reshape(shape))

    def attend_many(
        self, query: Tensor, key: Tensor, value: Tensor, operator: Operator, backend: str
    ) -> Attended | None:
        """The newest queries `[B, Hq, n, D]` in one call of native code or kernels; None where nothing is far.

        Queries before `exact_until` read every key, as in a full call.
        """
        n_query = query.shape[2]
        layout = make_layout(n_query, key.shape[2] - self._start, causal=True, config=self._config)
        query, key, value = (readable(t) for t in (query, key, value))
        grouped = query.reshape(-1, query.shape[1] // key.shape[1], n_query, query.shape[-1])
        if not layout.n_chunks or layout.first < 0:
            return None
        self.ran = backend
        position = torch.arange(layout.first, layout.n_keys, dtype=torch.int64, device="cpu")
        chunks = layout.far_chunks(position)
        local_start = (layout.sinks + chunks * layout.chunk_size).masked_fill(chunks == 0, 0) + self._start
        counts, start, stop = (
            t.to(torch.int32).expand(len(grouped), n_query).contiguous()
            for t in (chunks * layout.clusters_per_chunk, local_start, position + 1 + self._start)
        )
        log_inverse = log_inverse_weight(self._config.min_weight)
        options = (True, layout.chunk_size, layout.clusters_per_chunk, log_inverse, self._scale)
        with torch.no_grad():
            index = self._extended(key, value, layout, operator, int(chunks[chunks > 0].min()))
            self._index = index.trimmed()
            first = index.fewest - 1  # covariances of fewer chunks are read by no query
            covs = [pad(mean, (0, 0, 0, 0, first, 0)) for mean in index.means]
            keys = self._routed_keys(key, value, index.clusters, layout, (covs[0], covs[1]))
            forward = native.forward if backend == "native" else triton.forward
            attended, _, read = forward(grouped, keys, View(counts, start, stop, *options, operator, backend))
        always = float((position + 1 - chunks * layout.chunk_size).double().mean())
        n_centroids = float(chunks.double().mean()) * layout.clusters_per_chunk
        self.reads = Reads(always + float(read[1]) / attended.lse.numel(), n_centroids)
        shape = query.shape[:3]
        return Attended(attended.output.to(value.dtype).reshape(*shape, -1), attended.lse.reshape(shape))

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
        means = (moved(index.means[0]), moved(index.means[1]))
        self._index = _Index(index.n_chunks, own, means, index.built_by)

    def _extended(self, key: Tensor, value: Tensor, layout: Layout, operator: Operator, fewest: int) -> _Index:
        """The key index with all chunks that are far by now; some query sees the `fewest` chunks, at least 1."""
        index, built_by = self._index, (operator.name, self.ran or "plain")
        if index is not None and (fewest < index.fewest or index.built_by != built_by):
            index = None
        done = 0 if index is None else index.n_chunks
        if index is not None and layout.n_chunks <= done:
            return index
        new = self._new_chunks(key, value, layout, done)
        covs, sums = [new.key_cov, new.key_value_cov], [new.key_cov[:, :0], new.key_value_cov[:, :0]]
        parts, means = _tensors(new), []
        if index is not None:
            old = index.clusters
            sums = [old.key_cov, old.key_value_cov]
            parts = [torch.cat(pair, dim=1) for pair in zip(_tensors(old), parts, strict=True)]
        count = torch.arange(done + 1, layout.n_chunks + 1, dtype=covs[0].dtype, device=covs[0].device)
        for place in range(2):
            total = covs[place].cumsum(1) + sums[place].sum(1, keepdim=True)
            sums[place] = total[:, -1:]
            mean = total / count[:, None, None]
            means.append(mean if index is None else torch.cat((index.means[place], mean), dim=1))
        return _Index(layout.n_chunks, _clusters(parts, sums[0], sums[1]), (means[0], means[1]), built_by)

    def _new_chunks(self, key: Tensor, value: Tensor, layout: Layout, done: int) -> Clusters:
        """The key index of the chunks after the first `done`: those known, then those built."""
        known, store = done, self._chunks
        while store is not None and known < layout.n_chunks and known in store:
            known += 1
        parts = [] if store is None else [store[number] for number in range(done, known)]
        if known < layout.n_chunks:
            begin = self._start + layout.sinks + known * layout.chunk_size
            built = self._build(key, value, layout, begin, layout.n_chunks - known)
            parts.append(built)
            if store is not None:
                for number in range(known, layout.n_chunks):
                    store[number] = _one_chunk(built, number - known, layout.clusters_per_chunk)
        if len(parts) == 1:
            return parts[0]
        covs = [torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("key_cov", "key_value_cov")]
        joined = [torch.cat(tensors, dim=1) for tensors in zip(*(_tensors(part) for part in parts), strict=True)]
        return _clusters(joined, *covs)

    def _build(self, key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int) -> Clusters:
        """The key index of chunks of keys `[B, Hkv, N, D]`, which are not copied."""
        backend = self.ran or "plain"
        grown, self._grown = self._grown, None
        if backend != "plain" and grown is not None and n_chunks == layout.n_chunks:
            return grown.extended(key, value, layout, backend)
        return _build(key, value, layout, begin, n_chunks, backend)

    def _attend_far(
        self, index: _Index, query: Tensor, key: Tensor, value: Tensor, layout: Layout, operator: Operator
    ) -> tuple[Attended, float]:
        """The step of `query [T, G, 1, D]`, and the far keys that each query read on average."""
        n_clusters = layout.n_chunks * layout.clusters_per_chunk
        is_latest = layout.n_chunks == index.n_chunks  # else a step was taken back
        local_start = self._start + layout.sinks + layout.n_chunks * layout.chunk_size
        log_inverse = log_inverse_weight(self._config.min_weight)
        if self.ran == "native":
            step = index.step if is_latest else None
            if step is None:
                keys = self._step_keys(key, value, index, layout)
                step = native.PreparedStep(native.Tables.of(keys), log_inverse, self._scale)
                if is_latest:
                    self._index = replace(index, step=step)
            return step.attend(query, key, value, n_clusters, local_start)
        counts, start, stop = (
            torch.full((query.shape[0], 1), n, dtype=torch.int32, device="cpu")
            for n in (n_clusters, local_start, key.shape[2])
        )
        options = (True, layout.chunk_size, n_clusters, log_inverse, self._scale, operator, self.ran or "plain")
        view = View(counts, start, stop, *options)
        keys = self._step_keys(key, value, index, layout)
        if self.ran == "triton":
            merged, _, read = triton.forward(query, keys, view)
            return Attended(merged.output.to(value.dtype), merged.lse), float(read[1]) / merged.lse.numel()
        local_key, local_value = (t[:, None, local_start:] for t in (keys.key, keys.value))
        wide = accumulation_dtype(query.dtype)
        tile = Tile(query, local_key, local_value, self._scale)
        local = Attended(*(t.to(wide) for t in operator.forward(tile)))
        merged, _, counts = plain.add_far(query, keys, view, local)
        return Attended(merged.output.to(value.dtype), merged.lse), float(counts[1]) / merged.lse.numel()

    def _step_keys(self, key: Tensor, value: Tensor, index: _Index, layout: Layout) -> RoutedKeys:
        """What a step sees: under the mean covariances of as many chunks as it has."""
        place = layout.n_chunks - index.fewest
        means = (index.means[0][:, place : place + 1], index.means[1][:, place : place + 1])
        return self._routed_keys(key, value, index.clusters, layout, means)

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


def _build(key: Tensor, value: Tensor, layout: Layout, begin: int, n_chunks: int, backend: str) -> Clusters:
    """The key index of chunks of keys `[B, Hkv, N, D]`, which are not copied."""
    if backend == "native":
        return native.build_clusters(key, value, layout, begin, n_chunks)
    span = slice(begin, begin + n_chunks * layout.chunk_size)
    keys, values = (t[:, :, span].flatten(0, 1) for t in (key, value))
    new = reference.build_clusters(keys, values, layout, 0, n_chunks)
    return replace(new, positions=new.positions + begin)


def _tensors(clusters: Clusters) -> list[Tensor]:
    """All that grows with the clusters, in the order of the fields; `_clusters` puts them together."""
    own = (clusters.positions, clusters.key, clusters.value)
    return [*own, *clusters.int8, *clusters.sub_int8, clusters.spread, clusters.radius]


def of_heads(clusters: Clusters, heads: slice) -> Clusters:
    """The key index of some KV heads."""
    return _clusters(
        [t[heads] for t in _tensors(clusters)], clusters.key_cov[heads], clusters.key_value_cov[heads]
    )


def _joined(first: Clusters, second: Clusters) -> Clusters:
    """The key index of consecutive chunks."""
    pairs = zip(_tensors(first), _tensors(second), strict=True)
    covs = ((first.key_cov, second.key_cov), (first.key_value_cov, second.key_value_cov))
    return _clusters([torch.cat(pair, dim=1) for pair in pairs], *(torch.cat(pair, dim=1) for pair in covs))


def _one_chunk(clusters: Clusters, chunk: int, size: int) -> Clusters:
    """The key index of one chunk of `size` clusters, in memory of its own."""
    own = [part[:, chunk * size : (chunk + 1) * size].clone() for part in _tensors(clusters)]
    covs = [part[:, chunk : chunk + 1].clone() for part in (clusters.key_cov, clusters.key_value_cov)]
    return _clusters(own, *covs)


def _clusters(parts: list[Tensor], key_cov: Tensor, key_value_cov: Tensor) -> Clusters:
    positions, key, value, numbers, scales, sub_numbers, sub_scales, spread, radius = parts
    int8, sub_int8 = Int8Keys(numbers, scales), Int8Keys(sub_numbers, sub_scales)
    return Clusters(positions, key, value, int8, sub_int8, spread, radius, key_cov, key_value_cov)
