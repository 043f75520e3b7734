r"""Tables and pictures of measured studies.

python experiments/routed/studies/report.py --out DIR --to DIR      # records there, tables and pictures here
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from run import STUDIES, study_variants
from summary import Line, markdown, summarise

from prescore.bench.records import read_records
from prescore.bench.plots import COLOURS, bars, figure

ERROR = "relative squared error, thousandths"
RATIO = "error over the reference's (black), geometric mean over heads"


def draw_bars(lines: Sequence[Line], path: Path, title: str, *, log: bool = False) -> None:
    """Error over the reference's, head by head; oracles that leave no error have no bar."""
    lines = [line for line in lines if line.ratio > 0.01]
    with figure(path, (6.0, 0.9 + 0.2 * len(lines))) as (_, axes):
        colours = [COLOURS[7] if line.ratio == 1 and not line.ratio_spread else COLOURS[0] for line in lines]
        spreads = [line.ratio_spread for line in lines]
        bars(
            axes, [line.label.split(": ")[-1] for line in lines], [line.ratio for line in lines], spreads, colours
        )
        axes.axvline(1, color=COLOURS[7], linewidth=0.8)
        axes.set(title=title, xlabel=RATIO)
        if log:
            axes.set_xscale("log")


def draw_grid(lines: Sequence[Line], path: Path, title: str) -> None:
    """Error against everything a query reads far away."""
    with figure(path, (6.5, 4.2)) as (_, axes):
        for place, leaf in enumerate((128, 64, 32, 16)):
            own = [line for line in lines if line.settings.get("leaf") == leaf]
            _curve(axes, own, f"leaf {leaf}", COLOURS[place], "o-")
        for place, fine in enumerate((32, 16)):
            own = [line for line in lines if line.settings.get("fine") == fine and line.settings["coarse"] == 128]
            _curve(axes, own, f"leaf 128 opened into {fine}", COLOURS[2 + place], "x")
        axes.set(title=title, xlabel="far rows + singles + centroids", ylabel=ERROR, xscale="log", yscale="log")
        _plain_ticks(axes)
        axes.legend()


def draw_singles(lines: Sequence[Line], path: Path, title: str) -> None:
    """Error against the number of singles, one curve per size of trees; the smaller leaf beside it."""
    with figure(path, (7.5, 3.6), ncols=2, sharey=True) as (drawn, panels):
        drawn.suptitle(title, x=0.01, ha="left")
        for axes, leaf in zip(panels, (128, 64), strict=True):
            for place, trees in enumerate(("512", "2048", "doubling", "all")):
                own = [x for x in lines if x.settings["leaf"] == leaf and x.settings["trees"] == trees]
                own.sort(key=lambda line: line.settings["singles"])
                names = [f"1/{round(1 / x.settings['singles'])}" if x.settings["singles"] else "0" for x in own]
                spreads = [line.spread for line in own]
                axes.errorbar(
                    range(len(own)), [line.error for line in own], spreads,
                    label=f"trees over {trees}", color=COLOURS[place], marker="o", capsize=2,
                )  # fmt: skip
                axes.set_xticks(range(len(own)), names)
            axes.set(title=f"leaf {leaf}", xlabel="singles per key", ylim=(0, None))
        panels[0].set_ylabel(ERROR)
        panels[0].legend()


def draw_shared(lines: Sequence[Line], path: Path, title: str) -> None:
    """Error against the rows that everyone shares, at equal totals."""
    with figure(path, (6.0, 3.6)) as (_, axes):
        for place, by in enumerate(("cosine", "past")):
            own = [x for x in lines if x.settings["leaf"] == 64 and x.settings["singles_by"] == by]
            names = [x.settings["singles"] for x in own]
            axes.errorbar(
                names, [x.error for x in own], [x.spread for x in own],
                label=f"by {by}", color=COLOURS[place], marker="o", capsize=2,
            )  # fmt: skip
        axes.set(title=title, xlabel="share of far keys that every query reads", ylabel=ERROR, ylim=(0, None))
        axes.legend()


def draw_ways(lines: Sequence[Line], path: Path, title: str, out: Path) -> None:
    """Errors, and time and loss where they were measured."""
    shown = [x for x in lines if x.settings["rows"] == 512 and x.settings["leaf"] != 32]
    draw_bars(shown, path, title)
    times = out / "ways-time.jsonl"
    if times.exists():
        found: dict[tuple[int, str], list[float]] = {}
        for record in read_records(times):
            name = (record.config["leaf"], record.config["way"])
            found.setdefault(name, []).append(record.results["milliseconds"])
        rows = ["| leaf | way | milliseconds |", "|---|---|---|"]
        rows += [f"| {leaf} | {way} | {fmean(own):.1f} |" for (leaf, way), own in found.items()]
        path.with_name("ways-time.md").write_text("\n".join(rows) + "\n")
    losses = out / "ways-loss.jsonl"
    if losses.exists():
        records = read_records(losses)
        exact = next(r.results["loss"] for r in records if r.config["method"]["config"]["type"] == "Exact")
        rows = ["| method | loss | above exact |", "|---|---|---|"]
        rows += [
            f"| {r.config['method']['label']} | {r.results['loss']:.4f} | {r.results['loss'] - exact:.4f} |"
            for r in records
        ]
        path.with_name("ways-loss.md").write_text("\n".join(rows) + "\n")


def _curve(axes: Any, lines: Sequence[Line], label: str, colour: str, style: str) -> None:
    lines = sorted(lines, key=lambda line: line.far_keys_read + line.centroids)
    read = [line.far_keys_read + line.centroids for line in lines]
    axes.errorbar(
        read, [line.error for line in lines], [line.spread for line in lines],
        fmt=style, color=colour, label=label, capsize=2,
    )  # fmt: skip


def _plain_ticks(axes: Any) -> None:
    axes.set_xticks([200, 300, 500, 800, 1200], ["200", "300", "500", "800", "1200"])
    axes.minorticks_off()


TITLES = {
    "clustering": "(a) Tree against k-means, 512 rows",
    "ways": "(b) Who shares a choice, 512 rows",
    "budgets": "(c) Budgets from past queries, 512 rows on average",
    "selection": "(d) Selection alone at the rows of routed attention, sinks exact",
    "hyper": "(e) LSH block and something for the rest, 512 rows, sinks exact",
    "grid": "(f) Leaf size against rows",
    "centroids": "(g) Corrected choices, logits and values, 512 rows",
    "points": "(h) What the trees cut, 512 rows",
    "singles": "(i) Singles and size of trees, 512 rows",
    "shared": "(j) Shared against chosen rows, leaf 64, equal total",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write `STUDY.md` and `STUDY.png` for every study that has records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="records of run.py")
    parser.add_argument("--to", type=Path, required=True, help="where tables and pictures go")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    special: dict[str, Callable[..., None]] = {
        "grid": draw_grid, "singles": draw_singles, "shared": draw_shared,
        "ways": lambda *drawing: draw_ways(*drawing, options.out),
        "selection": lambda *drawing: draw_bars(*drawing, log=True),
        "hyper": lambda *drawing: draw_bars(*drawing, log=True),
        "centroids": lambda lines, *drawing: draw_bars([x for x in lines if x.settings["leaf"] == 128], *drawing),
    }  # fmt: skip
    for study in STUDIES:
        places = {variant.label: place for place, variant in enumerate(study_variants(study))}
        lines = sorted(summarise(study, options.out), key=lambda line: places[line.label])
        if lines:
            (options.to / f"{study}.md").write_text(markdown(lines))
            special.get(study, draw_bars)(lines, options.to / f"{study}.png", TITLES[study])


if __name__ == "__main__":
    main()
