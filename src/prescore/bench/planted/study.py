"""The planted-model study: which claims hold, and which methods find the planted keys.

Every row is one seed of one setting. Rows of part `recall` hold, per rule, the share of the planted keys among
the `d * m` selected ones and the share of heavy entries of polynomial attention they cover; rows of part
`claims` hold the checks of one topic.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.planted import model as planted
from prescore.bench.planted.model import PlantedModel, PlantedSetting
from prescore.bench.plots import COLOURS, bars, figure
from prescore.bench.records import Record, Row, row_key
from prescore.bench.tables import MISSING, Table, as_text, mean_and_spread, span
from prescore.config import Selected
from prescore.registry import get_scorer, list_scorers
from prescore.rng import as_streams
from prescore.scoring.kmeans import Minkowski
from prescore.scoring.rules import RULES
from prescore.scoring.select import score_keys, select_keys
from prescore.types import Values

COMMAND = "planted"
NO_RULE = "-"
SENSITIVITY = "lp-sensitivity"
VARIANTS = (("normalized", None), ("small-noise", False), ("small-noise", None))
"""Readings of the model, and `normalize`: False = raw keys, None = as the scorer does by default."""
CONVERGED = 30
"""Lloyd iterations for the claims, which speak of convergence."""


@dataclass(frozen=True)
class Sweep:
    """What to run: every combination of the settings, for every seed.

    `methods=None` is every registered scorer (`minkowski` with the last power), and l_p sensitivities for the
    powers below 4 but 2. Clusters are fitted on `fit_size` keys, 0 = all, so that the figures show the method and
    not the sampling. For the claims the cheapest of `restarts` clusterings counts; the l_p claim, whose centres
    are slow to find, gets one, at the smallest n.
    """

    n: tuple[int, ...] = (4096, 16384)
    d: tuple[int, ...] = (32,)
    epsilon: tuple[float, ...] = (0.1,)
    c_signal: tuple[float, ...] = (0.1,)
    c_noise: tuple[float, ...] = (0.1,)
    methods: tuple[str, ...] | None = None
    rules: tuple[str, ...] = RULES
    seeds: tuple[int, ...] = tuple(range(10))
    powers: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0)
    degree: int = 2
    norm: float = 100.0
    fit_size: int | None = 0
    n_queries: int = 256
    restarts: int = 4


QUICK = Sweep(n=(1024,), d=(16,), seeds=(0, 1), powers=(1.0, 2.0, 3.0), n_queries=64, restarts=2)


def rows(sweep: Sweep) -> list[Row]:
    """All rows of a sweep, seed by seed, so that an interrupted study has whole seeds first.

    Settings are checked here, and not in the middle of a long study.
    """
    settings = [
        PlantedSetting(*values)
        for values in itertools.product(sweep.n, sweep.d, sweep.epsilon, sweep.c_signal, sweep.c_noise)
    ]
    found: dict[str, Row] = {}
    for seed, setting in itertools.product(sweep.seeds, settings):
        for row in (*_claim_rows(sweep, setting, seed), *_recall_rows(sweep, setting, seed)):
            found.setdefault(row_key(COMMAND, row.config, row.seed), row)
    return list(found.values())


@dataclass(frozen=True)
class PlantedMethod:
    """A scorer, or l_p sensitivities with their power, on keys of one reading."""

    name: str
    power: float
    reading: str
    normalize: bool | None

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.name} p={self.power:g}" if self.name in (SENSITIVITY, "minkowski") else self.name

    def rules(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The rules to run; a scorer without clusters has none."""
        return asked if self.name != SENSITIVITY and "rule" in _fields(self.name) else (NO_RULE,)

    def choose(self, model: PlantedModel, rule: str, fit_size: int | None, seed: int) -> Tensor:
        """The keys it keeps, `[n]` bool, with a budget of exactly the planted ones."""
        budget = int(model.signal.sum())
        chosen = torch.zeros(len(model.keys), dtype=torch.bool)
        if self.name == SENSITIVITY:
            chosen[planted.lp_sensitivities(model.keys, self.power).topk(budget).indices] = True
            return chosen
        wanted = {"rule": rule, "normalize": self.normalize, "fit_size": fit_size or None, "p": self.power}
        known = _fields(self.name)
        # a scorer without clusters has no rule, and None leaves it as it is
        options = {name: value for name, value in wanted.items() if name in known and value is not None}
        config = Selected.paper(get_scorer(self.name)(**options), budget)
        keys = model.keys.float()[None, None]
        selection = select_keys(keys, config, valid=None, streams=as_streams(seed)).selection
        chosen[selection.indices[selection.valid]] = True
        return chosen


def _fields(scorer: str) -> set[str]:
    return {field.name for field in dataclasses.fields(get_scorer(scorer))}


def _recall_rows(sweep: Sweep, setting: PlantedSetting, seed: int) -> list[Row]:
    scorers = list_scorers()
    for name in sweep.methods or ():
        checks.one_of("method", name, scorers)
    names: list[tuple[str, float]] = [(name, sweep.powers[-1]) for name in sweep.methods or scorers]
    if sweep.methods is None:
        names += [(SENSITIVITY, p) for p in sweep.powers if p < 4 and p != 2]
    found = []
    for (name, power), (reading, normalize) in itertools.product(names, VARIANTS):
        method = PlantedMethod(name, power, reading, normalize)
        rules = method.rules(sweep.rules)
        config = {
            "part": "recall",
            **dataclasses.asdict(setting),
            "reading": reading,
            "normalize": normalize,
            "method": method.label,
            "rules": list(rules),
            "degree": sweep.degree,
            "fit_size": sweep.fit_size,
            "n_queries": sweep.n_queries,
        }
        run = partial(_recall, sweep, setting, method, seed)
        found.append(Row(config, seed, run, cost=setting.n * len(rules)))
    return found


def _recall(sweep: Sweep, setting: PlantedSetting, method: PlantedMethod, seed: int) -> Values:
    model = setting.draw(method.reading, generator=seed)
    query = planted.planted_queries(model, sweep.n_queries, generator=seed)
    attention = planted.polynomial_attention(query, model.keys, sweep.degree)
    figures: Values = {"recall": {}, "heavy_recall": {}}
    for rule in method.rules(sweep.rules):
        chosen = method.choose(model, rule, sweep.fit_size, seed)
        figures["recall"][rule] = float((chosen & model.signal).sum() / model.signal.sum())
        figures["heavy_recall"][rule] = planted.heavy_recall(attention, chosen, model.epsilon / 2)
    return figures


def _claim_rows(sweep: Sweep, setting: PlantedSetting, seed: int) -> list[Row]:
    found = []

    def add(topic: str, detail: Values, run: Callable[[], list[Check]], *, cost: float) -> None:
        config = {"part": "claims", "topic": topic, **dataclasses.asdict(setting), **detail}
        found.append(Row(config, seed, partial(_verdicts, run), cost=cost * setting.n))

    for reading in planted.READINGS:
        add("leverage", {"reading": reading}, partial(_leverage, sweep, setting, reading, seed), cost=1)
        run = partial(_clusters, sweep, setting, reading, seed)
        add("clusters", {"reading": reading}, run, cost=sweep.restarts)
        run = partial(_singleton, sweep, dataclasses.replace(setting, epsilon=1.0), reading, seed)
        add("singleton", {"reading": reading, "epsilon": 1.0}, run, cost=sweep.restarts)
    for p, rotated in itertools.product(sweep.powers if setting.n == min(sweep.n) else (), (False, True)):
        detail = {"reading": "small-noise", "p": p, "rotated": rotated}
        add("l_p", detail, partial(_lp, setting, p, rotated, seed), cost=2 if p >= 2 else 10)
    for spread in (0.0, 0.5):
        detail = {"reading": "counterexample", "norm": sweep.norm, "spread": spread}
        # the counterexample has no epsilon and no noise constants
        detail |= {"epsilon": None, "c_signal": None, "c_noise": None}
        run = partial(_counterexample, sweep, setting, spread, seed)
        add("counterexample", detail, run, cost=2 * sweep.restarts)
    return found


def _verdicts(run: Callable[[], list[Check]]) -> Values:
    return {"checks": [check.to_dict() for check in run()]}


def _leverage(sweep: Sweep, setting: PlantedSetting, reading: str, seed: int) -> list[Check]:
    model = setting.draw(reading, generator=seed)
    universal = universal_set_checks(model, n_queries=sweep.n_queries, seed=seed)
    return leverage_checks(model) + universal


def _clusters(sweep: Sweep, setting: PlantedSetting, reading: str, seed: int) -> list[Check]:
    model = setting.draw(reading, generator=seed)
    found = best_recovery(model, sweep.restarts, seed)
    return clustering_checks(found, "Theorem 2") + centroid_checks(model)


def _singleton(sweep: Sweep, setting: PlantedSetting, reading: str, seed: int) -> list[Check]:
    found = best_recovery(setting.draw(reading, generator=seed), sweep.restarts, seed)
    return clustering_checks(found, "Corollary 1")


def _lp(setting: PlantedSetting, p: float, rotated: bool, seed: int) -> list[Check]:
    model = setting.draw("small-noise", rotated=rotated, generator=seed)
    found = best_recovery(model, 1, seed, p=p)
    return lp_checks(model, found, p, "rotated" if rotated else "standard")


def _counterexample(sweep: Sweep, setting: PlantedSetting, spread: float, seed: int) -> list[Check]:
    d = setting.d + setting.d % 2
    model = planted.counterexample_keys(setting.n, d, sweep.norm, spread=spread, generator=seed)
    raw = best_recovery(model, sweep.restarts, seed)
    unit = dataclasses.replace(model, keys=torch.nn.functional.normalize(model.keys, dim=-1))
    name = "as printed" if spread == 0 else "norms spread"
    return counterexample_checks(model, raw, best_recovery(unit, sweep.restarts, seed), name)


def best_recovery(model: PlantedModel, restarts: int, seed: int, *, p: float = 2.0) -> Recovery:
    """Cluster all keys as they are into `d + 1` clusters; the cheapest of some restarts."""
    scorer = Minkowski(p=p, normalize=False, max_iter=CONVERGED)
    keys = model.keys[None, None]
    best: tuple[float, Tensor] | None = None
    for restart in range(restarts):
        scored = score_keys(keys, scorer, valid=None, streams=as_streams(seed * 1000 + restart))
        if scored.labels is None:
            raise TypeError("minkowski must return labels, got None")
        # with the nearest rule a score is minus the l_p distance to the own centre
        cost = float((-scored.scores).clamp_min(0).pow(p).sum())
        if best is None or cost < best[0]:
            best = cost, scored.labels[0, 0]
    if best is None:
        raise ValueError(f"restarts must be at least 1, got {restarts}")
    return recovery(model, best[1])


# The paper's statements about the planted model, each as a measured number beside its bound.
#
# An O() or Theta() hides a constant, so the constant that is used here is part of each check's bound. A check
# that fails is a finding, not an error.

CONSTANT = 4.0
"""What an O() may hide, unless a check says otherwise."""
SMALL = 0.5
"""What "sufficiently small" allows."""


@dataclass(frozen=True)
class Check:
    """One statement: `quantity` was `measured`, and should be `relation` `bound`."""

    claim: str
    quantity: str
    measured: float
    relation: str
    bound: float
    note: str = ""

    @property
    def held(self) -> bool:
        """Whether the measured quantity satisfies the bound."""
        value, bound = self.measured, self.bound
        return {
            "<=": value <= bound,
            ">=": value >= bound,
            "<": value < bound,
            ">": value > bound,
            "=": abs(value - bound) <= 1e-6 * max(1.0, abs(bound)),
            "within 4x of": bound / 4 <= value <= 4 * bound,
        }[self.relation]

    def to_dict(self) -> Values:
        """JSON values, with the verdict."""
        return {**asdict(self), "held": self.held}


@dataclass(frozen=True)
class Recovery:
    """How a clustering compares with the truth.

    Attributes:
        groups: Share of signal groups that form a cluster of exactly their rows.
        noise: Share of the noise rows in the cluster that holds most of them.
        cost_ratio: k-means cost of the true partition over the cost found; above 1, the truth is not optimal.
    """

    groups: float
    noise: float
    cost_ratio: float


def recovery(model: PlantedModel, labels: Tensor) -> Recovery:
    """Compare cluster labels `[n]` with the planted groups."""
    n_groups, n_labels = int(model.groups.max()) + 1, int(labels.max()) + 1
    pairs = torch.bincount(model.groups * n_labels + labels, minlength=n_groups * n_labels)
    table = pairs.view(n_groups, n_labels)
    best, home = table[1:].max(-1)
    whole = (best == table[1:].sum(-1)) & (best == table.sum(0)[home])
    found = _cost(model.keys.double(), labels)
    true = _cost(model.keys.double(), model.groups)
    return Recovery(
        groups=float(whole.double().mean()),
        noise=float(table[0].max() / table[0].sum()),
        cost_ratio=true / found if found > 0 else (1.0 if true <= 0 else float("inf")),
    )


def _cost(points: Tensor, labels: Tensor) -> float:
    means = _means(points, labels)
    return float((points - means[labels]).square().sum())


def _means(points: Tensor, labels: Tensor) -> Tensor:
    n_labels = int(labels.max()) + 1
    sums = torch.zeros(n_labels, points.shape[-1], dtype=points.dtype).index_add_(0, labels, points)
    return sums / torch.bincount(labels, minlength=n_labels).clamp_min(1)[:, None]


def leverage_checks(model: PlantedModel) -> list[Check]:
    """Lemma 1, Lemma 2 and Theorem 1, with the assumptions they stand on."""
    n, d = model.keys.shape
    leverage = planted.leverage_scores(model.keys)
    lowest, highest = float(leverage[model.signal].min()), float(leverage[~model.signal].max())
    sigma_min = float(torch.linalg.matrix_norm(model.keys.double(), ord=-2)) ** 2
    delta_1, delta_2 = planted.correlations(model)
    epsilon = model.epsilon
    inside = "rows of a group are parallel" if model.group_size > 1 else ""
    return [
        Check("Lemma 1", "max noise leverage / eps", highest / epsilon, "<=", 1.0),
        Check("Lemma 1, proof", "max noise leverage / (d / n)", highest * n / d, "<=", CONSTANT),
        Check("Lemma 2", "min signal leverage / eps", lowest / epsilon, ">=", 0.5),
        Check("Theorem 1", "min signal leverage / max noise leverage", lowest / highest, ">", 1.0),
        Check("Theorem 1, assumption", "sigma_min^2 * eps", sigma_min * epsilon, "within 4x of", 1.0),
        Check("(P1)", "delta_1", delta_1, "<", SMALL, inside),
        Check("(P2)", "delta_2", delta_2, "<", SMALL),
    ]


def universal_set_checks(model: PlantedModel, *, n_queries: int, seed: int) -> list[Check]:
    """LevAttention's universal set: at rho, and as a cover of the heavy entries of quadratic attention."""
    n, d = model.keys.shape
    leverage = planted.leverage_scores(model.keys)
    rho = planted.universal_threshold(model)
    vacuous = "says nothing, d/rho >= n" if d / rho >= n else ""
    query = planted.planted_queries(model, n_queries, generator=seed)
    threshold = model.epsilon / 2
    heavy = planted.heavy_recall(
        planted.polynomial_attention(query, model.keys, 2), leverage >= threshold, threshold
    )
    checks = [
        Check(
            "rho: S in U",
            "min signal leverage / rho",
            float(leverage[model.signal].min()) / rho,
            ">=",
            1.0,
            vacuous,
        ),
        Check("rho: size of U", "|U| / (d / rho)", int((leverage >= rho).sum()) * rho / d, "<=", 1.0, vacuous),
    ]
    if heavy is not None:
        checks.append(Check("universal set", "recall of entries > eps/2, degree 2", heavy, "=", 1.0))
    return checks


def clustering_checks(found: Recovery, claim: str) -> list[Check]:
    """Theorem 2 or Corollary 1: the clusters found are the planted groups, and the truth is optimal."""
    optimum = "" if found.cost_ratio <= 1 else "the truth is not optimal"
    stuck = "a local optimum" if found.cost_ratio < 1 - 1e-9 else ""
    # a search can refute optimality, never show it
    unproven = "" if optimum else "none cheaper found, no proof"
    return [
        Check(claim, "signal groups that are one cluster", found.groups, "=", 1.0, stuck or optimum),
        Check(claim, "noise rows in one cluster", found.noise, "=", 1.0, stuck or optimum),
        Check(
            f"{claim}, optimality", "cost of the truth / cost found", found.cost_ratio, "<=", 1.0 + 1e-9, unproven
        ),
    ]


def centroid_checks(model: PlantedModel) -> list[Check]:
    """Theorem 2's centroid errors, with the true partition, the best case for the bound.

    A mean of m Gaussian rows is off by about `sqrt(d) * sigma / sqrt(m)`, so the bound is also checked with
    the factor sqrt(d) that the paper's O() would have to hide.
    """
    d = model.keys.shape[-1]
    means = _means(model.keys.double(), model.groups)
    n_noise = int((~model.signal).sum())
    signal = float((means[1:] - model.directions).norm(dim=-1).max())
    signal *= model.group_size**0.5 / model.sigma_signal
    noise = float(means[0].norm()) * n_noise**0.5 / model.sigma_noise
    checks = []
    for factor, words in ((1.0, ""), (d**0.5, " sqrt(d)")):
        checks += [
            Check(
                "Theorem 2, centroids",
                f"max |mu_j - v_j| / (sigma_S{words} / sqrt(m))",
                signal / factor,
                "<=",
                CONSTANT,
            ),
            Check(
                "Theorem 2, centroids",
                f"|mu_0| / (sigma_N{words} / sqrt(n - dm))",
                noise / factor,
                "<=",
                CONSTANT,
            ),
        ]
    return checks


def lp_checks(model: PlantedModel, found: Recovery, p: float, basis: str) -> list[Check]:
    """Claim 1 for one p: the proof's separations in this basis, and what the clustering recovers."""
    claim = f"Claim 1, p={p:g}, {basis}"
    directions = model.directions
    gaps = (directions[:, None] - directions[None]).abs().pow(p).sum(-1)
    off_diagonal = gaps[~torch.eye(len(directions), dtype=torch.bool)]
    norms = directions.abs().pow(p).sum(-1)
    smallest = min(float(norms.min()), float(off_diagonal.min()) if len(off_diagonal) else float("inf"))
    centres = torch.cat((torch.zeros(1, directions.shape[-1], dtype=directions.dtype), directions))
    deviation = float((model.keys.double() - centres[model.groups]).abs().pow(p).sum(-1).max())
    sensitivity = planted.lp_sensitivities(model.keys, p)
    n_signal = int(model.signal.sum())
    top = sensitivity.topk(n_signal).indices
    return [
        Check(claim, "Delta_min", smallest, "=", 1.0),
        Check(claim, "Delta_min - 2 delta_max", smallest - 2 * deviation, ">", 0.0),
        Check(claim, "signal groups that are one cluster", found.groups, "=", 1.0),
        Check(claim, "noise rows in one cluster", found.noise, "=", 1.0),
        Check(claim, "recall by l_p sensitivity", float(model.signal[top].double().mean()), "=", 1.0),
    ]


def counterexample_checks(model: PlantedModel, raw: Recovery, normalized: Recovery, name: str) -> list[Check]:
    """Appendix B: correlations are zero, raw clustering loses the signal rows, normalised keys keep them."""
    claim = f"Appendix B, {name}"
    distinct = len(torch.unique(model.keys, dim=0))
    few = f"only {distinct} different rows" if distinct <= model.keys.shape[-1] + 1 else ""
    return [
        Check(claim, "max(delta_1, delta_2)", max(planted.correlations(model)), "=", 0.0),
        Check(claim, "signal rows isolated, raw keys", raw.groups, "<", 0.5, few),
        Check(claim, "signal rows isolated, normalised keys", normalized.groups, "=", 1.0, few),
    ]


# The planted-model study as tables and a plot.

VARIANTS_planted = {
    ("normalized", None): "rows normalised",
    ("small-noise", False): "small noise, raw",
    ("small-noise", None): "small noise, as shipped",
}
_SETTING = ("n", "d", "epsilon", "c_signal", "c_noise")

Cells = dict[tuple[str, str], dict[tuple[str, bool | None], list[Any]]]


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
        cells = [mean_and_spread(recall[name].get(variant, [])) for variant in VARIANTS_planted]
        covered = [mean_and_spread(heavy[name].get(variant, [])) for variant in VARIANTS_planted]
        rows.append((*name, *cells, *covered))
    return Table(
        title=f"Planted keys found, {describe_setting(setting)}",
        columns=(
            "method",
            "rule",
            *VARIANTS_planted.values(),
            *(f"heavy: {words}" for words in VARIANTS_planted.values()),
        ),
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
        for number_, (panel, (variant, title)) in enumerate(zip(axes[:3], VARIANTS_planted.items(), strict=True)):
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


def _figures(records: Sequence[Record], setting: tuple[Any, ...], figure_name: str) -> Cells:
    values: Cells = defaultdict(lambda: defaultdict(list))
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
