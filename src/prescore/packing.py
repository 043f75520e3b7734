"""From a mask of kept keys to a `Selection`."""

from __future__ import annotations

import torch
from torch import Tensor

from prescore.types import Selection


def pack_mask(kept: Tensor) -> Selection:
    """Positions of the True entries of `kept [B, H, N]`, ascending, as many slots as the fullest head needs.

    Heads that keep fewer repeat their last kept position, marked as not valid.
    """
    n_keys = kept.shape[2]
    counts = kept.sum(dim=2, keepdim=True)
    size = int(counts.max()) if counts.numel() else 0
    valid = torch.arange(size, device=kept.device) < counts
    if n_keys == 0 or size == 0:
        return Selection(torch.zeros_like(valid, dtype=torch.int64), valid)
    positions = torch.arange(n_keys, device=kept.device).expand_as(kept)
    # unkept positions go to a slot that is cut off
    slot = (kept.cumsum(dim=2) - 1).masked_fill_(~kept, size)
    indices = torch.zeros(*kept.shape[:2], size + 1, dtype=torch.int64, device=kept.device)
    indices = indices.scatter_(2, slot, positions)[:, :, :size]
    filler = indices.gather(2, (counts - 1).clamp(min=0))
    return Selection(torch.where(valid, indices, filler), valid)
