"""Left-align padded batches, so that positions count from each sequence's first real token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.types import Attended


@dataclass(frozen=True, eq=False)
class Aligned:
    """Inputs whose every row begins with its first real key.

    Attributes:
        query, key, value: As given, shifted left where a row had leading padding; padded keys and values are 0.
        valid: `[B, Nk]`, True = a real key; None = all are.
        query_start: `[B]` position of the first query row, or an int where all rows agree. Without causality
            positions of queries mean nothing and this is 0.
        query_valid: `[B, Nq]`, False on query rows that are padding (as many queries as keys, and the key there
            is padding); None = all are real. They are answered, but move no other query.
        shift: `[B]` how far each row moved; None = not at all.
        queries_moved: Whether the queries were shifted too.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None
    query_start: Tensor | int
    query_valid: Tensor | None
    shift: Tensor | None
    queries_moved: bool

    def restore(self, attended: Attended) -> Attended:
        """Put the outputs back where the queries were; rows shifted out saw nothing."""
        if self.shift is None or not self.queries_moved:
            return attended
        index = torch.arange(attended.lse.shape[2], device=self.shift.device) - self.shift[:, None]
        outside = index < 0
        index = index.clamp_min(0)
        output, lse = (_take_rows(t, index) for t in (attended.output, attended.lse[..., None]))
        output = output.masked_fill(outside[:, None, :, None], 0)
        lse = lse.squeeze(-1).masked_fill(outside[:, None, :], -torch.inf)
        return Attended(output, lse)


def first_real(mask: Tensor) -> Tensor:
    """`[B, N]` bool -> `[B]` position of the first True; 0 where there is none."""
    return mask.to(torch.uint8).argmax(dim=1)


def align_keys(key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Shift keys left to their first real one and zero the padding: `(key, valid, shift)`."""
    if mask is None or bool(mask.all()):
        return key, None, None
    key = key.masked_fill(~mask[:, None, :, None], 0)
    shift = first_real(mask)
    if not bool(shift.any()):
        return key, mask, None
    index, inside = _shifted(shift, mask.shape[1])
    return _take_rows(key, index) * inside[:, None, :, None], mask.gather(1, index) & inside, shift


def align(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool) -> Aligned:
    """Align a whole attention call."""
    n_query, n_keys = query.shape[2], key.shape[2]
    start = n_keys - n_query if is_causal else 0
    key, valid, shift = align_keys(key, mask)
    if mask is None or valid is None:
        return Aligned(query, key, value, None, start, None, None, False)
    value = value.masked_fill(~mask[:, None, :, None], 0)
    together = n_query == n_keys
    if shift is None:
        return Aligned(query, key, value, valid, start, valid if together else None, None, False)
    index, inside = _shifted(shift, n_keys)
    value = _take_rows(value, index) * inside[:, None, :, None]
    if not is_causal:
        # nothing depends on where a query stands, and with keys of their own padded rows may be real queries
        return Aligned(query, key, value, valid, 0, mask if together else None, shift, False)
    if together:
        return Aligned(_take_rows(query, index), key, value, valid, 0, valid, shift, True)
    return Aligned(query, key, value, valid, start - shift, None, shift, False)


def _shifted(shift: Tensor, length: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(length, device=shift.device) + shift[:, None]
    return index.clamp_max(length - 1), index < length


def _take_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """`[B, H, N, D]` rows by `[B, M]` positions, as one flat row gather."""
    batch, heads, length, dim = tensor.shape
    base = torch.arange(batch * heads, device=tensor.device).view(batch, heads, 1) * length
    rows = (base + index[:, None, :]).reshape(-1)
    return tensor.reshape(-1, dim).index_select(0, rows).view(batch, heads, -1, dim)
