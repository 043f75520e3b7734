"""A selection that the caller passed in."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.layout import Aligned
from prescore.types import Selection


def given_members(selection: Selection, key: Tensor, call: Aligned) -> Tensor:
    """A caller's selection as `[B, Hkv, N]` bool in aligned positions."""
    if not isinstance(selection, Selection):
        raise TypeError(f"selection must be a prescore.Selection, got {type(selection).__name__}")
    indices, valid = selection.indices, selection.valid
    for name, tensor in (("indices", indices), ("valid", valid)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"selection.{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if indices.ndim != 3 or indices.shape[:2] != key.shape[:2] or valid.shape != indices.shape:
        raise ValueError(
            f"selection must have indices and valid of shape {(*key.shape[:2], 'S')}, "
            f"got {tuple(indices.shape)} and {tuple(valid.shape)}"
        )
    if indices.dtype != torch.int64 or valid.dtype != torch.bool:
        raise TypeError(f"selection must have int64 indices and bool valid, got {indices.dtype} and {valid.dtype}")
    inside = (indices >= 0) & (indices < key.shape[2])
    if not bool((inside | ~valid).all()):
        wrong = int(indices[valid & ~inside][0])
        raise ValueError(f"selection must have indices in 0..{key.shape[2] - 1}, got {wrong}")
    if call.shift is not None:
        indices = indices - call.shift[:, None, None]
        valid = valid & (indices >= 0)
    member = torch.zeros(key.shape[:3], dtype=torch.int8, device=key.device)
    member.scatter_reduce_(-1, indices.clamp(0, key.shape[2] - 1), valid.to(torch.int8), "amax")
    chosen = member.bool()
    return chosen if call.valid is None else chosen & call.valid[:, None, :]
