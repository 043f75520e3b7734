"""The planted-model study as tables and a plot."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prescore.records import Record
from prescore.report.plots import COLOURS, bars, figure
from prescore.report.tables import MISSING, Table, as_text, mean_and_spread, span

VARIANTS = {
    ("normalized", None): "rows normalised",
    ("small-noise", False): "small noise, raw",
    ("small-noise", None): "small noise, as shipped",
}
_SETTING = ("n", "d", "epsilon", "c_signal", "c_noise")

Values = dict[tuple[str, str], dict[tuple[str, bool | None], list[Any]]]


def settings(records: Sequence[Record]) -> list[tuple[Any, ...]]:
    """The points of the sweep that recall was measured at, in order of appearance."""
    return list(dict.fromkeys(_setting(record) for record in records if record.config["part"] == "recall"))


def describe_setting(setting: tuple[Any, ...]) -> str:
    """`n=4096 d=32 ...`; what a part does not depend on is left out."""
    return " ".join(
        f"{name}={value:g}" for name, value in zip(_SETTING, setting, strict=True) if value is not None
    )


def recall_table(records: Sequence[Record], setting: tuple[Any, ...]) -> Table:
    """Recall of the planted keys, and of heavy polynomial-attention entries, by method, rule and reading."""
    recall, heavy = _figures(records, setting, "recall"), _figures(records, setting, "heavy_recall")
    rows = []
    for name in recall:
        cells = [mean_and_spread(recall[name].get(variant, [])) for variant in VARIANTS]
        covered = [mean_and_spread(heavy[name].get(variant, [])) for variant in VARIANTS]
        rows.append((*name, *cells, *covered))
    return Table(
        title=f"Planted keys found, {describe_setting(setting)}",
        columns=("method", "rule", *VARIANTS.values(), *(f"heavy: {words}" for words in VARIANTS.values())),
        rows=tuple(rows),
        note="recall of the d*m planted keys with a budget of d*m, mean ± standard deviation over seeds; "
        "as shipped = clustering scorers l2-normalise; heavy = share of polynomial-attention entries above eps/2 "
        "that the selected keys cover",
        left=2,
    )


def claim_table(records: Sequence[Record]) -> Table:
    """Every claim with its measured quantity beside the bound, and in how many seeds it held."""
    claims = [record for record in records if record.config["part"] == "claims"]
    points = list(dict.fromkeys((record.config["n"], record.config["d"]) for record in claims))
    found: dict[tuple[str, ...], dict[tuple[int, int], list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for record in claims:
        config = record.config
        extra = [f"{name}={config[name]:g}" for name in _varying(claims) if config.get(name) is not None]
        for check in record.figures["checks"]:
            bound = f"{check['relation']} {as_text(check['bound'])}"
            reading = " ".join([config["reading"], *extra])
            found[check["claim"], reading, check["quantity"], bound][config["n"], config["d"]].append(check)
    rows = []
    for name, by_point in found.items():
        cells = [cell for point in points for cell in _verdict(by_point.get(point, []))]
        notes = Counter(check["note"] for checks in by_point.values() for check in checks if check["note"])
        rows.append((*name, *cells, notes.most_common(1)[0][0] if notes else ""))
    columns = tuple(column for n, d in points for column in (f"measured, n={n} d={d}", "held"))
    return Table(
        title="Claims of the paper on the planted model",
        columns=("claim", "reading", "quantity", "bound", *columns, "note"),
        rows=tuple(rows),
        note="measured: mean over seeds (lowest to highest); held: seeds in which the bound was met",
        left=4,
    )


def planted_plot(records: Sequence[Record], setting: tuple[Any, ...], path: str | Path) -> None:
    """Recall by method and rule in each reading, and the leverage of signal and noise."""
    recall = _figures(records, setting, "recall")
    names = list(recall)
    labels = [method if rule == MISSING else f"{method}, {rule}" for method, rule in names]
    methods = list(dict.fromkeys(method for method, _ in names))
    colours = [COLOURS[methods.index(method) % len(COLOURS)] for method, _ in names]
    height = 1.2 + 0.19 * len(names)
    with figure(path, (15, height), ncols=4, width_ratios=(1, 1, 1, 0.9)) as (drawn, axes):
        drawn.suptitle(f"Planted keys found, {describe_setting(setting)}")
        for number_, (panel, (variant, title)) in enumerate(zip(axes[:3], VARIANTS.items(), strict=True)):
            values = [recall[name].get(variant, []) for name in names]
            means = [statistics.fmean(value) if value else 0.0 for value in values]
            spreads = [statistics.stdev(value) if len(value) > 1 else 0.0 for value in values]
            bars(panel, labels if number_ == 0 else [""] * len(names), means, spreads, colours)
            panel.set(title=title, xlabel="recall", xlim=(0, 1.15))
        _leverage_panel(axes[3], records, setting)


def _leverage_panel(axes: Any, records: Sequence[Record], setting: tuple[Any, ...]) -> None:
    wanted = {"Lemma 1": ("highest noise", COLOURS[1]), "Lemma 2": ("lowest signal", COLOURS[0])}
    readings = ("normalized", "small-noise")
    for claim, (words, colour) in wanted.items():
        points = [
            (readings.index(record.config["reading"]), check["measured"])
            for record in records
            if record.config.get("topic") == "leverage" and _setting(record) == setting
            for check in record.figures["checks"]
            if check["claim"] == claim
        ]
        offset = -0.1 if claim == "Lemma 1" else 0.1
        axes.plot(
            [x + offset for x, _ in points], [y for _, y in points], "o", alpha=0.6, color=colour, label=words
        )
    axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.annotate("eps", (1.45, 1.0), (0, 3), textcoords="offset points", fontsize=8, ha="right")
    axes.set(title="leverage / eps, one dot per seed", yscale="log", xlim=(-0.5, 1.5))
    axes.set_xticks([0, 1], ["every row\nnormalised", "small noise"])
    axes.legend(loc="lower left")


def _setting(record: Record) -> tuple[Any, ...]:
    return tuple(record.config[name] for name in _SETTING)


def _varying(claims: Sequence[Record]) -> list[str]:
    """Settings beside n and d that take several values, so that a row must name its own."""
    free = [record for record in claims if record.config["topic"] not in ("singleton", "counterexample")]
    return [name for name in _SETTING[2:] if len({record.config[name] for record in free}) > 1]


def _figures(records: Sequence[Record], setting: tuple[Any, ...], figure_name: str) -> Values:
    values: Values = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.config["part"] != "recall" or _setting(record) != setting:
            continue
        variant = (record.config["reading"], record.config["normalize"])
        for rule, value in record.figures[figure_name].items():
            values[record.config["method"], rule][variant].append(value)
    return values


def _verdict(checks: Sequence[dict[str, Any]]) -> tuple[str, str]:
    if not checks:
        return MISSING, MISSING
    held = sum(check["held"] for check in checks)
    word = "yes" if held == len(checks) else "no" if held == 0 else "partly"
    return span([check["measured"] for check in checks], digits=2), f"{word} {held}/{len(checks)}"
