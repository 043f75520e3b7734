"""A selection kept through a generation: what a decode step reads instead of the whole past."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from prescore.attention.parts import Part
from prescore.config import PrescoreConfig
from prescore.decoding.rows import Rows
from prescore.layout import align
from prescore.plan import Planner
from prescore.rng import as_streams


class DecodeState(Protocol):
    """What a cache layer keeps beside its keys and values; `SelectionState` is one way to do it.

    Attributes:
        config: The configuration it was made with.
        n_selected_from: Keys it stands for.
        n_rows: Rows a step reads for them.
    """

    config: PrescoreConfig
    n_selected_from: int
    n_rows: int

    @property
    def n_since(self) -> int:
        """Tokens appended since the state was made."""

    @property
    def n_bytes(self) -> int:
        """Memory held."""

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Take new tokens, all of them attended exactly from now on."""

    def attend(self, query: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        """Output `[B, Hq, Nq, Dv]` for the last `Nq` tokens, each seeing no later one."""

    def crop(self, n_since: int) -> None:
        """Forget tokens until `n_since` are left."""

    def take(self, index: Tensor) -> None:
        """Keep these batch rows, in this order."""

    def repeat(self, repeats: int) -> None:
        """Repeat every batch row."""


class SelectionState:
    """Selected keys, stand-ins for the others, and every token since, side by side in memory.

    A step is one exact attention over `n_rows + n_since` rows, however long the past was.

    Attributes:
        config: The configuration of the selection.
        n_selected_from: Keys that were there when it was made.
        n_rows: Rows that stand for them: selected keys, sinks and stand-ins.
        rows: These rows and the tokens since.
    """

    def __init__(self, config: PrescoreConfig, rows: Rows, n_selected_from: int, n_rows: int) -> None:
        self.config = config
        self.rows = rows
        self.n_selected_from = n_selected_from
        self.n_rows = n_rows

    @classmethod
    def select(cls, key: Tensor, value: Tensor, valid: Tensor | None, config: PrescoreConfig) -> SelectionState:
        """Select among the keys so far.

        The rows are those that `prescored_attention` of one query over the same keys would meet, with exact
        attention inside the selection, so that a fresh selection gives the same output.

        Args:
            key: `[B, Hkv, N, D]`.
            value: `[B, Hkv, N, Dv]`.
            valid: `[B, N]`, True = a real key; None = all.
            config: Method, budget, sinks, remainder.
        """
        call = align(key[:, :, -1:], key, value, valid, is_causal=False)
        plan = Planner(call, _exactly(config), as_streams(None), None, False).build()
        batch, heads = key.shape[:2]
        keys, values, biases = [], [], []
        for part in plan.parts:
            keys.append(_columns(plan.key, None if plan.stand_ins is None else plan.stand_ins.key, part))
            values.append(_columns(plan.value, None if plan.stand_ins is None else plan.stand_ins.value, part))
            biases.append(_bias(part, keys[-1]))
        columns = [torch.cat(tables, dim=1).unflatten(0, (batch, heads)) for tables in (keys, values)]
        bias = torch.cat(biases, dim=1).unflatten(0, (batch, heads))
        plain = not bool(bias.any())
        rows = Rows(columns[0], columns[1], None if plain else bias)
        return cls(config, rows, key.shape[2], rows.length)

    @property
    def n_since(self) -> int:
        """Tokens appended since the selection."""
        return self.rows.length - self.n_rows

    @property
    def n_bytes(self) -> int:
        """Memory held."""
        return self.rows.n_bytes

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Take new tokens; `valid [B, n]` marks padding among them."""
        bias = None
        if valid is not None and not bool(valid.all()):
            hidden = torch.zeros(valid.shape, dtype=key.dtype, device=key.device).masked_fill_(~valid, -torch.inf)
            bias = hidden[:, None, :].expand(key.shape[:3])
            key, value = (t.masked_fill(~valid[:, None, :, None], 0) for t in (key, value))
        self.rows.append(key, value, bias)

    def attend(self, query: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        """Exact attention of the last `Nq` tokens over the rows, in one call."""
        return attend_last(query, self.rows.key, self.rows.value, self.rows.bias, scale, dropout)

    def crop(self, n_since: int) -> None:
        """Forget the tokens after the first `n_since`."""
        self.rows.crop(self.n_rows + n_since)

    def take(self, index: Tensor) -> None:
        """Keep these batch rows, in this order."""
        self.rows.take(index)

    def repeat(self, repeats: int) -> None:
        """Repeat every batch row."""
        self.rows.repeat(repeats)


def _exactly(config: PrescoreConfig) -> PrescoreConfig:
    """One query over its selection is exact, also where the delta test failed and everything is kept."""
    return config.replace(inner="exact", min_seq_len=max(2, config.min_seq_len))


def attend_last(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None, dropout: float = 0.0
) -> Tensor:
    """Attention of the last `Nq` tokens over all rows up to each of them.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, n, D]`, the last `Nq` rows being the queries' own.
        value: `[B, Hkv, n, Dv]`.
        bias: `[B, Hkv, n]` added to the logits, or None.
        scale: Factor of the logits.
        dropout: Probability of dropping a weight, drawn by torch.
    """
    batch, n_heads, n_query, dim = query.shape
    n_kv_heads, n_rows = key.shape[1:3]
    # the queries of a group become rows of one head, so that no key is repeated
    grouped = query.reshape(batch, n_kv_heads, -1, dim)
    mask = None if bias is None else bias[:, :, None, :].to(query.dtype)
    if n_query > 1:
        reach = torch.arange(n_rows, device=query.device) - (n_rows - n_query)
        later = reach > torch.arange(n_query, device=query.device)[:, None]
        hidden = torch.zeros(n_query, n_rows, dtype=query.dtype, device=query.device)
        hidden = hidden.masked_fill_(later, -torch.inf).repeat(n_heads // n_kv_heads, 1)
        mask = hidden if mask is None else hidden + mask
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )
    return output.reshape(batch, n_heads, n_query, -1)


def _columns(table: Tensor, extra: Tensor | None, part: Part) -> Tensor:
    flat, tiles = table.reshape(-1, table.shape[-1]), part.shape[0]
    if part.key_rows is None:
        columns = flat.view(tiles, -1, flat.shape[-1])
    else:
        columns = flat.index_select(0, part.key_rows.reshape(-1)).view(tiles, -1, flat.shape[-1])
    if part.extra_rows is None or extra is None:
        return columns
    more = extra.index_select(0, part.extra_rows.reshape(-1)).view(tiles, -1, flat.shape[-1])
    return torch.cat((columns, more), dim=1)


def _bias(part: Part, columns: Tensor) -> Tensor:
    if part.bias is None:
        return columns.new_zeros(columns.shape[:2])
    return part.bias.reshape(columns.shape[:2])
