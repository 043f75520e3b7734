"""prescore: attention over long contexts in which each query reads the keys that matter to it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prescore.attention import exact_attention as exact_attention
    from prescore.attention import hyper_attention as hyper_attention
    from prescore.attention import prescored_attention as prescored_attention
    from prescore.attention import score as score
    from prescore.attention import select as select
    from prescore.config import Config as Config
    from prescore.config import Coupling as Coupling
    from prescore.config import Exact as Exact
    from prescore.config import Hyper as Hyper
    from prescore.config import Lsh as Lsh
    from prescore.config import Routed as Routed
    from prescore.config import Selected as Selected
    from prescore.config import config_from_dict as config_from_dict
    from prescore.int8.linear import use_int8_weights as use_int8_weights
    from prescore.integrations.apply import Applied as Applied
    from prescore.integrations.apply import apply as apply
    from prescore.ops.parts import merge as merge
    from prescore.registry import list_scorers as list_scorers
    from prescore.registry import register_scorer as register_scorer
    from prescore.scoring.base import Scorer as Scorer
    from prescore.scoring.companions import Companions as Companions
    from prescore.scoring.key_diff import KeyDiff as KeyDiff
    from prescore.scoring.key_norm import KeyNorm as KeyNorm
    from prescore.scoring.kmeans import GaussianKMeans as GaussianKMeans
    from prescore.scoring.kmeans import KMeans as KMeans
    from prescore.scoring.kmeans import KMedian as KMedian
    from prescore.scoring.kmeans import Minkowski as Minkowski
    from prescore.scoring.leverage import Leverage as Leverage
    from prescore.scoring.uniform import Uniform as Uniform
    from prescore.types import Attended as Attended
    from prescore.types import Aux as Aux
    from prescore.types import Selection as Selection
    from prescore.types import Stats as Stats

# Resolved on first use, so that `import prescore` touches neither a model library nor a device.
_HOMES = {
    "prescore.attention": (
        "attend_keys",
        "exact_attention",
        "hyper_attention",
        "prescored_attention",
        "score",
        "select",
    ),
    "prescore.config": ("Config", "Coupling", "Exact", "Hyper", "Lsh", "Routed", "Selected", "config_from_dict"),
    "prescore.int8.linear": ("use_int8_weights",),
    "prescore.integrations.apply": ("Applied", "apply"),
    "prescore.ops.parts": ("merge",),
    "prescore.registry": ("list_scorers", "register_scorer"),
    "prescore.scoring.base": ("Scorer",),
    "prescore.scoring.companions": ("Companions",),
    "prescore.scoring.key_diff": ("KeyDiff",),
    "prescore.scoring.key_norm": ("KeyNorm",),
    "prescore.scoring.kmeans": ("GaussianKMeans", "KMeans", "KMedian", "Minkowski"),
    "prescore.scoring.leverage": ("Leverage",),
    "prescore.scoring.uniform": ("Uniform",),
    "prescore.types": ("Attended", "Aux", "Selection", "Stats"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBPACKAGES = ("baselines", "errors", "integrations", "testing")

__version__ = "0.3.0"
__all__ = [*_HOME_OF, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    if name in _SUBPACKAGES:
        return importlib.import_module(f"prescore.{name}")
    raise AttributeError(f"module 'prescore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
