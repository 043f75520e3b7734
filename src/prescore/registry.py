"""Names of scorers. A scorer is one class in `prescore/scoring`, or any class that a third party registers.

An installed package registers its scorers through an entry point of the group `prescore.scorers` that names the
module with the classes.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from prescore import checks

_SCORERS: dict[str, type[Any]] = {}
_PACKAGE = "prescore.scoring"
_GROUP = "prescore.scorers"
_BASE = ("prescore.scoring.base", "Scorer")  # by name, because that module imports this one

ScorerType = TypeVar("ScorerType", bound=type[Any])


def register_scorer(name: str) -> Callable[[ScorerType], ScorerType]:
    """Class decorator: register a scorer under `name`.

    Example:
        >>> @register_scorer("key-norm")
        ... @dataclass(frozen=True)
        ... class KeyNorm(Scorer): ...
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty str, got {checks.shown(name)}")

    def register(scorer: ScorerType) -> ScorerType:
        bases = {(base.__module__, base.__name__) for base in getattr(scorer, "__mro__", ())}
        if _BASE not in bases:
            raise TypeError(f"scorer must be a class derived from prescore.Scorer, got {scorer!r}")
        known = _SCORERS.get(name, scorer)
        # a module that is loaded again registers its class again
        if (known.__module__, known.__qualname__) != (scorer.__module__, scorer.__qualname__):
            raise ValueError(f"name must be new, got {name!r}, which {known.__qualname__} has already")
        _SCORERS[name] = scorer
        scorer.name = name
        return scorer

    return register


def list_scorers() -> list[str]:
    """Names of all registered scorers, sorted."""
    _discover()
    return sorted(_SCORERS)


def get_scorer(name: object) -> type[Any]:
    """The class registered under `name`."""
    if not isinstance(name, str):
        raise TypeError(f"scorer must be a str, got {type(name).__name__} {checks.shown(name)}")
    checks.one_of("scorer", name, list_scorers())
    return _SCORERS[name]


def _discover() -> None:
    """Import every module of `prescore/scoring` and of installed packages: scorers register when imported."""
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{_PACKAGE}.{module.name}")
    load_entry_points(_GROUP)


@functools.cache
def load_entry_points(group: str) -> None:
    """Import the modules that installed packages name in a group, once; a failing import becomes a warning."""
    for point in metadata.entry_points(group=group):
        try:
            point.load()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"entry point {point.name!r} of {group} was left out ({reason})", stacklevel=2)
