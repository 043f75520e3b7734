"""Four configurations. The type selects the engine.

A setting that could have no effect next to the others is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from prescore import checks
from prescore.scoring.base import Scorer, as_scorer
from prescore.types import Values


class _Settings:
    """What all configurations share: copies with changed fields, and JSON values."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse an unknown field and name the nearest known one; `__init__` does everything else."""
        checks.known_argument(cls, given)
        return super().__new__(cls)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        known = [f.name for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        for name in changes:
            checks.known_field(type(self).__name__, name, known)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> Values:
        """Plain JSON values; `type` names the configuration."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"type": type(self).__name__, **{name: _plain(value) for name, value in values.items()}}


@dataclass(frozen=True)
class Exact(_Settings):
    """Exact attention over all keys; as `Selected.inner`, over all selected keys."""


@dataclass(frozen=True)
class Lsh(_Settings):
    """HyperAttention's two estimates of attention over many keys: sorted blocks and a sampled residual.

    Attributes:
        block_size: Keys in an LSH block; 0 switches the blocks off.
        sample_size: Residual samples, with replacement; 0 switches the residual off.
        n_projections: Hash bits.
        alignment: Which block a query reads. `hash`: the block of the query's hash; later queries change nothing.
            `rank`, as published: the block of the query's rank among all queries; later queries change it.
    """

    block_size: int = 256
    sample_size: int = 256
    n_projections: int = 7
    alignment: str = "hash"

    def __post_init__(self) -> None:
        checks.integer("block_size", self.block_size, minimum=0)
        checks.integer("sample_size", self.sample_size, minimum=0)
        checks.integer("n_projections", self.n_projections, minimum=1, maximum=30)
        checks.one_of("alignment", self.alignment, ("hash", "rank"))
        if not self.block_size and not self.sample_size:
            raise ValueError("block_size or sample_size must be at least 1, got 0 and 0, which read no key")


@dataclass(frozen=True)
class Coupling(_Settings):
    """How a selection enters attention. The defaults are the corrected integration (GLM3).

    The other values of `mask`, `residual_weight` and `overlap` are the three artefacts of the paper's early
    integration (Appendix F). `blocks="all"` is what the published GLM3 file does.

    Attributes:
        mask: `exclude` unselected keys, or `zero` them and their values, so that each still adds `e^0`.
        residual_weight: The residual is scaled by the number of `selected` keys, or of `all` keys.
        overlap: A key in the block and in the sample of a query counts once (`exclude`) or twice (`count`).
        blocks: LSH blocks are cut over the `selected` keys (Algorithm 2), or over `all` keys with the unselected
            ones masked (the published GLM3 file).
    """

    mask: str = "exclude"
    residual_weight: str = "selected"
    overlap: str = "exclude"
    blocks: str = "selected"

    def __post_init__(self) -> None:
        checks.one_of("coupling.mask", self.mask, ("exclude", "zero"))
        checks.one_of("coupling.residual_weight", self.residual_weight, ("selected", "all"))
        checks.one_of("coupling.overlap", self.overlap, ("exclude", "count"))
        checks.one_of("coupling.blocks", self.blocks, ("selected", "all"))


@dataclass(frozen=True)
class Routed(_Settings):
    """The default: each query reads the far keys that matter to it; centroids represent the others.

    The key index is built once, before any query is seen: keys are clustered and quantized to int8. Each query
    reads its own and the previous chunk exactly, the first tokens (attention sinks), and every far key that the
    search finds to weigh at least `min_weight`. The unread keys of a cluster are represented by its centroid,
    corrected for the covariance of the keys. Every query chooses for itself: no later query or key changes what it
    reads, and chunked prefill and decode steps read what the whole call reads. docs/default.md has the details and
    the measurements.

    Attributes:
        min_weight: A far key is read if the search finds its estimated attention weight to be at least this, in
            (0, 1]. Smaller values read more keys: smaller error, more time. 1 reads no far key. For a query
            that sees more than 16,384 far keys the bound falls, at most to half of this.
        cluster_size: Keys per cluster, at most.
        chunk_size: A causal query reads its own and the previous chunk of this many keys exactly.
        sinks: The first positions of the sequence, read exactly by every query.
        exact_until: Causal queries before this position read every key. Without a causal mask, calls with at
            most `exact_until` queries are exact. Exact attention is faster for such queries.
    """

    min_weight: float = 1 / 4096
    cluster_size: int = 128
    chunk_size: int = 256
    sinks: int = 16
    exact_until: int = 2048

    def __post_init__(self) -> None:
        checks.number("min_weight", self.min_weight, minimum=0.0, exclusive=True, maximum=1.0)
        checks.integer("cluster_size", self.cluster_size, minimum=1)
        checks.integer("chunk_size", self.chunk_size, minimum=1)
        checks.integer("sinks", self.sinks, minimum=0)
        checks.integer("exact_until", self.exact_until, minimum=0)


@dataclass(frozen=True)
class Selected(_Settings):
    """Algorithms 1 and 2: a scorer chooses keys before any query is seen, attention runs over those.

    Attributes:
        scorer: What ranks the keys: a name of `prescore.list_scorers()`, or a `Scorer` object with its settings.
        top_k: Keys kept: an int counts them, a float in (0, 1] is a share. In causal mode each off-diagonal block
            of the causal grid keeps that many of its own keys. 1024 where neither this nor `min_score` is given.
        min_score: Instead of `top_k`: keep every key that scores at least this (the paper's universal set).
        selector: `top` scores, or `sample` without replacement in proportion to the score.
        sinks: How many of the first real positions are always kept. They count towards `top_k` and are attended
            exactly (with `coupling.mask="zero"`: like any other selected key).
        recent: How many of the last real positions are always kept, in the same way.
        min_fraction: delta of Algorithm 2: with fewer than `min_fraction * n` keys selected, attention runs
            unfiltered.
        remainder: What represents the unselected keys. `none` (paper): nothing. `centroids`: one mean per cluster
            of the scorer, or of k-means with default settings if the scorer makes no clusters. A clustering
            scorer, such as `KMeans(n_clusters=64)`: one mean per cluster of that scorer.
        inner: Attention over the selected keys: `Exact()`, or an `Lsh(...)` for HyperAttention (paper).
        min_seq_len: Causal leaves have this many keys and are exact. With an `Lsh`, blocks with fewer queries than
            this are exact over their selected keys. All positions of a block of the causal grid count as queries,
            also positions without a query in this call, so that later tokens change nothing.
        leaf_inclusive: True: blocks with at most `min_seq_len` queries are exact over all their keys, before
            anything is scored (the paper's blockwise flag). Decode steps then read every key.
        coupling: How the selection enters attention, see `Coupling`.
    """

    scorer: str | Scorer = "key-diff"
    top_k: int | float | None = None
    min_score: float | None = None
    selector: str = "top"
    sinks: int = 4
    recent: int = 0
    min_fraction: float = 0.0
    remainder: str | Scorer = "centroids"
    inner: Exact | Lsh = field(default_factory=Exact)
    min_seq_len: int = 4096
    leaf_inclusive: bool = False
    coupling: Coupling = field(default_factory=Coupling)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", as_scorer(self.scorer))
        if self.top_k is None and self.min_score is None:
            object.__setattr__(self, "top_k", 1024)
        if self.top_k is not None and self.min_score is not None:
            raise ValueError(f"top_k must be None where min_score is given, got {checks.shown(self.top_k)}")
        if self.top_k is not None:
            checks.budget("top_k", self.top_k)
        if self.min_score is not None:
            checks.number("min_score", self.min_score, minimum=-math.inf)
            if self.selector != "top":
                raise ValueError(f"selector must be 'top' with min_score, got {self.selector!r}")
        checks.one_of("selector", self.selector, ("top", "sample"))
        checks.integer("sinks", self.sinks, minimum=0)
        checks.integer("recent", self.recent, minimum=0)
        checks.number("min_fraction", self.min_fraction, minimum=0.0, maximum=1.0)
        if not (isinstance(self.remainder, Scorer) and self.remainder.makes_clusters):
            checks.one_of("remainder", self.remainder, ("centroids", "none"))
        checks.instance("inner", self.inner, (Exact, Lsh))
        checks.integer("min_seq_len", self.min_seq_len, minimum=0)
        checks.boolean("leaf_inclusive", self.leaf_inclusive)
        checks.instance("coupling", self.coupling, (Coupling,))
        self._refuse_what_does_nothing()

    def _refuse_what_does_nothing(self) -> None:
        how, selected = self.coupling, "'selected' with inner=Exact()"
        exact, zeroed = isinstance(self.inner, Exact), how.mask == "zero"
        order = getattr(self.remainder, "rule", "nearest")
        for applies, name, value, idle, rule in (
            (True, "remainder.rule", order, "nearest", "'nearest', as it scores nothing"),
            (exact, "coupling.residual_weight", how.residual_weight, "selected", selected),
            (exact, "coupling.overlap", how.overlap, "exclude", "'exclude' with inner=Exact()"),
            (exact, "coupling.blocks", how.blocks, "selected", selected),
            (zeroed, "coupling.blocks", how.blocks, "selected", '"selected" where mask="zero" keeps every key'),
            (zeroed, "remainder", self.remainder, "none", '"none" where coupling.mask="zero" keeps every key'),
        ):
            if applies and value != idle:
                raise ValueError(f"{name} must be {rule}, got {value!r}")

    @property
    def budget(self) -> int | float:
        """`top_k`; all keys where `min_score` decides."""
        return 1.0 if self.top_k is None else self.top_k

    @property
    def scoring(self) -> Scorer:
        """The scorer as an object, whatever it was given as."""
        return as_scorer(self.scorer)

    @classmethod
    def paper(cls, scorer: str | Scorer = "kmeans", top_k: int | float | None = 2048, **changes: Any) -> Self:
        """Algorithms 1 and 2 as printed, with the corrected coupling.

        `min_fraction` (delta) is 0, and `leverage` is exact, where the paper leaves delta open and approximates.
        """
        printed: Values = {"sinks": 0, "remainder": "none", "inner": Lsh(alignment="rank")}
        return cls(scorer, top_k, **{**printed, **changes})

    @classmethod
    def early(cls, scorer: str | Scorer = "kmeans", top_k: int | float = 2048, **changes: Any) -> Self:
        """The paper's early integration (GLM2): all three coupling artefacts on (Appendix F)."""
        artefacts = Coupling(mask="zero", residual_weight="all", overlap="count")
        return cls.paper(scorer, top_k, **{"coupling": artefacts, **changes})


@dataclass(frozen=True)
class Hyper(_Settings):
    """HyperAttention over all keys.

    Attributes:
        lsh: Blocks and residual.
        sinks: The first real positions, attended exactly by every query.
        min_seq_len: Causal leaves have this many keys and are exact. So are blocks with fewer queries.
        leaf_inclusive: True: blocks with exactly `min_seq_len` queries are exact too (the paper's blockwise flag).
    """

    lsh: Lsh = field(default_factory=Lsh)
    sinks: int = 0
    min_seq_len: int = 4096
    leaf_inclusive: bool = False

    def __post_init__(self) -> None:
        checks.instance("lsh", self.lsh, (Lsh,))
        checks.integer("sinks", self.sinks, minimum=0)
        checks.integer("min_seq_len", self.min_seq_len, minimum=0)
        checks.boolean("leaf_inclusive", self.leaf_inclusive)

    @classmethod
    def published(cls, **changes: Any) -> Self:
        """As published: queries are aligned to blocks by rank."""
        return cls(**{"lsh": Lsh(alignment="rank"), **changes})


Config = Routed | Selected | Hyper | Exact
"""Any configuration of `prescored_attention`."""

TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Routed, Selected, Hyper, Exact)}
_PARTS: dict[str, tuple[type[Any], ...]] = {"inner": (Exact, Lsh), "lsh": (Lsh,), "coupling": (Coupling,)}


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; an unknown type or field is refused by name."""
    made: Config = _from_dict(values, TYPES, "config")
    return made


def check_config(config: Any, name: str = "config") -> Config:
    """The configuration itself, None as the default; anything else is refused."""
    if config is None:
        return DEFAULT
    if not isinstance(config, Config):
        is_type = isinstance(config, type) and config in TYPES.values()
        got = f"the type {config.__name__}: write {config.__name__}()" if is_type else type(config).__name__
        if isinstance(config, str):
            got = f"str {config!r}: pass an object, such as Routed() or Selected('key-diff')"
        if isinstance(config, Tensor):
            got = f"Tensor {checks.shown(config)}: masks are is_causal=True and key_padding_mask [batch, keys]"
        raise TypeError(f"{name} must be a prescore.Routed, Selected, Hyper or Exact, or None, got {got}")
    return config


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, _Settings | Scorer) else value


def _from_dict(values: Any, kinds: Mapping[str, type[Any]], name: str) -> Any:
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must be a mapping, got {type(values).__name__}")
    checks.one_of(f"{name} type", values.get("type"), tuple(kinds))
    kind = kinds[values["type"]]
    known = [f.name for f in dataclasses.fields(kind)]
    given = {}
    for field_name, value in values.items():
        if field_name == "type":
            continue
        checks.known_field(kind.__name__, field_name, known)
        given[field_name] = value
        if isinstance(value, Mapping) and field_name in ("scorer", "remainder"):
            given[field_name] = Scorer.from_dict(value)
        elif isinstance(value, Mapping) and field_name in _PARTS:
            parts = {part.__name__: part for part in _PARTS[field_name]}
            given[field_name] = _from_dict(value, parts, field_name)
    return kind(**given)


DEFAULT: Config = Routed()
