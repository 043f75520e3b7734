"""What one would use instead of pre-scoring, each behind the call shape of `prescored_attention`."""

from __future__ import annotations

from collections.abc import Callable

from prescore.baselines.heavy_hitters import heavy_hitter_attention
from prescore.baselines.lev_attention import lev_attention
from prescore.baselines.oracle import oracle_attention
from prescore.baselines.performer import performer_attention
from prescore.baselines.reformer import reformer_attention
from prescore.baselines.registered import REGISTERED, Registered
from prescore.baselines.registered import register_baseline as register_baseline
from prescore.baselines.streaming import streaming_attention
from prescore.registry import load_entry_points
from prescore.types import Attended

BASELINES: dict[str, Callable[..., Attended]] = {
    "lev-attention": lev_attention,
    "streaming": streaming_attention,
    "heavy-hitters": heavy_hitter_attention,
    "oracle": oracle_attention,
    "reformer": reformer_attention,
    "performer": performer_attention,
}
"""Those that come with the package."""


def get_baseline(name: str) -> Callable[..., Attended]:
    """The function of a baseline, ours or a third party's."""
    found = third_party_baselines()
    return found[name].run if name in found else BASELINES[name]


def third_party_baselines() -> dict[str, Registered]:
    """Those that were registered, entry points of the group `prescore.baselines` included; ours stay."""
    load_entry_points("prescore.baselines")
    return {name: found for name, found in REGISTERED.items() if name not in BASELINES}


def list_baselines() -> list[str]:
    """Names of all baselines."""
    return [*BASELINES, *third_party_baselines()]
