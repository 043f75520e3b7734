"""How the command line names a method of a vision study, and the configuration it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prescore.config import RULES, PrescoreConfig
from prescore.evaluation.vision_routed import routed_config, rows_read
from prescore.registry import list_scorers

EXACT = "exact"
CENTROIDS = "centroids"
ROUTED = "routed"
DEFAULT = "default"
_RANDOM = "random"
_STAND_INS = "+centroids"
_SAMPLE = "-sample"

PAPER_GRID = (
    EXACT,
    "kmeans",
    "kmeans-farthest-sample",
    "kmeans-cluster-share",
    "kmeans-balanced",
    "kmedian",
    "kmedian-farthest-sample",
    "leverage",
    "key-norm",
    "key-diff",
    _RANDOM,
    "key-diff+centroids",
    "kmeans-farthest+centroids",
    CENTROIDS,
)
"""The paper's comparison and ours."""


@dataclass(frozen=True)
class Method:
    """A method as the command line names it.

    `SCORER[-RULE][-sample][+centroids]`, such as `kmeans` (the paper's nearest rule), `kmeans-farthest-sample`
    (sampling in proportion to the distance) or `key-diff+centroids`; `random` is the scorer `uniform`; and
    `centroids` keeps the prefix tokens only and lets one stand-in per cluster speak for everything else;
    `routed` is the default's attention at so many rows, and `default` is `PrescoreConfig()` untouched.
    """

    name: str
    scorer: str
    rule: str = "nearest"
    selector: str = "top"
    stand_ins: bool = False
    only_stand_ins: bool = False
    routed: bool = False

    @property
    def clusters(self) -> bool:
        """Whether the number of clusters is free to choose."""
        return self.scorer.startswith(("kme", "minkowski", "gaussian")) and not self.stand_ins

    @property
    def random(self) -> bool:
        """Whether the seed changes anything."""
        return self.clusters or self.stand_ins or self.selector == "sample" or self.scorer == "uniform"

    def config(
        self, rows: int, *, clusters: int | None, share: float, n_prefix: int, n_tokens: int = 0
    ) -> PrescoreConfig:
        """The configuration that reads `rows` key rows per query in all; `n_tokens` matters to `routed` only."""
        if self.routed:
            untouched = self.name == DEFAULT
            return PrescoreConfig() if untouched else routed_config(rows, n_tokens=n_tokens, n_prefix=n_prefix)
        fields: dict[str, Any] = {
            "method": self.scorer,
            "rule": self.rule,
            "selector": self.selector,
            "top_k": rows,
            "inner": "exact",
            "sinks": 0,
            "remainder": "none",
            "n_clusters": clusters if self.clusters else None,
        }
        if self.stand_ins:
            least = max(1, n_prefix)
            n_clusters = rows - least if self.only_stand_ins else min(round(rows * share), rows - least)
            if n_clusters < 1:
                raise ValueError(f"rows must leave room for stand-ins beside {least} kept keys, got {rows}")
            # stand-ins are means of the true keys, so the clusters must be close in true keys too
            fields |= {
                "remainder": "centroids",
                "n_clusters": n_clusters,
                "top_k": rows - n_clusters,
                "normalize": False,
            }
        return PrescoreConfig(**fields)

    def rows(self, config: PrescoreConfig, rows: int, *, n_tokens: int) -> int:
        """Key rows that a query reads in all: as asked for, except that routing rounds to whole leaves."""
        return rows_read(config, n_tokens) if self.routed else rows


def parse_method(name: str) -> Method:
    """Read a method's name; an unknown one is refused with the known ones."""
    if name in (ROUTED, DEFAULT):
        return Method(name, PrescoreConfig().method, routed=True)
    if name == CENTROIDS:
        return Method(name, "kmeans", "farthest", stand_ins=True, only_stand_ins=True)
    rest, stand_ins = name.removesuffix(_STAND_INS), name.endswith(_STAND_INS)
    rest, sampled = rest.removesuffix(_SAMPLE), rest.endswith(_SAMPLE)
    scorers = {**{scorer: scorer for scorer in list_scorers()}, _RANDOM: "uniform"}
    for word in sorted(scorers, key=len, reverse=True):
        rule = rest.removeprefix(word).removeprefix("-")
        if rest == word or (rest.startswith(f"{word}-") and rule in RULES):
            return Method(
                name, scorers[word], rule or "nearest", "sample" if sampled else "top", stand_ins=stand_ins
            )
    raise ValueError(
        f"method must be {EXACT}, {CENTROIDS}, {ROUTED}, {DEFAULT} or SCORER[-RULE][-sample][+centroids] with a "
        f"scorer among {', '.join(scorers)} and a rule among {', '.join(RULES)}, got {name!r}"
    )
