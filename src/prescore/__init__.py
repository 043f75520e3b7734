"""prescore: attention over long contexts made cheap by scoring the keys before any query is seen."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prescore.attention.exact import exact_attention as exact_attention
    from prescore.attention.merge import merge as merge
    from prescore.config import Coupling as Coupling
    from prescore.config import PrescoreConfig as PrescoreConfig
    from prescore.integrations.apply import Applied as Applied
    from prescore.integrations.apply import apply as apply
    from prescore.pipeline import hyper_attention as hyper_attention
    from prescore.pipeline import prescored_attention as prescored_attention
    from prescore.pipeline import score as score
    from prescore.pipeline import select as select
    from prescore.registry import list_scorers as list_scorers
    from prescore.registry import register_scorer as register_scorer
    from prescore.scorers.base import Scorer as Scorer
    from prescore.types import Attended as Attended
    from prescore.types import Aux as Aux
    from prescore.types import Selection as Selection

# Resolved on first use, so that `import prescore` touches neither a model library nor a device.
_HOMES = {
    "exact_attention": "prescore.attention.exact",
    "merge": "prescore.attention.merge",
    "Coupling": "prescore.config",
    "PrescoreConfig": "prescore.config",
    "Applied": "prescore.integrations.apply",
    "apply": "prescore.integrations.apply",
    "hyper_attention": "prescore.pipeline",
    "prescored_attention": "prescore.pipeline",
    "score": "prescore.pipeline",
    "select": "prescore.pipeline",
    "list_scorers": "prescore.registry",
    "register_scorer": "prescore.registry",
    "Scorer": "prescore.scorers.base",
    "Attended": "prescore.types",
    "Aux": "prescore.types",
    "Selection": "prescore.types",
}

_SUBPACKAGES = ("baselines", "integrations", "planted", "testing")

__version__ = "0.1.0"
__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _SUBPACKAGES:
        return importlib.import_module(f"prescore.{name}")
    raise AttributeError(f"module 'prescore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
