"""The key index: what queries see of far keys. Reference, backends, prompts and steps use the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from prescore.routed.layout import Layout

SUMMED = (
    *("sink_key", "sink_value", "centroid_key", "centroid_value"),
    *("key_cov", "key_value_cov", "span_key_cov", "span_key_value_cov"),
)
"""The fields that gradients reach."""


@dataclass(frozen=True, eq=False)
class KeyIndex:
    """`T` KV heads with `S` sinks and `C` chunks, cut into `M` clusters of `L` keys, `B` subclusters each.

    Consecutive chunks form *spans*. A query reads one covariance of each span of which it sees a chunk. Native
    code stores positions as int32, and int8 keys in another order (`native.build_index`). The functions of the
    reference take the fields of one KV head (`of_head`): without `T`, and with one covariance per span in
    `key_cov` and `key_value_cov`. The last covariance is the mean over the chunks of the last span that the query
    sees.

    Attributes:
        clusters_per_span: Clusters of a span.
        sink_key, sink_value: `[T, S, D]`, `[T, S, Dv]` the first keys and values.
        centroid_key, centroid_value: `[T, M, D]`, `[T, M, Dv]` in the accumulation dtype.
        key_cov: `[T, C, D, D]` covariance of keys within clusters. `build_index` gives that of each chunk. Queries
            read means (`reference.covariances_of_spans`): entry `i` is the mean over the chunks of a span, from
            the first one to chunk `i`. Where only the last mean is kept, `C` is 1.
        key_value_cov: `[T, C, D, Dv]` covariance of keys and values within clusters, in the same form.
        span_key_cov, span_key_value_cov: `[T, P, D, D]`, `[T, P, D, Dv]` means over each complete span; `P` is 0
            in what `build_index` returns.
        positions: `[T, M, L]` where the keys of each cluster are, one subcluster after the other.
        int8, scales: `[T, M, L, D]` differences of keys and centroids as whole numbers from -63 to 63, and
            `[T, M]` what a unit is worth in each cluster.
        sub_int8, sub_scales: `[T, M, B, D]`, `[T, M]` the same for the centroids of the subclusters.
        spread: `[T, M, B]` root of the mean squared distance of a subcluster's keys from their centroid.
        radius: `[T, M]` 1.5 times the largest such root in a cluster, of distances from its centroid.
    """

    clusters_per_span: int
    sink_key: Tensor
    sink_value: Tensor
    centroid_key: Tensor
    centroid_value: Tensor
    key_cov: Tensor
    key_value_cov: Tensor
    span_key_cov: Tensor
    span_key_value_cov: Tensor
    positions: Tensor
    int8: Tensor
    scales: Tensor
    sub_int8: Tensor
    sub_scales: Tensor
    spread: Tensor
    radius: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def having(self, **tensors: Tensor) -> KeyIndex:
        """With other tensors of these names."""
        return KeyIndex(self.clusters_per_span, **{**self.tensors(), **tensors})

    def map(self, change: Callable[[Tensor], Tensor]) -> KeyIndex:
        """Every tensor changed in the same way."""
        return self.having(**{name: change(tensor) for name, tensor in self.tensors().items()})

    def under(self, covariance: int) -> KeyIndex:
        """This index with a single entry of `key_cov` and `key_value_cov`, the one of this number."""
        some = slice(covariance, covariance + 1)
        return self.having(key_cov=self.key_cov[:, some], key_value_cov=self.key_value_cov[:, some])

    def chunks(self, some: slice, clusters_per_chunk: int) -> KeyIndex:
        """Some chunks with their clusters, as they were built."""
        clusters = slice(some.start * clusters_per_chunk, some.stop * clusters_per_chunk)
        everything = dict.fromkeys(("sink_key", "sink_value", "span_key_cov", "span_key_value_cov"), slice(None))
        axis = {**everything, "key_cov": some, "key_value_cov": some}
        return self.having(**{name: t[:, axis.get(name, clusters)] for name, t in self.tensors().items()})

    def of_head(self, head: int, n_clusters: int, covariance: int) -> KeyIndex:
        """The fields of one KV head for queries that see the first `n_clusters`, under this entry of `key_cov`."""
        spans = slice((n_clusters - 1) // self.clusters_per_span)
        last, all_sinks = slice(covariance, covariance + 1), slice(None)
        seen = {"sink_key": all_sinks, "sink_value": all_sinks, "key_cov": last, "key_value_cov": last}
        seen |= {"span_key_cov": spans, "span_key_value_cov": spans}
        tensors = {name: t[head, seen.get(name, slice(n_clusters))] for name, t in self.tensors().items()}
        index, wide = self.having(**tensors), self.centroid_key.dtype
        return index.having(
            sink_key=index.sink_key.to(wide),
            sink_value=index.sink_value.to(wide),
            key_cov=torch.cat((index.span_key_cov, index.key_cov)),
            key_value_cov=torch.cat((index.span_key_value_cov, index.key_value_cov)),
        )

    @classmethod
    def cat(cls, parts: Sequence[KeyIndex]) -> KeyIndex:
        """The key index of consecutive chunks."""
        if len(parts) == 1:
            return parts[0]
        all_fields = [part.tensors() for part in parts]
        joined = {name: torch.cat([tensors[name] for tensors in all_fields], dim=1) for name in all_fields[0]}
        sinks = {"sink_key": parts[0].sink_key, "sink_value": parts[0].sink_value}
        return cls(parts[0].clusters_per_span, **{**joined, **sinks})


Build = Callable[[Tensor, Tensor, Layout, int, str], KeyIndex]
"""Keys and values `[B, Hkv, N, D]`, layout, how many chunks are built already, backend -> the other far chunks."""


class GrowingIndex:
    """The key index of sequences that are read in several calls: each call builds only the new chunks.

    Chunks of a prompt and steps share one `GrowingIndex`. It serves calls without gradients and padding. The owner
    must drop it when keys change. A copy and the original grow independently.

    Args:
        build: Builds the key index of new chunks.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._made_for: tuple[object, ...] = ()
        self._index: KeyIndex | None = None
        self._n_chunks = self._end = self._kv_heads = 0
        self._sums: tuple[Tensor, Tensor] | None = None

    def extend(
        self, key: Tensor, value: Tensor, layout: Layout, backend: str, fewest: int | None = None
    ) -> KeyIndex:
        """The key index of all far chunks, at least one, of keys `[B, Hkv, N, D]`.

        Of `n` chunks, the covariances are those of queries that see the first `n - R + 1`, ..., `n` chunks. `R` is
        large enough for a query that sees `fewest` chunks. None = every query sees all chunks of the layout.
        """
        made_for = (backend, layout.sinks, layout.chunk_size, layout.cluster_size)
        made_for = (*made_for, *key.shape[:2], key.shape[-1], value.shape[-1], key.dtype, key.device)
        fewest = layout.n_chunks if fewest is None else fewest
        index = self._index if self._made_for == made_for else None
        if index is not None and fewest <= self._n_chunks - index.key_cov.shape[1]:
            index = None  # means of so few chunks are not known any more
        n_done = 0 if index is None else self._n_chunks
        if index is None or n_done < layout.n_chunks:
            self._made_for, self._kv_heads, self._n_chunks = made_for, key.shape[1], layout.n_chunks
            self._end = layout.sinks + layout.n_chunks * layout.chunk_size
            new = self._build(key, value, layout, n_done, backend)
            index = self._joined(index, new, layout.chunks_per_span, n_done)
            # a step may still be taken back, so two means are kept
            self._index = index
            if index.key_cov.shape[1] > 2:
                latest = (index.key_cov[:, -2:].clone(), index.key_value_cov[:, -2:].clone())
                self._index = index.having(key_cov=latest[0], key_value_cov=latest[1])
            if fewest >= self._n_chunks - 1:
                return self._index
        return index

    def holds(self, index: KeyIndex, n_clusters: int) -> bool:
        """Whether this is the key index of so many clusters."""
        return self._index is index and index.positions.shape[1] == n_clusters

    def crop(self, n_keys: int) -> None:
        """Forget everything if a chunk loses keys; the next call builds it again."""
        if n_keys < self._end:
            self._index = None

    def reorder(self, rows: Tensor) -> None:
        """Sequence i becomes a copy of sequence `rows[i]`."""
        if self._index is None or self._sums is None:
            return

        def moved(tensor: Tensor) -> Tensor:
            by_sequence: Tensor = tensor.unflatten(0, (-1, self._kv_heads)).index_select(0, rows)
            return by_sequence.flatten(0, 1)

        self._index, self._sums = self._index.map(moved), (moved(self._sums[0]), moved(self._sums[1]))
        geometry, shape = self._made_for[:4], self._made_for[5:]
        self._made_for = (*geometry, len(rows), *shape)

    def _joined(self, index: KeyIndex | None, new: KeyIndex, chunks_per_span: int, n_done: int) -> KeyIndex:
        """The key index with new chunks, under means over the chunks of each span."""
        means, sums = {}, []
        for number, name in enumerate(("key_cov", "key_value_cov")):
            # torch sums float32 in float64; kept so, the means are those of a call over all keys, to the bit
            parts = getattr(new, name)
            before = None if index is None or self._sums is None else self._sums[number]
            totals, count = sums_in_spans(parts.double(), chunks_per_span, n_done, before)
            sums.append(totals[:, -1:].clone())  # a view would keep the sums of every chunk
            means[name] = totals.to(parts.dtype) / count.to(parts.dtype)
            means[f"span_{name}"] = means[name][
                :, chunks_per_span - 1 - n_done % chunks_per_span :: chunks_per_span
            ]
        self._sums = (sums[0], sums[1])
        if index is None:
            return new.having(**means)
        return KeyIndex.cat([index, new.having(**means)])


def sums_in_spans(
    parts: Tensor, chunks_per_span: int, n_done: int, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`[T, C, ...]` of chunks after `n_done` -> sums over the chunks of a span up to each, and how many these are.

    `before`, `[T, 1, ...]`, is the sum over all chunks of the last span that were done.
    """
    n_before, n_chunks = n_done % chunks_per_span, parts.shape[1]
    after = -(n_before + n_chunks) % chunks_per_span
    if n_before and before is not None and n_chunks == 1:  # of a step, which would wait for sums of zeros
        totals = before + parts
    else:
        filled = pad(parts, (0, 0, 0, 0, n_before, after))
        if n_before and before is not None:
            filled[:, n_before - 1] = before[:, 0]
        sums = filled.unflatten(1, (-1, chunks_per_span)).cumsum(2).flatten(1, 2)
        totals = sums[:, n_before : n_before + n_chunks]
    count = (
        torch.arange(n_before, n_before + n_chunks, dtype=torch.int64, device=parts.device) % chunks_per_span + 1
    )
    return totals, count[:, None, None]
