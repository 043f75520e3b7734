"""How the command line names a method of a vision study, and the configuration it stands for."""

from __future__ import annotations

from dataclasses import dataclass

from prescore.config import Routed, Selected
from prescore.registry import get_scorer, list_scorers
from prescore.routed.layout import make_layout
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import ClusteringScorer, KMeans
from prescore.scoring.rules import RULES

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
class VisionMethod:
    """A method as the command line names it.

    `SCORER[-RULE][-sample][+centroids]`, such as `kmeans` (the paper's nearest rule), `kmeans-farthest-sample`
    (sampling in proportion to the distance) or `key-diff+centroids`; `random` is the scorer `uniform`; and
    `centroids` keeps the prefix tokens only and lets one centroid per cluster speak for everything else;
    `routed` is the default's attention at so many rows, and `default` is `Routed()` untouched.
    """

    name: str
    scorer: str
    rule: str = "nearest"
    selector: str = "top"
    centroids: bool = False
    only_stand_ins: bool = False

    @property
    def routed(self) -> bool:
        """Whether queries choose clusters, and no scorer does."""
        return self.name in (ROUTED, DEFAULT)

    @property
    def clusters(self) -> bool:
        """Whether the number of clusters is free to choose."""
        return not self.routed and _clusters_keys(self.scorer) and not self.centroids

    @property
    def random(self) -> bool:
        """Whether the seed changes anything."""
        return self.clusters or self.centroids or self.selector == "sample" or self.scorer == "uniform"

    def config(
        self, rows: int, *, clusters: int | None, share: float, n_prefix: int, n_tokens: int = 0
    ) -> Selected | Routed:
        """The configuration that reads `rows` key rows per query in all; `n_tokens` matters to `routed` only."""
        if self.name == DEFAULT:
            return Routed()
        if self.name == ROUTED:
            return routed_config(rows, n_tokens=n_tokens, n_prefix=n_prefix)
        if not self.centroids:
            return self.selected(rows, clusters=clusters)
        least = max(1, n_prefix)
        n_clusters = rows - least if self.only_stand_ins else min(round(rows * share), rows - least)
        if n_clusters < 1:
            raise ValueError(f"rows must leave room for centroids beside {least} kept keys, got {rows}")
        # centroids are means of the true keys, so the clusters must be close in true keys too
        scorer = self._scorer(n_clusters, normalize=False)
        own = KMeans(n_clusters=n_clusters, normalize=False)
        remainder = "centroids" if isinstance(scorer, ClusteringScorer) else own
        return Selected(scorer, rows - n_clusters, selector=self.selector, sinks=0, remainder=remainder)

    def selected(self, rows: int, *, clusters: int | None) -> Selected:
        """The configuration that keeps `rows` keys and lets nothing stand for the others."""
        scorer = self._scorer(clusters, normalize=True)
        return Selected(scorer, rows, selector=self.selector, sinks=0, remainder="none")

    def rows(self, config: Selected | Routed, rows: int, *, n_tokens: int) -> int:
        """Key rows that a query reads in all: as asked for, except that routing rounds to whole leaves."""
        return keys_read(config, n_tokens) if isinstance(config, Routed) else rows

    def _scorer(self, n_clusters: int | None, *, normalize: bool) -> Scorer:
        kind = get_scorer(self.scorer)
        made: Scorer = kind()
        if _clusters_keys(self.scorer):
            made = kind(n_clusters=n_clusters, rule=self.rule, normalize=normalize)
        return made


def parse_method(name: str) -> VisionMethod:
    """Read a method's name; an unknown one is refused with the known ones."""
    if name in (ROUTED, DEFAULT):
        return VisionMethod(name, name)
    if name == CENTROIDS:
        return VisionMethod(name, "kmeans", "farthest", centroids=True, only_stand_ins=True)
    rest, centroids = name.removesuffix(_STAND_INS), name.endswith(_STAND_INS)
    rest, sampled = rest.removesuffix(_SAMPLE), rest.endswith(_SAMPLE)
    selector = "sample" if sampled else "top"
    scorers = {**{scorer: scorer for scorer in list_scorers()}, _RANDOM: "uniform"}
    for word, scorer in scorers.items():
        if rest == word:
            return VisionMethod(name, scorer, selector=selector, centroids=centroids)
        start, _, rule = rest.partition(f"{word}-")
        if not start and rule in RULES and _clusters_keys(scorer):
            return VisionMethod(name, scorer, rule, selector, centroids)
    raise ValueError(
        f"method must be {EXACT}, {CENTROIDS}, {ROUTED}, {DEFAULT} or SCORER[-RULE][-sample][+centroids] with a "
        f"scorer among {', '.join(scorers)} and, where it makes clusters, a rule among {', '.join(RULES)}, "
        f"got {name!r}"
    )


def _clusters_keys(scorer: str) -> bool:
    return issubclass(get_scorer(scorer), ClusteringScorer)


# The default, routed attention, at a given number of key rows in all on the short sequences of vision models.


def routed_config(rows: int, *, n_tokens: int, n_prefix: int) -> Routed:
    """Routed attention that reads about `rows` key rows per query: prefix, centroids, and rows it finds.

    All patches are one chunk, and at most half of the rows are centroids. How many rows are found depends on the
    queries; tables report what was read. `exact_until` is 0, because the untouched default runs such short
    sequences exactly.
    """
    behind = n_tokens - n_prefix
    fitting: list[Routed] = []
    for levels in range(1, max(2, behind.bit_length())):
        leaf_size = behind >> levels
        if leaf_size < 1:
            break
        config = Routed(1.0, leaf_size, leaf_size << levels, sinks=n_prefix, exact_until=0)
        always = rows_in_any_case(config, n_tokens)
        if always <= rows and (not fitting or 1 << levels <= rows // 2):
            fitting.append(config.replace(min_weight=1 / max(1, 2 * ((rows - always) // 2))))
    if not fitting:
        raise ValueError(f"rows must leave room for {n_prefix} prefix tokens and centroids, got {rows}")
    return fitting[-1]


def rows_in_any_case(config: Routed, n_tokens: int) -> int:
    """Key rows that a query of a full call reads, whatever it looks for."""
    layout = make_layout(n_tokens, n_tokens, causal=False, config=config)
    return int(layout.rows_in_any_case()[0])


def keys_read(config: Routed, n_tokens: int) -> int:
    """Key rows that a query of a full call reads, at most, where as many are found as there are shares."""
    if n_tokens < config.exact_until:
        return n_tokens
    return min(
        n_tokens,
        rows_in_any_case(config, n_tokens) + (round(1 / config.min_weight) if config.min_weight < 1 else 0),
    )
