"""Importing timm so that nothing else breaks.

timm imports torchvision. Beside a build of torch that its compiled part does not fit (the CPU build, say),
torchvision fails half way through its import, because it describes operators that were never defined; and
transformers, which tries torchvision when it is installed, then cannot import a single model. Defining the
missing operators first, by name only, lets all three load; calling one of them still fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from types import ModuleType

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_MISSING = re.compile(r"operator torchvision::(\w+) does not exist")

# torch removes a library's operators when the object that defined them dies: they must live with the process
_DEFINED: list[torch.library.Library] = []


def import_timm() -> ModuleType:
    """The module `timm`, imported without harm to torchvision or transformers.

    Raises:
        ModuleNotFoundError: timm or torchvision is not installed.
    """
    if "timm" not in sys.modules and importlib.util.find_spec("timm") is not None:
        mend_torchvision()
    return importlib.import_module("timm")


def mend_torchvision() -> bool:
    """Make an installed torchvision importable; True when operators had to be defined for it.

    Does nothing when torchvision is absent or loads by itself, so calling it is always safe. Call it before
    importing a model from transformers on a machine where torchvision may not fit torch.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return bool(_DEFINED)
    for _ in range(len(_SCHEMAS) + 1):
        try:
            importlib.import_module("torchvision")
            break
        except RuntimeError as error:
            if not define_missing(str(error)):
                raise
    return bool(_DEFINED)


def define_missing(message: str) -> bool:
    """Define the operator that torchvision's error message names; False when it names none we know."""
    missing = _MISSING.search(message)
    if missing is None or missing[1] not in _SCHEMAS:
        return False
    _define(missing[1])
    return True


def _define(operator: str) -> None:
    # FRAGMENT adds to a namespace whether or not somebody else has defined it
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(_SCHEMAS[operator])
    _DEFINED.append(library)
