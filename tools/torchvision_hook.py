"""Repair `import torchvision` in an environment where its compiled part does not fit torch.

A torchvision wheel built for CUDA cannot load its operators beside the CPU build of torch and then fails half way
through its import, which also keeps transformers from importing any model. `make setup` copies this file into the
project's own `.venv`, beside a `.pth` file that installs the hook; the package never installs it by itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_NAME = "torchvision"


def install() -> None:
    """Put the hook in front of the finders, once. Costs nothing until torchvision is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the real loader; after each missing operator, defines it by name and runs it again."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        while True:
            try:
                return self.loader.exec_module(module)
            except RuntimeError as error:
                from prescore.integrations.torchvision import define_missing

                if not define_missing(str(error)):
                    raise
                for name in [name for name in sys.modules if name.startswith(f"{_NAME}.")]:
                    del sys.modules[name]  # half-imported: they would be skipped the second time
