"""The one configuration object; its field docs are the reference."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from prescore import checks
from prescore.registry import get_scorer

RULES = ("nearest", "farthest", "cluster-share", "sensitivity", "balanced")
INNER = ("hyper", "exact", "routed", "auto")


@dataclass(frozen=True)
class Coupling:
    """How a selection enters HyperAttention. The defaults are the corrected integration (GLM3).

    The other value of each field is one artefact of the paper's early integration (Appendix F):
    `mask="zero"` zeroes unselected keys and values instead of excluding them (they stay in the softmax, so
    stand-ins and a part of their own for sinks do not apply); `residual_weight="all"` scales
    the residual by n instead of |S|; `overlap="count"` counts a key twice when block and sample both hold it.
    """

    mask: str = "exclude"
    residual_weight: str = "selected"
    overlap: str = "exclude"

    def __post_init__(self) -> None:
        checks.one_of("coupling.mask", self.mask, ("exclude", "zero"))
        checks.one_of("coupling.residual_weight", self.residual_weight, ("selected", "all"))
        checks.one_of("coupling.overlap", self.overlap, ("exclude", "count"))


@dataclass(frozen=True)
class PrescoreConfig:
    """How keys are scored, selected and attended to. `PrescoreConfig()` is the measured default.

    The default is routed attention (`inner="routed"`): keys are clustered once, before any query is seen; each
    query reads its own and the previous chunk exactly (nearby tokens matter to almost every head), the first
    tokens and a few keys unlike all others (they draw mass from every query and drown in any mean), and the
    `rows` keys of the clusters it likes best; a stand-in carries each other cluster (many small weights add up).
    Every query chooses for itself, so nothing leaks from later ones. Heads that copy, found by their first
    queries, read small clusters (a large one hides the key they look for). docs/default.md has the measurements.
    The ideas come from tree and multipole methods, cluster attention, and mixture-of-experts dispatch.

    Scoring:
        method: Scorer name, one of `prescore.list_scorers()`.
        rule: For clustering scorers, how the distance to the own centre becomes a score: `nearest` (paper,
            Algorithm 1), `farthest`, `cluster-share` (distance over its cluster's total), `sensitivity`
            (d^2 over the cluster's sum of d^2, plus 1 / cluster size), `balanced` (equal share per cluster,
            nearest first).
        n_clusters: None = D + 1.
        max_iter: Lloyd iterations at most.
        normalize: l2-normalise keys before scoring; attention always uses the true keys. None = True for
            clustering scorers, False for the others.
        noise: Standard deviation of the Gaussian noise added before scoring (Algorithm 1, line 1).
        p: Minkowski exponent, > 0.
        sketch_size: `leverage`: None = exact; int = rows of the sketch.
        seeding: `k-means++` or `random`.
        fit_size: Keys the clusters are fitted on, at most; None = 32 for each of n_clusters, counted as at
            least 64 (16 for metrics other than the Euclidean, and in the blocks of causal attention);
            0 = all keys. Every key is assigned once at the end in either case.

    Selection:
        top_k: int = keys kept; float in (0, 1] = share of the keys; 0 or None = no filtering. In causal mode
            each off-diagonal block (`routed`: each chunk) keeps that many of its own keys.
        selector: `top`, or `sample` (without replacement in proportion to the score).
        sinks: The first real positions of the sequence, always kept, inside the budget, attended exactly.
        recent: The last real positions, likewise.
        min_fraction: delta of Algorithm 2: with fewer than `min_fraction * n` keys selected, attention runs
            unfiltered.

    Attention:
        inner: Attention over the selected keys: `hyper` (paper), `exact`, `routed` (queries choose clusters:
            exact inside, stand-ins for the rest; where `top_k` filters keys out, exact over the others),
            `auto` (the cheaper of hyper and exact at no loss).
        block_size: Keys in an LSH block; 0 switches the block part off.
        sample_size: Residual samples, with replacement; 0 switches the residual off.
        n_projections: Hash bits.
        alignment: Which block a query reads: `rank` (published) or `hash` (strictly causal in queries too).
        min_seq_len: Causal leaves of this many keys are exact; `routed`: queries before this position, and whole
            calls without a causal mask that are shorter (reading all is faster there, and exact).
            HyperAttention over a full or off-diagonal block becomes exact attention over the same (selected)
            keys when it has fewer queries than this; an off-diagonal block counts the positions of its grid cell,
            so that nothing depends on how many later tokens there are.
        leaf_inclusive: The paper's "blockwise" flag: "at most this many" instead of "fewer".
        remainder: What stands for unselected keys: `none` (paper), or `centroids` (one per cluster).
        coupling: See `Coupling`.
        rows: `routed`: exact far key rows per query, on average over the heads of a layer.
        leaf_size: `routed`: keys per cluster; causal heads that copy use clusters of 8.
        chunk_size: `routed`: local exact part.
        tolerance: None, or the largest share of attention mass a query may leave unrepresented.

    Models:
        refresh_every: Decoding: select again after this many new tokens; None = keep the prefill's selection.
        on_unsupported: Model features that cannot be honoured: `raise`, or `exact` (that layer, said once).
    """

    method: str = "key-diff"
    top_k: int | float | None = None
    rule: str = "nearest"
    n_clusters: int | None = None
    max_iter: int = 10
    normalize: bool | None = None
    noise: float = 0.0
    p: float = 2.0
    sketch_size: int | None = None
    seeding: str = "k-means++"
    fit_size: int | None = None
    selector: str = "top"
    sinks: int = 4
    recent: int = 0
    min_fraction: float = 0.0
    inner: str = "routed"
    block_size: int = 256
    sample_size: int = 256
    n_projections: int = 7
    alignment: str = "hash"
    min_seq_len: int = 4096
    leaf_inclusive: bool = False
    remainder: str = "centroids"
    coupling: Coupling = field(default_factory=Coupling)
    rows: int = 512
    leaf_size: int = 128
    chunk_size: int = 512
    tolerance: float | None = None
    refresh_every: int | None = None
    on_unsupported: str = "raise"

    def __post_init__(self) -> None:
        if isinstance(self.coupling, dict):
            known = {f.name for f in dataclasses.fields(Coupling)}
            for name in self.coupling:
                checks.one_of("coupling field", name, sorted(known))
            object.__setattr__(self, "coupling", Coupling(**self.coupling))
        if not isinstance(self.coupling, Coupling):
            raise TypeError(f"coupling must be a prescore.Coupling, got {type(self.coupling).__name__}")
        get_scorer(self.method)
        checks.budget("top_k", self.top_k)
        for name, allowed in (
            ("rule", RULES),
            ("seeding", ("k-means++", "random")),
            ("selector", ("top", "sample")),
            ("inner", INNER),
            ("alignment", ("rank", "hash")),
            ("remainder", ("none", "centroids")),
            ("on_unsupported", ("raise", "exact")),
        ):
            checks.one_of(name, getattr(self, name), allowed)
        for name, minimum in (
            ("max_iter", 0),
            ("sinks", 0),
            ("recent", 0),
            ("block_size", 0),
            ("sample_size", 0),
            ("n_projections", 1),
            ("min_seq_len", 0),
            ("rows", 0),
            ("leaf_size", 1),
            ("chunk_size", 1),
        ):
            checks.integer(name, getattr(self, name), minimum=minimum)
        if self.n_projections > 30:
            raise ValueError(f"n_projections must be at most 30, got {self.n_projections}")
        for name, minimum in (("n_clusters", 1), ("sketch_size", 1), ("fit_size", 0), ("refresh_every", 1)):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), minimum=minimum)
        checks.number("noise", self.noise, minimum=0.0)
        checks.number("p", self.p, minimum=0.0, exclusive=True)
        checks.number("min_fraction", self.min_fraction, minimum=0.0)
        if self.tolerance is not None:
            checks.number("tolerance", self.tolerance, minimum=0.0)
        if self.normalize is not None:
            checks.boolean("normalize", self.normalize)
        checks.boolean("leaf_inclusive", self.leaf_inclusive)

    @classmethod
    def paper(cls, method: str = "kmeans", top_k: int | float | None = 2048, **overrides: Any) -> PrescoreConfig:
        """Algorithms 1 and 2 to the letter, with the corrected coupling."""
        letter: dict[str, Any] = {
            "method": method,
            "top_k": top_k,
            "rule": "nearest",
            "normalize": get_scorer(method).normalizes or None,
            "sinks": 0,
            "recent": 0,
            "inner": "hyper",
            "remainder": "none",
            "alignment": "rank",
            "min_seq_len": 4096,
        }
        return cls(**{**letter, **overrides})

    @classmethod
    def hyper(cls, **overrides: Any) -> PrescoreConfig:
        """Unfiltered HyperAttention as published."""
        return cls.paper(**{"top_k": None, **overrides})

    @classmethod
    def glm2(cls, method: str = "kmeans", top_k: int | float | None = 2048, **overrides: Any) -> PrescoreConfig:
        """The paper's early integration: all three coupling artefacts on (Appendix F)."""
        early = Coupling(mask="zero", residual_weight="all", overlap="count")
        return cls.paper(method, top_k, **{"coupling": early, **overrides})

    def replace(self, **overrides: Any) -> PrescoreConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **overrides)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrescoreConfig:
        """The inverse of `to_dict`; an unknown field is refused by name."""
        if not isinstance(values, dict):
            raise TypeError(f"values must be a dict, got {type(values).__name__}")
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ValueError(f"config fields must be among {', '.join(sorted(known))}, got {name!r}")
        return cls(**values)
