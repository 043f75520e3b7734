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
from functools import partial

import torch
from torch import Tensor

from prescore import checks
from prescore.config import Selected
from prescore.evaluation.planted import claims
from prescore.evaluation.planted import model as planted
from prescore.evaluation.planted.claims import Check, Recovery
from prescore.evaluation.planted.model import PlantedModel, PlantedSetting
from prescore.prescoring import score_keys, select_keys
from prescore.records import Row, row_key
from prescore.registry import get_scorer, list_scorers
from prescore.rng import as_streams
from prescore.scorers.minkowski import Minkowski
from prescore.scorers.rules import RULES
from prescore.values import Values

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
        wanted = {"rule": rule, "normalize": self.normalize, "fit_size": fit_size, "p": self.power}
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
    universal = claims.universal_set_checks(model, n_queries=sweep.n_queries, seed=seed)
    return claims.leverage_checks(model) + universal


def _clusters(sweep: Sweep, setting: PlantedSetting, reading: str, seed: int) -> list[Check]:
    model = setting.draw(reading, generator=seed)
    found = best_recovery(model, sweep.restarts, seed)
    return claims.clustering_checks(found, "Theorem 2") + claims.centroid_checks(model)


def _singleton(sweep: Sweep, setting: PlantedSetting, reading: str, seed: int) -> list[Check]:
    found = best_recovery(setting.draw(reading, generator=seed), sweep.restarts, seed)
    return claims.clustering_checks(found, "Corollary 1")


def _lp(setting: PlantedSetting, p: float, rotated: bool, seed: int) -> list[Check]:
    model = setting.draw("small-noise", rotated=rotated, generator=seed)
    found = best_recovery(model, 1, seed, p=p)
    return claims.lp_checks(model, found, p, "rotated" if rotated else "standard")


def _counterexample(sweep: Sweep, setting: PlantedSetting, spread: float, seed: int) -> list[Check]:
    d = setting.d + setting.d % 2
    model = planted.counterexample_keys(setting.n, d, sweep.norm, spread=spread, generator=seed)
    raw = best_recovery(model, sweep.restarts, seed)
    unit = dataclasses.replace(model, keys=torch.nn.functional.normalize(model.keys, dim=-1))
    name = "as printed" if spread == 0 else "norms spread"
    return claims.counterexample_checks(model, raw, best_recovery(unit, sweep.restarts, seed), name)


def best_recovery(model: PlantedModel, restarts: int, seed: int, *, p: float = 2.0) -> Recovery:
    """Cluster all keys as they are into `d + 1` clusters; the cheapest of some restarts."""
    scorer = Minkowski(p=p, normalize=False, fit_size=0, max_iter=CONVERGED)
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
    return claims.recovery(model, best[1])
