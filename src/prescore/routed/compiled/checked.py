"""What every call of compiled code goes through: tensors are what it takes them for, or the call is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.ops.native import library

WIDTH = 16
"""Columns and keys that lie side by side."""
MOST_DIM = 256
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POINTER, SIZE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class RowsStruct(ctypes.Structure):
    """Rows of queries, keys or values where they lie."""

    starts: ctypes.Array[ctypes.c_int64]
    _fields_ = (("data", POINTER), ("at", POINTER), ("step", SIZE), ("type", SIZE))


class Expected(NamedTuple):
    """A tensor that compiled code reads or writes as so many numbers of a type, one after the other."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def real_numbers(*shape: int) -> Tensor:
    """Room for what compiled code writes; torch's default dtype and device have no say in it."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def check_tensors(expected: Sequence[Expected]) -> None:
    """Refuse a tensor that compiled code could read or write outside of."""
    for name, tensor, shape, dtype in expected:
        # a result may have more dimensions than compiled code sees
        fits = (
            tensor.numel() == torch.Size(shape).numel() and tensor.is_contiguous() and tensor.device.type == "cpu"
        )
        if not fits or tensor.dtype != dtype:
            raise ValueError(
                f"{name} must be {shape} contiguous {dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
            )


def check_lanes(key: Tensor, value: Tensor, n_lanes: int, leaf: int) -> None:
    """Refuse keys and values that compiled code does not know, or not side by side."""
    dim, wide = key.shape[-1], value.shape[-1]
    check_row_tensor("key", key, n_lanes)
    check_row_tensor("value", value, n_lanes)
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value must have as many rows as key, {key.shape[-2]}, got {value.shape[-2]}")
    if dim % WIDTH or wide % WIDTH or leaf % WIDTH or not 0 < min(dim, wide) <= max(dim, wide) <= MOST_DIM:
        raise ValueError(f"sizes must be multiples of {WIDTH}, got {dim}, {wide} and {leaf}")


def check_row_tensor(name: str, rows: Tensor, n_lanes: int) -> None:
    """Refuse rows of numbers that compiled code does not know, or not side by side."""
    known = rows.dtype in TYPES and rows.device.type == "cpu" and not rows.is_neg()
    if rows.stride(-1) != 1 or not known or rows.shape[:-2].numel() != n_lanes:
        raise ValueError(
            f"{name} must be rows of {n_lanes} lanes, their numbers side by side, "
            f"got {tuple(rows.shape)} {rows.dtype} with strides {rows.stride()}"
        )


def call_library(name: str, *structures: ctypes.Structure) -> None:
    """Call a function whose arguments were checked; their tensors must live until it returns."""
    loaded = library.load()
    if loaded is None:
        raise RuntimeError("compiled code must be there to run, got none")
    if getattr(loaded, name)(*(ctypes.byref(structure) for structure in structures)):
        raise MemoryError("compiled attention needs more memory than there is")


def rows_struct(rows: Tensor) -> RowsStruct:
    """Where rows lie, with the number of numbers before the first row of each lane."""
    begins = [lane * rows.stride(0) for lane in range(rows.shape[0])]
    if rows.ndim == 4:
        begins = [begin + head * rows.stride(1) for begin in begins for head in range(rows.shape[1])]
    starts = (SIZE * len(begins))(*begins)
    found = RowsStruct(rows.data_ptr(), ctypes.addressof(starts), rows.stride(-2), TYPES[rows.dtype])
    found.starts = starts  # lives as long as what points to it
    return found
