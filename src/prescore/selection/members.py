"""Selections as sets of positions: membership, its inverse, and positions that are always kept."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.types import Selection


def protected_positions(valid: Tensor | None, like: Tensor, sinks: int, recent: int) -> Tensor:
    """`[B, N]`: the first `sinks` and the last `recent` real positions of keys `like [B, H, N, D]`."""
    if valid is None:
        valid = torch.ones(like.shape[0], like.shape[2], dtype=torch.bool, device=like.device)
    rank = valid.cumsum(1)
    return valid & ((rank <= sinks) | (rank > rank[:, -1:] - recent))


def membership(selection: Selection, n_keys: int) -> Tensor:
    """`[P, H, N]` bool: was the key selected."""
    indices = selection.indices
    member = torch.zeros(*indices.shape[:2], n_keys, dtype=torch.int8, device=indices.device)
    # amax, because filler repeats the index of a kept key
    return member.scatter_reduce_(-1, indices, selection.valid.to(torch.int8), "amax").bool()


def selection_of(member: Tensor) -> Selection:
    """The selection of the True positions of `[P, H, N]`."""
    positions = torch.arange(member.shape[-1], device=member.device).expand(member.shape)
    indices, valid = compact(positions, member)
    if valid is None:
        valid = torch.ones_like(indices, dtype=torch.bool)
    last = torch.where(valid, indices, 0).amax(-1, keepdim=True)
    return Selection(torch.where(valid, indices, last), valid)


def compact(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
    """Bring the wanted entries of the last axis to the front, in order, and cut to the longest list.

    Returns:
        The entries, and which of them are wanted; None = all.
    """
    count = wanted.sum(-1)
    most = max(1, int(count.max())) if count.numel() else 1
    order = torch.sort(wanted.to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :most]
    valid = wanted.gather(-1, order)
    return rows.gather(-1, order), None if bool(valid.all()) else valid
