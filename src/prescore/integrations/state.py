"""A selection kept through a generation: what a decode step reads instead of the whole past."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from prescore.call import make_call
from prescore.config import Config, Coupling, Exact, Selected
from prescore.ops.backend import Needs, accumulation_dtype, pick_backend
from prescore.ops.parts import Part
from prescore.rng import DEFAULT_SEED, Streams
from prescore.selected.plan import make_plan


class SelectionState:
    """Selected keys, centroids for the others, and every token since, side by side in memory.

    A step is one exact attention over `n_rows + n_since` rows, however long the past was.

    Attributes:
        config: The configuration of the selection.
        n_selected_from: Keys that were there when it was made.
        n_rows: Rows that stand for them: selected keys, sinks and centroids.
        rows: These rows and the tokens since.
    """

    def __init__(self, config: Selected, rows: Rows, n_selected_from: int, n_rows: int) -> None:
        self.config = config
        self.rows = rows
        self.n_selected_from = n_selected_from
        self.n_rows = n_rows

    @classmethod
    def select(
        cls, key: Tensor, value: Tensor, valid: Tensor | None, config: Config, seed: int = DEFAULT_SEED
    ) -> SelectionState:
        """Select among the keys so far.

        The rows are those that `prescored_attention` of one query over the same keys would meet, with exact
        attention inside the selection, so that a fresh selection gives the same output.

        Args:
            key: `[B, Hkv, N, D]`.
            value: `[B, Hkv, N, Dv]`.
            valid: `[B, N]`, True = a real key; None = all.
            config: A `Selected`: scorer, budget, sinks, remainder.
            seed: Of the scorer, as `generator` of `prescored_attention`.
        """
        if not isinstance(config, Selected):
            raise TypeError(f"config must be a Selected to keep a selection, got {type(config).__name__}")
        query = key[:, :, -1:]
        call = make_call(
            query,
            key,
            value,
            valid,
            is_causal=False,
            scale=None,
            backend=pick_backend(Needs.of(query)),
            streams=Streams(seed),
        )
        plan = make_plan(call, _exactly(config))
        keys, values, biases = [], [], []
        for part in plan.parts:
            keys.append(_columns(plan.key, None if plan.centroids is None else plan.centroids.key, part))
            values.append(_columns(plan.value, None if plan.centroids is None else plan.centroids.value, part))
            biases.append(_bias(part, keys[-1]))
        if not keys:  # nothing but padding so far
            return cls(config, Rows(key[:, :, :0], value[:, :, :0]), key.shape[2], 0)
        key_rows, value_rows, bias = (
            torch.cat(tables, dim=1).unflatten(0, key.shape[:2]) for tables in (keys, values, biases)
        )
        rows = Rows(key_rows, value_rows, bias if bool(bias.any()) else None)
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
            dtype = accumulation_dtype(key.dtype)
            hidden = torch.zeros(valid.shape, dtype=dtype, device=key.device).masked_fill_(~valid, -torch.inf)
            bias = hidden[:, None, :].expand(key.shape[:3])
            key, value = (t.masked_fill(~valid[:, None, :, None], 0) for t in (key, value))
        self.rows.append(key, value, bias)

    def attend(self, query: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
        """Exact attention of the last `Nq` tokens over the rows, in one call."""
        return attend_last(query, self.rows.key, self.rows.value, self.rows.bias, scale, dropout)

    def keys_read(self, n_query: int) -> Callable[[], float]:
        """Counts the rows that the last `n_query` tokens meet, on average; padding and empty clusters are none."""
        return partial(_rows_met, self.rows.length, self.rows.bias, n_query)

    def crop(self, n_since: int) -> None:
        """Forget the tokens after the first `n_since`."""
        self.rows.crop(self.n_rows + n_since)

    def take(self, index: Tensor) -> None:
        """Keep these batch rows, in this order."""
        self.rows.take(index)

    def repeat(self, repeats: int) -> None:
        """Repeat every batch row."""
        self.rows.repeat(repeats)


def _exactly(config: Selected) -> Selected:
    """One query over its selection is exact, also where the delta test failed and everything is kept."""
    return config.replace(
        inner=Exact(),
        min_seq_len=max(2, config.min_seq_len),
        # what only means something with an Lsh inside
        leaf_inclusive=False,
        coupling=Coupling(mask=config.coupling.mask),
    )


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
    mask = None if bias is None else bias[:, :, None, :]
    if mask is not None and query.device.type != "cpu":
        # elsewhere torch wants the mask in the queries' precision, which rounds the logs of counts
        mask = mask.to(query.dtype)
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
        return columns.new_zeros(columns.shape[:2], dtype=accumulation_dtype(columns.dtype))
    return part.bias.reshape(columns.shape[:2])


def _rows_met(n_rows: int, bias: Tensor | None, n_query: int) -> float:
    if bias is None:
        return n_rows - (n_query - 1) / 2
    met = (~torch.isneginf(bias)).cumsum(-1)[..., n_rows - n_query :]
    return float(met.double().mean())


# Key and value rows that grow at the end without being copied for every token.

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
        records_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (*new, *self._tables))
        if records_gradients or not self._owned or end > self._tables[0].shape[2]:
            room = 0 if records_gradients else max(_LEAST_ROOM, end // 8)
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
