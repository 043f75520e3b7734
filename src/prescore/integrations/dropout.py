"""Where a model's attention dropout comes from.

The one exception to "no global seed is read": users expect `torch.manual_seed` to reproduce a training run, and
gradient checkpointing restores torch's generator, and no other, before it computes a layer again. So with dropout,
and only then, a call draws one number from it.
"""

from __future__ import annotations

import torch

_SEEDS = 2**62


def dropout_seed() -> int:
    """The seed of one call's dropout, drawn from torch's own generator."""
    return int(torch.randint(_SEEDS, (), dtype=torch.int64, device="cpu"))
