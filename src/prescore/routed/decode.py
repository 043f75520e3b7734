"""Routed attention of the newest tokens of a growing sequence, over the key index of all earlier ones.

The caller owns keys and values. A call gets all keys and values, or int8 rows in place of the sinks and far ones
(`attend_int8_rows`). New tokens are local keys until their chunk is far; then the chunk joins the key index. A
step computes the logits of the centroids, searches, and reads sinks, local keys and the far keys that it finds.
Many new tokens at once are a chunk of a prompt: an ordinary call with the same key index.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from prescore import checks
from prescore.call import Call, with_positive_scale
from prescore.config import Routed
from prescore.errors import Unsupported
from prescore.ops.operators import Operator, Tile, accumulation_dtype, pick_operator, readable
from prescore.routed import native, plain, triton
from prescore.routed.attention import attend_routed
from prescore.routed.backends import build_index, pick_backend, unsupported
from prescore.routed.index import GrowingIndex, KeyIndex
from prescore.routed.layout import Layout, make_layout, make_view
from prescore.routed.native.library import loaded_level
from prescore.routed.reference import log_inverse_weight
from prescore.types import Attended, Reads, Values

MANY = 16
"""From so many new tokens on, one native call is faster than steps, which use prepared arrays again."""


class StepAttention:
    """Attention of the newest tokens, without gradients; a token gets its row of a causal call over all tokens.

    Args:
        config: The configuration.
        scale: Factor of the logits.
        start: `[B]` index of each sequence's first real token (left padding), or None = all 0.
        index: The key index of the earlier tokens; None = there is none yet. Not together with `start`.
    """

    def __init__(
        self, config: Routed, *, scale: float, start: Tensor | None = None, index: GrowingIndex | None = None
    ) -> None:
        self._config, self._scale = config, scale
        self._index = GrowingIndex(build_index) if index is None else index
        self._prepared: tuple[KeyIndex, native.PreparedStep] | None = None
        self._kind: tuple[object, ...] = ()
        self._runners: tuple[Operator, str]  # of calls of this kind
        self._alone: list[tuple[int, StepAttention]] = []  # by sequence, where they start at different tokens
        self.reads = Reads(0.0)
        """Keys and centroids that a query read in the last step, on average over the sequences."""
        self.stats: Values = {}
        """Which backend ran in the last step; empty where nothing was far."""
        if start is not None:
            checks.integer("start", int(start.min()), minimum=0)
            self._alone = [(first, StepAttention(config, scale=scale)) for first in start.tolist()]

    @property
    def starts(self) -> list[int]:
        """The first real token of each sequence where some are padded; empty = all begin at 0."""
        return [first for first, _ in self._alone]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> Attended:
        """Attend for the newest positions, `query [B, Hq, n, D]`, over all keys and values so far."""
        if self._alone:
            return self._attend_alone(query, key, value, backend)
        kind = (backend, query.dtype, query.device, query.shape[-1], value.shape[-1], loaded_level())
        if self._kind != kind:
            self._kind, self._runners = kind, self._pick_runners(query, value.shape[-1], backend)
        operator, backend = self._runners
        n_query, n_keys = query.shape[2], key.shape[2]
        query, scale = with_positive_scale(query, self._scale)
        if n_query == 1:
            return self._step(query, key, value, scale)
        if (n_query >= MANY or backend == "triton") and backend != "plain":
            call = Call(
                query, key, value, True, scale, operator,
                query_start=n_keys - n_query, backend=backend, key_index=self._index,
            )  # fmt: skip
            with torch.no_grad():
                result = attend_routed(call, self._config)
            self.reads = result.count_reads()
            self.stats = {name: result.stats[name] for name in ("backend", "native_level") if name in result.stats}
            return result.attended
        steps = []
        for number in range(n_query):  # each sees the keys before it
            stop = n_keys - n_query + number + 1
            steps.append(self._step(query[:, :, number : number + 1], key[:, :, :stop], value[:, :, :stop], scale))
        return Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*steps, strict=True)))

    def reads_int8_rows(self, n_keys: int, n_rows: int) -> bool:
        """Whether the next step, with `n_keys` keys, can read the first `n_rows` as int8 rows.

        These must be the sinks and far keys, all others local keys, and a native step must be prepared.
        """
        layout = make_layout(1, n_keys, causal=True, config=self._config)
        if self._prepared is None or self._kind[-1:] != (loaded_level(),) or not layout.n_chunks:
            return False
        n_clusters = layout.n_chunks * layout.clusters_per_chunk
        return layout.far_end == n_rows and self._index.holds(self._prepared[0], n_clusters)

    def attend_int8_rows(self, query: Tensor, key: Tensor, value: Tensor, far: tuple[Tensor, Tensor]) -> Attended:
        """A step of one query over local keys and values and the int8 rows `far` before them.

        `reads_int8_rows` must have said that this is possible.
        """
        n_rows, shape = far[0].shape[2], query.shape[:3]
        layout = make_layout(1, n_rows + key.shape[2], causal=True, config=self._config)
        if self._prepared is None or not self.reads_int8_rows(layout.n_keys, n_rows):
            raise ValueError(f"far rows must be those before the local keys, got {n_rows} of {layout.n_keys}")
        query, _ = with_positive_scale(query, self._scale)
        by_head = readable(query).reshape(-1, query.shape[1] // key.shape[1], 1, query.shape[-1])
        n_clusters = layout.n_chunks * layout.clusters_per_chunk
        attended, n_read = self._prepared[1].attend(by_head, key, value, n_clusters, n_rows, far)
        self.stats = {"backend": "native", "native_level": loaded_level()}
        self.reads = Reads(layout.sinks + key.shape[2] + n_read, float(n_clusters))
        return Attended(attended.output.reshape(*shape, -1), attended.lse.reshape(shape))

    def crop(self, n_keys: int) -> None:
        """Drop the key index if one of its chunks loses keys; the next step builds the key index again."""
        self._index.crop(n_keys)
        for first, sequence in self._alone:
            sequence.crop(n_keys - first)

    def reorder(self, rows: Tensor) -> None:
        """Beam search: sequence i becomes a copy of sequence `rows[i]`."""
        self._index.reorder(rows)
        if self._alone:
            self._alone = [
                (first, sequence._copied()) for first, sequence in (self._alone[row] for row in rows.tolist())
            ]

    def _copied(self) -> StepAttention:
        sequence = copy(self)
        sequence._index = copy(self._index)
        return sequence

    def _attend_alone(self, query: Tensor, key: Tensor, value: Tensor, backend: str) -> Attended:
        """Sequence by sequence, without the padding before each."""
        results = []
        for row, (first, sequence) in enumerate(self._alone):
            some = slice(row, row + 1)
            results.append(
                sequence.attend(query[some], key[some, :, first:], value[some, :, first:], backend=backend)
            )
        reads = zip(*(sequence.reads for _, sequence in self._alone), strict=True)
        self.reads = Reads(*(sum(numbers) / len(self._alone) for numbers in reads))
        self.stats = next((sequence.stats for _, sequence in self._alone if sequence.stats), {})
        return Attended(*(torch.cat(tensors) for tensors in zip(*results, strict=True)))

    def _pick_runners(self, query: Tensor, value_dim: int, backend: str) -> tuple[Operator, str]:
        """The operator for local keys, and what runs the far keys."""
        is_named = backend in ("native", "triton")
        reasons = unsupported(backend, query, value_dim, self._config) if is_named else []
        if reasons:
            raise Unsupported(f"backend {backend!r}", reasons)
        size = make_layout(1, 1, causal=True, config=self._config).cluster_size
        return pick_operator(query, backend), pick_backend(backend, query, value_dim, size)

    def _step(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """The newest query `[B, Hq, 1, D]`."""
        operator, backend = self._runners
        layout = make_layout(1, key.shape[2], causal=True, config=self._config)
        query, key, value = (readable(t) for t in (query, key, value))
        by_head = query.reshape(-1, query.shape[1] // key.shape[1], 1, query.shape[-1])
        self.stats, n_read = {}, 0.0
        if layout.n_chunks:
            self.stats = {"backend": backend}
            if backend == "native":
                self.stats["native_level"] = loaded_level()
            with torch.no_grad():
                attended, n_read = self._attend_far(by_head, key, value, layout, scale)
        else:
            local_key, local_value = (t.flatten(0, 1)[:, None] for t in (key, value))
            attended = operator.forward(Tile(by_head, local_key, local_value, scale))
        n_local = layout.n_keys - layout.n_chunks * layout.chunk_size
        self.reads = Reads(n_local + n_read, float(layout.n_chunks * layout.clusters_per_chunk))
        shape = query.shape[:3]
        return Attended(attended.output.reshape(*shape, -1), attended.lse.reshape(shape))

    def _attend_far(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> tuple[Attended, float]:
        """The step of `query [T, G, 1, D]`, and the far keys that each query read on average."""
        operator, backend = self._runners
        index = self._index.extend(key, value, layout, backend)
        n_behind = index.positions.shape[1] // layout.clusters_per_chunk - layout.n_chunks
        n_clusters = layout.n_chunks * layout.clusters_per_chunk
        local_start = layout.far_end
        if self._prepared is not None and self._prepared[0] is index and backend == "native" and not n_behind:
            return self._prepared[1].attend(query, key, value, n_clusters, local_start)
        seen = index.under(index.key_cov.shape[1] - 1 - n_behind)  # behind: a step was taken back
        log_inverse = log_inverse_weight(self._config.min_weight)
        if backend == "native":
            step = native.PreparedStep(seen, log_inverse, scale)
            self._prepared = self._prepared if n_behind else (index, step)
            return step.attend(query, key, value, n_clusters, local_start)
        view = make_view(layout, len(query), 1, log_inverse, scale, operator, backend)
        view = replace(view, clusters_per_cov=n_clusters)
        keys, values = key.flatten(0, 1), value.flatten(0, 1)
        if backend == "triton":
            merged, _, counts = triton.forward(query, keys, values, seen, view)
        else:
            start = int(view.local_start[0, 0])
            tile = Tile(query, keys[:, None, start:], values[:, None, start:], scale)
            local = Attended(*(t.to(accumulation_dtype(query.dtype)) for t in operator.forward(tile)))
            merged, _, counts = plain.add_far(query, keys, values, seen, view, local)
        return Attended(merged.output.to(value.dtype), merged.lse), float(counts[1]) / merged.lse.numel()
