"""Where a model's attention dropout comes from.

The one exception to "no global seed is read": users expect `torch.manual_seed` to reproduce a training run, and
gradient checkpointing restores torch's generator, and no other, before it computes a layer again. So with dropout,
and only then, a call draws one number from it.
"""

from __future__ import annotations

from typing import Any

import torch

_SEEDS = 2**62


def dropping(dropout: float) -> dict[str, Any]:
    """The arguments of `prescored_attention` that drop weights with this probability; none for 0."""
    if not dropout:
        return {}
    seed = int(torch.randint(_SEEDS, (), dtype=torch.int64, device="cpu"))
    return {"dropout_p": dropout, "dropout_generator": seed}
