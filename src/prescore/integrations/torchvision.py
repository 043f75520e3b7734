"""Import timm and torchvision with a build of torch that torchvision's compiled part does not fit.

There torchvision fails in the middle of its import, because it describes operators that were never defined; and
transformers, which imports an installed torchvision, cannot import a single model. Defining the missing operators
first, by name only, lets all three load; calling one of these operators still fails.
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

# torch removes a library's operators with the object that defined them, so the objects are kept
_DEFINED: list[torch.library.Library] = []


def import_timm() -> ModuleType:
    """Import timm, so that torchvision and transformers work too.

    Raises:
        ModuleNotFoundError: timm or torchvision is not installed; the message has the cure.
    """
    for name in ("timm", "torchvision"):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f"{name} must be installed for models of timm, got none: pip install timm, and the torchvision "
                "that belongs to your build of torch",
                name=name,
            )
    if "timm" not in sys.modules:
        mend_torchvision()
    return importlib.import_module("timm")


def mend_torchvision() -> bool:
    """Make an installed torchvision importable; True when operators had to be defined for it.

    Does nothing where torchvision is missing or loads by itself. Call it before importing a model from
    transformers on a machine where torchvision may not fit torch.
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
    """Define the operator that torchvision's error message names; False when it names none of ours."""
    missing = _MISSING.search(message)
    if missing is None or missing[1] not in _SCHEMAS:
        return False
    # FRAGMENT adds to a namespace, whether or not it is defined elsewhere
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(_SCHEMAS[missing[1]])
    _DEFINED.append(library)
    return True
