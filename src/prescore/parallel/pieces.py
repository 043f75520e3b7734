"""The whole sequence as the ranks hold it: consecutive, equal pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.ops.backend import Backend
from prescore.parallel.group import Group
from prescore.rng import Streams


@dataclass(frozen=True, eq=False)
class OwnPiece:
    """This rank's piece of a call, checked on every rank.

    Attributes:
        group: The ranks.
        query, key, value: `[B, Hq, nq, D]`, `[B, Hkv, nk, D]`, `[B, Hkv, nk, Dv]`.
        mask: `[B, size * nk]` of the whole sequence, True = a real key; None = all are.
        is_causal: The queries of all ranks are the last positions and see no later key.
        scale: Factor of the logits, above 0.
        backend: The operator.
        streams: Randomness, the same on every rank.
    """

    group: Group
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    backend: Backend
    streams: Streams

    @property
    def n_query(self) -> int:
        """Queries of all ranks."""
        return self.query.shape[2] * self.group.size

    @property
    def n_keys(self) -> int:
        """Keys of all ranks."""
        return self.key.shape[2] * self.group.size

    @property
    def first_query(self) -> int:
        """Position of this rank's first query; without causality positions of queries mean nothing."""
        before = self.n_keys - self.n_query if self.is_causal else 0
        return before + self.group.rank * self.query.shape[2]

    @property
    def end_query(self) -> int:
        """Position behind this rank's last query."""
        return self.first_query + self.query.shape[2]


def whole_mask(group: Group, mask: Tensor | None) -> Tensor | None:
    """The masks of all ranks as one `[B, N]`; None where every key is real.

    Raises:
        ValueError: A sequence has padding between real keys; every rank raises it.
    """
    if mask is None:
        return None
    whole = group.gather(mask.to(torch.uint8)).bool().transpose(0, 1).flatten(1)
    if bool(whole.all()):
        return None
    position = torch.arange(whole.shape[1], device=whole.device)
    first = torch.where(whole, position, whole.shape[1]).amin(1, keepdim=True)
    last = torch.where(whole, position, -1).amax(1, keepdim=True)
    holes = ~whole & (position > first) & (position < last)
    if bool(holes.any()):
        row, place = holes.nonzero()[0].tolist()
        raise ValueError(
            f"key_padding_mask must have no padding between the real keys of a sequence on several ranks, "
            f"got some at position {place} of sequence {row}"
        )
    return whole
