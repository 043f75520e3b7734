"""A device that is not there: tensors with numbers on the CPU that say they lie elsewhere, and every host read.

`PretendDevice` is a dispatch mode. Tensors of `put` hold CPU numbers and have the device `meta`, so the package
takes the path that it takes on a GPU with plain torch. Whatever would make the host wait for a GPU is recorded,
with the innermost function of the package that asked for it.
"""

import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import prescore

DEVICE = torch.device("meta")
_PACKAGE = str(Path(prescore.__file__).parent)
_READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "unique_consecutive", "_unique2", "_unique",
    "equal", "bincount", "repeat_interleave", "is_nonzero", "item", "unique_dim_consecutive", "allclose",
    "_linalg_eigh", "_linalg_svd", "linalg_pinv",
}  # fmt: skip
"""Operators whose result is a number on the host, has a shape that depends on numbers, or is checked by torch."""


class OnDevice(torch.Tensor):
    """CPU numbers that claim to lie on the device."""

    is_meta = False  # it holds numbers

    @staticmethod
    def __new__(cls, numbers):
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), dtype=numbers.dtype, device=DEVICE
        )

    def __init__(self, numbers):
        self.numbers = numbers

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} must run under a PretendDevice, as all work on its tensors")


class PretendDevice(TorchDispatchMode):
    """Runs operators on the CPU numbers, and collects `reads`: functions of the package, each with an operator."""

    def __init__(self):
        super().__init__()
        self.reads = set()

    def put(self, tensor):
        """The tensor on the device; None stays None."""
        return None if tensor is None else OnDevice(tensor.detach().clone()).requires_grad_(tensor.requires_grad)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
        if any(leaf.device == DEVICE and not isinstance(leaf, OnDevice) for leaf in leaves):
            raise AssertionError(f"torch.tensor and as_tensor copy numbers to the device and wait: {_asker()}")
        to = kwargs.get("device")
        on_device = bool(there) if to is None else torch.device(to) == DEVICE
        read = self._read(func, args, kwargs, there, leaves, on_device)
        if read:
            self.reads.add((_asker(), read))
        wrappers = {id(leaf.numbers): leaf for leaf in there}
        result = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        if func.overloadpacket.__name__ in ("empty", "new_empty", "empty_like", "empty_strided"):
            _poison(result)
        if not on_device:
            return result

        def put(leaf):
            return (
                (wrappers[id(leaf)] if id(leaf) in wrappers else OnDevice(leaf)) if torch.is_tensor(leaf) else leaf
            )

        return tree_map(put, result)

    def _read(self, func, args, kwargs, there, leaves, on_device):
        """What makes the host wait for the device, or the device for the host; empty = nothing."""
        name = func.overloadpacket.__name__
        if (
            there
            and name in _READS
            and not (name == "repeat_interleave" and kwargs.get("output_size") is not None)
        ):
            return name
        if there and name in ("index", "index_put", "index_put_", "_unsafe_index"):
            flags = (torch.bool, torch.uint8)
            if any(t is not None and t.dtype in flags for t in args[1]):
                return f"{name} by a mask"
        if name in ("_to_copy", "copy_", "copy"):
            source = args[1] if name != "_to_copy" else args[0]
            into = on_device if name == "_to_copy" else isinstance(args[0], OnDevice)
            if isinstance(source, OnDevice) and not into:
                return "copy to the host"
            blocking = not kwargs.get("non_blocking", len(args) > 2 and args[2])
            if not isinstance(source, OnDevice) and into and blocking and source.ndim:
                return "blocking copy to the device"
        return ""


def _on_cpu(leaf):
    if isinstance(leaf, OnDevice):
        return leaf.numbers
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _poison(tensor):
    """Memory that nobody wrote holds what breaks every result."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _asker():
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            module = Path(path).relative_to(_PACKAGE).with_suffix("").as_posix().replace("/", ".")
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "outside of the package"
