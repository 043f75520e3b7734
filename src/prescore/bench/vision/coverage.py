"""Heavy-entry coverage (Appendix G): how many of the large attention weights lie on keys that were kept.

Measured on the true queries and keys of every layer, beside what keys chosen at random would cover. Coverage is
a poor guide to accuracy (a method may cover every large weight and still lose the rest), so read it beside
`prescore vision` or `prescore perplexity`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from prescore.attention import select_by
from prescore.bench.records import Row
from prescore.bench.vision.accuracy import Study
from prescore.bench.vision.methods import EXACT, parse_method
from prescore.config import Selected
from prescore.integrations.apply import Observer, observe
from prescore.integrations.attention import AttentionContext, layer_seed
from prescore.integrations.masks import full_mask
from prescore.scoring.select import membership
from prescore.types import Values

THRESHOLDS = (0.01, 0.1, 0.3)
METHODS = (
    "kmeans",
    "kmeans-farthest-sample",
    "kmedian",
    "kmedian-farthest-sample",
    "leverage",
    "key-diff",
    "random",
)


class Subject(Protocol):
    """A model with inputs."""

    @property
    def described(self) -> Mapping[str, Any]:
        """What identifies it in a record."""

    @property
    def n_prefix(self) -> int:
        """Tokens before the patches."""

    def run(self, look: Observer) -> None:
        """Run all inputs with `look` on every attention layer."""


@dataclass(frozen=True, eq=False)
class VisionSubject:
    """A vision study's model and images."""

    study: Study

    @property
    def described(self) -> Mapping[str, Any]:
        """What identifies it in a record."""
        return self.study.described

    @property
    def n_prefix(self) -> int:
        """Tokens before the patches."""
        return self.study.model.n_prefix

    @torch.inference_mode()
    def run(self, look: Observer) -> None:
        """See `Subject.run`."""
        study = self.study
        with observe(study.model.model, look):
            for pixels, _ in study.images.batches(study.model.preprocessing, study.batch_size):
                study.model.logits(pixels.to(study.device))


@dataclass(frozen=True, eq=False)
class TextSubject:
    """A causal language model and token sequences `[n, length]`."""

    model: nn.Module
    tokens: Tensor
    described: Mapping[str, Any] = field(default_factory=dict)
    n_prefix: int = 0

    @torch.no_grad()
    def run(self, look: Observer) -> None:
        """See `Subject.run`."""
        with observe(self.model, look):
            for sequence in self.tokens.split(1):
                self.model(input_ids=sequence, use_cache=False)


@dataclass(frozen=True)
class CoverageGrid:
    """What to measure: all combinations. Protected prefix tokens count among the kept keys."""

    methods: tuple[str, ...] = METHODS
    rows: tuple[int, ...] = (32, 64, 128)
    clusters: tuple[int, ...] = (4,)
    protect: tuple[bool, ...] = (False,)
    thresholds: tuple[float, ...] = THRESHOLDS
    seeds: tuple[int, ...] = (0,)


def coverage_rows(subject: Subject, grid: CoverageGrid) -> list[Row]:
    """One row per combination; see `measure_coverage` for the figures."""
    rows = []
    for name in grid.methods:
        method = parse_method(name) if name != EXACT else None
        if method is None or method.centroids or method.routed:
            raise ValueError(f"method must select keys and nothing else to have a coverage, got {name!r}")
        clusters: Sequence[int | None] = grid.clusters if method.clusters else (None,)
        protections = grid.protect if subject.n_prefix else (False,)
        seeds = grid.seeds if method.random else (0,)
        for n_rows, n_clusters, protect in itertools.product(grid.rows, clusters, protections):
            config = method.selected(n_rows, clusters=n_clusters)
            described = {
                **subject.described,
                "method": name,
                "rows": n_rows,
                "clusters": n_clusters,
                "protect": protect,
                "thresholds": list(grid.thresholds),
                "config": config.to_dict(),
            }
            measure = partial(measure_coverage, subject, config, grid.thresholds, protect=protect)
            rows += [Row(described, seed, partial(measure, seed=seed)) for seed in seeds]
    return rows


def measure_coverage(
    subject: Subject, config: Selected, thresholds: Sequence[float], *, protect: bool = True, seed: int = 0
) -> Values:
    """Coverage over all inputs, layers and heads; with `protect`, prefix tokens are always kept.

    Figures: for each threshold the median and mean over (input, layer, head) of the share of heavy entries whose
    key was kept (those without a heavy entry are left out and counted), the same mean per layer, the share of
    the s heaviest columns that were kept, the attention mass on kept keys, and `chance`, s / n.
    """
    gathered: dict[int, list[dict[str, Tensor]]] = {}
    chances: list[float] = []
    n_keys: list[int] = []

    def look(query: Tensor, key: Tensor, context: AttentionContext) -> None:
        sinks = max(config.sinks, context.n_prefix) if protect else config.sinks
        kept = kept_keys(key, config.replace(sinks=sinks), layer_seed(seed, context.layer))
        chances.append(float(kept.float().mean()))
        n_keys.append(key.shape[2])
        found = head_coverage(query, key, kept, context, thresholds)
        gathered.setdefault(context.layer, []).append(found)

    subject.run(look)
    by_layer = [
        {name: torch.cat([part[name].flatten() for part in parts]) for name in parts[0]}
        for _, parts in sorted(gathered.items())
    ]
    everything = {name: torch.cat([found[name] for found in by_layer]) for name in by_layer[0]}
    figures: Values = {
        "chance": sum(chances) / len(chances),
        "n_keys": max(n_keys),
        "n_heads": len(everything["mass"]),
    }
    for name, values in everything.items():
        known = values[~values.isnan()]
        figures[f"{name}_mean"] = float(known.mean()) if len(known) else None
        # torch's median of an even number of values is the lower of the two in the middle
        figures[f"{name}_median"] = statistics.median(known.tolist()) if len(known) else None
        figures[f"{name}_without"] = int(values.isnan().sum())
        figures[f"{name}_layers"] = [_mean_or_none(found[name]) for found in by_layer]
    return figures


def kept_keys(key: Tensor, config: Selected, seed: int) -> Tensor:
    """`[B, Hkv, N]` bool: the keys that `prescore.select` keeps."""
    return membership(select_by(key, config, generator=seed), key.shape[2])


def head_coverage(
    query: Tensor, key: Tensor, kept: Tensor, context: AttentionContext, thresholds: Sequence[float]
) -> dict[str, Tensor]:
    """Coverage per (input, head), `[B, Hq]` each.

    `heavy_E`: share of the entries above E whose key was kept, NaN where there is none; `columns`: share of the s
    columns with the largest sums that were kept, s = keys kept; `mass`: attention on kept keys.
    """
    weights = attention_weights(query, key, context)
    kept = kept.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    found = {}
    for threshold in thresholds:
        heavy = (weights > threshold).sum(dim=2)
        total = heavy.sum(dim=-1)
        share = (heavy * kept).sum(dim=-1) / total
        found[f"heavy_{threshold:g}"] = share.masked_fill(total == 0, torch.nan)
    sums = weights.sum(dim=2)
    n_kept = kept.sum(dim=-1, keepdim=True)
    rank = sums.argsort(dim=-1, descending=True).argsort(dim=-1)
    found["columns"] = ((rank < n_kept) & kept).sum(dim=-1) / n_kept.squeeze(-1)
    found["mass"] = (sums * kept).sum(dim=-1) / sums.sum(dim=-1)
    return found


def attention_weights(query: Tensor, key: Tensor, context: AttentionContext) -> Tensor:
    """The layer's own softmax, `[B, Hq, Nq, Nk]`."""
    scale = query.shape[-1] ** -0.5 if context.scale is None else context.scale
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    mask = full_mask(context.form(query, key), query.shape[2], query.device)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(dim=-1).nan_to_num(0.0)


def _mean_or_none(values: Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else None
