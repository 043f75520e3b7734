"""The planted-model study: which claims hold, and which methods find the planted keys.

Every row is one seed of one setting. Rows of part `recall` hold, per rule, the share of the planted keys among
the `d * m` selected ones and the share of heavy entries of polynomial attention they cover; rows of part
`claims` hold the checks of one topic.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prescore import planted
from prescore.config import RULES, PrescoreConfig
from prescore.evaluation import planted_checks
from prescore.planted import PlantedModel
from prescore.records import Record, Row, measure, row_key
from prescore.registry import get_scorer, list_scorers
from prescore.rng import as_streams
from prescore.scoring import score_keys, select_keys

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


@dataclass(frozen=True)
class Setting:
    """One point of the sweep."""

    n: int
    d: int
    epsilon: float
    c_signal: float
    c_noise: float

    def __post_init__(self) -> None:
        # before the first row is measured, not in the middle of a long study
        planted.check_settings(self.n, self.d, self.epsilon, self.c_signal, self.c_noise)

    def draw(self, reading: str, seed: int, *, rotated: bool = False) -> PlantedModel:
        """The keys of this setting."""
        values = (self.n, self.d, self.epsilon, self.c_signal, self.c_noise)
        return planted.planted_keys(*values, reading=reading, rotated=rotated, generator=seed)


def rows(sweep: Sweep) -> list[Row]:
    """All rows of a sweep, seed by seed, so that an interrupted study has whole seeds first."""
    settings = [
        Setting(*values)
        for values in itertools.product(sweep.n, sweep.d, sweep.epsilon, sweep.c_signal, sweep.c_noise)
    ]
    found: dict[str, Row] = {}
    for seed, setting in itertools.product(sweep.seeds, settings):
        for row in (*_claim_rows(sweep, setting, seed), *_recall_rows(sweep, setting, seed)):
            found.setdefault(row_key(COMMAND, row.config, row.seed), row)
    return list(found.values())


def study(sweep: Sweep) -> list[Record]:
    """Run a sweep in memory."""
    return [measure(COMMAND, row, threads=torch.get_num_threads()) for row in rows(sweep)]


@dataclass(frozen=True)
class Method:
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
        if self.name == SENSITIVITY or "rule" not in {f.name for f in dataclasses.fields(get_scorer(self.name))}:
            return (NO_RULE,)
        return asked

    def choose(self, model: PlantedModel, rule: str, fit_size: int | None, seed: int) -> Tensor:
        """The keys it keeps, `[n]` bool, with a budget of exactly the planted ones."""
        budget = int(model.signal.sum())
        chosen = torch.zeros(len(model.keys), dtype=torch.bool)
        if self.name == SENSITIVITY:
            chosen[planted.lp_sensitivities(model.keys, self.power).topk(budget).indices] = True
            return chosen
        rule = "nearest" if rule == NO_RULE else rule
        options = {"rule": rule, "normalize": self.normalize, "fit_size": fit_size, "p": self.power}
        config = PrescoreConfig.paper(self.name, budget, **options)
        keys = model.keys.float()[None, None]
        selection = select_keys(keys, valid=None, config=config, streams=as_streams(seed)).selection
        chosen[selection.indices[selection.valid]] = True
        return chosen


def _recall_rows(sweep: Sweep, setting: Setting, seed: int) -> list[Row]:
    names: list[tuple[str, float]] = [(name, sweep.powers[-1]) for name in sweep.methods or list_scorers()]
    if sweep.methods is None:
        names += [(SENSITIVITY, p) for p in sweep.powers if p < 4 and p != 2]
    found = []
    for (name, power), (reading, normalize) in itertools.product(names, VARIANTS):
        method = Method(name, power, reading, normalize)
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
        found.append(Row(config, seed, _recall(sweep, setting, method, seed), cost=setting.n * len(rules)))
    return found


def _recall(sweep: Sweep, setting: Setting, method: Method, seed: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        model = setting.draw(method.reading, seed)
        query = planted.planted_queries(model, sweep.n_queries, generator=seed)
        attention = planted.polynomial_attention(query, model.keys, sweep.degree)
        figures: dict[str, Any] = {"recall": {}, "heavy_recall": {}}
        for rule in method.rules(sweep.rules):
            chosen = method.choose(model, rule, sweep.fit_size, seed)
            figures["recall"][rule] = float((chosen & model.signal).sum() / model.signal.sum())
            figures["heavy_recall"][rule] = planted.heavy_recall(attention, chosen, model.epsilon / 2)
        return figures

    return run


def _claim_rows(sweep: Sweep, setting: Setting, seed: int) -> list[Row]:
    found = []

    def add(
        topic: str, detail: dict[str, Any], checks: Callable[[], list[planted_checks.Check]], *, cost: float
    ) -> None:
        config = {"part": "claims", "topic": topic, **dataclasses.asdict(setting), **detail}
        run = lambda: {"checks": [check.to_dict() for check in checks()]}  # noqa: E731
        found.append(Row(config, seed, run, cost=cost * setting.n))

    for reading in planted.READINGS:
        add("leverage", {"reading": reading}, _leverage(sweep, setting, reading, seed), cost=1)
        add("clusters", {"reading": reading}, _clusters(sweep, setting, reading, seed), cost=sweep.restarts)
        single = dataclasses.replace(setting, epsilon=1.0)
        detail = {"reading": reading, "epsilon": 1.0}
        add("singleton", detail, _singleton(sweep, single, reading, seed), cost=sweep.restarts)
    for p, rotated in itertools.product(sweep.powers if setting.n == min(sweep.n) else (), (False, True)):
        detail = {"reading": "small-noise", "p": p, "rotated": rotated}
        add("l_p", detail, _lp(setting, p, rotated, seed), cost=2 if p >= 2 else 10)
    for spread in (0.0, 0.5):
        detail = {"reading": "counterexample", "norm": sweep.norm, "spread": spread}
        # the counterexample has no epsilon and no noise constants
        detail |= {"epsilon": None, "c_signal": None, "c_noise": None}
        add("counterexample", detail, _counterexample(sweep, setting, spread, seed), cost=2 * sweep.restarts)
    return found


Checks = Callable[[], list[planted_checks.Check]]


def _leverage(sweep: Sweep, setting: Setting, reading: str, seed: int) -> Checks:
    def run() -> list[planted_checks.Check]:
        model = setting.draw(reading, seed)
        universal = planted_checks.universal_set_checks(model, n_queries=sweep.n_queries, seed=seed)
        return planted_checks.leverage_checks(model) + universal

    return run


def _clusters(sweep: Sweep, setting: Setting, reading: str, seed: int) -> Checks:
    def run() -> list[planted_checks.Check]:
        model = setting.draw(reading, seed)
        found = best_recovery(model, sweep.restarts, seed)
        return planted_checks.clustering_checks(found, "Theorem 2") + planted_checks.centroid_checks(model)

    return run


def _singleton(sweep: Sweep, setting: Setting, reading: str, seed: int) -> Checks:
    def run() -> list[planted_checks.Check]:
        found = best_recovery(setting.draw(reading, seed), sweep.restarts, seed)
        return planted_checks.clustering_checks(found, "Corollary 1")

    return run


def _lp(setting: Setting, p: float, rotated: bool, seed: int) -> Checks:
    def run() -> list[planted_checks.Check]:
        model = setting.draw("small-noise", seed, rotated=rotated)
        found = best_recovery(model, 1, seed, p=p)
        return planted_checks.lp_checks(model, found, p, "rotated" if rotated else "standard")

    return run


def _counterexample(sweep: Sweep, setting: Setting, spread: float, seed: int) -> Checks:
    def run() -> list[planted_checks.Check]:
        d = setting.d + setting.d % 2
        model = planted.counterexample_keys(setting.n, d, sweep.norm, spread=spread, generator=seed)
        raw = best_recovery(model, sweep.restarts, seed)
        unit = dataclasses.replace(model, keys=torch.nn.functional.normalize(model.keys, dim=-1))
        name = "as printed" if spread == 0 else "norms spread"
        return planted_checks.counterexample_checks(model, raw, best_recovery(unit, sweep.restarts, seed), name)

    return run


def best_recovery(model: PlantedModel, restarts: int, seed: int, *, p: float = 2.0) -> planted_checks.Recovery:
    """Cluster all keys as they are into `d + 1` clusters; the cheapest of some restarts."""
    config = PrescoreConfig.paper("minkowski", p=p, normalize=False, fit_size=0, max_iter=CONVERGED)
    keys = model.keys[None, None]
    best: tuple[float, Tensor] | None = None
    for restart in range(restarts):
        scored = score_keys(keys, valid=None, config=config, streams=as_streams(seed * 1000 + restart))
        if scored.labels is None:
            raise TypeError("minkowski must return labels, got None")
        # with the nearest rule a score is minus the l_p distance to the own centre
        cost = float((-scored.scores).clamp_min(0).pow(p).sum())
        if best is None or cost < best[0]:
            best = cost, scored.labels[0, 0]
    if best is None:
        raise ValueError(f"restarts must be at least 1, got {restarts}")
    return planted_checks.recovery(model, best[1])
