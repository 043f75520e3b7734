"""Keys or values as int8 rows: numbers from -127 to 127, and behind them what 1 stands for in each 32 of them.

Native steps read such rows as they are; everything else gets the numbers that they stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

UNIT_NUMBERS = 32
"""Numbers that share a unit, as in routed.h: single large dimensions of keys leave the others their precision."""
_MOST = 127


def row_size(dim: int) -> int:
    """Bytes of a row: its numbers, and a bfloat16 for each unit."""
    return dim + 2 * -(-dim // UNIT_NUMBERS)


def to_int8_rows(tensor: Tensor) -> Tensor:
    """`[..., D]` as uint8 `[..., row_size(D)]`."""
    dim = tensor.shape[-1]
    wide = pad(tensor.float(), (0, -dim % UNIT_NUMBERS)).unflatten(-1, (-1, UNIT_NUMBERS))
    unit = (wide.abs().amax(-1) / _MOST).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    numbers = (wide / unit.float()[..., None]).round_().clamp_(-_MOST, _MOST).to(torch.int8).flatten(-2)
    return torch.cat((numbers[..., :dim].view(torch.uint8), unit.view(torch.uint8)), dim=-1)


def from_int8_rows(rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """What the rows stand for, `[..., D]`."""
    numbers = pad(rows[..., :dim].contiguous().view(torch.int8).float(), (0, -dim % UNIT_NUMBERS))
    unit = rows[..., dim:].contiguous().view(torch.bfloat16).float()
    wide: Tensor = numbers.unflatten(-1, (-1, UNIT_NUMBERS)) * unit[..., None]
    return wide.flatten(-2)[..., :dim].to(dtype)
