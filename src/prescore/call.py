"""One attention call as the engines see it: aligned tensors, their meaning, and what runs them.

Positions count from each sequence's first real token. Rows with leading padding are shifted to the left before an
engine runs, and results are shifted back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.devices import maybe_any, surely_all
from prescore.ops.operators import Operator, accumulation_dtype
from prescore.rng import Generator as Generator
from prescore.rng import Streams
from prescore.scoring.sampling import arange, gather_rows
from prescore.types import Attended, Selection


class Options(NamedTuple):
    """The arguments of `prescored_attention` other than tensors and configuration, with its defaults.

    `key_index` is what a cache keeps between calls, see `Call`.
    """

    is_causal: bool = False
    key_padding_mask: Tensor | None = None
    scale: float | None = None
    generator: Generator | Streams = None
    selection: Selection | None = None
    dropout_p: float = 0.0
    dropout_generator: Generator = None
    backend: str = "auto"
    group: object = None
    key_index: object = None


@dataclass(frozen=True, eq=False)
class Call:
    """Inputs of one call; rows begin at their first real key unless made with `aligned=False`.

    Attributes:
        query, key, value: As given, shifted left where a row had leading padding; padded keys and values are 0.
        is_causal: Queries are the last positions and see no later key.
        scale: Factor of the logits.
        operator: The operator.
        streams: Randomness.
        valid: `[B, Nk]`, True = a real key; None = all are.
        query_start: `[B]` position of the first query row, or an int where all rows agree. 0 without a causal
            mask.
        query_valid: `[B, Nq]`, False on padding queries (as many queries as keys, and the key there is padding);
            None = all are real. They move no other query.
        shift: `[B]` how far each row moved; None = not at all.
        queries_moved: Whether the queries were shifted too.
        blind: `[B, Nq]` in the caller's positions, for `restore`: causal queries before the first or after the
            last real key, which see nothing; None = there are none.
        backend: What runs the far keys of a `Routed`: `native`, `triton` or `plain`; under `auto`, what can.
        key_index: What the engine keeps between calls over a growing sequence; None = nothing.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    scale: float
    operator: Operator
    streams: Streams = field(default_factory=Streams)
    valid: Tensor | None = None
    query_start: Tensor | int = 0
    query_valid: Tensor | None = None
    shift: Tensor | None = None
    queries_moved: bool = False
    blind: Tensor | None = None
    backend: str = "auto"
    key_index: object = None

    @property
    def n_query(self) -> int:
        """Query rows of a sequence."""
        return self.query.shape[2]

    @property
    def n_keys(self) -> int:
        """Key rows of a sequence, padding included."""
        return self.key.shape[2]

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.key.shape[1]

    def mean_keys(self) -> float:
        """Real keys of a sequence, on average."""
        if self.valid is None or not self.valid.shape[0]:
            return float(self.n_keys)
        return float(self.valid.sum(1).double().mean())

    def restore(self, attended: Attended) -> Attended:
        """Shift outputs back to the given rows; blind queries have output 0 and lse -inf."""
        output, lse = attended
        if self.shift is not None and self.queries_moved:
            index = (arange(lse.shape[2], like=self.shift) - self.shift[:, None]).clamp_min(0)
            output, lse = _take_rows(output, index), _take_rows(lse[..., None], index).squeeze(-1)
        if self.blind is not None:
            blind = self.blind[:, None]
            output, lse = output.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)
        return Attended(output, lse)


def mean_visible_keys(n_query: int, n_keys: int, valid: Tensor | None, *, is_causal: bool) -> float:
    """Real keys (`valid [B, Nk]`, None = all) that a real query may see, on average."""
    if not n_query or not n_keys:
        return 0.0
    if valid is None:
        return n_keys - ((n_query - 1) / 2 if is_causal else 0.0)
    visible = valid.cumsum(1)
    visible = visible[:, n_keys - n_query :] if is_causal else visible[:, -1:].expand(-1, n_query)
    # with as many queries as keys, the queries of padded keys are padding
    real = valid if n_query == n_keys else torch.ones_like(visible, dtype=torch.bool)
    return float(visible[real].double().mean()) if bool(real.any()) else 0.0


def first_real(mask: Tensor) -> Tensor:
    """`[B, N]` bool -> `[B]` position of the first True; 0 where there is none."""
    return mask.to(torch.uint8).argmax(dim=1)


def align_keys(key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Shift keys left to their first real one and zero the padding: `(key, valid, shift)`."""
    if mask is None or surely_all(mask):
        return key, None, None
    key = key.masked_fill(~mask[:, None, :, None], 0)
    shift = first_real(mask)
    if not maybe_any(shift):
        return key, mask, None
    index, inside = _shifted(shift, mask.shape[1])
    return _take_rows(key, index) * inside[:, None, :, None], mask.gather(1, index) & inside, shift


def shifted_back(selection: Selection, shift: Tensor | None, n_keys: int) -> Selection:
    """A selection among aligned keys as positions of the keys before they were shifted."""
    if shift is None:
        return selection
    # filler of a block beyond a short sequence would point past the end, and break a caller's gather
    indices = (selection.indices + shift[:, None, None]).clamp_max(n_keys - 1)
    return Selection(indices, selection.valid, selection.fallback)


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    *,
    operator: Operator,
    streams: Streams | None = None,
    aligned: bool = True,
) -> Call:
    """The inputs of an attention function, as the user gave them, as a call.

    `aligned` shifts rows to their first real key, which exact attention does not need.
    """
    is_causal, mask = options.is_causal, options.key_padding_mask
    # C reads memory, which an efficient zero tensor does not have
    query, key, value = (t.clone() if t._is_zerotensor() else t for t in (query, key, value))
    n_query, n_keys = query.shape[2], key.shape[2]
    blind = None
    if is_causal and mask is not None:
        real = mask[:, n_keys - n_query :]
        query, blind = _finite_padding(query, real), _blind_queries(mask)[:, n_keys - n_query :]
    query, factor = with_positive_scale(query, options.scale)
    call = Call(
        query, key, value, is_causal, factor, operator, streams or Streams(),
        query_start=n_keys - n_query if is_causal else 0,
        blind=blind if blind is not None and maybe_any(blind) else None,
        backend=options.backend, key_index=options.key_index,
    )  # fmt: skip
    if mask is None:
        return call
    if aligned:
        return _aligned(call, mask)
    hidden = ~mask[:, None, :, None]
    key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    return replace(call, key=key, value=value, valid=mask, key_index=None)


def _aligned(call: Call, mask: Tensor) -> Call:
    """The same with rows that begin at their first real key, and without the content of padding."""
    key, valid, shift = align_keys(call.key, mask)
    if valid is None:
        return call
    # padding may hold anything, and 0 * NaN is NaN
    value = call.value.masked_fill(~mask[:, None, :, None], 0)
    is_self = call.n_query == call.n_keys
    # without causality nothing depends on positions of queries: padded rows may be real queries of their own
    query_valid = None if not is_self else valid if call.is_causal or shift is None else mask
    call = replace(call, key=key, value=value, valid=valid, query_valid=query_valid, shift=shift, key_index=None)
    if shift is None:
        return call
    index, inside = _shifted(shift, call.n_keys)
    value = _take_rows(value, index) * inside[:, None, :, None]
    if not call.is_causal:
        return replace(call, value=value)
    if not is_self:
        return replace(call, value=value, query_start=call.query_start - shift)
    return replace(call, query=_take_rows(call.query, index), value=value, query_start=0, queries_moved=True)


def with_positive_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The same logits with a factor above 0: operators and engines may divide by it, or multiply -inf with it."""
    factor = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if abs(factor) < torch.finfo(accumulation_dtype(query.dtype)).tiny:  # operators would round it to 0
        return query * 0, 1.0
    return (query, factor) if factor > 0 else (-query, -factor)


def _finite_padding(query: Tensor, real: Tensor) -> Tensor:
    """Zero the padding queries (`real [B, Nq]`) that hold NaN or infinity.

    Their output is not used, but gradients of keys and values sum over all rows, and 0 * NaN is NaN.
    """
    broken = ~real[:, None] & ~torch.isfinite(query.detach()).all(-1)
    return query.masked_fill(broken[..., None], 0)


def _blind_queries(mask: Tensor) -> Tensor:
    """`[B, Nk]` positions before the first or after the last real key."""
    n_real = mask.cumsum(1)
    return ~mask & ((n_real == 0) | (n_real == n_real[:, -1:]))


def _shifted(shift: Tensor, length: int) -> tuple[Tensor, Tensor]:
    index = arange(length, like=shift) + shift[:, None]
    return index.clamp_max(length - 1), index < length


def _take_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """`[B, H, N, D]` rows by `[B, M]` positions, as one flat row gather."""
    batch, heads = tensor.shape[:2]
    rows = gather_rows(tensor.flatten(0, 1), index.repeat_interleave(heads, dim=0))
    return rows.view(batch, heads, *rows.shape[1:])
