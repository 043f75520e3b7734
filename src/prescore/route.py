"""Routed attention as a whole call: trees from the clustering layer, aligned batches, budgets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from prescore.attention.exact import exact_parts
from prescore.attention.kernels import Backend, as_backend
from prescore.attention.parts import attend_parts
from prescore.attention.routed import exact_figures, routed_attention
from prescore.clustering.tree import bisection_tree
from prescore.config import PrescoreConfig
from prescore.layout import Aligned
from prescore.types import Attended, Selection


def build_tree(points: Tensor, levels: int, valid: Tensor | None) -> Tensor:
    """The trees that routed attention uses: bisection along main directions."""
    return bisection_tree(points, levels, valid=valid)


def routes(config: PrescoreConfig, n_keys: int, is_causal: bool) -> bool:
    """Whether a call with `inner="routed"` is routed: its budget must leave every key reachable.

    In causal mode the budget counts in each chunk. A smaller budget means attending exactly to what it selects.
    Recent keys beyond the local part are not a part that routing has: then everything is read exactly.
    """
    if config.inner != "routed" or config.recent > (config.chunk_size if is_causal else 0):
        return False
    kept = config.top_k
    if isinstance(kept, float):
        return kept == 1.0
    return not kept or kept >= (min(n_keys, config.chunk_size) if is_causal else n_keys)


def rows_with_gaps(call: Aligned, is_causal: bool) -> Tensor | None:
    """`[B]`: sequences whose queries have padding behind them, which chunks cannot express; None = none.

    Trailing padding is no gap where each query has its own key: it lies in every real query's future.
    """
    if not is_causal or call.valid is None:
        return None
    n_real = call.valid.sum(1)
    column = torch.arange(call.valid.shape[1], device=call.valid.device)
    gaps = (call.valid != (column < n_real[:, None])).any(1) | (n_real == 0)
    if call.query.shape[2] != call.key.shape[2]:
        gaps = gaps | (n_real < call.query_start + call.query.shape[2])
    return gaps if bool(gaps.any()) else None


def route(
    call: Aligned,
    config: PrescoreConfig,
    *,
    is_causal: bool,
    scale: float,
    backend: str | Backend = "auto",
    error_bar: bool = False,
    elsewhere: Tensor | None = None,
) -> tuple[Attended, dict[str, Any]]:
    """Routed attention of an aligned call, and figures about what was read.

    Without causality, sequences with fewer queries than `min_seq_len` read every key exactly. Sequences in
    `elsewhere [B]` are answered by somebody else: figures leave them out.
    """
    backend = as_backend(backend, call.query)
    if not is_causal:
        few = _few_queries(call, config)
        if bool(few.any()):
            return _partly_exact(call, few, config, scale, backend, error_bar)
    start, asked = call.query_start, _asked(call, elsewhere)
    if isinstance(start, int):
        return _routed(
            call.query, call.key, call.value, call.valid, asked, config, is_causal, scale, backend, error_bar
        )
    # Queries of a padded batch that begin at different positions: one call per position.
    outputs, lses, rows = [], [], []
    figures: list[tuple[int, dict[str, Any]]] = []
    for first in start.unique().tolist():
        some = (start == first).nonzero().squeeze(1)
        query, key, value = (t.index_select(0, some) for t in (call.query, call.key, call.value))
        valid = None if call.valid is None else call.valid.index_select(0, some)
        seen = max(0, first + query.shape[2])
        unseen = min(max(0, -first), query.shape[2])  # queries before the first real key see nothing
        past = None if valid is None else valid[:, :seen]
        real = None if asked is None else asked.index_select(0, some)[:, unseen:]
        part, stats = _routed(
            query[:, :, unseen:], key[:, :, :seen], value[:, :, :seen], past, real, config, is_causal, scale,
            backend.at(f"start {first}"), error_bar,
        )  # fmt: skip
        figures.append((part.lse[:, 0].numel() if real is None else int(real.sum()), stats))
        outputs.append(torch.nn.functional.pad(part.output, (0, 0, unseen, 0)))
        lses.append(torch.nn.functional.pad(part.lse, (unseen, 0), value=-torch.inf))
        rows.append(some)
    back = torch.cat(rows).argsort()
    output, lse = (torch.cat(parts).index_select(0, back) for parts in (outputs, lses))
    return Attended(output, lse), _together(figures)


def _asked(call: Aligned, elsewhere: Tensor | None) -> Tensor | None:
    """`[B, Nq]`: real queries of sequences that are not answered elsewhere; None = all."""
    if elsewhere is None:
        return call.query_valid
    asked = ~elsewhere[:, None].expand(-1, call.query.shape[2])
    return asked if call.query_valid is None else asked & call.query_valid


def _together(figures: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Figures of several calls, with the number of queries in each, as one; the geometry is the longest's."""
    whole = dict(figures[-1][1])
    n_queries = max(1, sum(count for count, _ in figures))
    for name in whole:
        found = [(count, own[name]) for count, own in figures]
        if name in ("recomputed_queries", "fine_heads"):
            whole[name] = sum(figure for _, figure in found)
        elif name.endswith("_bound_max"):
            whole[name] = max((figure for count, figure in found if count), default=0.0)
        elif name == "sampled_error_se":
            whole[name] = math.hypot(*(count * figure for count, figure in found)) / n_queries
        elif name in ("sampled_error", "rows_per_query") or name.endswith("_bound_mean"):
            whole[name] = sum(count * figure for count, figure in found) / n_queries
    return whole


def routed_selection(call: Aligned, is_causal: bool, config: PrescoreConfig) -> list[Selection]:
    """What may be routed to: every key, chunk by chunk in causal mode."""
    n_keys = call.key.shape[2]
    size = config.chunk_size if is_causal else max(1, n_keys)
    chunks = []
    for begin in range(0, n_keys, size):
        indices = torch.arange(begin, min(begin + size, n_keys), device=call.key.device)
        indices = indices.expand(*call.key.shape[:2], -1)
        valid = torch.ones_like(indices, dtype=torch.bool)
        if call.valid is not None:
            valid = call.valid[:, None, begin : begin + size].expand(indices.shape)
        chunks.append(Selection(indices, valid))
    return chunks


def _few_queries(call: Aligned, config: PrescoreConfig) -> Tensor:
    """`[B]`: sequences too short to be routed."""
    n_query = torch.full((call.query.shape[0],), call.query.shape[2], device=call.query.device)
    if call.query_valid is not None:
        n_query = call.query_valid.sum(1)
    return n_query <= config.min_seq_len if config.leaf_inclusive else n_query < config.min_seq_len


def _partly_exact(
    call: Aligned, few: Tensor, config: PrescoreConfig, scale: float, backend: Backend, error_bar: bool
) -> tuple[Attended, dict[str, Any]]:
    """Exact attention for the sequences in `few`, routed attention for the others."""
    parts = exact_parts(call.query, call.key, is_causal=False, valid=call.valid)
    exact = attend_parts(call.query, call.key, call.value, parts, scale=scale, backend=backend.at("few"))
    if bool(few.all()):
        return exact, exact_figures(call.query, call.key, config, error_bar)
    routed, stats = _routed(
        call.query, call.key, call.value, call.valid, _asked(call, few), config, False, scale, backend, error_bar
    )
    output = torch.where(few[:, None, None, None], exact.output, routed.output)
    return Attended(output, torch.where(few[:, None, None], exact.lse, routed.lse)), stats


def _routed(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, query_valid: Tensor | None,
    config: PrescoreConfig, is_causal: bool, scale: float, backend: Backend, error_bar: bool,
) -> tuple[Attended, dict[str, Any]]:  # fmt: skip
    return routed_attention(
        query,
        key,
        value,
        is_causal=is_causal,
        valid=valid,
        query_valid=query_valid,
        config=config,
        scale=scale,
        tree_builder=build_tree,
        backend=backend,
        error_bar=error_bar,
    )
