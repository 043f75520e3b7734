"""The engine of `Routed`: build the key index, attend, count; a padded batch sequence by sequence.

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
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from prescore.autograd import records_gradients
from prescore.call import Call, mean_visible_keys
from prescore.config import Routed
from prescore.ops.operators import accumulation_dtype, readable
from prescore.ops.parts import attend_parts, exact_parts, fold_lse_gradient
from prescore.routed import native, plain, reference
from prescore.routed.backends import BACKENDS, build_index, pick_backend
from prescore.routed.index import SUMMED, GrowingIndex, KeyIndex
from prescore.routed.layout import Layout, View, make_layout, make_view, why_exact
from prescore.routed.native.library import loaded_level
from prescore.types import Attended, Reads, Result, Selection, Values

KEY_NUMBERS_AT_ONCE = 2**22
"""Elements of keys processed per batch of KV heads; keeps temporaries small enough to be reused."""
KEY_NUMBERS_ON_DEVICE = 2**27
"""The same for kernels: a launch should fill the device."""
MAX_EXPONENT = 80.0
"""Bound on an exponent whose exponential would overflow float32."""
_GAPS = "padding between real keys"
_MEANS = ("keys_per_query", "centroids_per_query", "keys_compared", "far_keys_read")


def attend_routed(call: Call, config: Routed, *, explain: bool = False) -> Result:
    """Run routed attention; with `explain` also return what could be read, and all stats."""
    begin = time.perf_counter()
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    reason = why_exact(config, call.n_query, call.n_keys, is_causal=call.is_causal)
    if call.valid is None:
        part = _attend(call, config)
    elif isinstance(call.query_start, int) and (reason or not len(call.valid)):
        part = _attend_exactly(call, reason)
    else:
        part = _attend_padded(call, config, call.valid)
    count_means = part.count_means

    def count_reads() -> Reads:
        means = count_means()
        return Reads(means["keys_per_query"], means["centroids_per_query"])

    stats: Values = {**asdict(layout), "exact_queries": layout.n_query if reason else layout.n_exact, **part.stats}
    if not explain:
        return Result(*part.attended, count_reads, stats, why_exact=part.why_exact)
    stats = {
        "backend": call.operator.name,
        **stats,
        **count_means(),
        "keys_selected": call.mean_keys(),
        "seconds": {"attending": time.perf_counter() - begin},
    }
    return Result(*part.attended, count_reads, stats, _visible_chunks(call, config), part.why_exact)


class _Part(NamedTuple):
    """The result of a call without padding, or of its sequences together.

    Attributes:
        attended: Output and lse.
        stats: Fields of `Stats` that cost nothing.
        count_means: Counts the means over queries, `_MEANS`. Device counters are read when it is called, after all
            work of the call was started.
        why_exact: Why every query reads every key; empty where some query routes.
    """

    attended: Attended
    stats: Values
    count_means: Callable[[], dict[str, float]]
    why_exact: str = ""


# --- padded batches


def _attend_padded(call: Call, config: Routed, valid: Tensor) -> _Part:
    """Sequence by sequence, without padding; with padding between real keys a sequence reads every key."""
    parts, weights, firsts = [], [], []
    for alone, first, n_queries in _sequences(call, valid):
        has_gaps = alone.valid is not None
        parts.append(_attend_exactly(alone, _GAPS) if has_gaps else _attend(alone, config, n_queries=n_queries))
        weights.append(n_queries)
        firsts.append(first)
    stats = {name: number for part in parts for name, number in part.stats.items()}
    reasons = [part.why_exact for part in parts]
    if _GAPS in reasons:
        stats["exact_sequences"] = reasons.count(_GAPS)
    attended = _rejoined([part.attended for part in parts], firsts, call)
    counters = [part.count_means for part in parts]

    def count_means() -> dict[str, float]:
        all_means = [count() for count in counters]
        totals = {name: sum(w * m[name] for w, m in zip(weights, all_means, strict=True)) for name in _MEANS}
        return {name: total / max(1, sum(weights)) for name, total in totals.items()}

    return _Part(attended, stats, count_means, "; ".join(dict.fromkeys(reasons)) if all(reasons) else "")


def _rejoined(parts: list[Attended], firsts: list[int], call: Call) -> Attended:
    """Results of the sequences as one batch, each from its first query on; the other queries see nothing."""
    if records_gradients(call.query, call.key, call.value):  # a slice of the batch would have a gradient as large
        rows = []
        for (output, lse), before in zip(parts, firsts, strict=True):
            after = call.n_query - before - lse.shape[2]
            rows.append((pad(output, (0, 0, before, after)), pad(lse, (before, after), value=-torch.inf)))
        return Attended(*(torch.cat(tensors) for tensors in zip(*rows, strict=True)))
    shape = call.query.shape[:3]
    output = parts[0].output.new_zeros(*shape, call.value.shape[3])
    lse = parts[0].lse.new_full(shape, -torch.inf)
    for row, (part, first) in enumerate(zip(parts, firsts, strict=True)):
        queries = slice(first, first + part.lse.shape[2])
        output[row, :, queries], lse[row, :, queries] = part.output[0], part.lse[0]
    return Attended(output, lse)


def _sequences(call: Call, valid: Tensor) -> Iterator[tuple[Call, int, int]]:
    """Every sequence as a call without padding, the first of its queries that it has, and how many are real.

    A sequence with padding between its real keys keeps its mask.
    """
    position = torch.arange(call.n_keys, dtype=torch.int64, device=valid.device)
    n_real = valid.sum(1)
    start = call.query_start if isinstance(call.query_start, Tensor) else torch.full_like(n_real, call.query_start)
    gaps = (valid != (position < n_real[:, None])).any(1) | (n_real == 0)
    if call.is_causal and call.n_query != call.n_keys:  # padding after the last real key
        gaps = gaps | (n_real < start + call.n_query)
    n_counted = torch.full_like(n_real, -1) if call.query_valid is None else call.query_valid.sum(1)
    facts = torch.stack((n_real, start.expand_as(n_real), gaps, n_counted), dim=1).tolist()
    # split and not sliced: the gradient of a slice is as large as the batch
    tensors = zip(*(tensor.split(1) for tensor in (call.query, call.key, call.value, valid)), strict=True)
    for row, (sequence, (n_keys, first, has_gaps, n_queries)) in enumerate(zip(tensors, facts, strict=True)):
        before, stop = max(0, -first), call.n_query
        if has_gaps:
            n_keys = max(0, first + call.n_query) if call.is_causal else call.n_keys  # noqa: PLW2901
        if call.is_causal:  # other queries see nothing
            before, stop = min(before, call.n_query), min(call.n_query, n_keys - first)
        query, key, value, mask = sequence
        alone = replace(
            call,
            query=query[:, :, before:stop],
            key=key[:, :, :n_keys],
            value=value[:, :, :n_keys],
            operator=call.operator.at(f"sequence {row}"),
            valid=mask[:, :n_keys] if has_gaps else None,
            query_start=n_keys - (stop - before) if call.is_causal else 0,
            query_valid=None,
            shift=None,
            queries_moved=False,
            key_index=None,
        )
        yield alone, before, stop - before if n_queries < 0 else n_queries


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


def _attend_exactly(call: Call, why: str = "") -> _Part:
    """Every query of the call reads every key it may see."""
    parts = exact_parts(call.query, call.key, is_causal=call.is_causal, valid=call.valid)
    operator = call.operator.at("head" if call.is_causal else "few")
    attended = attend_parts(call.query, call.key, call.value, parts, scale=call.scale, operator=operator)
    sizes = call.n_query, call.n_keys, call.valid, call.is_causal
    return _Part(attended, {}, partial(_exact_means, *sizes), why)


def _attend(call: Call, config: Routed, *, n_queries: int | None = None) -> _Part:
    """Routed attention of a call without padding; `n_queries` of its queries are real, None = all."""
    layout = make_layout(call.n_query, call.n_keys, causal=call.is_causal, config=config)
    n_queries = layout.n_query if n_queries is None else n_queries
    reason = why_exact(config, n_queries, call.n_keys, is_causal=call.is_causal)
    n_exact = layout.n_exact
    if reason or n_exact == layout.n_query or not call.query.numel() or not call.key.numel():
        return _attend_exactly(call, reason)
    backend = _backend_of(call, layout)
    # native code reads the first queries too, and faster; the operator alone has their gradients
    is_recorded = records_gradients(call.query, call.key, call.value)
    n_apart = 0 if backend == "native" and not is_recorded else n_exact
    results = [_attend_exactly(_first_queries(call, layout, n_apart)).attended] if n_apart else []
    parts: list[tuple[Tensor, Tensor]] = []
    counts = torch.zeros(2, dtype=torch.float64, device=call.query.device)
    index, n_done = _kept_index(call, layout, backend), 0
    log_inverse = reference.log_inverse_weight(config.min_weight)
    for inputs in _head_batches(call, n_apart, backend):
        query, key, value = inputs
        operator = call.operator.at(f"heads {len(parts)}")
        view = make_view(layout, len(key), query.shape[2], log_inverse, call.scale, operator, backend)
        heads, n_done = slice(n_done, n_done + len(key)), n_done + len(key)
        visible = _built_index(key, value, layout, backend) if index is None else index.map(itemgetter(heads))
        output, lse, count = _RoutedAttention.apply(view, *inputs, *visible.tensors().values())  # type: ignore[no-untyped-call]
        parts.append((output, lse))
        counts += count
    results.append(_all_heads(call, parts))
    stats = {"backend": backend}
    if backend == "native":
        stats["native_level"] = loaded_level()
    attended = results[0]
    if len(results) > 1:
        attended = Attended(*(torch.cat(tensors, dim=2) for tensors in zip(*results, strict=True)))
    n_rows = call.query.shape[0] * call.query.shape[1]
    return _Part(attended, stats, partial(_routed_means, layout, n_exact, n_rows, counts))


def _backend_of(call: Call, layout: Layout) -> str:
    if call.operator.dropout is not None:
        return "plain"
    return pick_backend(call.backend, call.query, call.value.shape[-1], layout.cluster_size)


def _first_queries(call: Call, layout: Layout, n_exact: int) -> Call:
    """The first queries of a causal call, with the keys that they may see."""
    stop = layout.first + n_exact
    query, key, value = call.query[:, :, :n_exact], call.key[:, :, :stop], call.value[:, :, :stop]
    return replace(call, query=query, key=key, value=value)


def _all_heads(call: Call, parts: list[tuple[Tensor, Tensor]]) -> Attended:
    """Outputs and lse of batches of KV heads, `[T, G, n, ...]` each, as those of the call, `[B, Hq, n, ...]`."""
    output, lse = (torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts, strict=True))
    heads = call.query.shape[:2]
    return Attended(output.reshape(*heads, *output.shape[2:]), lse.reshape(*heads, *lse.shape[2:]))


def _head_batches(call: Call, n_skipped: int, backend: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of KV heads: queries `[T, G, n, D]` after the first `n_skipped`, keys `[T, Nk, D]` and values."""
    queries = call.query[:, :, n_skipped:].unflatten(1, (call.key.shape[1], call.heads_per_kv)).flatten(0, 1)
    keys, values = (readable(tensor.flatten(0, 1)) for tensor in (call.key, call.value))
    most = KEY_NUMBERS_ON_DEVICE if backend == "triton" else KEY_NUMBERS_AT_ONCE
    step = max(1, most // (call.n_keys * max(keys.shape[-1], values.shape[-1])))
    for start in range(0, len(queries), step):
        heads = slice(start, start + step)
        yield readable(queries[heads]), keys[heads], values[heads]


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


def _built_index(key: Tensor, value: Tensor, layout: Layout, backend: str) -> KeyIndex:
    """The key index of a batch of KV heads, under the covariances that its queries read."""
    index = build_index(key, value, layout, 0, backend)
    return reference.covariances_of_spans(index, layout)


class _RoutedAttention(torch.autograd.Function):
    """Forward and backward of a batch; nothing is saved but inputs, result and thresholds."""

    @staticmethod
    def forward(
        ctx: Any, view: View, query: Tensor, key: Tensor, value: Tensor, *fields: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, threshold, counts = BACKENDS[view.backend].forward(
            query, key, value, KeyIndex(view.clusters_per_span, *fields), view
        )
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
        inputs, view, wide = (query, key, value), ctx.view, accumulation_dtype(query.dtype)
        index = KeyIndex(view.clusters_per_span, *fields)
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


def _exact_means(n_query: int, n_keys: int, valid: Tensor | None, is_causal: bool) -> dict[str, float]:
    """What queries read that read every key."""
    n_visible = mean_visible_keys(n_query, n_keys, valid, is_causal=is_causal)
    return {**dict.fromkeys(_MEANS, 0.0), "keys_per_query": n_visible}


def _routed_means(layout: Layout, n_exact: int, n_rows: int, counts: Tensor) -> dict[str, float]:
    """What `n_rows` rows of queries read, one for each head; `counts` are the keys compared, and far keys read."""
    n_routed = layout.n_query - n_exact
    compared, read = (counts / (n_rows * n_routed)).tolist()
    position = torch.arange(layout.n_query, dtype=torch.int64, device="cpu") + layout.first
    chunks = float(layout.far_chunks(position).double().mean())
    n_visible = mean_visible_keys(layout.n_query, layout.n_keys, None, is_causal=layout.causal)
    return {
        "keys_compared": compared,
        "far_keys_read": read,
        "centroids_per_query": chunks * layout.clusters_per_chunk,
        "keys_per_query": n_visible - chunks * layout.chunk_size + read * n_routed / layout.n_query,
    }
