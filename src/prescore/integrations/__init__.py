"""Adapters for model libraries."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("chatglm", "timm", "transformers")


def __getattr__(name: str) -> Any:
    # on first use, so that importing the package imports no model library
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
