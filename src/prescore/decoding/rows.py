"""Key and value rows that grow at the end without being copied for every token."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_ROOM = 64


class Rows:
    """Keys `[B, H, n, D]`, values `[B, H, n, Dv]` and a bias `[B, H, n]` that grow along the sequence.

    The bias keeps its own precision: it holds logs of counts, which half precision would round by percents.

    Rows lie in a larger buffer, so that appending writes the new rows only; when gradients are recorded, or the
    buffer is full, everything is copied once.

    Attributes:
        length: Rows in use.
    """

    def __init__(self, key: Tensor, value: Tensor, bias: Tensor | None = None) -> None:
        self._tables = [key, value] if bias is None else [key, value, bias[..., None]]
        self._owned = False  # what the caller gave is never written to
        self.length = key.shape[2]

    @property
    def key(self) -> Tensor:
        """The keys in use, a view."""
        return self._tables[0][:, :, : self.length]

    @property
    def value(self) -> Tensor:
        """The values in use, a view."""
        return self._tables[1][:, :, : self.length]

    @property
    def bias(self) -> Tensor | None:
        """What is added to each row's logit, a view; None = nothing."""
        return self._tables[2][:, :, : self.length, 0] if len(self._tables) > 2 else None

    @property
    def n_bytes(self) -> int:
        """Memory held, the room for later rows included."""
        return sum(table.numel() * table.element_size() for table in self._tables)

    def append(self, key: Tensor, value: Tensor, bias: Tensor | None = None) -> None:
        """Add rows at the end; `bias` is 0 where none is given."""
        if bias is not None and len(self._tables) == 2:
            self._tables.append(torch.zeros_like(self._tables[0][..., :1], dtype=bias.dtype))
        new = [key, value]
        if len(self._tables) > 2:
            more = torch.zeros_like(key[..., :1]) if bias is None else bias[..., None]
            new.append(more.to(self._tables[2].dtype))
        end = self.length + key.shape[2]
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (*new, *self._tables))
        if recorded or not self._owned or end > self._tables[0].shape[2]:
            room = 0 if recorded else max(_LEAST_ROOM, end // 8)
            self._tables = [
                _joined(table[:, :, : self.length], more, room)
                for table, more in zip(self._tables, new, strict=True)
            ]
            self._owned = True
        else:
            for table, more in zip(self._tables, new, strict=True):
                table[:, :, self.length : end] = more
        self.length = end

    def crop(self, length: int) -> None:
        """Forget the rows from `length` on."""
        self.length = min(self.length, length)

    def take(self, index: Tensor) -> None:
        """Keep these batch rows, in this order; an index may occur several times."""
        index = index.to(self._tables[0].device)
        # only what is in use is copied, and room grows again when it is needed
        self._tables = [table[:, :, : self.length].index_select(0, index) for table in self._tables]

    def repeat(self, repeats: int) -> None:
        """Repeat every batch row."""
        self._tables = [table[:, :, : self.length].repeat_interleave(repeats, dim=0) for table in self._tables]


def _joined(old: Tensor, new: Tensor, room: int) -> Tensor:
    if room == 0:
        return torch.cat((old, new), dim=2)
    batch, heads, length, dim = old.shape
    end = length + new.shape[2]
    table = old.new_empty(batch, heads, end + room, dim)
    table[:, :, :length] = old
    table[:, :, length:end] = new
    return table
