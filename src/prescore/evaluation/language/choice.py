"""Which methods a run measures: an experiment's, or every combination of what was asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from prescore import checks
from prescore.config import Hyper, Lsh, Selected
from prescore.evaluation.language.experiments import (
    COUPLINGS,
    EXPERIMENTS,
    Scale,
    default_leaf,
    experiment_methods,
)
from prescore.evaluation.language.methods import LanguageMethod, asked_for, exact, local
from prescore.evaluation.language.overrides import Overrides, check_overrides
from prescore.registry import list_scorers
from prescore.values import Values

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
