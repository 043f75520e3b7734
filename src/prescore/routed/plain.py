"""The plain backend of routed attention: the reference in blocks of queries, forward and backward, on any device.

Local keys run on torch's fused operator. A block has the queries of all query heads of a KV head that see the same
clusters. One matrix product gives the int8 logits of all its far keys. Both parts meet in one softmax. The
backward pass runs each part under the merged output and lse; the keys read are found again from the saved
thresholds.

On CPUs the keys that reach the bounds of the search are listed and read by `embedding_bag`, a weighted sum of rows
that copies none of them (`Search`). How many there are is data, which the host of another device would have to
wait for. There all far keys of a block are columns of matrix products, with weight 0 where they are not read
(`DenseSearch`): as much arithmetic as exact attention over the far keys, and no host read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from prescore.ops.dropout import Dropout
from prescore.ops.operators import Operator, Tile, accumulation_dtype
from prescore.routed.index import SUMMED, KeyIndex
from prescore.routed.layout import View
from prescore.routed.reference import (
    QUERY_MAX,
    SUBCLUSTER,
    FarLogits,
    FarTerms,
    Hits,
    exact_margin,
    far_logits,
    far_peak,
    far_sums,
    far_terms,
    logit_threshold,
    quantize,
    search_bounds,
    with_gradient,
)
from prescore.types import Attended

SEEN = SUMMED[:6]
"""The fields of one KV head that gradients reach: its covariances are those of all spans."""
LOGITS_AT_ONCE = 2**23
"""Int8 logits of a block; a block of one query per head may have more."""


class HeadQueries(NamedTuple):
    """Queries of all query heads of one KV head that see the same clusters, and what they see.

    Attributes:
        rows: Where they are in a tensor `[T, G, n, ...]`.
        key, value: `[N, D]`, `[N, Dv]` of the KV head, in the accumulation dtype.
        seen: The key index of the KV head, as far as they see it.
        dequantized: `[M * L, D]` the int8 keys as numbers.
        scratch: `[t * M * L]` memory for their int8 logits, used again by the next ones.
        covariance: Which one of their last span belongs to them.
        dropout: Of their far keys.
    """

    rows: tuple[int, slice, slice]
    key: Tensor
    value: Tensor
    seen: KeyIndex
    dequantized: Tensor
    scratch: Tensor
    covariance: int
    dropout: Dropout | None

    def take(self, tensor: Tensor) -> Tensor:
        """`[T, G, n, ...]` -> `[t, ...]`, those of these queries."""
        return tensor[self.rows].flatten(0, 1)

    def put(self, into: Tensor, rows: Tensor) -> None:
        """The way back."""
        target = into[self.rows]
        target.copy_(rows.view(target.shape))


class Search(NamedTuple):
    """What a block reads, as a list.

    Attributes:
        hits: The keys read, with the logits that enter the softmax.
        first: `[t]` where the hits of each query begin.
        pairs: `[R]` query and key of each hit, as a place in `[t, M * L]`.
    """

    hits: Hits
    first: Tensor
    pairs: Tensor

    @property
    def per_cluster(self) -> Tensor:
        """`[t, M]` keys read of each cluster."""
        return self.hits.per_cluster

    @property
    def n_compared(self) -> Tensor:
        """Int8 keys and centroids of subclusters that were compared."""
        return self.hits.n_compared

    @property
    def n_read(self) -> int:
        """Keys read by all queries."""
        return self.hits.position.shape[0]

    def peak(self, terms: FarTerms, local_lse: Tensor) -> Tensor:
        """`[t]` the largest logit of each query."""
        return far_peak(terms, self.hits, self.hits.logits, local_lse)

    def weights(self, shift: Tensor) -> Tensor:
        """`[R]` of the keys read, `exp(logit - shift)`, with `shift [t]`."""
        return torch.exp(self.hits.logits - shift.index_select(0, self.hits.query))

    def add_mass(self, mass: Tensor, weights: Tensor) -> Tensor:
        """`mass [t]` and the weights of each query; may overwrite it."""
        return mass.index_add_(0, self.hits.query, weights)

    def sum_rows(self, table: Tensor, weights: Tensor) -> Tensor:
        """`[t, D]` sums of the keys read of `table [N, D]`, with weights `[R]`."""
        return embedding_bag(self.hits.position, table, self.first, mode="sum", per_sample_weights=weights)

    def gradients(
        self, query: Tensor, block: HeadQueries, shift: Tensor, grad: Tensor, grad_mass: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries `[t, D]`, and of keys and values of all clusters `[M * L, ...]`, by the keys read.

        The weight of a key read is `w = exp(logit - shift)`, the gradient of its logit `w (grad . v + grad_mass)`.
        """
        index, weights = block.seen, self.weights(shift)
        dropped = weights * _factors(block, weights)
        members = block.value.index_select(0, index.positions.view(-1))
        dense = block.scratch[: len(query) * len(members)].view(len(query), -1)
        torch.mm(grad, members.t(), out=dense)
        by_logit = dropped * dense.view(-1).index_select(0, self.pairs)
        by_logit += weights * grad_mass.index_select(0, self.hits.query)
        parts = []
        for numbers, rows in ((by_logit, query), (dropped, grad)):
            dense.zero_().view(-1).index_copy_(0, self.pairs, numbers)
            parts.append(dense.t() @ rows)
        return self.sum_rows(block.key, by_logit), parts[0], parts[1]


class DenseSearch(NamedTuple):
    """What a block reads, as columns for all far keys, in memory of the block; see `Search`.

    Attributes:
        logits: `[t, M * L]` that enter the softmax, -inf where a key is not read.
        positions: `[M * L]` of the keys.
        per_cluster: `[t, M]` keys read of each cluster.
        n_compared: Int8 keys and centroids of subclusters that were compared.
    """

    logits: Tensor
    positions: Tensor
    per_cluster: Tensor
    n_compared: Tensor

    @property
    def n_read(self) -> Tensor:
        """See `Search`."""
        return self.per_cluster.sum()

    def peak(self, terms: FarTerms, local_lse: Tensor) -> Tensor:
        """See `Search`."""
        peak = torch.cat((local_lse[:, None], terms.columns), dim=1).amax(1).maximum(self.logits.amax(1))
        return peak.masked_fill(torch.isneginf(peak), 0.0)

    def weights(self, shift: Tensor) -> Tensor:
        """See `Search`; `[t, M * L]`."""
        return torch.exp(self.logits - shift[:, None])

    def add_mass(self, mass: Tensor, weights: Tensor) -> Tensor:
        """See `Search`."""
        return mass + weights.sum(1)

    def sum_rows(self, table: Tensor, weights: Tensor) -> Tensor:
        """See `Search`."""
        return weights @ table.index_select(0, self.positions)

    def gradients(
        self, query: Tensor, block: HeadQueries, shift: Tensor, grad: Tensor, grad_mass: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Search`."""
        weights = self.weights(shift)
        dropped = weights * _factors(block, weights)
        by_logit = dropped * (grad @ block.value.index_select(0, self.positions).t())
        by_logit += weights * grad_mass[:, None]
        return self.sum_rows(block.key, by_logit), by_logit.t() @ query, dropped.t() @ grad


def forward(
    query: Tensor, key: Tensor, value: Tensor, index: KeyIndex, view: View
) -> tuple[Attended, Tensor, Tensor]:
    """Attention of `query [T, G, n, D]` over keys and values `[T, N, ...]` with their key index.

    Returns:
        The result, each query's threshold, and counts: keys compared, far keys read.
    """
    return add_far(query, key, value, index, view, attend_local(query, key, value, view))


def add_far(
    query: Tensor, key: Tensor, value: Tensor, index: KeyIndex, view: View, local: Attended
) -> tuple[Attended, Tensor, Tensor]:
    """`forward` of queries that have read their local keys already; `local` is overwritten with the result."""
    output, lse = local
    thresholds = torch.full_like(lse, torch.inf)
    counts = torch.zeros(2, dtype=torch.int64, device=query.device)
    for block in far_blocks(query, key, value, index, view):
        scaled, local_lse, seen = block.take(query).to(lse.dtype) * view.scale, block.take(lse), block.seen
        logits = far_logits(scaled, seen)
        threshold = logit_threshold(logits, seen, view.log_inverse, local_lse)
        hits = search(scaled, block, logits, threshold, view.log_inverse)
        terms = far_terms(scaled, seen, logits, threshold, hits.per_cluster)
        peak = hits.peak(terms, local_lse)
        total, mass = far_sums(terms, peak, seen, block.dropout)
        weights = hits.weights(peak)
        local_mass = torch.exp(local_lse - peak)
        mass = hits.add_mass(mass + local_mass, weights)
        total += hits.sum_rows(block.value, weights * _factors(block, weights))
        total += block.take(output) * local_mass[:, None]
        block.put(output, total / mass.masked_fill(mass == 0, 1.0)[:, None])
        block.put(lse, peak + mass.log())
        block.put(thresholds, threshold)
        counts[0] += hits.n_compared
        counts[1] += hits.n_read
    return Attended(output, lse), thresholds, counts


def search(
    query: Tensor, block: HeadQueries, logits: FarLogits, threshold: Tensor, log_inverse: float
) -> Search | DenseSearch:
    """`reference.find_keys` and `reference.hit_logits` of a block; on CPUs exact logits of heavy keys alone."""
    index, n_query = block.seen, len(query)
    n_clusters, size = index.positions.shape
    bounds, n_compared = search_bounds(query, index, logits, threshold, log_inverse)
    numbers, scales = quantize(query, QUERY_MAX)
    offsets = block.scratch[: n_query * n_clusters * size].view(n_query, -1)
    torch.mm(numbers * scales, block.dequantized.t(), out=offsets)
    if size % SUBCLUSTER:
        bounds = bounds.repeat_interleave(SUBCLUSTER, dim=2)[..., :size]
    hit = offsets.view(*bounds.shape, -1) >= bounds[..., None]
    if query.device.type != "cpu":
        positions, per_key = index.positions.view(-1), (n_query, n_clusters, size)
        offsets.view(per_key).add_(logits.centroids[..., None])
        heavy = offsets >= (threshold + exact_margin(log_inverse))[:, None]
        estimates = torch.where(heavy, query @ block.key.index_select(0, positions).t(), offsets)
        estimates.masked_fill_(~hit.view(n_query, -1), -torch.inf)
        return DenseSearch(estimates, positions, hit.view(per_key).sum(-1), n_compared)
    pairs = _set_flags(hit)
    clusters = pairs // size
    per_cluster = torch.bincount(clusters, minlength=n_query * n_clusters).view(n_query, n_clusters)
    counts = per_cluster.sum(1)
    which = torch.repeat_interleave(counts)
    estimates = offsets.view(-1).index_select(0, pairs)
    estimates += logits.centroids.reshape(-1).index_select(0, clusters)
    position = index.positions.view(-1).index_select(0, pairs - which * (n_clusters * size))
    exact = estimates >= (threshold + exact_margin(log_inverse)).index_select(0, which)
    heavy = exact.nonzero().squeeze(1)
    rows = query.index_select(0, which.index_select(0, heavy))
    rows *= block.key.index_select(0, position.index_select(0, heavy))
    estimates[heavy] = rows.sum(-1)
    return Search(
        Hits(which, position, estimates, exact, per_cluster, n_compared), counts.cumsum(0) - counts, pairs
    )


def _set_flags(flags: Tensor) -> Tensor:
    """`[R]` where the flags are set, counted through. Few are, so eight at a time are looked at first."""
    flat = flags.view(-1)
    if flat.shape[0] % 8:
        return flat.nonzero().squeeze(1)
    words = flat.view(torch.int64)
    some = words.nonzero().squeeze(1)
    within = words.index_select(0, some).view(torch.bool).nonzero().squeeze(1)
    return some.index_select(0, within >> 3).mul_(8).add_(within & 7)


def _factors(block: HeadQueries, weights: Tensor) -> Tensor | float:
    """By which dropout multiplies the weights of the keys read."""
    return 1.0 if block.dropout is None else block.dropout.at("rows").factors(tuple(weights.shape), weights)


def add_far_gradients(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    index: KeyIndex,
    view: View,
    merged: Attended,
    threshold: Tensor,
    sums: dict[str, Tensor],
) -> Tensor:
    """Add the gradients of the far part to `sums`: of query, key and value (`inputs`) and of fields of the index.

    Returns:
        `[T, G, n]`, the gradient of each query's threshold, which local keys have a share in.
    """
    wide, grad_threshold = merged.lse.dtype, torch.zeros_like(threshold)
    product = (grad.to(wide) * merged.output.to(wide)).sum(-1)
    for block in far_blocks(*inputs, index, view):
        head, seen = block.rows[0], block.seen
        scaled, thresholds = block.take(inputs[0]).to(wide) * view.scale, block.take(threshold)
        hits = search(scaled, block, far_logits(scaled, seen), thresholds, view.log_inverse)
        lse = block.take(merged.lse)
        shift = lse.masked_fill(torch.isneginf(lse), torch.inf)  # a query that saw nothing: every weight is 0
        leaves = {"query": scaled, "threshold": thresholds, **{name: getattr(seen, name) for name in SEEN}}
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
        with torch.enable_grad():
            both = _sums_again(leaves, seen, hits.per_cluster, view, shift, block.dropout)
        passed = (block.take(grad).to(wide), -block.take(product))
        grads = dict(zip(leaves, torch.autograd.grad(both, list(leaves.values()), passed), strict=True))
        by_query, by_key, by_value = hits.gradients(scaled, block, shift, *passed)
        by_query = ((grads["query"] + by_query) * view.scale).view(sums["query"][block.rows].shape)
        sums["query"][block.rows] += by_query
        for name, part in (("key", by_key), ("value", by_value)):
            sums[name][head].index_add_(0, seen.positions.view(-1), part)
        for name in ("sink_key", "sink_value", "centroid_key", "centroid_value"):
            sums[name][head, : grads[name].shape[0]] += grads[name]
        for name in ("key_cov", "key_value_cov"):
            sums[f"span_{name}"][head, : len(grads[name]) - 1] += grads[name][:-1]
            sums[name][head, block.covariance] += grads[name][-1]
        block.put(grad_threshold, grads["threshold"])
    return grad_threshold


def _sums_again(
    leaves: dict[str, Tensor],
    seen: KeyIndex,
    per_cluster: Tensor,
    view: View,
    shift: Tensor,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor]:
    """The sums of the forward pass but for the keys read, as a function of all that gradients reach."""
    seen, query = seen.having(**{name: leaves[name] for name in SEEN}), leaves["query"]
    logits = far_logits(query, seen)
    threshold = with_gradient(leaves["threshold"], logits, seen, view.log_inverse)
    return far_sums(far_terms(query, seen, logits, threshold, per_cluster), shift, seen, dropout)


def far_blocks(query: Tensor, key: Tensor, value: Tensor, index: KeyIndex, view: View) -> Iterator[HeadQueries]:
    """The queries that see clusters, those of one KV head after the other."""
    wide, heads_per_kv, last = index.centroid_key.dtype, query.shape[1], -1
    keys = values = dequantized = scratch = torch.empty(0, dtype=wide, device=query.device)
    for head, queries, n_clusters in view.runs():
        if not n_clusters:
            continue
        if head != last:
            last, (keys, values) = head, (t[head].to(wide).contiguous() for t in (key, value))
            dequantized = index.int8[head].to(wide).mul_(index.scales[head][:, None, None]).flatten(0, 1)
        covariance, n_keys = view.covariance(n_clusters), n_clusters * index.positions.shape[2]
        seen = index.of_head(head, n_clusters, covariance)
        step = max(1, LOGITS_AT_ONCE // (heads_per_kv * n_keys))
        for start in range(queries.start, queries.stop, step):
            some = slice(start, min(start + step, queries.stop))
            n_logits = heads_per_kv * (some.stop - some.start) * n_keys
            if scratch.shape[0] < n_logits:
                scratch = torch.empty(n_logits, dtype=wide, device=query.device)
            rows, dropout = (head, slice(None), some), view.operator.at(f"far {head} {start}").dropout
            yield HeadQueries(rows, keys, values, seen, dequantized[:n_keys], scratch, covariance, dropout)


# --- local keys


def attend_local(query: Tensor, key: Tensor, value: Tensor, view: View) -> Attended:
    """Queries `[T, G, n, D]` over their local keys, without the sinks; in the accumulation dtype."""
    wide = accumulation_dtype(query.dtype)
    if not view.causal:
        tail = _Tail.of(key, value, view)
        if not tail.key.shape[1]:
            empty = query.new_zeros((*query.shape[:3], value.shape[-1]), dtype=wide)
            return Attended(empty, query.new_full(query.shape[:3], -torch.inf, dtype=wide))
        result = view.operator.at("tail").forward(tail.tile(query, view))
        return Attended(result.output.to(wide), result.lse.to(wide))
    grid = _ChunkGrid.of(view)
    blocks = grid.cut(query)  # [T, n_blocks, G, size, D]
    output = query.new_empty((*blocks.shape[:4], value.shape[-1]), dtype=wide)
    lse = query.new_empty(blocks.shape[:4], dtype=wide)
    for head in range(query.shape[0]):
        chunks = _Chunks(*(grid.chunks(t[head]) for t in (key, value)))
        for some, rows, operators in grid.strips(view, head):
            tiles = chunks.of(some).tiles(blocks[head, some, :, rows], rows, view.scale)
            window, square = (operator.forward(tile) for operator, tile in zip(operators, tiles, strict=True))
            merged = torch.logaddexp(window.lse, square.lse)
            weight = torch.exp(window.lse - merged)[..., None]
            into = output[head, some, :, rows]
            into.copy_(torch.lerp(square.output.to(wide), window.output.to(wide), weight))
            lse[head, some, :, rows] = merged
    return Attended(grid.joined(output), grid.joined(lse[..., None]).squeeze(-1))


def add_local_gradients(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], view: View, merged: Attended, sums: dict[str, Tensor]
) -> None:
    """Add the gradients of the local keys, under the merged result, to `sums`: of queries, keys and values."""
    dtype = merged.output.dtype  # where a gradient of lse is folded in, half precision would round it away
    grad, query, key, value = (t.to(dtype) for t in (grad, *inputs))
    if not view.causal:
        tail = _Tail.of(key, value, view)
        if tail.key.shape[1]:
            full = Attended(*(t.contiguous() for t in merged))
            grads = view.operator.at("tail").backward(tail.tile(query, view), grad.contiguous(), full)
            sums["query"] += grads.query
            tail.add(sums["key"], grads.key[:, 0])
            tail.add(sums["value"], grads.value[:, 0])
        return
    grid = _ChunkGrid.of(view)
    cut = [grid.cut(t) for t in (grad, query, merged.output, merged.lse[..., None])]
    wide = accumulation_dtype(query.dtype)
    for head in range(query.shape[0]):
        chunks = _Chunks(*(grid.chunks(t[head]) for t in (key, value)))
        by_query = torch.zeros(cut[1][head].shape, dtype=wide, device=query.device)
        totals = _Chunks(*(torch.zeros(t.shape, dtype=wide, device=t.device) for t in chunks))
        for some, rows, operators in grid.strips(view, head):
            strip_grad, strip_query, output, lse = (t[head, some, :, rows].contiguous() for t in cut)
            result, tiles = Attended(output, lse.squeeze(-1)), chunks.of(some).tiles(strip_query, rows, view.scale)
            window, square = (
                o.backward(tile, strip_grad, result) for o, tile in zip(operators, tiles, strict=True)
            )
            by_query[some, :, rows] += window.query + square.query
            for total, from_window, from_square in zip(totals.of(some), window[1:], square[1:], strict=True):
                total[:-1] += from_window[:, 0, : grid.size]
                total[1:, : rows.start] += from_window[:, 0, grid.size :]
                total[1:, rows] += from_square[:, 0]
        sums["query"][head] += grid.joined(by_query[None])[0]
        for name, total in zip(("key", "value"), totals, strict=True):
            grid.add(sums[name][head], total)


@dataclass(frozen=True)
class _ChunkGrid:
    """How causal queries lie in blocks of a chunk each.

    Attributes:
        size: Queries of a block, keys of a chunk.
        n_blocks: Of all queries.
        before: Filler before the first query.
        n_query: Queries without filler.
        start: Position where the chunk before the first block begins.
    """

    size: int
    n_blocks: int
    before: int
    n_query: int
    start: int

    @classmethod
    def of(cls, view: View) -> _ChunkGrid:
        start, size, n_query = int(view.local_start[0, 0]), view.chunk_size, view.local_stop.shape[1]
        before = int(view.local_stop[0, 0]) - 1 - start - size
        return cls(size, -(-(before + n_query) // size), before, n_query, start)

    def cut(self, rows: Tensor) -> Tensor:
        """`[T, G, n, D]` -> `[T, n_blocks, G, size, D]`, filler is 0."""
        after = self.n_blocks * self.size - self.before - self.n_query
        blocks: Tensor = pad(rows, (0, 0, self.before, after)).unflatten(2, (self.n_blocks, self.size))
        return blocks.transpose(1, 2)

    def joined(self, blocks: Tensor) -> Tensor:
        """The way back, without the filler."""
        rows: Tensor = blocks.transpose(1, 2).flatten(2, 3)
        return rows[:, :, self.before : self.before + self.n_query]

    def chunks(self, rows: Tensor) -> Tensor:
        """`[N, D]` of a KV head -> `[n_blocks + 1, size, D]`, see `_Chunks`."""
        length = (self.n_blocks + 1) * self.size
        some = rows[self.start : self.start + length]
        if some.shape[0] < length:
            some = pad(some, (0, 0, 0, length - some.shape[0]))
        return some.contiguous().view(-1, self.size, rows.shape[-1])

    def add(self, rows: Tensor, chunks: Tensor) -> None:
        """Add gradients of `chunks` to those of the rows."""
        changed = rows[self.start : self.start + chunks.shape[0] * self.size]
        changed += chunks.flatten(0, 1)[: changed.shape[0]]

    def strips(self, view: View, head: int) -> Iterator[tuple[slice, slice, list[Operator]]]:
        """Blocks, rows and operators of each half of the blocks: in halves, less of a causal square is masked."""
        n_strips = 2 if self.size % 2 == 0 and self.size >= 128 else 1
        step, stop = self.size // n_strips, self.before + self.n_query
        for start in range(0, self.size, step):
            first = max(0, (self.before - start - step) // self.size + 1)
            last = (stop - 1 - start) // self.size + 1
            if first < last:
                operator = view.operator.at(f"near {head}")
                operators = [operator.at(f"{part} {start}") for part in ("window", "square")]
                yield slice(first, last), slice(start, start + step), operators


class _Chunks(NamedTuple):
    """Keys and values `[n + 1, t, D]`: block i of the queries lies in chunk i + 1."""

    key: Tensor
    value: Tensor

    def of(self, blocks: slice) -> _Chunks:
        """Those of some blocks."""
        return _Chunks(self.key[blocks.start : blocks.stop + 1], self.value[blocks.start : blocks.stop + 1])

    def tiles(self, query: Tensor, rows: slice, scale: float) -> tuple[Tile, Tile]:
        """A strip of queries over the keys before it, from the previous chunk on; and over its own, causally."""
        window = Tile(query, _window(self.key, rows.start), _window(self.value, rows.start), scale)
        return window, Tile(query, self.key[1:, None, rows], self.value[1:, None, rows], scale, causal=True)


def _window(chunks: Tensor, n_more: int) -> Tensor:
    """`[n + 1, t, D]` -> `[n, 1, t + n_more, D]`: every chunk but the last, with rows of the next one."""
    n_chunks, size, dim = chunks.shape
    step, *inner = chunks.stride()
    return chunks.as_strided((n_chunks - 1, 1, size + n_more, dim), (step, step, *inner), chunks.storage_offset())


class _Tail(NamedTuple):
    """Keys and values `[T, c, D]` after the last full chunk, without a causal mask; the first is at `start`."""

    key: Tensor
    value: Tensor
    start: int

    @classmethod
    def of(cls, key: Tensor, value: Tensor, view: View) -> _Tail:
        start = int(view.local_start[0, 0])
        return cls(key[:, start:], value[:, start:], start)

    def tile(self, query: Tensor, view: View) -> Tile:
        """All queries over them."""
        return Tile(query, self.key[:, None], self.value[:, None], view.scale)

    def add(self, rows: Tensor, grads: Tensor) -> None:
        """Add their gradients to `rows [T, N, D]`."""
        rows[:, self.start :] += grads
