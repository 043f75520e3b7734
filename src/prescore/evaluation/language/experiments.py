"""The paper's language tables and figures as lists of methods, scaled to the length that is run.

The paper read 32768 tokens with leaves of 4096, blocks of 256 and 256 samples. At another length every count is
multiplied by `length / 32768`, so that each stays the same fraction of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prescore import checks
from prescore.causal_sizes import largest_block
from prescore.config import Coupling, Exact, Hyper, Lsh, Routed, Selected
from prescore.evaluation.language.methods import (
    LEAVES_PER_TEXT,
    SINKS,
    LanguageMethod,
    exact,
    local,
    named,
    prescored,
)
from prescore.evaluation.language.overrides import AnyConfig, Overrides, changed, check_overrides, fitting

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
        yield prescored(f"default, {rows} rows", scale.changed(Routed(rows=rows)), rows=rows)


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
