"""The methods of `prescore perplexity`: every name at every budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prescore.bench.methods import (
    EXACT,
    TOP_K,
    Baseline,
    Method,
    Sizes,
    check_changes,
    leaf_of,
    local_only,
    parse_method,
)
from prescore.bench.records import Values
from prescore.config import Hyper, Lsh, Selected

USUAL = ("hyper", "paper:kmeans", "paper:leverage", "default")
_TAKEN = {"scorer": "--method", "top_k": "--top-k"}
"""Fields that an option sets, so that `--set` must not."""


def grid_methods(
    names: Sequence[str],
    length: int,
    *,
    leaf: int | None = None,
    top_k: Sequence[int | float] = (),
    changes: Mapping[str, Any] | None = None,
) -> list[Method]:
    """Exact and local-only, then every method (none = `USUAL`) at every budget; see `parse_method`."""
    methods = [EXACT, local_only(leaf or leaf_of(length))]
    for name in names or USUAL:
        has_budget = name not in ("exact", "local", "default", "hyper")
        for budget in top_k if top_k and has_budget else (TOP_K,):
            method = parse_method(name, Sizes.of_text(length, leaf, budget, changes))
            label = f"{method.label}, top {budget}" if len(top_k) > 1 and has_budget else method.label
            axes = {**method.axes, **_axes(method.config)}
            methods.append(replace(method, label=label, axes={**axes, "series": method.label} if axes else {}))
    check_set(changes or {}, _TAKEN, methods)
    return unique(methods)


def _axes(config: Any) -> Values:
    """The coordinates of a configuration in a grid."""
    if not isinstance(config, Hyper | Selected):
        return {}
    axes: Values = {"leaf_inclusive": config.leaf_inclusive, "sinks": config.sinks}
    if isinstance(config, Selected):
        axes["top_k"] = config.top_k
    lsh = config.lsh if isinstance(config, Hyper) else config.inner
    return {**axes, "sample_size": lsh.sample_size} if isinstance(lsh, Lsh) else axes


def check_set(changes: Mapping[str, Any], taken: Mapping[str, str], methods: Sequence[Method]) -> None:
    """Refuse a change of a field that something else decides, or that no method has."""
    for name, value in changes.items():
        if name in taken:
            raise ValueError(f"set must leave {name} to {taken[name]}, got {name}={value!r}")
    check_changes(changes, methods)


def unique(methods: Iterable[Method]) -> list[Method]:
    """Every method once."""
    return list({repr(method.describe()): method for method in methods}.values())


def is_random(method: Method) -> bool:
    """Whether the seed can change what a method computes."""
    if isinstance(method.config, Baseline):
        return method.config.name in ("performer", "reformer")
    return isinstance(method.config, Hyper | Selected)
