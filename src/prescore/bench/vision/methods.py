"""The methods of the vision studies: their names on the command line, and their configurations."""

from __future__ import annotations

from dataclasses import dataclass

from prescore.config import Config, Routed, Selected
from prescore.registry import get_scorer, list_scorers
from prescore.scoring.kmeans import ClusteringScorer, KMeans
from prescore.scoring.rules import RULES

EXACT, CENTROIDS, PUBLISHED, ROUTED, DEFAULT = "exact", "centroids", "published", "routed", "default"

PAPER_GRID = (
    EXACT,
    "kmeans",
    PUBLISHED,
    "kmeans-farthest-sample",
    "kmeans-cluster-share",
    "kmeans-balanced",
    "kmedian",
    "kmedian-farthest-sample",
    "leverage",
    "key-norm",
    "key-diff",
    "random",
    "key-diff+centroids",
    "kmeans-farthest+centroids",
    CENTROIDS,
)
"""The paper's comparison and ours."""


@dataclass(frozen=True)
class VisionMethod:
    """A method by its name.

    `SCORER[-RULE][-sample][+centroids]`, such as `kmeans` (the paper's nearest rule), `kmeans-farthest-sample`
    (keys sampled in proportion to their distance) or `key-diff+centroids`. `random` is the scorer `uniform`.
    `published` is the rule of the paper's published ViT script: k-means from random seeds on the keys as they are,
    keys sampled in proportion to their distance. `centroids` selects the prefix tokens and represents all others
    by centroids, `routed` is `Routed` at a given budget, `default` is `Routed()`.
    """

    name: str
    scorer: str | None = None
    rule: str = "nearest"
    selector: str = "top"
    adds_centroids: bool = False

    @property
    def makes_clusters(self) -> bool:
        """Whether its scorer clusters the keys."""
        return self.scorer is not None and issubclass(get_scorer(self.scorer), ClusteringScorer)

    @property
    def takes_n_clusters(self) -> bool:
        """Whether the number of clusters is free; centroids fix it to theirs."""
        return self.makes_clusters and not self.adds_centroids

    @property
    def takes_share(self) -> bool:
        """Whether the share of centroids in the budget is free."""
        return self.adds_centroids and self.name != CENTROIDS

    @property
    def is_random(self) -> bool:
        """Whether the seed changes the result."""
        return self.makes_clusters or self.adds_centroids or self.selector == "sample" or self.scorer == "uniform"

    def config(
        self,
        budget: int,
        *,
        n_clusters: int | None = None,
        share: float = 0.5,
        n_prefix: int = 0,
        n_tokens: int = 0,
    ) -> Config:
        """The configuration under which a query reads `budget` keys and centroids.

        Args:
            budget: Keys and centroids in all.
            n_clusters: Clusters of a clustering scorer without centroids.
            share: Centroids in the budget, as a share.
            n_prefix: Tokens before the patches.
            n_tokens: Keys of a layer; only `routed` depends on it.
        """
        if self.name == DEFAULT:
            return Routed()
        if self.name == ROUTED:
            return routed_config(budget, n_tokens=n_tokens, n_prefix=n_prefix)
        n_centroids, least = 0, max(1, n_prefix)
        if self.adds_centroids:
            n_centroids = min(round(budget * share) if self.takes_share else budget, budget - least)
            if n_centroids < 1:
                raise ValueError(
                    f"budget must leave room for centroids in addition to {least} selected keys, got {budget}"
                )
        # centroids are means of the keys as they are, so these are clustered without normalisation
        is_raw = bool(n_centroids) or self.name == PUBLISHED
        options = {"n_clusters": n_centroids or n_clusters, "rule": self.rule, "normalize": not is_raw}
        options |= {"seeding": "random"} if self.name == PUBLISHED else {}
        scorer = get_scorer(self.scorer or "")(**options if self.makes_clusters else {})
        remainder: str | KMeans = "centroids" if n_centroids else "none"
        if n_centroids and not self.makes_clusters:
            remainder = KMeans(n_clusters=n_centroids, normalize=False)
        return Selected(scorer, budget - n_centroids, selector=self.selector, sinks=0, remainder=remainder)


def parse_method(name: str) -> VisionMethod:
    """Read a method's name; an unknown one is refused with the known ones."""
    if name in (EXACT, ROUTED, DEFAULT):
        return VisionMethod(name)
    if name == CENTROIDS:
        return VisionMethod(name, "kmeans", "farthest", adds_centroids=True)
    if name == PUBLISHED:
        return VisionMethod(name, "kmeans", "farthest", "sample")
    stem = name.removesuffix("+centroids")
    adds_centroids = stem != name
    selector = "sample" if stem.endswith("-sample") else "top"
    stem = stem.removesuffix("-sample")
    scorers = {**{scorer: scorer for scorer in list_scorers()}, "random": "uniform"}
    for word, scorer in scorers.items():
        rule = stem.removeprefix(f"{word}-")
        method = VisionMethod(name, scorer, "nearest" if stem == word else rule, selector, adds_centroids)
        if stem == word or (rule != stem and rule in RULES and method.makes_clusters):
            return method
    raise ValueError(
        f"method must be {EXACT}, {CENTROIDS}, {PUBLISHED}, {ROUTED}, {DEFAULT} or "
        f"SCORER[-RULE][-sample][+centroids] with a scorer among {', '.join(scorers)} and, where it "
        f"makes clusters, a rule among {', '.join(RULES)}, got {name!r}"
    )


def routed_config(budget: int, *, n_tokens: int, n_prefix: int) -> Routed:
    """Routed attention that reads about `budget` keys and centroids per query, on short sequences.

    All patches are one chunk, and at most half of the budget are centroids. How many keys a query reads depends
    on the query; 1 / `min_weight` keys are the most that can reach the weight. `exact_until` is 0, because the
    default is exact on such short sequences.
    """
    n_patches = n_tokens - n_prefix
    fitting: list[Routed] = []
    for levels in range(1, max(2, n_patches.bit_length())):
        cluster_size, n_centroids = n_patches >> levels, 1 << levels
        n_others = n_tokens - (cluster_size << levels)  # the prefix, and patches that the chunk leaves over
        n_far_keys = budget - n_others - n_centroids
        if cluster_size and n_far_keys >= 0 and (not fitting or n_centroids <= budget // 2):
            min_weight = 1 / (2 * (n_far_keys // 2)) if n_far_keys > 1 else 1.0
            chunk_size = cluster_size << levels
            fitting.append(Routed(min_weight, cluster_size, chunk_size, sinks=n_prefix, exact_until=0))
    if not fitting:
        raise ValueError(f"budget must leave room for {n_prefix} prefix tokens and centroids, got {budget}")
    return fitting[-1]


def full_budget(config: Config, budget: int, n_tokens: int) -> int:
    """Keys and centroids that a query reads, at most: `budget`, which routing rounds down."""
    if not isinstance(config, Routed):
        return min(budget, n_tokens)
    if n_tokens <= config.exact_until:
        return n_tokens
    n_centroids = config.chunk_size // config.cluster_size
    n_far_keys = round(1 / config.min_weight) if config.min_weight < 1 else 0
    return min(n_tokens, n_tokens - config.chunk_size + n_centroids + n_far_keys)
