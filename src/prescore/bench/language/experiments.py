"""The paper's language tables and figures as lists of methods, scaled to the length that is run.

The paper read 32768 tokens with leaves of 4096, blocks of 256 and 256 samples. At another length every count is
multiplied by `length / 32768`, so that each stays the same fraction of the context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prescore import checks
from prescore.bench.language.methods import (
    LEAVES_PER_TEXT,
    SINKS,
    AnyConfig,
    LanguageMethod,
    Overrides,
    asked_for,
    changed,
    check_overrides,
    exact,
    fitting,
    local,
    named,
    prescored,
)
from prescore.config import Coupling, Exact, Hyper, Lsh, Routed, Selected
from prescore.registry import list_scorers
from prescore.types import Values

PAPER_LENGTH = 32768
PAPER_LEAF, PAPER_BLOCK, PAPER_SAMPLES = 4096, 256, 256
TOP_K = (0, 32, 128, 512, 2048, 8192, 16384)
TOP_K_GAUSSIAN = (0, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
CORRECTED, EARLY = Coupling(), Coupling(mask="zero", residual_weight="all", overlap="count")
COUPLINGS = {
    "corrected": CORRECTED,
    "zeroed keys": Coupling(mask="zero"),
    "residual by n": Coupling(residual_weight="all"),
    "overlap counted": Coupling(overlap="count"),
    "early": EARLY,
}
BUDGETS = (32, 64, 128, 256, 512, 1024)
"""Far keys per block in the comparison at equal cost, at 4096 tokens."""
ROWS = (256, 512, 1024)
"""Far rows per query at which the default is measured."""
BLIND, PUBLISHED, LOOKING = "keys chosen before any query", "published methods", "sees the queries first"
"""Panels of that comparison."""


@dataclass(frozen=True)
class Scale:
    """The paper's counts at another length.

    Attributes:
        length: Tokens read.
        leaf: Exact leaves; None = the paper's share of the length.
        sinks: First tokens that every method keeps; the paper keeps none.
        overrides: Fields to change in every configuration that has them.
    """

    length: int
    leaf: int | None = None
    sinks: int = 0
    overrides: Overrides = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """One count here for so many of the paper's."""
        return self.length / PAPER_LENGTH

    @property
    def leaf_size(self) -> int:
        """Keys of a causal leaf."""
        return self.leaf if self.leaf is not None else self.count(PAPER_LEAF)

    def count(self, of_paper: int) -> int:
        """A count of the paper at this length; what is not zero stays at least one."""
        return 0 if of_paper == 0 else max(1, round(of_paper * self.factor))

    def prescored(
        self,
        scorer: str,
        top_k: int,
        samples: int = PAPER_SAMPLES,
        *,
        inclusive: bool = False,
        coupling: str = "corrected",
    ) -> LanguageMethod:
        """One configuration of the paper, its counts given as the paper prints them; top_k = 0 selects nothing."""
        lsh = Lsh(self.count(PAPER_BLOCK), self.count(samples), alignment="rank")
        config: Hyper | Selected
        if top_k == 0 and COUPLINGS[coupling] == CORRECTED:
            config = Hyper(lsh, self.sinks, self.leaf_size, inclusive)
        else:
            config = self._selected(scorer, top_k, lsh, inclusive, COUPLINGS[coupling])
        config = self.changed(config)
        kept, n_samples = self.count(top_k), self.count(samples)
        parts = ["HyperAttention" if top_k == 0 else f"{scorer} + Hyper"]
        parts += [f"top {kept}"] if top_k else []
        parts += [f"{n_samples} samples"]
        parts += ["blockwise"] if inclusive else []
        parts += [coupling] if coupling != "corrected" else []
        parts += [f"{config.sinks} sinks"] if config.sinks else []
        return prescored(
            ", ".join(parts),
            config,
            scorer="none" if top_k == 0 else scorer,
            top_k=kept,
            paper_top_k=top_k,
            fraction=kept / self.length,
            sample_size=n_samples,
            paper_sample_size=samples,
            blockwise=inclusive,
            coupling=coupling,
            sinks=config.sinks,
        )

    def changed(self, config: AnyConfig) -> AnyConfig:
        """A configuration with those overrides that it has fields for."""
        return changed(config, fitting(config, self.overrides))

    def _selected(self, scorer: str, top_k: int, lsh: Lsh, inclusive: bool, coupling: Coupling) -> Selected:
        if top_k == 0 and self.sinks:
            # with every key kept there is none to zero, and the sinks have a part of their own
            coupling = coupling.replace(mask="exclude")
        return Selected.paper(
            scorer,
            1.0 if top_k == 0 else self.count(top_k),
            sinks=self.sinks,
            inner=lsh,
            min_seq_len=self.leaf_size,
            leaf_inclusive=inclusive,
            coupling=coupling,
        )


def table1(scale: Scale) -> Iterator[LanguageMethod]:
    """Pre-scoring and the blockwise flag, one at a time."""
    for inclusive in (False, True):
        yield scale.prescored("kmeans", 0, inclusive=inclusive)
    # the paper's best budget in either column
    yield scale.prescored("kmeans", 2048)
    yield scale.prescored("kmeans", 8192, inclusive=True)


def appendix_a(
    scale: Scale,
    scorers: Sequence[str] = ("kmeans", "kmedian", "leverage", "gaussian-kmeans"),
    coupling: str = "corrected",
) -> Iterator[LanguageMethod]:
    """Budget by sample size by leaf rule, for every scorer."""
    yield from _grid(scale, scorers, TOP_K, (PAPER_SAMPLES, 0), (False, True), coupling)


def figure_glm3(scale: Scale) -> Iterator[LanguageMethod]:
    """Perplexity against the budget, with and without residual samples, corrected coupling."""
    yield from _grid(scale, ("kmeans", "kmedian", "leverage"), TOP_K, (PAPER_SAMPLES, 0), (False,), "corrected")


def appendix_f(scale: Scale) -> Iterator[LanguageMethod]:
    """The early integration, and each of its three artefacts alone."""
    yield scale.prescored("kmeans", 0)
    for coupling in COUPLINGS:
        yield from _grid(scale, ("kmeans",), TOP_K[1:], (PAPER_SAMPLES,), (False,), coupling)
    yield from _grid(scale, ("kmedian", "leverage"), TOP_K[1:], (PAPER_SAMPLES,), (False,), "early")


def appendix_i(scale: Scale, coupling: str = "early") -> Iterator[LanguageMethod]:
    """Gaussian-kernel k-means, in the early integration as printed."""
    yield from _grid(scale, ("gaussian-kmeans",), TOP_K_GAUSSIAN, (PAPER_SAMPLES, 0), (False,), coupling)


def longest(scale: Scale) -> Iterator[LanguageMethod]:
    """The short list, for lengths up to and past the trained one."""
    yield scale.prescored("kmeans", 0)
    yield scale.prescored("kmeans", 2048)
    yield default_method(scale)


def cost(scale: Scale) -> Iterator[LanguageMethod]:
    """Everything one would use instead, over a range of budgets, to be read against measured cost."""
    leaf = scale.leaf_size
    for budget in BUDGETS:
        count = max(SINKS + 1, round(budget * scale.length / 4096))
        half = max(1, count // 2)
        own = dict(scale.overrides)
        yield _at(named("random", leaf=leaf, top_k=count, overrides=own), "random + sinks", count, BLIND)
        for name in ("key-norm", "key-diff", "leverage", "kmeans"):
            kept = {"sinks": SINKS, "inner": Exact(), **own}
            yield _at(named(name, leaf=leaf, top_k=count, overrides=kept), f"{name} + sinks", count, BLIND)
        sizes = Lsh(half, half, alignment="rank")
        paper = {"lsh": sizes, "inner": sizes, **own}
        yield _at(named("hyper", leaf=leaf, overrides=paper), "HyperAttention", count, PUBLISHED)
        with_sinks = {"sinks": SINKS, **paper}
        yield _at(named("hyper", leaf=leaf, overrides=with_sinks), "HyperAttention + sinks", count, PUBLISHED)
        filtered = named("kmeans", leaf=leaf, top_k=2 * count, overrides=paper)
        yield _at(filtered, "paper: k-means + Hyper", count, PUBLISHED)
        for name, group in (
            ("lev-attention", PUBLISHED),
            ("streaming", PUBLISHED),
            ("heavy-hitters", LOOKING),
            ("oracle", LOOKING),
        ):
            yield _at(named(name, leaf=leaf, top_k=count), name, count, group)
        yield _at(default_at(scale, count), "default", count, None)


def default_rows(scale: Scale) -> Iterator[LanguageMethod]:
    """The default, and nothing of it changed but the far rows per query."""
    for rows in ROWS:
        yield prescored(f"default, {rows} rows", scale.changed(Routed(min_weight=1 / (2 * rows))), rows=rows)


def default_method(scale: Scale, **changes: Any) -> LanguageMethod:
    """The recommended configuration with the experiment's leaves."""
    return named("default", leaf=scale.leaf_size, overrides={**changes, **scale.overrides})


def default_at(scale: Scale, count: int) -> LanguageMethod:
    """The recommended configuration with `count` exact far rows per query, and nothing else changed."""
    return default_method(scale, rows=count)


EXPERIMENTS: dict[str, Callable[..., Iterator[LanguageMethod]]] = {
    "table1": table1,
    "appendix-a": appendix_a,
    "figure-glm3": figure_glm3,
    "appendix-f": appendix_f,
    "appendix-i": appendix_i,
    "longest": longest,
    "cost": cost,
    "rows": default_rows,
}


def experiment_methods(name: str, scale: Scale, **options: Any) -> list[LanguageMethod]:
    """The methods of a named experiment, exact and local-only first; the same configuration appears once."""
    checks.one_of("experiment", name, tuple(EXPERIMENTS))
    methods = [exact(), local(scale.leaf_size), *EXPERIMENTS[name](scale, **options)]
    check_overrides(scale.overrides, [config for method in methods if (config := method.config) is not None])
    if name == "longest":
        return methods
    unique: dict[str, LanguageMethod] = {}
    for method in methods:
        unique.setdefault(repr(method.describe()), method)
    return list(unique.values())


def default_lengths(name: str | None, trained: int | None) -> list[int]:
    """Lengths of an experiment on a model: within what it was trained on, but for `longest`."""
    limit = trained or PAPER_LENGTH
    if name == "longest":
        return [limit, 2 * limit, 4 * limit]
    return [min(limit, 8192 if name in ("table1", "rows") else 4096)]


def default_leaf(name: str | None, length: int) -> int:
    """Exact leaves of an experiment: the paper's share of the length, or the default's own chunk."""
    return Routed().chunk_size if name == "rows" else max(1, length // LEAVES_PER_TEXT)


def _grid(
    scale: Scale,
    scorers: Sequence[str],
    budgets: Sequence[int],
    samples: Sequence[int],
    rules: Sequence[bool],
    coupling: str,
) -> Iterator[LanguageMethod]:
    for scorer in scorers:
        for n_samples in samples:
            for top_k in budgets:
                for inclusive in rules:
                    # without a selection, or with one that keeps every key, the scorer plays no part
                    own = scorer if top_k else "kmeans"
                    if scale.count(top_k) >= largest_block(scale.length, scale.leaf_size):
                        own = scorers[0]
                    yield scale.prescored(own, top_k, n_samples, inclusive=inclusive, coupling=coupling)


def _at(method: LanguageMethod, label: str, budget: int, group: str | None) -> LanguageMethod:
    """A method at a budget; without a group it is drawn beside every group."""
    axes = {**method.axes, "series": label, "budget": budget, "group": group}
    return LanguageMethod(f"{label}, {budget}", method.kind, method.settings, axes)


# Sizes of the causal recursion, for whoever reads a budget against them; imports no torch.


def largest_block(length: int, leaf: int) -> int:
    """Keys of the largest off-diagonal block: leaves double until twice as many would reach past the last query.

    A budget of as many keys filters nothing, so that all scorers give one result. 0 = everything is in one leaf.
    """
    block = leaf
    while 2 * block < length:
        block *= 2
    return block if block < length else 0


# Which methods a run measures: an experiment's, or every combination of what was asked for.

USUAL = ("hyper", "kmeans", "leverage", "default")
USUAL_TOP_K = 256
LEAF_RULES = {"exclusive": (False,), "inclusive": (True,), "both": (False, True)}

_OWN_OPTIONS = {
    "scorer": "--method",
    "top_k": "--top-k",
    "sinks": "--sinks",
    "lsh.sample_size": "--sample-size",
    "inner.sample_size": "--sample-size",
    "leaf_inclusive": "--leaf-rule",
}
_COUPLING = ("coupling", "coupling.mask", "coupling.residual_weight", "coupling.overlap")
_VARIED = {
    **dict.fromkeys((*_COUPLING, "lsh.block_size", "inner.block_size", "rows", "leaf_size"), "the experiment"),
    **dict.fromkeys(("min_seq_len", "exact_until"), "--leaf"),
}


@dataclass(frozen=True)
class MethodChoice:
    """What is to be measured, as `prescore perplexity` is told; empty tuples stand for options not given.

    Attributes:
        experiment: A name of `EXPERIMENTS`, which then fixes `names`, `top_k`, `samples` and `leaf_rule`.
        names: Names that `methods.named` understands; `default` is `Routed()` itself unless there is a `leaf`.
        top_k: Keys kept, each a count or a share.
        samples: Residual samples of HyperAttention.
        leaf: Exact causal leaves; None = the paper's share of the length.
        leaf_rule: `exclusive`, `inclusive` (the paper's blockwise flag) or `both`.
        coupling: A name of `COUPLINGS`, for experiments that vary it.
        sinks: First tokens that the paper's methods keep.
        overrides: Fields to change in every configuration that has them.
    """

    experiment: str | None = None
    names: tuple[str, ...] = ()
    top_k: tuple[int | float, ...] = ()
    samples: tuple[int, ...] = ()
    leaf: int | None = None
    leaf_rule: str = "exclusive"
    coupling: str | None = None
    sinks: int = 0
    overrides: Overrides = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of("leaf_rule", self.leaf_rule, tuple(LEAF_RULES))
        if self.experiment is not None:
            self._check_experiment(self.experiment)
        taken = _OWN_OPTIONS if self.experiment is None else {**_OWN_OPTIONS, **_VARIED}
        # where an option was not given and no experiment varies its field, the field may be set
        free = {"--sample-size": not self.samples, "--sinks": not self.sinks}
        for name, value in self.overrides.items():
            if name in taken and not (self.experiment is None and free.get(taken[name])):
                raise ValueError(f"set must leave {name} to {taken[name]}, got {name}={value!r}")
        if self.coupling is not None:
            checks.one_of("coupling", self.coupling, tuple(COUPLINGS))
            checks.one_of("experiment with a coupling", self.experiment, ("appendix-a", "appendix-i"))

    def methods(self, length: int) -> list[LanguageMethod]:
        """Exact and local-only first, then the experiment's methods or every combination asked for."""
        leaf = self.leaf or default_leaf(self.experiment, length)
        if self.experiment is not None:
            scale = Scale(length, leaf, self.sinks, self.overrides)
            options = {} if self.coupling is None else {"coupling": self.coupling}
            return experiment_methods(self.experiment, scale, **options)
        found = [exact(), local(leaf)]
        for name in self.names or USUAL:
            for own in self._combinations(name, length):
                found += self._at_budgets(name, length, own)
        check_overrides(self.overrides, [config for method in found if (config := method.config) is not None])
        return list({repr(method.describe()): method for method in found}.values())

    def _check_experiment(self, name: str) -> None:
        checks.one_of("experiment", name, tuple(EXPERIMENTS))
        fixed = {
            "method": self.names,
            "top-k": self.top_k,
            "sample-size": self.samples,
            "leaf-rule": self.leaf_rule != "exclusive",
        }
        beside = [option for option, given in fixed.items() if given]
        if beside:
            raise ValueError(f"an experiment must be given without {', '.join(fixed)}, got {beside[0]} too")
        if self.sinks and name in ("cost", "rows"):
            raise ValueError(f"sinks must be left to the experiment {name}, got {self.sinks}")

    def _combinations(self, name: str, length: int) -> list[Values]:
        """Changes of the configuration: leaf rules by sample sizes, for what runs HyperAttention."""
        if name != "hyper" and name not in list_scorers():
            return [dict(self.overrides)]
        part = "lsh" if name == "hyper" else "inner"
        size = max(1, length // 128)
        return [
            {
                f"{part}.block_size": size,
                f"{part}.sample_size": samples,
                "sinks": self.sinks,
                **({"leaf_inclusive": True} if inclusive else {}),
                **self.overrides,
            }
            for inclusive, samples in itertools.product(LEAF_RULES[self.leaf_rule], self.samples or (size,))
        ]

    def _at_budgets(self, name: str, length: int, own: Values) -> list[LanguageMethod]:
        """A method at every budget, where it has one, each by a name of its own."""
        budgets = self.top_k or (USUAL_TOP_K,)
        if name in ("exact", "local", "default", "hyper"):
            budgets = budgets[:1]
        made = [asked_for(name, length=length, leaf=self.leaf, top_k=top_k, overrides=own) for top_k in budgets]
        # `random` has its sinks in its name
        words, axes = _told(made[0], sinks=0 if name == "random" else own.get("sinks", 0))
        return [
            replace(
                method,
                label=", ".join([method.label, *([f"top {top_k}"] if len(budgets) > 1 else []), *words]),
                axes={**method.axes, **axes},
            )
            for method, top_k in zip(made, budgets, strict=True)
        ]


def _told(method: LanguageMethod, *, sinks: int) -> tuple[list[str], Values]:
    """What a label says beside the name, and the axes of a free grid; the same at every budget."""
    config = method.config
    if config is None:
        return [], {}
    words: list[str] = []
    axes: Values = {}
    part = config.lsh if isinstance(config, Hyper) else config.inner if isinstance(config, Selected) else None
    if isinstance(part, Lsh):
        axes["sample_size"] = part.sample_size
        words.append(f"sample_size={part.sample_size}")
    if isinstance(config, Hyper | Selected):
        axes |= {"leaf_inclusive": config.leaf_inclusive, "sinks": config.sinks}
        words += [f"leaf_inclusive={config.leaf_inclusive}"] if config.leaf_inclusive else []
    words += [f"sinks={sinks}"] if sinks else []
    axes["series"] = ", ".join([method.label, *words])
    return words, axes
