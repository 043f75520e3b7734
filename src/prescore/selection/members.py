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
    """`[B, H, N]` bool: was the key selected."""
    indices = selection.indices
    member = torch.zeros(*indices.shape[:2], n_keys, dtype=torch.int8, device=indices.device)
    # amax, because filler repeats the index of a kept key
    return member.scatter_reduce_(-1, indices, selection.valid.to(torch.int8), "amax").bool()


def selection_of(member: Tensor) -> Selection:
    """Positions of the True entries of `[B, H, N]`, ascending, as many slots as the fullest head needs.

    Heads that keep fewer repeat their last kept position, marked as not valid.
    """
    n_keys = member.shape[2]
    counts = member.sum(dim=2, keepdim=True)
    size = int(counts.max()) if counts.numel() else 0
    valid = torch.arange(size, device=member.device) < counts
    if size == 0:
        return Selection(torch.zeros_like(valid, dtype=torch.int64), valid)
    positions = torch.arange(n_keys, device=member.device).expand_as(member)
    # other positions go to a slot that is cut off
    slot = (member.cumsum(dim=2) - 1).masked_fill_(~member, size)
    indices = torch.zeros(*member.shape[:2], size + 1, dtype=torch.int64, device=member.device)
    indices = indices.scatter_(2, slot, positions)[:, :, :size]
    filler = indices.gather(2, (counts - 1).clamp(min=0))
    return Selection(torch.where(valid, indices, filler), valid)


def bring_forward(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
    """Bring the wanted entries of the last axis to the front, in order, and cut to the longest list.

    Returns:
        The entries, and which of them are wanted; None = all.
    """
    count = wanted.sum(-1)
    most = max(1, int(count.max())) if count.numel() else 1
    order = torch.sort(wanted.to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :most]
    valid = wanted.gather(-1, order)
    return rows.gather(-1, order), None if bool(valid.all()) else valid
