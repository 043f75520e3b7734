"""Baselines of third parties: a function, and what is needed to compare it at an equal budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from prescore.types import Attended

Run: TypeAlias = Callable[..., Attended]
"""`f(query, key, value, *, <settings>, is_causal, key_padding_mask, scale, generator)`."""
RunType = TypeVar("RunType", bound=Run)


@dataclass(frozen=True)
class Registered:
    """A baseline with what compares it.

    Attributes:
        run: The attention.
        settings: `(leaf, top_k)` -> its arguments where others read `leaf / 2` local keys on average and `top_k`
            far ones.
        rows: `(length, settings)` -> key rows that a query of a causal call meets, on average.
    """

    run: Run
    settings: Callable[[int, int], Mapping[str, Any]]
    rows: Callable[[int, Mapping[str, Any]], float]


REGISTERED: dict[str, Registered] = {}
"""Baselines that `register_baseline` made known, by name."""


def register_baseline(
    name: str,
    *,
    settings: Callable[[int, int], Mapping[str, Any]],
    rows: Callable[[int, Mapping[str, Any]], float],
) -> Callable[[RunType], RunType]:
    """Decorator: make a function known as a baseline, to commands too; see `Registered` for the arguments.

    Example:
        >>> @register_baseline("last", settings=lambda leaf, top_k: {"n": top_k}, rows=lambda n, own: own["n"])
        ... def last_keys(query, key, value, *, n, is_causal=False, **options): ...
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty str, got {name!r}")

    def register(run: RunType) -> RunType:
        known = REGISTERED.get(name)
        # a module that is loaded again registers its function again
        if known is not None and known.run.__qualname__ != run.__qualname__:
            raise ValueError(f"name must be new, got {name!r}, which {known.run.__qualname__} has already")
        REGISTERED[name] = Registered(run, settings, rows)
        return run

    return register
