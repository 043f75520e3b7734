"""The paper's language tables and figures as lists of methods, scaled to the length that is run.

The paper read 32768 tokens with leaves of 4096, blocks of 256 and 256 samples. At another length every count is
multiplied by `length / 32768`, so that each stays the same fraction of the context.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prescore import checks
from prescore.bench.cli.options import read_value
from prescore.bench.language.grid import check_set, grid_methods, unique
from prescore.bench.methods import (
    EXACT,
    SINKS,
    Baseline,
    Method,
    change,
    largest_block,
    leaf_of,
    local_only,
    sliding_window,
)
from prescore.bench.records import Values
from prescore.config import Coupling, Exact, Hyper, Lsh, Routed, Selected
from prescore.paper.printed import BUDGETS, GAUSSIAN_BUDGETS
from prescore.scoring.leverage import Leverage

PAPER_LENGTH = 32768
PAPER_LEAF, PAPER_BLOCK, PAPER_SAMPLES = 4096, 256, 256
COUPLINGS = {
    "corrected": Coupling(),
    "zeroed keys": Coupling(mask="zero"),
    "residual by n": Coupling(residual_weight="all"),
    "overlap counted": Coupling(overlap="count"),
    "early": Coupling(mask="zero", residual_weight="all", overlap="count"),
    "blocks over all keys": Coupling(blocks="all"),
}
READS = 640
"""Keys that every method of `baselines` reads per query, about as many as the default."""
READS_LEAF = 512
SKETCH_SIZE = 256
"""Rows of the sketch of `ApproxLeverage`."""
MIN_SCORES = (0.4, 0.2, 0.1, 0.05)
"""Thresholds eps of the universal set: least leverage of a key, among the keys of its block."""


@dataclass(frozen=True)
class Scale:
    """The paper's counts at another length.

    Attributes:
        length: Tokens read.
        leaf: Causal leaves.
        sinks: First tokens that every method keeps; the paper keeps none.
    """

    length: int
    leaf: int
    sinks: int = 0

    def count(self, of_paper: int) -> int:
        """A count of the paper at this length; what is not zero stays at least one."""
        return 0 if of_paper == 0 else max(1, round(of_paper * self.length / PAPER_LENGTH))

    def paper(
        self,
        scorer: str,
        top_k: int,
        samples: int = PAPER_SAMPLES,
        *,
        inclusive: bool = False,
        coupling: str = "corrected",
    ) -> Method:
        """One configuration of the paper, its counts as the paper prints them; top_k = 0 selects nothing."""
        kept, n_samples, switches = self.count(top_k), self.count(samples), COUPLINGS[coupling]
        lsh = Lsh(self.count(PAPER_BLOCK), n_samples, alignment="rank")
        config: Hyper | Selected
        if top_k == 0 and coupling == "corrected":
            config = Hyper(lsh, self.sinks, self.leaf, inclusive)
        else:
            if top_k == 0 and self.sinks:
                # with every key kept there is none to zero, and sinks are attended exactly
                switches = switches.replace(mask="exclude")
            options: Values = {"inner": lsh, "leaf_inclusive": inclusive, "coupling": switches}
            config = Selected.paper(scorer, kept or 1.0, sinks=self.sinks, min_seq_len=self.leaf, **options)
        words = [f"{scorer} + Hyper", f"top {kept}"] if top_k else ["HyperAttention"]
        words += [f"{n_samples} samples"]
        words += ["blockwise"] if inclusive else []
        words += [coupling] if coupling != "corrected" else []
        words += [f"{self.sinks} sinks"] if self.sinks else []
        axes = {
            "scorer": scorer if top_k else "none",
            "top_k": kept,
            "paper_top_k": top_k,
            "fraction": kept / self.length,
            "sample_size": n_samples,
            "paper_sample_size": samples,
            "leaf_inclusive": inclusive,
            "coupling": coupling,
            "sinks": self.sinks,
        }
        return Method(", ".join(words), config, axes)


def _table1(scale: Scale) -> Iterator[Method]:
    """Pre-scoring and the blockwise flag, one at a time."""
    for inclusive in (False, True):
        yield scale.paper("kmeans", 0, inclusive=inclusive)
    # the paper's best budget in either column
    yield scale.paper("kmeans", 2048)
    yield scale.paper("kmeans", 8192, inclusive=True)


def _appendix_f(scale: Scale, coupling: str | None = None, budgets: Sequence[int] = BUDGETS) -> Iterator[Method]:
    """The early integration, and each of its three artefacts alone; or k-means under one coupling."""
    yield scale.paper("kmeans", 0)
    samples = (PAPER_SAMPLES,)
    for name in [coupling] if coupling else COUPLINGS:
        yield from _grid(scale, ("kmeans",), budgets[1:], coupling=name, samples=samples)
    if not coupling:
        yield from _grid(scale, ("kmedian", "leverage"), budgets[1:], coupling="early", samples=samples)


def _baselines(scale: Scale) -> Iterator[Method]:
    """The families of Appendix H at equal keys read, and the default, which reads what its queries need."""
    length, leaf = scale.length, scale.leaf
    # half of the queries read a block at each level of the causal grid, those in odd blocks
    n_levels = (largest_block(length, leaf) // leaf).bit_length()
    count = max(SINKS + 1, round((READS - leaf / 2) / (n_levels / 2))) if n_levels else leaf
    half = max(1, count // 2)
    lsh = Lsh(half, half, alignment="rank")
    methods: list[tuple[str, Any]] = []
    for name in ("kmeans", "kmedian", "leverage"):
        methods.append((f"paper: {name} + Hyper", Selected.paper(name, 2 * count, inner=lsh, min_seq_len=leaf)))
    methods += [
        ("HyperAttention", Hyper(lsh, min_seq_len=leaf)),
        ("HyperAttention, 4 sinks", Hyper(lsh, SINKS, leaf)),
    ]
    scorers: dict[str, str | Leverage] = {"k-means": "kmeans", "leverage": "leverage", "random keys": "uniform"}
    scorers["sketched leverage"] = Leverage(sketch_size=SKETCH_SIZE)
    for label, scorer in scorers.items():
        config = Selected.paper(scorer, count, sinks=SINKS, inner=Exact(), min_seq_len=leaf)
        methods.append((f"{label}, 4 sinks", config))
    methods += [
        ("sliding window", sliding_window(length, READS, 0).config),
        ("StreamingLLM, 4 sinks", sliding_window(length, READS, SINKS).config),
        ("Performer", Baseline("performer", {"n_features": READS})),
        ("Reformer", Baseline("reformer", {"chunk_size": READS // 8, "n_rounds": 4})),
    ]
    for label, name in {"LevAttention": "lev-attention", "H2O": "heavy-hitters", "oracle": "oracle"}.items():
        methods.append((label, reading_about(name, length, leaf, READS)))
    methods.append(("default", Routed()))
    for label, config in methods:
        yield Method(label, config, {"series": label, "reads": READS})


def reading_about(name: str, length: int, leaf: int, reads: float) -> Baseline:
    """A baseline with exact chunks and the smallest budget that reads at least so many keys per query."""

    def budgeted(budget: int) -> Baseline:
        return Baseline(name, {"budget": budget, "chunk_size": leaf})

    return budgeted(bisect.bisect_left(range(length), reads, key=lambda budget: budgeted(budget).reads(length)))


def _universal_set(scale: Scale) -> Iterator[Method]:
    """Section 2's hybrid: HyperAttention over the keys whose leverage, exact or sketched, is at least eps."""
    lsh = Lsh(scale.count(PAPER_BLOCK), scale.count(PAPER_SAMPLES), alignment="rank")
    for sketch_size, eps in itertools.product((None, SKETCH_SIZE), MIN_SCORES):
        scorer = Leverage(sketch_size=sketch_size)
        config = Selected.paper(scorer, None, min_score=eps, inner=lsh, sinks=scale.sinks, min_seq_len=scale.leaf)
        series = "universal set, sketched" if sketch_size else "universal set"
        yield Method(f"{series}, eps={eps:g}", config, {"series": series, "min_score": eps})


def _grid(
    scale: Scale,
    scorers: Sequence[str],
    budgets: Sequence[int] = BUDGETS,
    *,
    coupling: str = "corrected",
    samples: Sequence[int] = (PAPER_SAMPLES, 0),
    rules: Sequence[bool] = (False,),
) -> Iterator[Method]:
    """Budget by sample size by leaf rule, for every scorer."""
    for scorer, n_samples, top_k, inclusive in itertools.product(scorers, samples, budgets, rules):
        # without a selection, or with one that keeps every key, the scorer has no effect
        effective = scorer if top_k else "kmeans"
        if scale.count(top_k) >= largest_block(scale.length, scale.leaf):
            effective = scorers[0]
        yield scale.paper(effective, top_k, n_samples, inclusive=inclusive, coupling=coupling)


_SCORERS = ("kmeans", "kmedian", "leverage", "gaussian-kmeans")
EXPERIMENTS: dict[str, Callable[..., Iterator[Method]]] = {
    "table1": _table1,
    "appendix-a": partial(_grid, scorers=_SCORERS, rules=(False, True)),
    "figure-glm3": partial(_grid, scorers=_SCORERS[:3], rules=(True,), coupling="blocks over all keys"),
    "appendix-f": _appendix_f,
    "appendix-i": partial(_grid, scorers=_SCORERS[3:], budgets=GAUSSIAN_BUDGETS, coupling="early"),
    "baselines": _baselines,
    "universal-set": _universal_set,
}
_OWN_SINKS = ("baselines",)
"""Experiments whose methods say themselves which sinks they keep."""
_OWN_LEAVES = {"baselines": READS_LEAF}
_BY_SCORER = ("appendix-a", "figure-glm3")
_QUICK_BUDGETS = {
    "appendix-a": (0, 512),
    "appendix-f": (0, 512, 8192),
    **dict.fromkeys(("figure-glm3", "appendix-i"), (0, 128, 2048, 16384)),
}
"""Budgets of `--quick`, as the paper prints them."""


def default_lengths(experiment: str | None, trained: int | None) -> list[int]:
    """Lengths of an experiment on a model, within its trained length."""
    longest = trained or PAPER_LENGTH
    if experiment == "baselines":
        return sorted({min(longest, 4096), min(longest, 8192)})
    return [min(longest, 8192 if experiment in ("table1",) else 4096)]


_COUPLING = ("coupling", *(f"coupling.{name}" for name in Coupling().to_dict() if name != "type"))
_LSH = tuple(f"{owner}.{name}" for owner in ("lsh", "inner") for name in ("block_size", "sample_size"))
_VARIED = {
    **dict.fromkeys((*_COUPLING, *_LSH, "min_weight", "leaf_inclusive", "scorer", "top_k"), "the experiment"),
    **dict.fromkeys(("min_seq_len", "exact_until"), "--leaf"),
    "sinks": "--sinks",
}


def experiment_methods(
    name: str,
    length: int,
    *,
    leaf: int | None = None,
    sinks: int = 0,
    coupling: str | None = None,
    scorers: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    quick: bool = False,
) -> list[Method]:
    """The methods of an experiment, exact and local-only first; the same configuration appears once.

    Without `leaf` the leaves are the paper's share of the length, or the experiment's own. `coupling` is a name of
    `COUPLINGS` (None = as printed), `scorers` are the columns of Appendix A to run (none = all), `changes` are
    fields to change in every configuration that has them. `quick` runs every column at a few budgets.
    """
    checks.one_of("experiment", name, tuple(EXPERIMENTS))
    if sinks and name in _OWN_SINKS:
        raise ValueError(f"sinks must be left to the experiment {name}, got {sinks}")
    options: Values = {}
    if coupling is not None:
        checks.one_of("coupling", coupling, tuple(COUPLINGS))
        checks.one_of(
            "experiment with a coupling", name, ("appendix-a", "appendix-f", "appendix-i", "figure-glm3")
        )
        options["coupling"] = coupling
    if scorers:
        checks.one_of("experiment with methods", name, _BY_SCORER)
        for scorer in scorers:
            checks.one_of("method", scorer, _SCORERS)
        options["scorers"] = scorers
    if quick and name in _QUICK_BUDGETS:
        options["budgets"] = _QUICK_BUDGETS[name]
    scale = Scale(length, leaf or _OWN_LEAVES.get(name) or leaf_of(length), sinks)
    changes = changes or {}
    methods = [EXACT, local_only(scale.leaf), *EXPERIMENTS[name](scale, **options)]
    check_set(changes, _VARIED, methods)
    return unique(replace(method, config=change(method.config, changes, partly=True)) for method in methods)


# Sweeps: every combination of some values of some fields.


def read_sweep(changes: Sequence[str]) -> dict[str, list[Any]]:
    """Values by field of `FIELD=VALUE,VALUE,...`; a value is JSON or a word."""
    values: dict[str, list[Any]] = {}
    for change_ in changes:
        name, equals, words = change_.partition("=")
        if not equals or not words.strip(" ,"):
            raise ValueError(f"set must be FIELD=VALUE,VALUE,..., got {change_!r}")
        values[name.strip()] = [read_value(word.strip()) for word in words.split(",") if word.strip()]
    return values


def sweep_methods(
    names: Sequence[str],
    length: int,
    values: Mapping[str, Sequence[Any]],
    *,
    leaf: int | None = None,
    top_k: Sequence[int | float] = (),
) -> list[Method]:
    """Exact and local-only, then every method at every combination of values."""
    methods: list[Method] = []
    for combination in itertools.product(*values.values()):
        changes = dict(zip(values, combination, strict=True))
        words = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in changes.items())
        for method in grid_methods(names, length, leaf=leaf, top_k=top_k, changes=changes):
            if method.label not in ("exact", "local only"):
                axes = {"series": method.label, **method.axes, **changes}
                methods.append(
                    replace(method, label=f"{method.label}, {words}" if words else method.label, axes=axes)
                )
    return unique([EXACT, local_only(leaf or leaf_of(length)), *methods])
