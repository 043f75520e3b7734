"""Names of scorers. A scorer is one file in `prescore/scorers`, or any class a third party registers."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

_SCORERS: dict[str, type[Any]] = {}
_PACKAGE = "prescore.scorers"
_BASE = ("prescore.scorers.base", "Scorer")  # by name: that module asks this one for names

ScorerType = TypeVar("ScorerType", bound=type[Any])


def register_scorer(name: str) -> Callable[[ScorerType], ScorerType]:
    """Class decorator: make a scorer known under `name`.

    Example:
        >>> @register_scorer("key-norm")
        ... @dataclass(frozen=True)
        ... class KeyNorm(Scorer): ...
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty str, got {name!r}")

    def register(scorer: ScorerType) -> ScorerType:
        if not isinstance(scorer, type) or _BASE not in {
            (base.__module__, base.__name__) for base in scorer.__mro__
        }:
            raise TypeError(f"scorer must be a class derived from prescore.Scorer, got {scorer!r}")
        known = _SCORERS.get(name)
        # a module that is loaded again registers its class again
        if known is not None and (known.__module__, known.__qualname__) != (
            scorer.__module__,
            scorer.__qualname__,
        ):
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
    _discover()
    if not isinstance(name, str):
        raise TypeError(f"scorer must be a str, got {type(name).__name__} {name!r}")
    if name not in _SCORERS:
        raise ValueError(f"scorer must be one of {', '.join(list_scorers())}, got {name!r}")
    return _SCORERS[name]


def _discover() -> None:
    # The one place with import magic: every file beside scorers/base.py registers itself when imported.
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{_PACKAGE}.{module.name}")
