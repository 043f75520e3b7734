"""Methods by their names on the command line: configurations with the sizes that a text or an image gives them."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from prescore import checks
from prescore.attention import exact_attention
from prescore.bench.baselines import get_baseline, list_baselines, third_party_baselines
from prescore.bench.windows import attend_window
from prescore.config import Config, Exact, Hyper, Lsh, Routed, Selected, config_from_dict
from prescore.ops.parts import merge
from prescore.registry import get_scorer, list_scorers
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import ClusteringScorer, KMeans
from prescore.scoring.rules import RULES
from prescore.types import Values

SINKS = 4
"""First tokens that sliding windows and "+ sinks" methods keep."""
LEAVES_PER_TEXT, BLOCKS_PER_TEXT = 8, 128
"""The paper read 32768 tokens with leaves of 4096 and LSH blocks of 256."""
TOP_K = 256


@dataclass(frozen=True)
class Local:
    """Exact causal attention to the query's own chunk. Far keys are dropped.

    Attributes:
        chunk_size: Positions of a chunk.
        previous_chunk: Also read the chunk before.
        sinks: Also read the first positions.
    """

    chunk_size: int
    previous_chunk: bool = False
    sinks: int = 0

    def __post_init__(self) -> None:
        checks.integer("chunk_size", self.chunk_size, minimum=1)
        checks.integer("sinks", self.sinks, minimum=0)

    def to_dict(self) -> Values:
        """JSON values, as those of a configuration."""
        return {"type": "Local", **asdict(self)}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, seed: int) -> Tensor:
        """Attention of one layer."""
        begins = torch.arange(query.shape[2], dtype=torch.int32, device="cpu")
        begins -= begins % self.chunk_size
        start = (begins - self.chunk_size).clamp_min(0) if self.previous_chunk else begins
        output = attend_window(query, key, value, start, sinks=self.sinks, scale=scale)
        if output is not None:
            return output
        outputs = []
        for begin in range(0, query.shape[2], self.chunk_size):
            first = max(0, begin - self.chunk_size) if self.previous_chunk else begin
            local = slice(first, begin + self.chunk_size)
            queries = query[:, :, begin : begin + self.chunk_size]
            attended = exact_attention(queries, key[:, :, local], value[:, :, local], is_causal=True, scale=scale)
            n_sinks = min(self.sinks, first)
            if n_sinks:
                sinks = exact_attention(queries, key[:, :, :n_sinks], value[:, :, :n_sinks], scale=scale)
                attended = merge(attended, sinks)
            outputs.append(attended.output)
        return torch.cat(outputs, dim=2)

    def last_keys(self, length: int) -> list[slice]:
        """What the last of so many positions reads."""
        begin = (length - 1) // self.chunk_size * self.chunk_size
        first = max(0, begin - self.chunk_size) if self.previous_chunk else begin
        return [slice(0, min(self.sinks, first)), slice(first, length)]

    def reads(self, length: int) -> float:
        """Keys that a query reads on average."""
        position = torch.arange(length, dtype=torch.float64)
        begin = position - position % self.chunk_size
        first = (begin - self.chunk_size).clamp_min(0) if self.previous_chunk else begin
        return float((position + 1 - first + first.clamp_max(self.sinks)).mean())


@dataclass(frozen=True)
class Baseline:
    """One of `prescore.bench.baselines` with its arguments."""

    name: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        checks.one_of("baseline", self.name, tuple(list_baselines()))

    @classmethod
    def at_budget(cls, name: str, leaf: int, top_k: int | float) -> Baseline:
        """A baseline that reads about `leaf / 2` local and `top_k` far keys per query."""
        if not isinstance(top_k, int) or isinstance(top_k, bool):
            raise ValueError(f"top_k must be a count of keys for the baseline {name!r}, got {top_k!r}")
        checks.integer("top_k", top_k, minimum=0)
        if name in third_party_baselines():
            return cls(name, dict(third_party_baselines()[name].settings(leaf, top_k)))
        settings: dict[str, Values] = {
            "streaming": {"window": leaf // 2 + max(1, top_k - SINKS), "sinks": SINKS},
            "performer": {"n_features": max(1, top_k)},
            "reformer": {"chunk_size": max(1, top_k // 8), "n_rounds": 4},
        }
        return cls(name, settings.get(name, {"budget": top_k, "chunk_size": leaf}))

    def to_dict(self) -> Values:
        """JSON values, as those of a configuration."""
        return {"type": "Baseline", "name": self.name, **self.settings}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, seed: int) -> Tensor:
        """Attention of one layer; the sliding window by native code where it can run."""
        if self.name == "streaming":
            start = torch.arange(query.shape[2], dtype=torch.int32, device="cpu") - (self.settings["window"] - 1)
            sinks = self.settings["sinks"]
            output = attend_window(query, key, value, start.clamp_min(0), sinks=sinks, scale=scale)
            if output is not None:
                return output
        run = get_baseline(self.name)
        return run(query, key, value, is_causal=True, scale=scale, generator=seed, **self.settings).output

    def last_keys(self, length: int) -> list[slice]:
        """What the last of so many positions reads: its sliding window; all keys for every other baseline."""
        if self.name != "streaming":
            return [slice(0, length)]
        first = max(0, length - self.settings["window"])
        return [slice(0, min(self.settings["sinks"], first)), slice(first, length)]

    def reads(self, length: int) -> float:
        """Keys that a query reads on average, from the settings; what choosing them costs is in the time alone.

        For `performer` it is the number of features, for `reformer` an upper bound.
        """
        settings, third_party = self.settings, third_party_baselines()
        if self.name in third_party:
            return float(third_party[self.name].keys_read(length, settings))
        position = torch.arange(length, dtype=torch.float64)
        if self.name == "streaming":
            beyond = (position + 1 - settings["window"]).clamp_min(0)
            reads = (position + 1).clamp_max(settings["window"]) + beyond.clamp_max(settings["sinks"])
        elif self.name == "performer":
            reads = torch.full_like(position, settings["n_features"])
        elif self.name == "reformer":
            reads = (position + 1).clamp_max(2 * settings["chunk_size"] * settings["n_rounds"])
        else:
            inside = position % settings["chunk_size"]
            reads = inside + 1 + (position - inside).clamp_max(settings["budget"])
        return float(reads.mean())


@dataclass(frozen=True)
class Method:
    """One way to compute causal attention.

    Attributes:
        label: Its name in tables.
        config: A configuration of the library, local attention or a baseline.
        axes: Its coordinates in an experiment (top_k, sample size, ...), for tables and pictures.
    """

    label: str
    config: Config | Local | Baseline
    axes: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> Values:
        """Everything that identifies the method, for a record."""
        return {"label": self.label, "config": self.config.to_dict(), "axes": dict(self.axes)}


EXACT = Method("exact", Exact())
"""The reference: softmax over every key."""


def local_only(chunk_size: int, *, previous_chunk: bool = False, sinks: int = 0) -> Method:
    """The floor: far keys are dropped."""
    return Method("local only", Local(chunk_size, previous_chunk, sinks))


def sliding_window(length: int, reads: float, sinks: int, **axes: Any) -> Method:
    """The narrowest sliding window that reads at least so many keys per query, sinks included."""
    checks.integer("sinks", sinks, minimum=0)

    def windowed(window: int) -> Baseline:
        return Baseline("streaming", {"window": window, "sinks": sinks})

    window = 1 + bisect.bisect_left(range(1, length), reads, key=lambda window: windowed(window).reads(length))
    return Method("sliding window", windowed(window), axes)


def leaf_of(length: int) -> int:
    """Causal leaves at a length, as large a share of it as the paper's."""
    return max(1, length // LEAVES_PER_TEXT)


def largest_block(length: int, leaf: int) -> int:
    """Keys of the largest off-diagonal block of the causal recursion; 0 = everything is in one leaf.

    A budget of as many keys filters nothing, so that all scorers give one result.
    """
    block = leaf
    while 2 * block < length:
        block *= 2
    return block if block < length else 0


# Names.

PAPER, SAMPLE, ADDS_CENTROIDS = "paper:", "-sample", "+centroids"
RANDOM, CENTROIDS, PUBLISHED, ROUTED = "random", "centroids", "published", "routed"
_ALIASES = {RANDOM: "uniform", CENTROIDS: "kmeans-farthest+centroids", PUBLISHED: "kmeans-farthest-sample"}
_CONFIGS: dict[str, Config] = {"exact": Exact(), "default": Routed(), "hyper": Hyper.published()}
_FORM = "SCORER[-RULE][-sample][+centroids]"


@dataclass(frozen=True)
class ScorerName:
    """`[paper:]SCORER[-RULE][-sample][+centroids]` taken apart.

    `kmeans` has the paper's nearest rule, `kmeans-farthest-sample` samples keys in proportion to their distance,
    and `+centroids` represents the keys left out by centroids. `random` is the scorer `uniform`, `centroids`
    selects as few keys as it can and represents all others, `published` is the rule of the paper's published
    ViT script: k-means from random seeds on the keys as they are, keys sampled in proportion to their distance.
    """

    name: str
    scorer: str
    rule: str | None
    selector: str
    adds_centroids: bool
    is_paper: bool

    @classmethod
    def read(cls, name: str) -> ScorerName | None:
        """A name taken apart; None = it names no scorer."""
        stem = _ALIASES.get(name, name)
        stem, is_paper = stem.removeprefix(PAPER), stem.startswith(PAPER)
        stem, adds_centroids = stem.removesuffix(ADDS_CENTROIDS), stem.endswith(ADDS_CENTROIDS)
        stem, selector = stem.removesuffix(SAMPLE), "sample" if stem.endswith(SAMPLE) else "top"
        for scorer in _scorer_names():
            rule = None if stem == scorer else stem.removeprefix(f"{scorer}-")
            parsed = cls(name, _ALIASES.get(scorer, scorer), rule, selector, adds_centroids, is_paper)
            if rule is None or (rule != stem and rule in RULES and parsed.makes_clusters):
                return parsed
        return None

    @property
    def makes_clusters(self) -> bool:
        """Whether its scorer clusters the keys."""
        return issubclass(get_scorer(self.scorer), ClusteringScorer)

    @property
    def takes_n_clusters(self) -> bool:
        """Whether the number of clusters is free; centroids fix it to theirs."""
        return self.makes_clusters and not self.adds_centroids

    @property
    def takes_share(self) -> bool:
        """Whether the share of centroids in a budget is free."""
        return self.adds_centroids and self.name != CENTROIDS

    @property
    def is_random(self) -> bool:
        """Whether the seed changes the result."""
        return self.makes_clusters or self.adds_centroids or self.selector == "sample" or self.scorer == "uniform"

    def make_scorer(self, **fields: Any) -> Scorer:
        """Its scorer; `fields` are for scorers that make clusters."""
        options = {**fields, **({"rule": self.rule} if self.rule else {})}
        options |= {"seeding": "random", "normalize": False} if self.name == PUBLISHED else {}
        scorer: Scorer = get_scorer(self.scorer)(**options if self.makes_clusters else {})
        return scorer

    def config(self) -> Selected:
        """Its configuration, with the sizes of `Selected` or of `Selected.paper`."""
        changes: Values = {"selector": self.selector} if self.selector != "top" else {}
        changes |= {"remainder": "centroids"} if self.adds_centroids else {}
        preset = Selected.paper if self.is_paper else Selected
        return preset(self.make_scorer(), **changes)


@dataclass(frozen=True)
class Sizes:
    """What a name leaves open; None = as the configuration has it.

    Attributes:
        top_k: Keys kept by scorers, far keys of baselines.
        leaf: Exact causal leaves; chunks of `local` and of baselines.
        lsh: Sorted blocks and residual of `hyper` and of `paper:SCORER`.
        chunk_size: Chunks of the default, which is exact up to one of them.
        changes: Fields to change where the configuration has them, see `change`.
    """

    top_k: int | float | None = None
    leaf: int | None = None
    lsh: Lsh | None = None
    chunk_size: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_text(
        cls,
        length: int,
        leaf: int | None = None,
        top_k: int | float = TOP_K,
        changes: Mapping[str, Any] | None = None,
    ) -> Sizes:
        """Sizes for so many tokens: LSH blocks and, without `leaf`, the leaves have the paper's share of them."""
        block = max(1, length // BLOCKS_PER_TEXT)
        lsh = Lsh(block, block, alignment="rank")
        return cls(top_k, leaf or leaf_of(length), lsh, leaf, changes or {})


def parse_method(name: str, sizes: Sizes) -> Method:
    """A method by its name: `exact`, `default`, `hyper`, `local`, a baseline, or what `ScorerName` takes apart."""
    leaf, top_k = sizes.leaf or Selected().min_seq_len, TOP_K if sizes.top_k is None else sizes.top_k
    if name == "local":
        return local_only(leaf)
    if name in list_baselines():
        return Method(name, Baseline.at_budget(name, leaf, top_k), {"top_k": top_k})
    scorer = ScorerName.read(name)
    if scorer is None and name not in _CONFIGS:
        names = (*_CONFIGS, "local", *list_baselines(), *_scorer_names(), f"[{PAPER}]{_FORM}")
        hint = checks.nearest(name, names) or "; one that a file of yours registers needs --import FILE"
        raise ValueError(f"method must be one of {', '.join(map(repr, names))}, got {name!r}{hint}")
    config: Config = _CONFIGS[name] if scorer is None else scorer.config()
    fields = {"top_k": sizes.top_k, "min_seq_len": sizes.leaf, "lsh": sizes.lsh}
    fields |= {"inner": sizes.lsh} if scorer is not None and scorer.is_paper else {}
    fields |= {"chunk_size": sizes.chunk_size, "exact_until": sizes.chunk_size}
    known = {field: value for field, value in fields.items() if value is not None}
    return Method(name, change(change(config, known, partly=True), sizes.changes, partly=True))


def _scorer_names() -> list[str]:
    return [RANDOM, *list_scorers()]


# Images: a query reads `budget` keys and centroids, whatever the method.


def image_config(
    name: str,
    budget: int,
    *,
    n_clusters: int | None = None,
    share: float = 0.5,
    n_prefix: int = 0,
    n_tokens: int = 0,
) -> Config:
    """The configuration under which a query reads `budget` keys and centroids; `default` reads what it does.

    Args:
        name: `default`, `routed` (`Routed` at the budget) or what `ScorerName` takes apart; without `+centroids`
            the keys left out are dropped.
        budget: Keys and centroids in all.
        n_clusters: Clusters of a clustering scorer without centroids.
        share: Centroids in the budget, as a share.
        n_prefix: Tokens before the patches.
        n_tokens: Keys of a layer; only `routed` depends on it.
    """
    if name == "default":
        return Routed()
    if name == ROUTED:
        return routed_config(budget, n_tokens=n_tokens, n_prefix=n_prefix)
    method = ScorerName.read(name)
    if method is None or method.is_paper:
        names = "exact", "default", ROUTED, CENTROIDS, PUBLISHED, *_scorer_names(), _FORM
        raise ValueError(f"method must be one of {', '.join(map(repr, names))}, got {name!r}")
    n_centroids, least = 0, max(1, n_prefix)
    if method.adds_centroids:
        n_centroids = min(round(budget * share) if method.takes_share else budget, budget - least)
        if n_centroids < 1:
            raise ValueError(
                f"budget must leave room for centroids in addition to {least} selected keys, got {budget}"
            )
    # centroids are means of the keys as they are, so these are clustered without normalisation
    scorer = method.make_scorer(n_clusters=n_centroids or n_clusters, normalize=not n_centroids)
    remainder: str | KMeans = "centroids" if n_centroids else "none"
    if n_centroids and not method.makes_clusters:
        remainder = KMeans(n_clusters=n_centroids, normalize=False)
    return Selected(scorer, budget - n_centroids, selector=method.selector, sinks=0, remainder=remainder)


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


# Fields of a configuration by name, nested ones by their path: `--set scorer.n_clusters=64`.

AnyConfig = TypeVar("AnyConfig", bound="Config | Local | Baseline")


def field_paths(config: Config | Local | Baseline) -> list[str]:
    """All fields of a configuration; those of its scorer, `Lsh` and `Coupling` by their paths."""

    def paths(values: Mapping[str, Any], owner: str) -> Iterator[str]:
        for name, value in values.items():
            if name not in ("type", "name"):
                yield owner + name
                if isinstance(value, Mapping):
                    yield from paths(value, f"{owner}{name}.")

    return list(paths(config.to_dict(), ""))


def change(config: AnyConfig, changes: Mapping[str, Any], *, partly: bool = False) -> AnyConfig:
    """A copy with some fields changed.

    A word for a nested field names its type (`inner=Exact`, `scorer=leverage`), with that type's defaults, but for
    `remainder`, which may be a word itself.

    Args:
        config: What to change; local attention and baselines have no such fields.
        changes: New values, such as `{"top_k": 64, "scorer.n_clusters": 32}`.
        partly: Leave out fields that the configuration lacks, instead of refusing them.
    """
    if isinstance(config, Local | Baseline):
        return config
    for is_nested in (False, True):  # a whole part comes before the fields inside it
        values, known = config.to_dict(), field_paths(config)
        for path, value in changes.items():
            if ("." in path) != is_nested or (partly and path not in known):
                continue
            checks.known_field(type(config).__name__, path, known)
            *parents, name = path.split(".")
            owner = reduce(operator.getitem, parents, values)
            if isinstance(owner[name], Mapping) and isinstance(value, str) and name != "remainder":
                owner[name] = {"name" if "name" in owner[name] else "type": value}
            else:
                owner[name] = value.to_dict() if hasattr(value, "to_dict") else value
        config = cast("AnyConfig", config_from_dict(values))
    return config


def check_changes(changes: Mapping[str, Any], methods: Sequence[Method]) -> None:
    """Refuse a change that no configuration of a run has a field for."""
    configs = [method.config for method in methods if isinstance(method.config, Routed | Selected | Hyper)]
    known = dict.fromkeys(path for config in configs for path in field_paths(change(config, changes, partly=True)))
    kinds = " or ".join(dict.fromkeys(type(config).__name__ for config in configs))
    for name in changes:
        checks.known_field(kinds or "a run without a configuration", name, list(known))
