"""Figure 1 on this machine: the paper's methods against exact attention, and the cost of scoring alone.

Columns in which nothing is pre-scored are left out: up to twice the leaves a causal call keeps every key.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.attention import score
from prescore.bench.plots import figure, line_style, powers_of_two
from prescore.bench.records import Record, Row, Values
from prescore.bench.speed.studies import HEADS, Run, heads_of, measure_methods, row
from prescore.bench.speed.tables import kind
from prescore.bench.speed.timing import EXACT, random_inputs, time_calls
from prescore.bench.tables import MISSING, Table
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import GaussianKMeans, KMeans, KMedian, Minkowski
from prescore.scoring.leverage import Leverage

METHODS = {
    "hyper": "HyperAttention",
    "paper:kmeans": "k-means + Hyper",
    "paper:kmedian": "k-median + Hyper",
    "paper:leverage": "leverage + Hyper",
    "default": "default",
}
SCORERS: dict[str, Scorer] = {
    "kmeans": KMeans(),
    "kmedian": KMedian(),
    "minkowski p=1.5": Minkowski(p=1.5),
    "minkowski p=3": Minkowski(p=3.0),
    "gaussian-kmeans": GaussianKMeans(),
    "leverage": Leverage(),
}
"""Every clustering scorer with the paper's settings, and leverage."""
LENGTHS = (8192, 32768, 65536)
SCORING_LENGTHS, DIMS = (8192, 16384, 32768), (32, 64, 128)
TOP_K, CLUSTERS = (256, 512, 1024, 2048, 4096), (8, 16, 32, 65, 128, 256)
LEAF, KEPT = 2048, 2048


def cost_rows(run: Run, dims: Sequence[int], quick: bool) -> list[Row]:
    """Every scorer by keys and dimensions, O(n d k I) and O(n d log d); the preset by budget and clusters."""
    settings, lengths, repeats = run.settings, run.lengths or SCORING_LENGTHS, run.settings["repeats"]
    rows = []
    for n, dim in itertools.product(lengths, dims):
        sizes: Values = {"heads": settings["heads"] or HEADS, "dim": dim, "n": n, "repeats": repeats}
        config = {"study": "scoring", **sizes}
        rows.append(Row(config, run.seed, partial(measure_scoring, config, run.seed), n * dim))
    preset = {"n": lengths[0], "causal": False, "backward": False, "methods": ["paper:kmeans"], "dim": dims[0]}
    every = 3 if quick else 1
    budgets = [("top-k", top_k, None) for top_k in TOP_K if top_k < lengths[0]][::every]
    for study, top_k, n_clusters in [*budgets, *(("clusters", KEPT, n) for n in CLUSTERS[::every])]:
        config = {**settings, **preset, "heads": heads_of(run, lengths[0]), "top_k": top_k}
        rows.append(row(run, study, measure_methods, {**config, "n_clusters": n_clusters}))
    return rows


@torch.no_grad()
def measure_scoring(config: Values, seed: int) -> Values:
    """Times of exact full attention and of every scorer on the same keys."""
    inputs = random_inputs(config["n"], config["heads"], config["dim"], seed=seed)
    calls: dict[str, Callable[[], Tensor]] = {EXACT: partial(scaled_dot_product_attention, *inputs)}
    for name, scorer in SCORERS.items():
        calls[name] = partial(score, inputs[1], scorer)
        if not bool(torch.isfinite(scores := calls[name]()).all()):
            raise RuntimeError(f"scores of {name} must be finite, got {scores}")
    return {"methods": time_calls(calls, config["repeats"])}


# Tables.


def length_table(records: Sequence[Record]) -> Table:
    """Exact time over method time, by mask, pass and length; rows that were run apart are one line."""
    cells: dict[tuple[bool, bool, int, int], dict[str, str]] = defaultdict(dict)
    kinds = {}
    for record in records:
        config, methods = record.config, record.results["methods"]
        key = (not config["causal"], config["backward"], config["n"], config["heads"])
        kinds[key] = kind(config)
        cells[key].setdefault("exact", f"{methods['exact']['seconds']:.2f} s")
        cells[key] |= {name: f"{methods[name]['speedup']:.1f}x" for name in config["methods"]}
    rows = []
    for key, line in sorted(cells.items()):
        times = (line["exact"], *(line.get(name, MISSING) for name in METHODS))
        rows.append((kinds[key], f"{key[2]:,}", str(key[3]), *times))
    columns = ("mask and pass", "tokens", "heads", "exact attention", *METHODS.values())
    note = "exact time / method time; the paper's figure is of a GPU and has no numbers: 'mild acceleration'"
    return Table("Figure 1", columns, tuple(rows), note)


def share_table(records: Sequence[Record]) -> Table:
    """The preset with k-means: its part of the ideal speed-up, and its stages."""
    rows = []
    measured = [record for record in records if "paper:kmeans" in record.config["methods"]]
    for record in sorted(measured, key=lambda r: (not r.config["causal"], r.config["backward"], r.config["n"])):
        results = record.results["methods"]["paper:kmeans"]
        shares = results["shares"]
        scoring, hashing, sorting, operator = (
            shares.get(stage, 0.0) for stage in ("scoring", "hashing", "sorting", "attending")
        )
        stages = (scoring, hashing + sorting, operator)
        cells = [f"{100 * share:.0f} %" for share in (results["share_of_bound"], *stages)]
        rows.append((kind(record.config), f"{record.config['n']:,}", *cells))
    columns = ("mask and pass", "tokens", "of the ideal speed-up", "scoring", "hashing and sorting", "operator")
    return Table("The preset with k-means", columns, tuple(rows))


def scoring_table(records: Sequence[Record]) -> Table:
    """Scorers alone, and their share of exact attention without a causal mask."""
    rows = []
    for record in records:
        methods = record.results["methods"]
        for name, results in methods.items():
            share = 100 * results["seconds"] / methods["exact"]["seconds"]
            sizes = (f"{record.config['n']:,}", str(record.config["dim"]))
            rows.append((name, *sizes, f"{1000 * results['seconds']:.0f} ms", f"{share:.1f} %"))
    columns = ("scorer", "keys", "dimensions", "time", "share of exact attention")
    return Table("Scoring alone, full", columns, tuple(rows))


def preset_table(records: Sequence[Record], study: str) -> Table:
    """The preset with k-means against its budget (`top-k`) or its clusters."""
    field = {"top-k": "top_k", "clusters": "n_clusters"}[study]
    times = [record.results["methods"]["paper:kmeans"]["seconds"] for record in records]
    cells = ("time", *(f"{1000 * seconds:.0f} ms" for seconds in times))
    title = f"The preset with k-means by {study}"
    return Table(title, (study, *(str(record.config[field]) for record in records)), (cells,))


def speed_tables(records: Sequence[Record]) -> list[Table]:
    """The tables of the studies that were run."""
    studies = {name: [r for r in records if r.config["study"] == name] for name in (*_TABLES, "top-k", "clusters")}
    made = [table(studies[name]) for name, tables in _TABLES.items() if studies[name] for table in tables]
    return made + [preset_table(studies[name], name) for name in ("top-k", "clusters") if studies[name]]


_TABLES = {"lengths": (length_table, share_table), "scoring": (scoring_table,)}


def scoring_plot(records: Sequence[Record], path: str | Path) -> None:
    """Time of every scorer against the number of keys, a line for each and for the dimensions."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in records:
        if record.config["study"] == "scoring":
            for name, results in record.results["methods"].items():
                lines[f"{name}, {record.config['dim']} dimensions"].append(
                    (record.config["n"], results["seconds"])
                )
    with figure(path, (7, 4.5)) as (_, axes):
        for line_number, (label, points) in enumerate(lines.items()):
            axes.plot(*zip(*sorted(points), strict=True), label=label, markersize=4, **line_style(line_number))
        powers_of_two(axes)
        axes.set_yscale("log")
        axes.set(title="Scoring alone", xlabel="keys", ylabel="seconds")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
