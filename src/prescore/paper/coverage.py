"""Heavy-entry coverage (Appendix G): how many of the large attention weights lie on selected keys.

Measured on the queries and keys of every layer, and compared with keys selected at random. Coverage says little
about accuracy: a method may cover every large weight and lose all the others. Read it with `prescore vision`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from prescore.attention import select_by
from prescore.bench.language.tables import half_width
from prescore.bench.methods import PUBLISHED, ScorerName, image_config
from prescore.bench.plots import figure, line_style
from prescore.bench.records import Record, Row, Values
from prescore.bench.tables import MISSING, Table, as_text
from prescore.bench.vision.accuracy import image_seeds
from prescore.bench.vision.tables import label, values_by_line
from prescore.config import Selected
from prescore.integrations.apply import Observer
from prescore.integrations.attention import AttentionContext, layer_seed
from prescore.integrations.masks import full_mask
from prescore.paper import printed
from prescore.scoring.select import membership

METHODS = (
    *("kmeans", PUBLISHED, "kmeans-farthest-sample", "kmedian", "kmedian-farthest-sample"),
    *("leverage", "key-diff", "random"),
)
QUICK_METHODS = ("kmeans", "kmedian", "random")

ObserveAll = Callable[[Observer], None]
"""Runs all inputs with exact attention and shows the queries and keys of every layer."""


def coverage_rows(
    observe_all: ObserveAll,
    subject: Values,
    *,
    n_prefix: int = 0,
    methods: Sequence[str] = METHODS,
    budgets: Sequence[int] = (32, 64, 128),
    n_clusters: Sequence[int] = (4,),
    keep_prefix: Sequence[bool] = (False,),
    thresholds: Sequence[float] = (0.01, 0.1, 0.3),
    seeds: Sequence[int] = (0,),
) -> list[Row]:
    """A row for each combination; `subject` identifies model and inputs.

    Prefix tokens that are kept count as selected keys.
    """
    rows = []
    for name, budget, n, keep, seed in itertools.product(methods, budgets, n_clusters, keep_prefix, seeds):
        method = ScorerName.read(name)
        config = None if method is None else image_config(name, budget, n_clusters=n, n_prefix=n_prefix)
        if not isinstance(config, Selected) or method is None or method.adds_centroids:
            raise ValueError(f"method must select keys and nothing else to have a coverage, got {name!r}")
        described = {
            **subject,
            "method": name,
            "budget": budget,
            "n_clusters": n if method.takes_n_clusters else None,
            "keep_prefix": keep and n_prefix > 0,
            "thresholds": list(thresholds),
            "config": config.to_dict(),
        }
        seed = seed if method.is_random else 0  # noqa: PLW2901
        measure = partial(measure_coverage, observe_all, config, thresholds, keep_prefix=keep, seed=seed)
        rows.append(Row(described, seed, measure))
    return rows


def measure_coverage(
    observe_all: ObserveAll,
    config: Selected,
    thresholds: Sequence[float],
    *,
    keep_prefix: bool = True,
    seed: int = 0,
) -> Values:
    """Coverage over all inputs, layers and heads.

    Results: for each of `head_coverage` its `mean` and `median` over (input, layer, head), the means of each layer
    and of each input, and `without`, the heads that have no heavy entry and are left out; `chance` is the share
    of keys selected.
    """
    by_layer: dict[int, list[dict[str, Tensor]]] = {}
    chances: list[float] = []
    n_keys = 0

    def observer(query: Tensor, key: Tensor, context: AttentionContext) -> None:
        nonlocal n_keys
        sinks = max(config.sinks, context.n_prefix) if keep_prefix else config.sinks
        first = sum(len(part["mass"]) for part in by_layer.get(context.layer, ()))
        seeds = [layer_seed(one, context.layer) for one in image_seeds(seed, first, len(key))]
        chosen = select_by(key, config.replace(sinks=sinks), generator=seeds)
        selected = membership(chosen, key.shape[2])  # [B, Hkv, N]
        chances.append(float(selected.float().mean()))
        n_keys = max(n_keys, key.shape[2])
        coverage = head_coverage(query, key, selected, context, thresholds)
        by_layer.setdefault(context.layer, []).append(coverage)

    observe_all(observer)
    layers = [
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for _, parts in sorted(by_layer.items())
    ]
    results: Values = {"chance": statistics.fmean(chances), "n_keys": n_keys}
    results["n_heads"] = sum(layer["mass"].numel() for layer in layers)
    for name in layers[0]:
        values = torch.cat([layer[name] for layer in layers], dim=1)
        known = values[~values.isnan()]
        results[f"{name}_mean"] = _mean(values)
        # torch's median of an even number of values is the lower of the two in the middle
        results[f"{name}_median"] = statistics.median(known.tolist()) if len(known) else None
        results[f"{name}_without"] = values.numel() - len(known)
        results[f"{name}_layers"] = [_mean(layer[name]) for layer in layers]
        results[f"{name}_inputs"] = [_mean(by_head) for by_head in values]
    return results


def head_coverage(
    query: Tensor, key: Tensor, selected: Tensor, context: AttentionContext, thresholds: Sequence[float]
) -> dict[str, Tensor]:
    """Coverage per (input, head), `[B, Hq]` each.

    `heavy_E`: share of the entries above E whose key is selected, NaN where there is none. `columns_E`: share of
    the s columns with the most entries above E that are selected, s = selected keys, NaN likewise; columns that
    tie for the last places count by the share of the places. `mass`: attention on selected keys.
    """
    weights = attention_weights(query, key, context)
    selected = selected.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    coverage = {}
    for threshold in thresholds:
        heavy = (weights > threshold).sum(dim=2)
        total = heavy.sum(dim=-1)
        share = (heavy * selected).sum(dim=-1) / total
        coverage[f"heavy_{threshold:g}"] = share.masked_fill(total == 0, torch.nan)
        coverage[f"columns_{threshold:g}"] = _heaviest(heavy, selected).masked_fill(total == 0, torch.nan)
    sums = weights.sum(dim=2)
    coverage["mass"] = (sums * selected).sum(dim=-1) / sums.sum(dim=-1)
    return coverage


def _heaviest(counts: Tensor, selected: Tensor) -> Tensor:
    """Share of the s largest of `counts [B, H, N]` that are among the s `selected`, `[B, H]`."""
    n_places = selected.sum(dim=-1, keepdim=True)
    last = counts.sort(dim=-1, descending=True).values.gather(-1, (n_places - 1).clamp_min(0))
    above, tied = counts > last, counts == last
    n_left = n_places - above.sum(dim=-1, keepdim=True)
    worth = above + tied * n_left / tied.sum(dim=-1, keepdim=True)
    return (worth * selected).sum(dim=-1) / n_places.squeeze(-1)


def attention_weights(query: Tensor, key: Tensor, context: AttentionContext) -> Tensor:
    """The softmax of the layer, `[B, Hq, Nq, Nk]`."""
    scale = query.shape[-1] ** -0.5 if context.scale is None else context.scale
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    mask = full_mask(context.form(query, key), query.shape[2], query.device)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(dim=-1).nan_to_num(0.0)


def _mean(values: Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else None


# Tables and a plot.


def coverage_table(records: Sequence[Record]) -> Table:
    """Median / mean coverage per threshold, top columns and mass, with chance in the last column."""
    thresholds = [f"{value:g}" for value in records[0].config["thresholds"]]
    names = [f"heavy_{e}_{kind}" for e in thresholds for kind in ("median", "mean")]
    columns = [f"columns_{e}_mean" for e in thresholds]
    cells = {name: values_by_line(records, name) for name in (*names, *columns, "mass_mean", "chance")}
    widths = {e: values_by_line(records, f"heavy_{e}_inputs") for e in thresholds}
    rows = []
    for line, by_budget in cells["chance"].items():
        for budget in by_budget:
            shares = {name: as_text(_percent(values[line][budget])) for name, values in cells.items()}
            heavy = [
                f"{shares[f'heavy_{e}_median']} / {shares[f'heavy_{e}_mean']}{_interval(widths[e][line][budget])}"
                for e in thresholds
            ]
            last = (" / ".join(shares[name] for name in columns), shares["mass_mean"], shares["chance"])
            rows.append((label(line, keeps_prefix=False), str(budget), *heavy, *last))
    if thresholds == ["0.01", "0.1", "0.3"]:
        for (method, budget), theirs in printed.COVERAGE.items():
            rows.append((f"paper: ViT-B/16, {method}", str(budget), *theirs, MISSING, MISSING))
    return Table(
        title="Coverage of heavy attention entries, per cent: median / mean",
        columns=("method", "keys", *(f"> {e}" for e in thresholds), "heaviest columns", "mass", "chance s/n"),
        rows=tuple(rows),
        note="over inputs, layers and heads that have such an entry, means ± 95 % over inputs x seeds; "
        "heaviest columns: share of the s columns "
        "with the most such entries that are selected, mean, for each threshold; mass: weight on selected keys; "
        f"the paper ({printed.IMAGE_TOKENS} tokens) prints medians and does not say for which threshold its "
        "columns are",
    )


def coverage_plot(records: Sequence[Record], path: str | Path) -> None:
    """Median coverage against the budget, a panel per threshold and one for the top columns, with chance."""
    thresholds = [f"{value:g}" for value in records[0].config["thresholds"]]
    panels = {f"heavy_{e}_median": f"entries > {e}, median" for e in thresholds}
    panels[f"columns_{thresholds[0]}_mean"] = f"heaviest columns by entries > {thresholds[0]}, mean"
    chances = values_by_line(records, "chance").values()
    chance = {b: _percent(seeds) for by_budget in chances for b, seeds in sorted(by_budget.items())}
    with figure(path, (3.2 * len(panels), 3.4), ncols=len(panels), sharey=True) as (_, axes):
        for panel, (name, title) in zip(axes, panels.items(), strict=True):
            for line_number, (line, by_budget) in enumerate(values_by_line(records, name).items()):
                means = [_percent(by_budget[budget]) for budget in sorted(by_budget)]
                words = label(line, keeps_prefix=False)
                # open markers and thin lines: a line that equals another one stays visible
                style = {
                    "markersize": 9 - line_number % 4 * 2,
                    "markerfacecolor": "none",
                    **line_style(line_number),
                }
                panel.plot(sorted(by_budget), means, label=words, **style)
            panel.plot(list(chance), list(chance.values()), "--", color="#444444", label="chance")
            # lines at 0 and 100 need room
            panel.set(title=title, xlabel="keys selected", ylim=(-4, 110))
            panel.set_xticks(list(chance))
        axes[0].set_ylabel("covered, per cent")
        axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _interval(by_seed: Sequence[Sequence[float | None] | None]) -> str:
    """Half of the 95 % interval of the mean; nothing for one input and seed."""
    runs: dict[tuple[str, int | None], float] = {
        (str(number), seed): 100 * share
        for seed, shares in enumerate(by_seed)
        for number, share in enumerate(shares or ())
        if share is not None
    }
    half = half_width(runs)
    return "" if half is None else f" ± {half:.1f}"


def _percent(shares: Sequence[float | None]) -> float | None:
    """The mean over seeds in per cent; None where no seed has a value."""
    known = [share for share in shares if share is not None]
    return 100 * statistics.fmean(known) if known else None
