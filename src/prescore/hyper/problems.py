"""Cut a call into problems: one per batch row, or the off-diagonal blocks of the causal grid."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.call import Call
from prescore.config import Selected
from prescore.hyper.grid import Level, Queries, key_rows, key_valid
from prescore.selection.members import protected_positions

FULL = "full"
"""Name of the random stream of a non-causal problem: `score` and `select` draw from it too, so they agree."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Queries and candidate keys of equal-sized problems, `P = B * n` for `n` blocks of each batch row.

    Attributes:
        name: Of its random streams.
        n_blocks: `n`.
        query_rows: `[P, H, G, W]` flat rows of the queries.
        query_valid: `[P, W]`, False = filler; None = none.
        query_real: `[P, W]`, False = filler or padding; None = none.
        key: `[P, H, N, D]` candidates.
        value: Their values, where stand-ins need them.
        rows: `[P, H, N]` flat rows of the candidates.
        valid: `[P, N]`, False = padding; None = none.
        protect: `[P, N]`, keys to be kept and seen exactly; None = none.
        exact: `[P]`, problems with so few queries that they are exact over their selection.
        given: `[P, H, N]`, the caller's selection; None = make one.
    """

    name: str
    n_blocks: int
    query_rows: Tensor
    query_valid: Tensor | None
    query_real: Tensor | None
    key: Tensor
    value: Tensor
    rows: Tensor
    valid: Tensor | None
    protect: Tensor | None
    exact: Tensor
    given: Tensor | None

    def any_valid(self) -> bool:
        """Whether some problem has a real key."""
        return self.valid is None or bool(self.valid.any())

    def n_keys(self) -> Tensor:
        """`[P]` real keys of each problem."""
        if self.valid is not None:
            return self.valid.sum(1)
        return torch.full((self.rows.shape[0],), self.rows.shape[-1], device=self.rows.device)


@dataclass(frozen=True, eq=False)
class Problems:
    """The problems of one call; `given [B, Hkv, Nk]` is the caller's selection, in aligned positions."""

    call: Call
    config: Selected
    queries: Queries
    given: Tensor | None

    def full(self) -> Candidates:
        """One problem per batch row; rows with few queries are exact over their selection, the others not."""
        call, config = self.call, self.config
        positions = torch.arange(call.n_keys, device=call.key.device)[None]
        everywhere = dataclasses.replace(self.queries, start=0)
        query_rows, _ = everywhere.rows(torch.arange(self.queries.length, device=call.key.device)[None])
        n_query = torch.full((self.queries.batch,), self.queries.length, device=call.key.device)
        if call.query_valid is not None:
            n_query = call.query_valid.sum(1)
        few = n_query <= config.min_seq_len if config.leaf_inclusive else n_query < config.min_seq_len
        return Candidates(
            name=FULL,
            n_blocks=1,
            query_rows=query_rows,
            query_valid=None,
            query_real=call.query_valid,
            key=call.key,
            value=call.value,
            rows=key_rows(positions, self.queries, call.n_keys),
            valid=call.valid,
            protect=protected_positions(call.valid, call.key, config.sinks, config.recent),
            exact=few,
            given=self.given,
        )

    def level(self, level: Level) -> Candidates:
        """All off-diagonal blocks of one level as one batch of problems."""
        call, config, queries = self.call, self.config, self.queries
        width, key_positions, query_positions = level.width, level.key_positions, level.query_positions
        inside = key_positions.clamp_max(call.n_keys - 1)
        query_rows, there = queries.rows(query_positions)
        valid = key_valid(key_positions, queries, call.n_keys, call.valid)
        rows = key_rows(key_positions, queries, call.n_keys)
        key, value = self._gathered(rows, valid)
        protect = None
        if config.sinks or config.recent:
            protect = protected_positions(call.valid, call.key, config.sinks, 0)[:, inside].flatten(0, 1)
            protect = protect | protected_positions(valid, key, 0, config.recent)
        real = there
        if call.query_valid is not None:
            real = there & call.query_valid[:, query_positions.clamp_max(call.n_keys - 1)].flatten(0, 1)
        return Candidates(
            # named by size, not by rank in the list: which levels a call reaches depends on its other rows
            name=f"level{(width // max(1, config.min_seq_len)).bit_length() - 1}",
            n_blocks=key_positions.shape[0],
            query_rows=query_rows,
            query_valid=None if bool(there.all()) else there,
            query_real=None if bool(real.all()) else real,
            key=key,
            value=value,
            rows=rows,
            valid=valid,
            protect=protect,
            exact=torch.full((rows.shape[0],), config.leaf_inclusive and width <= config.min_seq_len),
            given=None if self.given is None else self.given[:, :, inside].transpose(1, 2).flatten(0, 1),
        )

    def _gathered(self, rows: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of a level's blocks; values only where stand-ins need them."""
        shape = (*rows.shape, -1)
        flat = rows.reshape(-1)
        key = self.call.key.reshape(-1, self.call.key.shape[-1]).index_select(0, flat).view(shape)
        value = self.call.value
        if self.config.remainder != "none":
            value = value.reshape(-1, value.shape[-1]).index_select(0, flat).view(shape)
        if valid is not None:
            key = key * valid[:, None, :, None]
        return key, value
