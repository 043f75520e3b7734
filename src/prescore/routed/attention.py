"""The engine of `Routed`: split a call into sequences that start together, build the key index, attend, count.

Why each part is there, with measurements in docs/default.md: *local keys*, because nearby tokens are read by
almost every head; *sinks*, because the first keys draw mass from every query and are lost in any mean; *keys found
by their int8 logits*, because what else matters is single keys, other ones for each query; *centroids corrected
for the covariance*, because many small weights add up. Every query chooses for itself, so that
nothing depends on later queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from prescore.autograd import records_gradients
from prescore.call import Call
from prescore.config import Routed
from prescore.ops.operators import accumulation_dtype, readable
from prescore.ops.parts import fold_lse_gradient
from prescore.routed import native, plain, reference
from prescore.routed.backends import BACKENDS, build_index, pick_backend
from prescore.routed.index import SUMMED, GrowingIndex, KeyIndex
from prescore.routed.layout import Layout, View, make_layout, why_exact
from prescore.routed.native.library import loaded_level
from prescore.types import Attended, Reads, Result, Selection, Values

KEY_NUMBERS_AT_ONCE = 2**22
"""Elements of keys processed per batch of KV heads; keeps temporaries small enough to be reused."""
KEY_NUMBERS_ON_DEVICE = 2**27
"""The same for kernels: a launch should fill the device."""
MAX_EXPONENT = 80.0
"""Bound on an exponent whose exponential would overflow float32."""
_MEANS = ("keys_per_query", "centroids_per_query", "keys_compared", "far_keys_read")


def attend_routed(call: Call, config: Routed, *, explain: bool = False) -> Result:
    """Run routed attention; with `explain` also return what could be read, and all stats."""
    begin = time.perf_counter()
    if call.is_causal and call.valid is None:
        part = _attend(call, config)
    elif isinstance(call.query_start, int):
        part = _same_start(call, config, _gaps(call))
    else:
        part = _by_start(call, config, _gaps(call))
    count_means, reason = part.count_means, why_exact(config, call.n_query, call.n_keys, is_causal=call.is_causal)

    def count_reads() -> Reads:
        means = count_means()
        return Reads(means["keys_per_query"], means["centroids_per_query"])

    if not explain:
        return Result(*part.attended, count_reads, part.stats, why_exact=reason)
    stats = {
        "backend": call.operator.name,
        **part.stats,
        **count_means(),
        "keys_selected": call.mean_keys(),
        "seconds": {"attending": time.perf_counter() - begin},
    }
    return Result(*part.attended, count_reads, stats, _visible_chunks(call, config), reason)


class _Part(NamedTuple):
    """The result of some sequences.

    Attributes:
        attended: Output and lse.
        stats: Fields of `Stats` that cost nothing.
        count_means: Counts the means over queries, `_MEANS`. Device counters are read when it is called, after all
            work of the call was started.
    """

    attended: Attended
    stats: Values
    count_means: Callable[[], dict[str, float]]


# --- sequences of a batch


def _gaps(call: Call) -> Tensor | None:
    """`[B]`: sequences with padding between real keys; they run exactly. None = none.

    Trailing padding is no gap without a causal mask, nor where each query has its own key: there it comes after
    every real query.
    """
    if call.valid is None:
        return None
    n_real = call.valid.sum(1)
    position = torch.arange(call.n_keys, dtype=torch.int64, device=call.valid.device)
    gaps = (call.valid != (position < n_real[:, None])).any(1) | (n_real == 0)
    if call.is_causal and call.n_query != call.n_keys:
        gaps = gaps | (n_real < call.query_start + call.n_query)
    return gaps if bool(gaps.any()) else None


def _by_start(call: Call, config: Routed, gaps: Tensor | None) -> _Part:
    """Queries of a padded batch that begin at different positions: one call for each position."""
    start = torch.as_tensor(call.query_start, dtype=torch.int64, device=call.query.device)
    parts, rows = [], []
    for first in start.unique().tolist():
        some = (start == first).nonzero().squeeze(1)
        blind = min(max(0, -first), call.n_query)  # queries before the first real key see nothing
        own = _sequences(call, some, max(0, first + call.n_query), blind, f"start {first}")
        part = _same_start(own, config, None if gaps is None else gaps.index_select(0, some))
        output, lse = part.attended
        output, lse = pad(output, (0, 0, blind, 0)), pad(lse, (blind, 0), value=-torch.inf)
        parts.append(part._replace(attended=Attended(output, lse)))
        rows.append(some)
    return _joined(call, parts, rows)


def _same_start(call: Call, config: Routed, gaps: Tensor | None) -> _Part:
    """Sequences whose queries begin at one position; those with gaps, and short ones, read every key."""
    if call.valid is None:
        is_exact = not call.is_causal and why_exact(config, call.n_query, call.n_keys, is_causal=False)
        return _attend_exactly(call, config) if is_exact else _attend(call, config)
    exact = gaps
    if not call.is_causal:
        exact = _short(call, config) if gaps is None else _short(call, config) | gaps
    if exact is None or not bool(exact.any()):
        return _attend(call, config)
    if bool(exact.all()):
        part = _attend_exactly(call, config)
    else:
        few, many = rows = [some.nonzero().squeeze(1) for some in (exact, ~exact)]
        short = _attend_exactly(_sequences(call, few, call.n_keys, 0, "few"), config)
        long = _attend(_sequences(call, many, call.n_keys, 0, "many"), config)
        part = _joined(call, [short, long], rows)
    if gaps is not None:
        part.stats["exact_sequences"] = int(gaps.sum())
    return part


def _short(call: Call, config: Routed) -> Tensor:
    """`[B]`: sequences without a causal mask that read every key: few queries, or no full chunk of keys."""
    layout = make_layout(call.n_query, call.n_keys, causal=False, config=config)
    counted = _Counted.of(call)
    n_query, n_keys = counted.real_queries().sum(1), counted.real_keys().sum(1)
    return (n_query <= config.exact_until) | (n_keys < layout.sinks + layout.chunk_size)


def _sequences(call: Call, rows: Tensor, n_keys: int, n_skipped: int, place: str) -> Call:
    """Some sequences of a call, their first `n_keys` keys, and their queries after the first `n_skipped`."""
    query, key, value = (t.index_select(0, rows) for t in (call.query, call.key, call.value))
    valid = None if call.valid is None else call.valid.index_select(0, rows)[:, :n_keys]
    query_valid = None if call.query_valid is None else call.query_valid.index_select(0, rows)[:, n_skipped:]
    return replace(
        call,
        query=query[:, :, n_skipped:],
        key=key[:, :, :n_keys],
        value=value[:, :, :n_keys],
        operator=call.operator.at(place),
        valid=valid,
        query_start=n_keys - (call.n_query - n_skipped) if call.is_causal else 0,
        query_valid=query_valid,
    )


def _joined(call: Call, parts: list[_Part], rows: list[Tensor]) -> _Part:
    """Results of some sequences each, as one. Stats are means over queries; the layout is the last part's."""
    order = torch.cat(rows).argsort()
    attended = zip(*(part.attended for part in parts), strict=True)
    output, lse = (torch.cat(tensors).index_select(0, order) for tensors in attended)
    all_stats, real = [part.stats for part in parts], _Counted.of(call).real_queries()
    counters = [part.count_means for part in parts]

    def count_means() -> dict[str, float]:
        counts, all_means = (
            [int(real.index_select(0, some).sum()) for some in rows],
            [count() for count in counters],
        )
        totals = (sum(n * means[name] for n, means in zip(counts, all_means, strict=True)) for name in _MEANS)
        return {name: total / max(1, sum(counts)) for name, total in zip(_MEANS, totals, strict=True)}

    merged = dict(all_stats[-1])
    with_gaps = [stats["exact_sequences"] for stats in all_stats if "exact_sequences" in stats]
    if with_gaps:
        merged["exact_sequences"] = sum(with_gaps)
    for stats in all_stats:  # only parts that routed know what ran
        merged |= {name: stats[name] for name in ("backend", "native_level") if name in stats}
    return _Part(Attended(output, lse), merged, count_means)


def _visible_chunks(call: Call, config: Routed) -> list[Selection]:
    """What may be read: every key, chunk by chunk in causal mode."""
    size = config.chunk_size if call.is_causal else max(1, call.n_keys)
    chunks = []
    for begin in range(0, call.n_keys, size):
        end = min(begin + size, call.n_keys)
        indices = torch.arange(begin, end, dtype=torch.int64, device=call.key.device)
        indices = indices.expand(*call.key.shape[:2], -1)
        valid = torch.ones_like(indices, dtype=torch.bool)
        if call.valid is not None:
            valid = call.valid[:, None, begin:end].expand(indices.shape)
        chunks.append(Selection(indices, valid))
    return chunks


# --- one call


def _attend_exactly(call: Call, config: Routed) -> _Part:
    """Every query of the call reads every key it may see."""
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    stats = {**asdict(layout), "exact_queries": layout.n_query}
    return _Part(call.exactly("few"), stats, _Counted.of(call).exact_means)


def _attend(call: Call, config: Routed) -> _Part:
    """Routed attention of sequences whose queries all begin at one position.

    Padding may only follow the last real key, in causal mode only if Nq == Nk.
    Without a causal mask every sequence has a full chunk.
    """
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    n_exact = layout.n_exact if call.query.numel() and call.key.numel() else layout.n_query
    counted = _Counted.of(call)
    stats, count_means = {**asdict(layout), "exact_queries": n_exact}, counted.exact_means
    backend = _backend_of(call, layout)
    # native code reads the first queries too, and faster; the operator alone has their gradients
    n_apart = n_exact
    is_recorded = records_gradients(call.query, call.key, call.value)
    if backend == "native" and n_exact < layout.n_query and not is_recorded:
        n_apart = 0
    results = []
    if n_apart or n_exact == layout.n_query:
        results.append(_attend_first(call, layout, n_apart))
    if n_exact < layout.n_query:
        parts: list[tuple[Tensor, Tensor]] = []
        counts = torch.zeros(2, dtype=torch.float64, device=call.query.device)
        index, n_done = _kept_index(call, layout, backend), 0
        for batch in _head_batches(call, n_apart, backend):
            view = _view(call, batch, layout, config, f"heads {len(parts)}", backend)
            heads, n_done = slice(n_done, n_done + len(batch.key)), n_done + len(batch.key)
            seen = _built_index(batch, layout, backend) if index is None else index.map(partial(_of_heads, heads))
            inputs = (batch.query, batch.key, batch.value, *seen.tensors().values())
            output, lse, count = _RoutedAttention.apply(view, *inputs)  # type: ignore[no-untyped-call]
            parts.append((output, lse))
            counts += count
        results.append(_all_heads(call, parts))
        count_means = partial(counted.routed_means, layout, n_exact, counts)
        stats["backend"] = backend
        if backend == "native":
            stats["native_level"] = loaded_level()
    attended = results[0]
    if len(results) > 1:
        attended = Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*results, strict=True)))
    return _Part(attended, stats, count_means)


def _backend_of(call: Call, layout: Layout) -> str:
    if call.operator.dropout is not None:
        return "plain"
    return pick_backend(call.backend, call.query, call.value.shape[-1], layout.cluster_size)


def _attend_first(call: Call, layout: Layout, n_exact: int) -> Attended:
    """The first queries, which read every key they may see."""
    query, key, value, valid = call.query[:, :, :n_exact], call.key, call.value, call.valid
    if layout.causal:
        stop = layout.first + n_exact
        key, value = key[:, :, :stop], value[:, :, :stop]
        valid = None if valid is None else valid[:, :stop]
    return replace(call, query=query, key=key, value=value, valid=valid).exactly("head")


def _all_heads(call: Call, parts: list[tuple[Tensor, Tensor]]) -> Attended:
    """Outputs and lse of batches of KV heads, `[T, G, n, ...]` each, as those of the call, `[B, Hq, n, ...]`."""
    output, lse = (torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts, strict=True))
    heads = call.query.shape[:2]
    return Attended(output.reshape(*heads, *output.shape[2:]), lse.reshape(*heads, *lse.shape[2:]))


class _HeadBatch(NamedTuple):
    """Some KV heads: queries `[T, G, n, D]`, keys `[T, Nk, D]` and values `[T, Nk, Dv]`.

    Attributes:
        valid: `[T, Nk]` real keys; None = all are.
        searching: `[T, n]` queries that search far keys: not padding queries, answered elsewhere. None = all do.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None
    searching: Tensor | None


def _head_batches(call: Call, n_skipped: int, backend: str) -> Iterator[_HeadBatch]:
    """Batches of KV heads with their queries after the first `n_skipped`; a long sequence goes alone."""
    n_kv_heads = call.key.shape[1]
    queries = call.query[:, :, n_skipped:].unflatten(1, (n_kv_heads, call.heads_per_kv)).flatten(0, 1)
    keys, values = (readable(tensor.flatten(0, 1)) for tensor in (call.key, call.value))
    searching = call.query_valid[:, n_skipped:] if call.is_causal and call.query_valid is not None else None
    masks = [None if t is None else t.repeat_interleave(n_kv_heads, dim=0) for t in (call.valid, searching)]
    most = KEY_NUMBERS_ON_DEVICE if backend == "triton" else KEY_NUMBERS_AT_ONCE
    step = max(1, most // (call.n_keys * max(keys.shape[-1], values.shape[-1])))
    for start in range(0, len(queries), step):
        some = slice(start, start + step)
        own = (None if mask is None else mask[some] for mask in masks)
        yield _HeadBatch(readable(queries[some]), keys[some], values[some], *own)


def _view(call: Call, batch: _HeadBatch, layout: Layout, config: Routed, place: str, backend: str) -> View:
    """What the queries of a batch see: the last ones of a causal call, or all."""
    n_heads, _, n_query, _ = batch.query.shape
    if layout.causal:
        position = torch.arange(layout.n_keys - n_query, layout.n_keys, dtype=torch.int64, device="cpu")[None]
        chunks, stop = layout.far_chunks(position), position + 1
    else:
        chunks = layout.full_chunks(batch.valid, n_heads, torch.device("cpu")).cpu()[:, None]
        stop = torch.full_like(chunks, layout.n_keys)
        if batch.valid is not None:
            stop = batch.valid.sum(1, keepdim=True).cpu()
    start = (layout.sinks + chunks * layout.chunk_size).masked_fill(chunks == 0, 0)
    n_clusters, start, stop = (
        t.expand(n_heads, n_query).to(torch.int32).contiguous()
        for t in (chunks * layout.clusters_per_chunk, start, stop)
    )
    if batch.searching is not None:
        n_clusters.masked_fill_(~batch.searching.cpu(), 0)
    clusters_per_cov = layout.clusters_per_chunk * (1 if layout.causal else layout.n_chunks)
    log_inverse = reference.log_inverse_weight(config.min_weight)
    return View(
        n_clusters, start, stop, layout.causal, layout.chunk_size, clusters_per_cov, log_inverse, call.scale,
        call.operator.at(place), backend,
    )  # fmt: skip


def _kept_index(call: Call, layout: Layout, backend: str) -> KeyIndex | None:
    """The key index that a cache keeps from chunk to chunk of a prompt; None = there is none."""
    if not isinstance(call.key_index, GrowingIndex) or backend == "plain" or not layout.causal:
        return None
    if records_gradients(call.key, call.value):
        return None
    key, value = (readable(tensor) for tensor in (call.key, call.value))
    index = call.key_index.extend(key, value, layout, backend, layout.fewest_chunks)
    # no query reads the covariances of fewer chunks
    n_unknown = index.positions.shape[1] // layout.clusters_per_chunk - index.key_cov.shape[1]
    key_cov, key_value_cov = (
        pad(t, (0, 0, 0, 0, n_unknown, 0)) if n_unknown else t for t in (index.key_cov, index.key_value_cov)
    )
    return replace(index, key_cov=key_cov, key_value_cov=key_value_cov)


def _of_heads(heads: slice, tensor: Tensor) -> Tensor:
    return tensor[heads]


def _built_index(batch: _HeadBatch, layout: Layout, backend: str) -> KeyIndex:
    """The key index of a batch, under the covariances that its queries read."""
    index = build_index(batch.key, batch.value, layout, 0, backend)
    covs = (index.key_cov, index.key_value_cov)
    if layout.causal:
        key_cov, key_value_cov = (reference.mean_of_prefixes(t) for t in covs)
    else:  # all queries of a KV head see the same chunks
        counts = layout.full_chunks(batch.valid, len(batch.key), batch.key.device)
        key_cov, key_value_cov = (reference.mean_of_first(t, counts) for t in covs)
    return replace(index, key_cov=key_cov, key_value_cov=key_value_cov)


class _RoutedAttention(torch.autograd.Function):
    """Forward and backward of a batch; nothing is saved but inputs, result and thresholds."""

    @staticmethod
    def forward(
        ctx: Any, view: View, query: Tensor, key: Tensor, value: Tensor, *fields: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, threshold, counts = BACKENDS[view.backend].forward(query, key, value, KeyIndex(*fields), view)
        output = attended.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, *fields, output, attended.lse, threshold)
        ctx.view = view
        ctx.mark_non_differentiable(counts)
        ctx.set_materialize_grads(False)
        return output, attended.lse, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        # once: checkpointing forbids a second look
        query, key, value, *fields, output, lse, threshold = ctx.saved_tensors
        inputs, index, view, wide = (
            (query, key, value),
            KeyIndex(*fields),
            ctx.view,
            accumulation_dtype(query.dtype),
        )
        if grad is None and grad_lse is None:
            return (None,) * (4 + len(fields))
        if grad is None:
            grad = torch.zeros_like(output)
        if grad_lse is not None:
            grad, output = fold_lse_gradient(grad.to(wide), output.to(wide), grad_lse)
        merged = Attended(output, lse)
        by_name = {"query": query, "key": key, "value": value, **index.tensors()}
        # contiguous, whatever the inputs are: native code adds to them by place
        sums = {
            name: torch.zeros(by_name[name].shape, dtype=wide, device=query.device)
            for name in ("query", "key", "value", *SUMMED)
        }
        far = native if view.backend == "native" else plain  # kernels have no backward pass
        grad_threshold = far.add_far_gradients(grad, inputs, index, view, merged, threshold, sums)
        grad, merged = _through_threshold(grad, merged, threshold + view.log_inverse, grad_threshold)
        plain.add_local_gradients(grad, inputs, view, merged, sums)
        grads = (sums[name].to(t.dtype) if name in sums else None for name, t in by_name.items())
        return None, *grads


def _through_threshold(
    grad: Tensor, merged: Attended, log_mass: Tensor, grad_threshold: Tensor
) -> tuple[Tensor, Attended]:
    """Gradient and result under which local keys also get their share of the gradient of each query's threshold.

    A local key of logit `x` moves the threshold by `exp(x - log_mass)` and has the weight `exp(x - lse)` in the
    result. So the gradient of the threshold, times `exp(lse - log_mass)`, is one of lse.
    """
    # where that overflows, local keys weigh nothing
    more = grad_threshold * torch.exp((merged.lse - log_mass).clamp_max(MAX_EXPONENT))
    more = more.masked_fill(grad_threshold == 0, 0.0)  # without a search log_mass may be NaN
    wide, dtype = merged.lse.dtype, merged.output.dtype
    moved, output = fold_lse_gradient(grad.to(wide), merged.output.to(wide), more)
    # a half dtype rounds it as it rounds the output itself
    return moved.to(grad.dtype), Attended(output.to(dtype), merged.lse)


# --- stats


class _Counted(NamedTuple):
    """The queries and keys of a call that stats are about; holds no keys or values.

    Attributes:
        n_sequences, n_heads, n_query, n_keys: Of the call, with its query heads.
        is_causal: As in the call.
        valid, query_valid: As in the call; None = all are real.
        device: Of the call.
    """

    n_sequences: int
    n_heads: int
    n_query: int
    n_keys: int
    is_causal: bool
    valid: Tensor | None
    query_valid: Tensor | None
    device: torch.device

    @classmethod
    def of(cls, call: Call) -> _Counted:
        n_sequences, n_heads, n_query, _ = call.query.shape
        masks = call.valid, call.query_valid
        return cls(n_sequences, n_heads, n_query, call.n_keys, call.is_causal, *masks, call.query.device)

    def real_queries(self) -> Tensor:
        """`[B, Nq]`: the queries that stats are about."""
        if self.query_valid is not None:
            return self.query_valid
        return torch.ones((self.n_sequences, self.n_query), dtype=torch.bool, device=self.device)

    def real_keys(self) -> Tensor:
        """`[B, Nk]`."""
        if self.valid is not None:
            return self.valid
        return torch.ones((self.n_sequences, self.n_keys), dtype=torch.bool, device=self.device)

    def visible_keys(self) -> Tensor:
        """`[B, Nq]` in float64: real keys that each query may see; causal queries are the last positions."""
        valid = self.real_keys()
        if self.is_causal:
            return valid.cumsum(1)[:, self.n_keys - self.n_query :].double()
        return valid.sum(1, keepdim=True).expand(-1, self.n_query).double()

    def exact_means(self) -> dict[str, float]:
        """The means where every query reads every key."""
        return {**dict.fromkeys(_MEANS, 0.0), "keys_per_query": _mean(self.visible_keys(), self.real_queries())}

    def routed_means(self, layout: Layout, n_exact: int, counts: Tensor) -> dict[str, float]:
        """What queries read; `counts` are the keys that all of them compared, and the far keys they read.

        Padding queries do not search in a causal call. Without a causal mask they are answered as others are and
        count.
        """
        real = self.real_queries()
        if layout.causal:
            position = torch.arange(layout.n_query, dtype=torch.int64, device=real.device) + layout.first
            chunks = layout.far_chunks(position).expand(real.shape)
        else:
            chunks = layout.full_chunks(self.valid, real.shape[0], real.device)[:, None].expand(real.shape)
        routed = real[:, n_exact:]
        n_searching = int(routed.sum()) if layout.causal else routed.numel()
        compared, read = (counts / (self.n_heads * max(1, n_searching))).tolist()
        share = int(routed.sum()) / max(1, int(real.sum()))
        return {
            "keys_compared": compared,
            "far_keys_read": read,
            "centroids_per_query": _mean(chunks.double(), real) * layout.clusters_per_chunk,
            "keys_per_query": _mean(self.visible_keys() - chunks * layout.chunk_size, real) + read * share,
        }


def _mean(numbers: Tensor, mask: Tensor) -> float:
    """Over the masked ones; 0 where there are none."""
    some = numbers[mask]
    return float(some.mean()) if some.numel() else 0.0
