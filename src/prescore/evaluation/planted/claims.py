"""The paper's statements about the planted model, each as a measured number beside its bound.

An O() or Theta() hides a constant, so the constant that is used here is part of each check's bound. A check
that fails is a finding, not an error.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from prescore.evaluation.planted import model as planted
from prescore.evaluation.planted.model import PlantedModel
from prescore.values import Values

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
