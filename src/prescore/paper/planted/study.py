"""The study of the planted model: which methods find the planted keys, and which claims of the paper hold.

Every row is one seed of one setting. Rows of part `recall` hold, per rule, the share of the planted keys among the
`d * m` selected ones, and the share of heavy entries of polynomial attention on them. Rows of part `claims` hold
the checks of one topic: a measured number with its bound. A check that fails is a finding, not an error.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from prescore import checks
from prescore.attention import select_by
from prescore.bench.records import Row, Values
from prescore.config import Selected
from prescore.paper.planted import model as planted
from prescore.paper.planted.model import PlantedModel, PlantedSetting, lewis_weights
from prescore.registry import get_scorer, list_scorers
from prescore.rng import as_streams
from prescore.scoring.kmeans import Minkowski
from prescore.scoring.rules import RULES
from prescore.scoring.select import membership, score_keys

NO_RULE = "-"
VARIANTS = {
    ("normalized", None, False): "rows normalised",
    ("normalized", None, True): "the same, rotated basis",
    ("small-noise", False, False): "small noise, raw",
    ("small-noise", None, False): "small noise, as shipped",
}
"""Reading of the model, `normalize` (False = raw, None = as the scorer has it), whether the basis is rotated."""
CONVERGED = 30
"""Lloyd iterations of the claims, which assume convergence."""
CONSTANT = 4.0
"""The constant that an O() or Theta() may hide, unless a check says otherwise."""
SMALL = 0.5
"""What "sufficiently small" allows."""
LATENT_NOISE = (0.1, 0.01)
"""Norms of the small components of Appendix D's model."""
VARIANCE_RATIOS = (0.2, 0.01)
"""theta_1 of LevAttention's Gaussian model, below 1/4."""

Claims = Callable[[PlantedModel], list[Values]]


@dataclass(frozen=True)
class Sweep:
    """What to run: every combination of the settings, for every seed.

    `methods=None` is every registered scorer, `minkowski` with the last power. Claims use the cheapest of
    `restarts` clusterings; the l_p claim, whose centres are slow to find, uses one, at the smallest n.
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
    degrees: tuple[int, ...] = (2,)
    norm: float = 100.0
    n_queries: int = 256
    restarts: int = 4

    def __post_init__(self) -> None:
        for name in self.methods or ():
            checks.one_of("method", name, list_scorers())
        for name in self.rules:
            checks.one_of("rule", name, RULES)
        checks.integer("restarts", self.restarts, minimum=1)


QUICK = Sweep(n=(1024,), d=(16,), seeds=(0, 1), powers=(1.0, 2.0, 3.0), n_queries=64, restarts=2)


def planted_rows(sweep: Sweep) -> list[Row]:
    """All rows of a sweep, seed by seed, so that an interrupted study has complete seeds first.

    Rows that do not depend on all settings repeat; a session measures them once.
    """
    values = itertools.product(sweep.n, sweep.d, sweep.epsilon, sweep.c_signal, sweep.c_noise)
    rows = []
    for seed, setting in itertools.product(sweep.seeds, [PlantedSetting(*one) for one in values]):
        rows += [*_claim_rows(sweep, setting, seed), *_recall_rows(sweep, setting, seed)]
    return rows


def _recall_rows(sweep: Sweep, setting: PlantedSetting, seed: int) -> list[Row]:
    methods, power = sweep.methods or list_scorers(), sweep.powers[-1]
    rows = []
    for name, (reading, normalize, rotated), degree in itertools.product(methods, VARIANTS, sweep.degrees):
        has_rule = "rule" in _fields(name)
        config = {
            "part": "recall",
            **asdict(setting),
            "reading": reading,
            "normalize": normalize,
            **({"rotated": True} if rotated else {}),
            "method": f"{name} p={power:g}" if name == "minkowski" else name,
            "rules": list(sweep.rules) if has_rule else [NO_RULE],
            "degree": degree,
            "n_queries": sweep.n_queries,
        }
        measure = partial(_measure_recall, setting, config, name, power, seed)
        rows.append(Row(config, seed, measure, cost=setting.n * len(config["rules"])))
    return rows


def _measure_recall(setting: PlantedSetting, config: Values, name: str, power: float, seed: int) -> Values:
    model = setting.draw(config["reading"], rotated=config.get("rotated", False), generator=seed)
    query = planted.planted_queries(model, config["n_queries"], generator=seed)
    attention = planted.polynomial_attention(query, model.keys, config["degree"])
    results: Values = {"recall": {}, "heavy_recall": {}}
    for rule in config["rules"]:
        options = {"rule": rule, "normalize": config["normalize"], "p": power}
        selected = select_planted(model, name, options, seed)
        results["recall"][rule] = float((selected & model.signal).sum() / model.signal.sum())
        results["heavy_recall"][rule] = planted.heavy_recall(attention, selected, model.epsilon / 2)
    return results


def select_planted(model: PlantedModel, name: str, options: Values, seed: int) -> Tensor:
    """`[n]` bool: the keys that a method selects with a budget of the number of planted keys.

    Args:
        model: The keys.
        name: A scorer.
        options: Fields of the scorer; those that it lacks, and None, are ignored.
        seed: Of the scorer.
    """
    budget, n = int(model.signal.sum()), len(model.keys)
    known = {field: value for field, value in options.items() if field in _fields(name) and value is not None}
    config = Selected.paper(get_scorer(name)(**known), budget)
    return membership(select_by(model.keys.float()[None, None], config, generator=seed), n)[0, 0]


def _fields(scorer: str) -> set[str]:
    return {field.name for field in dataclasses.fields(get_scorer(scorer))}


def _claim_rows(sweep: Sweep, setting: PlantedSetting, seed: int) -> list[Row]:
    rows = []

    def add(topic: str, detail: Values, draw: Callable[[], PlantedModel], *claims: Claims, cost: float) -> None:
        config = {"part": "claims", "topic": topic, **asdict(setting), **detail}
        rows.append(Row(config, seed, partial(_measure_claims, draw, claims), cost=cost * setting.n))

    cluster = partial(clustering_claims, restarts=sweep.restarts, seed=seed)
    for reading in planted.READINGS:
        draw = partial(setting.draw, reading, generator=seed)
        universal_set = partial(universal_set_claims, n_queries=sweep.n_queries, seed=seed)
        add("leverage", {"reading": reading}, draw, leverage_claims, universal_set, cost=1)
        for degree in sweep.degrees:
            if degree != 2:  # the quadratic kernel is one of the claims above
                cover = partial(kernel_claims, degree=degree, n_queries=sweep.n_queries, seed=seed)
                add("leverage", {"reading": reading, "degree": degree}, draw, cover, cost=1)
        theorem = partial(cluster, claim="Theorem 2")
        add("clusters", {"reading": reading}, draw, theorem, centroid_claims, cost=sweep.restarts)
        draw = partial(dataclasses.replace(setting, epsilon=1.0).draw, reading, generator=seed)
        corollary = partial(cluster, claim="Corollary 1")
        singleton = (corollary, distance_claims)
        add("singleton", {"reading": reading, "epsilon": 1.0}, draw, *singleton, cost=sweep.restarts)
        if setting.n == min(sweep.n):
            draw = partial(setting.draw, reading, generator=seed)
            add("many clusters", {"reading": reading}, draw, partial(many_cluster_claims, seed=seed), cost=10)
    for p, rotated in itertools.product(sweep.powers if setting.n == min(sweep.n) else (), (False, True)):
        draw = partial(setting.draw, "small-noise", rotated=rotated, generator=seed)
        claims = partial(lp_claims, p=p, basis="rotated" if rotated else "standard", seed=seed)
        detail = {"reading": "small-noise", "p": p, "rotated": rotated}
        add("l_p", detail, draw, claims, cost=2 if p >= 2 else 10)
    without: Values = {"epsilon": None, "c_signal": None, "c_noise": None}  # models without these
    for small in LATENT_NOISE:
        draw = partial(planted.latent_keys, setting.n, setting.d, small, generator=seed)
        detail = {**without, "reading": f"latent V, {small:g}", "small": small}
        latent = partial(latent_claims, restarts=sweep.restarts, seed=seed)
        add("latent", detail, draw, latent, cost=sweep.restarts)
    for ratio in VARIANCE_RATIOS:
        draw = partial(planted.variance_keys, setting.n, setting.d, ratio, generator=seed)
        detail = {**without, "reading": f"theta_1 = {ratio:g}", "ratio": ratio}
        corollary = partial(cluster, claim="Variance ratio, Corollary 1")
        gap = partial(gap_claims, ratio=ratio)
        add("variance ratio", detail, draw, gap, corollary, cost=sweep.restarts)
    for spread, name in ((0.0, "as printed"), (0.5, "norms spread")):
        d = setting.d + setting.d % 2
        draw = partial(planted.counterexample_keys, setting.n, d, sweep.norm, spread=spread, generator=seed)
        claims = partial(counterexample_claims, name=name, restarts=sweep.restarts, seed=seed)
        detail = {**without, "reading": "counterexample", "norm": sweep.norm, "spread": spread}
        add("counterexample", detail, draw, claims, cost=2 * sweep.restarts)
    return rows


def _measure_claims(draw: Callable[[], PlantedModel], claims: tuple[Claims, ...]) -> Values:
    model = draw()
    return {"checks": [check for claim in claims for check in claim(model)]}


def check(claim: str, quantity: str, measured: float, relation: str, bound: float, note: str = "") -> Values:
    """One statement: `quantity` was `measured`, should be `relation` `bound`, and is so or not (`held`)."""
    held = {
        "<=": measured <= bound,
        ">=": measured >= bound,
        "<": measured < bound,
        ">": measured > bound,
        "=": abs(measured - bound) <= 1e-6 * max(1.0, abs(bound)),
        "within 4x of": bound / 4 <= measured <= 4 * bound,
    }[relation]
    values = {"claim": claim, "quantity": quantity, "measured": measured, "relation": relation, "bound": bound}
    return {**values, "note": note, "held": held}


class Recovery(NamedTuple):
    """How a clustering compares with the truth.

    Attributes:
        groups: Share of signal groups that form a cluster of exactly their rows.
        noise: Share of the noise rows in the cluster that holds most of them.
        cost_ratio: k-means cost of the true partition over the cost found; above 1, the truth is not optimal.
    """

    groups: float
    noise: float
    cost_ratio: float


def best_recovery(
    model: PlantedModel, restarts: int, seed: int, *, p: float = 2.0, n_clusters: int | None = None
) -> Recovery:
    """Cluster all keys as they are into `n_clusters` (None = `d + 1`) clusters; the cheapest of some restarts."""
    scorer = Minkowski(n_clusters, p=p, normalize=False, max_iter=CONVERGED)
    costs, labels = [], []
    for restart in range(restarts):
        streams = as_streams(seed * 1000 + restart)
        scored = score_keys(model.keys[None, None], scorer, valid=None, streams=streams)
        if scored.labels is None:
            raise TypeError("minkowski must return labels, got None")
        # with the nearest rule a score is minus the l_p distance to the key's centre
        costs.append(float((-scored.scores).clamp_min(0).pow(p).sum()))
        labels.append(scored.labels[0, 0])
    return recovery(model, labels[costs.index(min(costs))])


def recovery(model: PlantedModel, labels: Tensor) -> Recovery:
    """Compare cluster labels `[n]` with the planted groups."""
    n_groups, n_labels = int(model.groups.max()) + 1, int(labels.max()) + 1
    pairs = torch.bincount(model.groups * n_labels + labels, minlength=n_groups * n_labels)
    table = pairs.view(n_groups, n_labels)
    most, cluster = table[1:].max(-1)
    is_cluster = (most == table[1:].sum(-1)) & (most == table.sum(0)[cluster])
    cost, true_cost = (
        float((model.keys.double() - _means(model, groups)[groups]).square().sum())
        for groups in (labels, model.groups)
    )
    return Recovery(
        groups=float(is_cluster.double().mean()),
        noise=float(table[0].max() / table[0].sum()),
        cost_ratio=true_cost / cost if cost > 0 else (1.0 if true_cost <= 0 else float("inf")),
    )


def _means(model: PlantedModel, labels: Tensor) -> Tensor:
    points, n_labels = model.keys.double(), int(labels.max()) + 1
    sums = torch.zeros(n_labels, points.shape[-1], dtype=points.dtype).index_add_(0, labels, points)
    return sums / torch.bincount(labels, minlength=n_labels).clamp_min(1)[:, None]


def leverage_claims(model: PlantedModel) -> list[Values]:
    """Lemma 1, Lemma 2 and Theorem 1, with their assumptions."""
    n, d = model.keys.shape
    leverage = lewis_weights(model.keys, 2.0)
    lowest, highest = float(leverage[model.signal].min()), float(leverage[~model.signal].max())
    sigma_min = float(torch.linalg.matrix_norm(model.keys.double(), ord=-2)) ** 2
    delta_1, delta_2 = planted.correlations(model)
    epsilon = model.epsilon
    parallel = "rows of a group are parallel" if planted.group_size(model.epsilon) > 1 else ""
    return [
        check("Lemma 1", "max noise leverage / eps", highest / epsilon, "<=", 1.0),
        check("Lemma 1, proof", "max noise leverage / (d / n)", highest * n / d, "<=", CONSTANT),
        check("Lemma 2", "min signal leverage / eps", lowest / epsilon, ">=", 0.5),
        check("Theorem 1", "min signal leverage / max noise leverage", lowest / highest, ">", 1.0),
        check("Theorem 1, assumption", "sigma_min^2 * eps", sigma_min * epsilon, "within 4x of", 1.0),
        check("(P1)", "delta_1", delta_1, "<", SMALL, parallel),
        check("(P2)", "delta_2", delta_2, "<", SMALL),
    ]


def universal_set_claims(model: PlantedModel, *, n_queries: int, seed: int) -> list[Values]:
    """LevAttention's universal set: at rho, and as a cover of the heavy entries of quadratic attention.

    `rho = 1 / (1 + delta_1^2 |S| + delta_2^2 n)` with the measured deltas.
    """
    n, d = model.keys.shape
    delta_1, delta_2 = planted.correlations(model)
    leverage = lewis_weights(model.keys, 2.0)
    rho = 1 / (1 + delta_1**2 * int(model.signal.sum()) + delta_2**2 * n)
    vacuous = "says nothing, d/rho >= n" if d / rho >= n else ""
    lowest = float(leverage[model.signal].min()) / rho
    size = int((leverage >= rho).sum()) * rho / d
    claims = [
        check("rho: S in U", "min signal leverage / rho", lowest, ">=", 1.0, vacuous),
        check("rho: size of U", "|U| / (d / rho)", size, "<=", 1.0, vacuous),
    ]
    covered = kernel_claims(model, degree=2, n_queries=n_queries, seed=seed)
    return claims + [claim for claim in covered if claim["quantity"].startswith("recall")]


def kernel_claims(model: PlantedModel, *, degree: int, n_queries: int, seed: int) -> list[Values]:
    """LevAttention's universal set for a polynomial kernel: keys that can hold an entry above eps / 2.

    By the inequality of power means an entry `a` of degree r needs a leverage of `a^(2/r) n^(2/r - 1)` above r = 2
    and of `a^(2/r)` up to it.
    """
    n, heavy = len(model.keys), model.epsilon / 2
    threshold = heavy ** (2 / degree) * n ** min(0.0, 2 / degree - 1)
    universal = lewis_weights(model.keys, 2.0) >= threshold
    query = planted.planted_queries(model, n_queries, generator=seed)
    recall = planted.heavy_recall(planted.polynomial_attention(query, model.keys, degree), universal, heavy)
    share = float(universal.double().mean())
    claims = [check("universal set", f"|U| / n, degree {degree}", share, "<", SMALL)]
    if recall is not None:
        claims.append(check("universal set", f"recall of entries > eps/2, degree {degree}", recall, "=", 1.0))
    return claims


def gap_claims(model: PlantedModel, *, ratio: float) -> list[Values]:
    """The gap of the Gaussian model: no noise row is nearer to a signal row than 2 (1 - theta_1), squared."""
    gap = float(torch.cdist(model.keys[model.signal], model.keys[~model.signal]).min()) ** 2
    claim, quantity = "Variance ratio, D_min", "squared distance of signal and noise"
    return [
        check(claim, f"{quantity} / (2 - 2 theta_1)", gap / (2 * (1 - ratio)), ">=", 1.0 - 1e-6),
        check(claim, quantity, gap, ">=", 1.5),
    ]


def clustering_claims(model: PlantedModel, *, claim: str, restarts: int, seed: int) -> list[Values]:
    """Theorem 2 or Corollary 1: the clusters are the planted groups, and the truth is optimal."""
    recovered, note = best_recovery(model, restarts, seed), ""
    if recovered.cost_ratio < 1 - 1e-9:
        note = "a local optimum"
    elif recovered.cost_ratio > 1:
        note = "the truth is not optimal"
    # a search can refute optimality but not prove it
    unproven = "" if recovered.cost_ratio > 1 else "none cheaper found, no proof"
    ratio = ("cost of the truth / cost found", recovered.cost_ratio, "<=", 1.0 + 1e-9, unproven)
    return [
        check(claim, "signal groups that are one cluster", recovered.groups, "=", 1.0, note),
        check(claim, "noise rows in one cluster", recovered.noise, "=", 1.0, note),
        check(f"{claim}, optimality", *ratio),
    ]


def distance_claims(model: PlantedModel, *, claim: str = "Corollary 1") -> list[Values]:
    """`D_min`: the smallest squared distance from a signal row to any other row, at least 3/2 in the paper."""
    signal = model.keys[model.signal].double()
    squared = torch.cdist(signal, model.keys.double()).square()
    squared[:, model.signal] = squared[:, model.signal].fill_diagonal_(torch.inf)
    return [check(claim, "D_min, squared distance of a signal row", float(squared.min()), ">=", 1.5)]


def many_cluster_claims(model: PlantedModel, *, seed: int) -> list[Values]:
    """Appendix C on Theorem 2: `k = Theta(d / eps)` centres, one for each heavy row and one for all other rows."""
    n_signal = int(model.signal.sum())
    groups = torch.zeros_like(model.groups)
    groups[model.signal] = torch.arange(1, n_signal + 1)
    recovered = best_recovery(dataclasses.replace(model, groups=groups), 1, seed, n_clusters=n_signal + 1)
    claim = "Appendix C, k = d m + 1"
    return [
        check(claim, "signal rows that are clusters of their own", recovered.groups, "=", 1.0),
        check(claim, "noise rows in one cluster", recovered.noise, "=", 1.0),
        check(f"{claim}, optimality", "cost of the truth / cost found", recovered.cost_ratio, "<=", 1.0 + 1e-9),
    ]


def latent_claims(model: PlantedModel, *, restarts: int, seed: int) -> list[Values]:
    """Appendix D: isolation of S by its correlations, the universal set at rho, and `k = O(d / rho)` clusters."""
    n, d = model.keys.shape
    delta_1, delta_2 = planted.correlations(model)
    rho = 1 / (1 + delta_1**2 * int(model.signal.sum()) + delta_2**2 * n)
    leverage = lewis_weights(model.keys, 2.0)
    (distance,) = distance_claims(model, claim="Appendix D")
    separation = 2 * (1 - max(delta_1, delta_2))  # all rows have norm 1
    n_clusters = max(d + 1, min(round(d / rho), n // 4))
    vacuous = "says nothing, d/rho >= n" if d / rho >= n else ""
    few, many = (best_recovery(model, restarts, seed, n_clusters=k).groups for k in (None, n_clusters))
    lowest = float(leverage[model.signal].min())
    return [
        check("Appendix D", "D_sep = 2 (1 - max delta)", separation, ">", 0.0),
        check("Appendix D", "D_min / D_sep", distance["measured"] / separation, ">=", 1.0 - 1e-6),
        distance,
        check("Appendix D", "min signal leverage / rho", lowest / rho, ">=", 1.0, vacuous),
        check("Appendix D", "|U| / (d / rho)", int((leverage >= rho).sum()) * rho / d, "<=", 1.0, vacuous),
        check("Appendix D", "signal rows isolated, k = d + 1", few, "=", 1.0),
        check("Appendix D", "signal rows isolated, k = d / rho", many, "=", 1.0, f"k = {n_clusters}"),
    ]


def centroid_claims(model: PlantedModel) -> list[Values]:
    """Theorem 2's centroid errors with the true partition, the best case for the bound.

    A mean of m Gaussian rows is off by about `sqrt(d) * sigma / sqrt(m)`, so the bound is also checked with the
    factor sqrt(d), which the paper's O() would have to hide.
    """
    d, means = model.keys.shape[-1], _means(model, model.groups)
    signal = float((means[1:] - model.directions).norm(dim=-1).max())
    signal *= planted.group_size(model.epsilon) ** 0.5 / model.sigma_signal
    noise = float(means[0].norm()) * int((~model.signal).sum()) ** 0.5 / model.sigma_noise
    claims = []
    for factor, words in ((1.0, ""), (d**0.5, " sqrt(d)")):
        for quantity, value in (
            (f"max |mu_j - v_j| / (sigma_S{words} / sqrt(m))", signal),
            (f"|mu_0| / (sigma_N{words} / sqrt(n - dm))", noise),
        ):
            claims.append(check("Theorem 2, centroids", quantity, value / factor, "<=", CONSTANT))
    return claims


def lp_claims(model: PlantedModel, *, p: float, basis: str, seed: int) -> list[Values]:
    """Claim 1 for one p: the proof's separations in this basis, and the groups that clustering recovers."""
    claim, directions = f"Claim 1, p={p:g}, {basis}", model.directions
    recovered = best_recovery(model, 1, seed, p=p)
    gaps = (directions[:, None] - directions[None]).abs().pow(p).sum(-1)
    gaps = gaps[~torch.eye(len(directions), dtype=torch.bool)]
    smallest = float(torch.cat((directions.abs().pow(p).sum(-1), gaps)).min())
    centres = torch.cat((torch.zeros(1, directions.shape[-1], dtype=directions.dtype), directions))
    deviation = float((model.keys.double() - centres[model.groups]).abs().pow(p).sum(-1).max())
    n_signal = int(model.signal.sum())
    weights = lewis_weights(model.keys, p) if p < 4 else None
    sensitivities = planted.lp_sensitivities(model.keys, p, generator=seed) if p < 4 else None

    def recall(scores: Tensor) -> float:
        return float(model.signal[scores.topk(n_signal).indices].double().mean())

    recalls = []
    if weights is not None and sensitivities is not None:
        recalls.append(check(claim, "recall by l_p sensitivity", recall(sensitivities), "=", 1.0))
        recalls.append(check(claim, "recall by Lewis weights", recall(weights), "=", 1.0))
    return [
        check(claim, "Delta_min", smallest, "=", 1.0),
        check(claim, "Delta_min - 2 delta_max", smallest - 2 * deviation, ">", 0.0),
        check(claim, "signal groups that are one cluster", recovered.groups, "=", 1.0),
        check(claim, "noise rows in one cluster", recovered.noise, "=", 1.0),
        *recalls,
    ]


def counterexample_claims(model: PlantedModel, *, name: str, restarts: int, seed: int) -> list[Values]:
    """Appendix B: correlations are zero, raw clustering loses the signal rows, normalised keys keep them."""
    claim = f"Appendix B, {name}"
    unit = dataclasses.replace(model, keys=torch.nn.functional.normalize(model.keys, dim=-1))
    raw, normalized = (best_recovery(keys, restarts, seed).groups for keys in (model, unit))
    distinct = len(torch.unique(model.keys, dim=0))
    few = f"only {distinct} different rows" if distinct <= model.keys.shape[-1] + 1 else ""
    return [
        check(claim, "max(delta_1, delta_2)", max(planted.correlations(model)), "=", 0.0),
        check(claim, "signal rows isolated, raw keys", raw, "<", 0.5, few),
        check(claim, "signal rows isolated, normalised keys", normalized, "=", 1.0, few),
    ]
