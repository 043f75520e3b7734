"""A selection made once and reused by many steps, refreshed, or made anew: what it costs while a model reads on.

The prompt is read exactly, so that the steps alone differ. Every step sees the true earlier tokens.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from prescore.bench.language.generation import prefill
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import Window, describe_window
from prescore.bench.language.tables import half_width
from prescore.bench.methods import EXACT, Method
from prescore.bench.observed import observed
from prescore.bench.plots import figure, line_style
from prescore.bench.records import Record, Row, Values
from prescore.bench.tables import Table
from prescore.paper.tables import signed

STEPS, QUARTERS = 256, 4
REFRESHES, QUICK_REFRESHES = (None, 64, 16), (None, 4)
"""Tokens after which keys are selected again; None = never."""
_Runs = dict[tuple[str, int | None], list[float]]


def reuse_rows(
    language_model: LanguageModel,
    windows: Sequence[Window],
    methods: Sequence[Method],
    refreshes: Sequence[int | None],
    seeds: Sequence[int],
) -> list[Row]:
    """Exact attention, and every method by how often it selects, on every window."""
    cases = [(EXACT, None, seeds[:1]), *((method, every, seeds) for method in methods for every in refreshes)]
    rows = []
    for method, every, own in cases:
        for window in windows:
            config: Values = {"part": "reuse", **describe_window(language_model, window), "first": window.first}
            config |= {"refresh_every": every, "method": method.describe()}
            rows += [
                Row(config, seed, partial(measure_reuse, language_model, window, method, every, seed))
                for seed in own
            ]
    return rows


@torch.no_grad()
def measure_reuse(
    language_model: LanguageModel, window: Window, method: Method, refresh_every: int | None, seed: int
) -> Values:
    """Losses of the counted tokens, each predicted by a step after the prompt before `window.first`."""
    from prescore.integrations.transformers.cache import PrescoredCache

    model, tokens = language_model.model, window.tokens.to(language_model.device)
    with language_model.extended(len(tokens)):
        cache = PrescoredCache(model.config, refresh_every=refresh_every)
        logits = [prefill(model, tokens[None, : window.first], cache)]
        with observed(model, method.config, seed=window.seed(seed)) as observer:
            for token in tokens[window.first : -1]:
                logits.append(model(token[None, None], past_key_values=cache, use_cache=True).logits[0, -1])
            results: Values = {"paths": dict(observer.paths)}
    losses = torch.nn.functional.cross_entropy(
        torch.stack(logits).float(), tokens[window.first :], reduction="none"
    ).double()
    results |= {"loss": float(losses.mean()), "positions": len(losses)}
    return results | {"segment_losses": [float(part.mean()) for part in losses.tensor_split(QUARTERS)]}


def _above_exact(records: Sequence[Record]) -> dict[tuple[str, str], _Runs]:
    """By method and refresh, and by window and seed: the quarters' losses above exact attention's."""
    of_exact = {r.config["digest"]: r.results["segment_losses"] for r in records if _label(r) == EXACT.label}
    lines: dict[tuple[str, str], _Runs] = defaultdict(dict)
    for record in records:
        digest, every = record.config["digest"], record.config["refresh_every"]
        if _label(record) == EXACT.label or digest not in of_exact:
            continue
        pairs = zip(record.results["segment_losses"], of_exact[digest], strict=True)
        line = (_label(record), f"every {every} tokens" if every else "once")
        lines[line][digest, record.seed] = [own - exact for own, exact in pairs]
    return lines


def _label(record: Record) -> str:
    return str(record.config["method"]["label"])


def reuse_table(records: Sequence[Record]) -> Table:
    """Loss above exact attention by quarter of the steps."""
    rows = []
    for line, runs in _above_exact(records).items():
        means = {run: statistics.fmean(quarters) for run, quarters in runs.items()}
        whole = signed(statistics.fmean(means.values()), half_width(means))
        quarters = (signed(statistics.fmean(values)) for values in zip(*runs.values(), strict=True))
        rows.append((*line, whole, *quarters))
    places = (f"quarter {number + 1}" for number in range(QUARTERS))
    n_steps = records[0].results["positions"] if records else STEPS
    note = "nats per token above exact attention, ± 95 % over texts x seeds; the prompt is read exactly"
    return Table(f"{n_steps} steps", ("method", "selected", "all steps", *places), tuple(rows), note, left=2)


def reuse_plot(records: Sequence[Record], path: str | Path) -> None:
    """Loss above exact attention against the step, a line for each method and refresh."""
    n_steps = records[0].results["positions"] if records else STEPS
    with figure(path, (7, 4)) as (_, axes):
        for place, (line, runs) in enumerate(_above_exact(records).items()):
            means = [statistics.fmean(values) for values in zip(*runs.values(), strict=True)]
            middles = [n_steps * (number + 0.5) / QUARTERS for number in range(QUARTERS)]
            axes.plot(middles, means, label=", ".join(line), markersize=4, **line_style(place))
        axes.set(title="A selection reused", xlabel="step", ylabel="nats above exact attention")
        axes.legend(fontsize=7)
