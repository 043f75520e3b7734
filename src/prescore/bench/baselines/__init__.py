"""Methods to compare pre-scoring with, each with the call shape of `prescored_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from prescore.bench.baselines.heavy_hitters import heavy_hitter_attention
from prescore.bench.baselines.lev_attention import lev_attention
from prescore.bench.baselines.oracle import oracle_attention
from prescore.bench.baselines.performer import performer_attention
from prescore.bench.baselines.prefill import (
    flexprefill_attention,
    minference_attention,
    quest_attention,
    snapkv_attention,
    xattention,
)
from prescore.bench.baselines.reformer import reformer_attention
from prescore.bench.baselines.streaming import streaming_attention
from prescore.registry import load_entry_points
from prescore.types import Attended

Run: TypeAlias = Callable[..., Attended]
"""`f(query, key, value, *, <settings>, is_causal, key_padding_mask, scale, generator)`."""
RunType = TypeVar("RunType", bound=Run)

BASELINES: dict[str, Run] = {
    "lev-attention": lev_attention,
    "streaming": streaming_attention,
    "heavy-hitters": heavy_hitter_attention,
    "oracle": oracle_attention,
    "reformer": reformer_attention,
    "performer": performer_attention,
    "quest": quest_attention,
    "snapkv": snapkv_attention,
    "minference": minference_attention,
    "flexprefill": flexprefill_attention,
    "xattention": xattention,
}
"""The baselines of this package."""


@dataclass(frozen=True)
class Registered:
    """A third party's baseline, and what compares it at an equal budget.

    Attributes:
        run: The attention function.
        settings: `(leaf, top_k)` -> its arguments where others read `leaf / 2` local keys on average and `top_k`
            far ones.
        keys_read: `(length, settings)` -> keys that a query of a causal call reads, on average.
    """

    run: Run
    settings: Callable[[int, int], Mapping[str, Any]]
    keys_read: Callable[[int, Mapping[str, Any]], float]


REGISTERED: dict[str, Registered] = {}
"""Baselines of third parties, by name."""


def register_baseline(
    name: str,
    *,
    settings: Callable[[int, int], Mapping[str, Any]],
    keys_read: Callable[[int, Mapping[str, Any]], float],
) -> Callable[[RunType], RunType]:
    """Decorator: register a function as a baseline, for commands too; see `Registered` for the arguments.

    Example:
        >>> @register_baseline(
        ...     "last", settings=lambda leaf, top_k: {"n": top_k}, keys_read=lambda n, own: own["n"]
        ... )
        ... def last_keys(query, key, value, *, n, is_causal=False, **options): ...
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty str, got {name!r}")

    def register(run: RunType) -> RunType:
        known = REGISTERED.get(name)
        # a module that is loaded again registers its function again
        if known is not None and known.run.__qualname__ != run.__qualname__:
            raise ValueError(f"name must be new, got {name!r}, which {known.run.__qualname__} has already")
        REGISTERED[name] = Registered(run, settings, keys_read)
        return run

    return register


def third_party_baselines() -> dict[str, Registered]:
    """Registered baselines, entry points of the group `prescore.baselines` included; they replace none of ours."""
    load_entry_points("prescore.baselines")
    return {name: baseline for name, baseline in REGISTERED.items() if name not in BASELINES}


def get_baseline(name: str) -> Run:
    """The function of a baseline, ours or a third party's."""
    registered = third_party_baselines()
    return registered[name].run if name in registered else BASELINES[name]


def list_baselines() -> list[str]:
    """Names of all baselines."""
    return [*BASELINES, *third_party_baselines()]
