"""A selection that the caller passed in."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.selection.members import membership
from prescore.types import Selection


def given_members(selection: Selection, shift: Tensor | None, valid: Tensor | None, n_keys: int) -> Tensor:
    """A caller's selection as `[B, Hkv, N]` bool in aligned positions.

    Args:
        selection: What the caller passed in, checked.
        shift: `[B]` how far alignment moved each row; None = not at all.
        valid: `[B, N]` real keys after alignment; None = all.
        n_keys: `N`.
    """
    indices, chosen = selection.indices, selection.valid
    if shift is not None:
        indices = indices - shift[:, None, None]
        chosen = chosen & (indices >= 0)
    member = membership(Selection(indices.clamp(0, n_keys - 1), chosen), n_keys)
    return member if valid is None else member & valid[:, None, :]


def check_selection(selection: Selection, key: Tensor) -> None:
    """Refuse what is no selection among these keys."""
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
