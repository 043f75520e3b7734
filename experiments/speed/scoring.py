"""What scoring costs: scorers alone, and the paper's preset against `top_k` and against the number of clusters.

python experiments/speed/scoring.py --study scoring -n 16384 --threads 2 --out experiments/speed/scoring --resume
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import typer
from torch import Tensor

from prescore import checks
from prescore.attention import score
from prescore.bench.cli.main import script
from prescore.bench.cli.options import Run
from prescore.bench.memory import KEPT, choose_freed_memory
from prescore.bench.records import Record, Row, Values
from prescore.bench.speed.studies import HEADS, exact_call, make_inputs, measure_methods
from prescore.bench.speed.tables import entry_table, of_study, time
from prescore.bench.speed.timing import EXACT, time_calls
from prescore.bench.tables import Table
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import GaussianKMeans, KMeans, KMedian, Minkowski
from prescore.scoring.leverage import Leverage

SCORERS: dict[str, Scorer] = {
    "kmeans": KMeans(),
    "kmedian": KMedian(),
    "minkowski p=1.5": Minkowski(p=1.5),
    "minkowski p=3": Minkowski(p=3.0),
    "gaussian-kmeans": GaussianKMeans(),
    "leverage": Leverage(),
}
"""Every clustering scorer with the paper's settings, and leverage."""
SWEEPS = {
    "top-k": ("top_k", (256, 512, 1024, 2048, 4096, 8192)),
    "clusters": ("n_clusters", (8, 16, 32, 65, 128, 256)),
}
"""What a study varies: the field of its records, and its values."""
STUDIES = ("scoring", *SWEEPS)
METHODS = ("paper:kmeans",)


@torch.no_grad()
def measure_scoring(config: Values, seed: int) -> Values:
    """Times of exact full attention and of every scorer on the same keys."""
    inputs, _ = make_inputs(config, seed, None)
    calls: dict[str, Callable[[], Tensor]] = {EXACT: partial(exact_call, inputs, False, None)}
    for name, scorer in SCORERS.items():
        calls[name] = partial(score, inputs[1], scorer)
        scores = calls[name]()
        if not bool(torch.isfinite(scores).all()):
            raise RuntimeError(f"scores of {name} must be finite, got {scores}")
    return {"methods": time_calls(calls, config["repeats"])}


def plan_rows(
    studies: Sequence[str], n: int, *, dim: int, repeats: int, seed: int, values: Sequence[int] | None = None
) -> list[Row]:
    """The rows of the studies at one length; `values` replaces those of `SWEEPS`."""
    rows = []
    for study in studies:
        checks.one_of("--study", study, STUDIES)
        config: Values = {"study": study, "heads": HEADS, "dim": dim, "n": n, "repeats": repeats}
        if study == "scoring":
            rows.append(Row(config, seed, partial(measure_scoring, config, seed)))
            continue
        config |= {"dtype": "float32", "top_k": 2048, "min_seq_len": 2048, "methods": list(METHODS)}
        config |= {"causal": False, "backward": False, "n_clusters": None, "memory": choose_freed_memory(KEPT)}
        field, known = SWEEPS[study]
        for value in values or [value for value in known if field != "top_k" or value < n]:
            varied = {**config, field: value}
            rows.append(Row(varied, seed, partial(measure_methods, varied, seed)))
    return rows


def tables(records: Sequence[Record]) -> list[Table]:
    """A table for each study."""
    made = []
    for study, (field, _) in SWEEPS.items():
        if chosen := of_study(records, study):
            rows = [
                (str(r.config[field]), *(time(r.results["methods"][name]) for name in METHODS)) for r in chosen
            ]
            title = f"Time against {field}, n = {chosen[0].config['n']}, full, forward"
            made.append(Table(title, (field, *METHODS), tuple(rows)))
    if chosen := of_study(records, "scoring"):
        made.append(entry_table(chosen, "Scoring alone, full", "n|method|time|share of exact"))
    return made


def command(
    options: Run,
    study: list[str] | None = typer.Option(None, help="scoring, top-k, clusters; repeatable.  [default: all]"),
    length: int = typer.Option(16384, "--length", "-n", min=16, help="Keys."),
    dim: int = typer.Option(64, min=1, help="Head dimension."),
    repeats: int = typer.Option(5, min=1, help="Timed rounds; the median counts."),
) -> None:
    """Time scorers, and the paper's preset at several sizes, on random heads."""
    rows = plan_rows(study or STUDIES, length, dim=dim, repeats=repeats, seed=options.seed)
    session = options.open("speed")
    records = session.run(rows)
    session.show(*(table.to_rich() for table in tables(records)))


if __name__ == "__main__":
    sys.exit(script(command))
