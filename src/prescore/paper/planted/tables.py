"""Records of the planted model as tables and a plot."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prescore.bench.language.answers import wilson_interval
from prescore.bench.plots import COLOURS, bars, figure
from prescore.bench.records import Record, Values
from prescore.bench.tables import MISSING, Table, as_text, mean_and_spread, span
from prescore.paper.planted.study import NO_RULE, VARIANTS

_SETTING = ("n", "d", "epsilon", "c_signal", "c_noise")

Setting = tuple[Any, ...]
Recall = dict[tuple[str, str], dict[tuple[str, bool | None, bool], list[Any]]]
"""By (method, rule) and variant, a value for each seed."""


def recall_settings(records: Sequence[Record]) -> list[Setting]:
    """The settings at which recall was measured, in order."""
    return list(dict.fromkeys(_setting(record) for record in records if record.config["part"] == "recall"))


def describe_setting(setting: Setting) -> str:
    """`n=4096 d=32 ...`."""
    return " ".join(f"{name}={value:g}" for name, value in zip(_SETTING, setting, strict=True))


def recall_table(records: Sequence[Record], setting: Setting) -> Table:
    """Recall of the planted keys and of heavy entries, by method, rule and reading."""
    recall, heavy = _recall(records, setting, "recall"), _recall(records, setting, "heavy_recall")
    rows = tuple(
        (*name, *(mean_and_spread(values[name].get(v, [])) for values in (recall, heavy) for v in VARIANTS))
        for name in recall
    )
    words = tuple(VARIANTS.values())
    return Table(
        title=f"Planted keys found, {describe_setting(setting)}",
        columns=("method", "rule", *words, *(f"heavy: {word}" for word in words)),
        rows=rows,
        note="recall of the d*m planted keys with a budget of d*m, mean ± standard deviation over seeds; "
        "as shipped = clustering scorers l2-normalise; heavy = share of polynomial-attention entries above eps/2 "
        "on selected keys",
        left=2,
    )


def claim_table(records: Sequence[Record]) -> Table:
    """Every claim with its measured quantity next to the bound, and in how many seeds it held."""
    claims = [record for record in records if record.config["part"] == "claims"]
    points = list(dict.fromkeys((record.config["n"], record.config["d"]) for record in claims))
    # settings other than n and d that vary are named in the row
    swept = [
        record.config
        for record in claims
        if record.config["topic"] not in ("singleton", "counterexample", "latent", "variance ratio")
    ]
    varying = [name for name in _SETTING[2:] if len({config[name] for config in swept}) > 1]
    by_claim: dict[tuple[str, ...], dict[tuple[int, int], list[Values]]] = defaultdict(lambda: defaultdict(list))
    for record in claims:
        config = record.config
        more = [f"{name}={config[name]:g}" for name in varying if config[name] is not None]
        reading = " ".join([config["reading"], *more])
        for check in record.results["checks"]:
            bound = f"{check['relation']} {as_text(check['bound'])}"
            by_claim[check["claim"], reading, check["quantity"], bound][config["n"], config["d"]].append(check)
    rows = []
    for row, by_point in by_claim.items():
        cells = [cell for point in points for cell in verdict(by_point.get(point, []))]
        notes = Counter(check["note"] for checks in by_point.values() for check in checks if check["note"])
        rows.append((*row, *cells, notes.most_common(1)[0][0] if notes else ""))
    columns = [column for n, d in points for column in (f"measured, n={n} d={d}", "held")]
    return Table(
        title="Claims of the paper on the planted model",
        columns=("claim", "reading", "quantity", "bound", *columns, "note"),
        rows=tuple(rows),
        note="measured: mean over seeds (lowest to highest); held: seeds in which the bound was met",
        left=4,
    )


def probability_table(records: Sequence[Record]) -> Table:
    """In how many draws each claim held, by every value of n, d and eps, and the interval of its probability."""
    draws: dict[tuple[str, ...], list[tuple[Values, bool]]] = defaultdict(list)
    for record in records:
        for check in record.results.get("checks", ()):
            claim = f"{check['claim']}, {record.config['reading']}"
            bounded = f"{check['quantity']} {check['relation']} {as_text(check['bound'])}"
            draws[claim, bounded].append((record.config, check["held"]))
    configs = [config for draw in draws.values() for config, _ in draw]
    values = {name: sorted({config[name] for config in configs} - {None}) for name in _SETTING[:3]}
    varied = [(name, value) for name, several in values.items() if len(several) > 1 for value in several]
    rows = []
    for names, draw in draws.items():
        held = [[met for config, met in draw if config[name] == value] for name, value in varied]
        held.append([met for _, met in draw])
        low, high = wilson_interval(sum(held[-1]) / len(draw), len(draw))
        cells = [f"{sum(some)}/{len(some)}" if some else MISSING for some in held]
        rows.append((*names, *cells, f"{100 * low:.0f} to {100 * high:.0f} %"))
    heads = (f"{'eps' if name == 'epsilon' else name} = {value:,g}" for name, value in varied)
    return Table(
        title="Probability of each claim",
        columns=("claim", "quantity and bound", *heads, "all draws", "95 %"),
        rows=tuple(rows),
        note="draws in which the bound was met; 95 %: Wilson's interval of the probability over all draws",
        left=2,
    )


def verdict(checks: Sequence[Values]) -> tuple[str, str]:
    """What was measured over seeds, and in how many of them a claim held."""
    if not checks:
        return MISSING, MISSING
    held = sum(check["held"] for check in checks)
    word = "yes" if held == len(checks) else "no" if held == 0 else "partly"
    return span([check["measured"] for check in checks], digits=2), f"{word} {held}/{len(checks)}"


def planted_plot(records: Sequence[Record], setting: Setting, path: str | Path) -> None:
    """Recall by method and rule in each reading."""
    recall = _recall(records, setting, "recall")
    methods = list(dict.fromkeys(method for method, _ in recall))
    colours = [COLOURS[methods.index(method) % len(COLOURS)] for method, _ in recall]
    with figure(path, (16, 1.2 + 0.19 * len(recall)), ncols=len(VARIANTS)) as (drawn, axes):
        drawn.suptitle(f"Planted keys found, {describe_setting(setting)}")
        for panel, (variant, title) in zip(axes, VARIANTS.items(), strict=True):
            lines = {
                method if rule == NO_RULE else f"{method}, {rule}": by_variant.get(variant, [])
                for (method, rule), by_variant in recall.items()
            }
            bars(panel, lines, colours)
            panel.set(title=title, xlabel="recall", xlim=(0, 1.15))
            if panel is not axes[0]:
                panel.set_yticklabels([])


def claim_plot(records: Sequence[Record], path: str | Path) -> None:
    """Share of the seeds and settings in which each statement held."""
    held: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.config["part"] == "claims":
            for check in record.results["checks"]:
                name = f"{check['claim']}, {record.config['reading']}: {check['quantity']}"
                held[name].append(float(check["held"]))
    with figure(path, (9, 1.2 + 0.3 * len(held))) as (_, axes):
        bars(axes, held, [COLOURS[0] if all(values) else COLOURS[3] for values in held.values()])
        axes.set(title="Statements that held", xlabel="share of seeds and settings", xlim=(0, 1.15))


def _setting(record: Record) -> Setting:
    return tuple(record.config[name] for name in _SETTING)


def _recall(records: Sequence[Record], setting: Setting, name: str) -> Recall:
    values: Recall = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.config["part"] == "recall" and _setting(record) == setting:
            config = record.config
            variant = (config["reading"], config["normalize"], config.get("rotated", False))
            for rule, value in record.results[name].items():
                values[config["method"], rule][variant].append(value)
    return values
