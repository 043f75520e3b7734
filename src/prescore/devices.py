"""What the host may ask about numbers on a device without waiting for it.

Reading a number from a GPU stops the host until all work before it is done. On CPUs the answers are exact and save
work; elsewhere they are bounds that are always right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def surely_all(flags: Tensor) -> bool:
    """Whether all flags are known to be True."""
    return flags.device.type == "cpu" and bool(flags.all())


def maybe_any(flags: Tensor) -> bool:
    """Whether a flag may be True."""
    return flags.device.type != "cpu" or bool(flags.any())


def largest(counts: Tensor, bound: int) -> int:
    """The largest of the counts, 0 where there are none; elsewhere than on CPUs a `bound` that none exceeds."""
    if counts.device.type != "cpu":
        return bound
    return int(counts.max()) if counts.numel() else 0


def all_finite(numbers: list[Tensor]) -> bool:
    """Whether all of some single numbers are finite; the host reads once from a device."""
    if not numbers:
        return True
    if numbers[0].device.type == "cpu":  # short calls feel every operator
        return all(math.isfinite(number.item()) for number in numbers)
    return bool((torch.stack(numbers) * 0).sum() == 0)  # 0 times what is not finite is NaN


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """CPU numbers on a device; a copy from memory that is not pinned would wait for the device."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
