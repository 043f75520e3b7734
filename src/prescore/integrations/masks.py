"""The structure of an attention mask (causal, padded, windowed, packed, ...), and attention under it.

transformers passes a bool mask `[B, 1, Nq, Nk]`, True = attend. Sparse attention needs its structure instead.
`read_mask` guesses the structure from the mask's margins, and accepts a guess only if the mask rebuilt from it
equals the given one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore.attention import Options, attend
from prescore.autograd import records_gradients, without_autocast
from prescore.call import mean_visible_keys
from prescore.config import Config, Exact
from prescore.errors import Unsupported
from prescore.ops.operators import readable
from prescore.routed import native
from prescore.types import Result

_BLOCK = 512
_WINDOW_BLOCK = 256
_HIDDEN_BELOW = -1e4
NO_STRUCTURE = "the attention mask is neither causal, full, packed nor a sliding window, with or without padding"
_MEMO = "_prescore_form"
_SEEDS = 2**62


@dataclass(frozen=True, eq=False)
class MaskForm:
    """The structure of a mask.

    Attributes:
        kind: `causal`, `full`, `window` (causal, and at most `window` keys back), `packed` (causal inside
            segments), `ahead` (causal, but some queries see to the end of a block: a prefix, an image), or
            `other`.
        n_keys: Keys that count; no query sees later ones (the unused end of a static cache).
        valid: `[B, Nk]`, True = a real key; None = all are.
        window: For `window`: keys a query sees, its own included.
        starts: For `packed`: `[B, Nq]` first position of each query's segment.
        reach: For `ahead`: `[B, Nq]` last position that each query sees, at least its own.
        mask: For `other`: the mask, of 4 dimensions.
    """

    kind: str
    n_keys: int
    valid: Tensor | None = None
    window: int | None = None
    starts: Tensor | None = None
    reach: Tensor | None = None
    mask: Tensor | None = None

    def for_batch(self, size: int) -> MaskForm:
        """The same for every sequence of a batch, where the mask was given once for all."""
        tensors = (self.valid, self.starts, self.reach)
        if all(tensor is None or tensor.shape[0] == size for tensor in tensors):
            return self
        valid, starts, reach = (None if tensor is None else tensor.expand(size, -1) for tensor in tensors)
        return replace(self, valid=valid, starts=starts, reach=reach)

    def fewest_keys(self) -> int:
        """Real keys of the shortest sequence that has any."""
        if self.valid is None:
            return self.n_keys
        counts = self.valid.sum(1)
        counts = counts[counts > 0]
        return int(counts.min()) if counts.numel() else 0

    def visible_keys(self, n_query: int) -> float | None:
        """Real keys that a real query sees, on average; None where only the mask itself could tell."""
        if self.kind not in ("full", "causal"):
            return None
        return mean_visible_keys(n_query, self.n_keys, self.valid, is_causal=self.kind == "causal")


def read_mask(
    mask: Tensor | None, *, n_query: int, n_keys: int, is_causal: bool, layer: int | None = None
) -> MaskForm:
    """The structure of a mask.

    Args:
        mask: None (nothing but `is_causal`), `[B, Nk]` or `[B, 1, 1, Nk]` (real keys, in addition to `is_causal`),
            or `[B, 1 or H, Nq, Nk]`; bool with True = attend, or float with very negative = hidden.
        n_query: Queries; with `is_causal` they are the last positions.
        n_keys: Keys.
        is_causal: Whether a mask without a query dimension of its own is causal.
        layer: The layer that asks. All layers of a forward share one mask, which is then read once; a layer that
            asks again is in a new forward, and the mask may say something else by then.
    """
    plain = "causal" if is_causal and n_query > 1 else "full"
    if mask is None:
        return MaskForm(plain, n_keys)
    if torch.compiler.is_compiling():  # the content of the mask is unknown
        rows = mask if mask.ndim == 2 else mask[:, 0, 0]
        if mask.ndim == 2 or mask.shape[2] == 1:
            return MaskForm(plain, n_keys, valid=rows.bool())
        return MaskForm("other", n_keys, mask=mask)
    # `.data`, NumPy and inference tensors change without a new version: a forward must not trust the one before
    question = (None if mask.is_inference() else mask._version, plain, n_query, n_keys)
    memo: tuple[object, MaskForm, set[int]] | None = getattr(mask, _MEMO, None)
    if memo is not None and layer is not None and memo[0] == question and layer not in memo[2]:
        memo[2].add(layer)
        return memo[1]
    form = _read(mask, plain, n_query, n_keys)
    if layer is not None and form.kind != "other":  # that form holds the mask, and would keep it alive
        setattr(mask, _MEMO, (question, form, {layer}))
    return form


def _read(mask: Tensor, plain: str, n_query: int, n_keys: int) -> MaskForm:
    if mask.ndim == 4 and mask.shape[3] == 1:
        mask = mask.expand(-1, -1, -1, n_keys)  # as sdpa broadcasts it
    has_rows = mask.ndim == 2 or (mask.ndim == 4 and mask.shape[2] in (1, n_query))
    if not has_rows or mask.shape[-1] != n_keys:
        raise ValueError(
            f"attention_mask must end in {(n_query, n_keys)} [queries, keys] or be [batch, {n_keys}], "
            f"got {tuple(mask.shape)}"
        )
    shown = as_bool(mask)
    if shown is None:
        return MaskForm("other", n_keys, mask=mask)
    if shown.ndim == 2:
        return MaskForm(plain, n_keys, valid=_unless_all(shown))
    rows = shown[:, 0]
    if not torch.equal(shown, shown[:, :1].expand_as(shown)):
        return MaskForm("other", n_keys, mask=shown)
    if rows.shape[1] == 1:
        return MaskForm(plain, n_keys, valid=_unless_all(rows[:, 0]))
    form = next((guess for guess in _guesses(rows) if _matches(guess, rows)), None)
    if (form is None or form.kind == "ahead") and n_query == n_keys:
        # a mask that also blinds padding queries (as NaFlex's does) is padding: their outputs are not used
        real = rows.any(dim=1)
        if torch.equal(rows, real[:, None, :] & real[:, :, None]):
            return MaskForm("full", n_keys, valid=real)
    return form or MaskForm("other", n_keys, mask=shown[:, :1])


def as_bool(mask: Tensor) -> Tensor | None:
    """True = attend; None when a float mask holds more than shown and hidden."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask.bool() if mask.ndim == 2 else None
    hidden = mask <= _HIDDEN_BELOW
    return None if bool((mask.masked_fill(hidden, 0) != 0).any()) else ~hidden


def rebuild(form: MaskForm, first: int, last: int, n_query: int, device: torch.device) -> Tensor:
    """The mask of queries `first` to `last` that a form describes, `[B or 1, last - first, Nk]` bool."""
    key = torch.arange(form.n_keys, dtype=torch.int64, device=device)
    query = torch.arange(first, last, dtype=torch.int64, device=device)[:, None] + (form.n_keys - n_query)
    shown = torch.ones(1, last - first, form.n_keys, dtype=torch.bool, device=device)
    if form.kind in ("causal", "window", "packed"):
        shown = shown & (key <= query)
    if form.reach is not None:
        shown = shown & (key <= form.reach[:, first:last, None])
    if form.window is not None:
        shown = shown & (key > query - form.window)
    if form.starts is not None:
        shown = shown & (key >= form.starts[:, first:last, None])
    return shown if form.valid is None else shown & form.valid[:, None, :]


def full_mask(form: MaskForm, n_query: int, device: torch.device) -> Tensor | None:
    """The mask `[B or 1, 1, Nq, Nk]`; None when it hides nothing."""
    if form.mask is not None:
        return form.mask
    if form.kind == "full" and form.valid is None:
        return None
    return rebuild(form, 0, n_query, n_query, device)[:, None]


def _guesses(shown: Tensor) -> Iterator[MaskForm]:
    """Forms that the margins of `shown [B, Nq, Nk]` allow, most likely first."""
    n_query, n_keys = shown.shape[1:]
    real, last_key = shown.any(dim=1), _last_visible(shown)
    position = torch.arange(n_query, dtype=torch.int64, device=shown.device)
    # all keys count, or those before the unused room of a static cache: a causal query sees up to its own key
    n_before = int((last_key - position).max()) if shown.numel() else 0
    for end in dict.fromkeys((n_keys, min(n_keys, n_query + max(0, n_before)))):
        causal = MaskForm("causal", end, valid=_unless_all(real[:, :end]))
        yield causal
        if end == n_keys:
            yield replace(causal, kind="full")
        window = int(shown.sum(dim=2).max())
        # keys that left every window are not padding
        inside = real[:, :end] | (
            torch.arange(end, dtype=torch.int64, device=shown.device) <= end - n_query - window
        )
        yield MaskForm("window", end, valid=_unless_all(inside), window=window)
        yield MaskForm("window", end, valid=_unless_all(real[:, :end]), window=window)
    if n_query == n_keys:
        starts = torch.where(shown.any(dim=2), shown.to(torch.uint8).argmax(dim=2), position)
        yield MaskForm("packed", n_keys, valid=_unless_all(real), starts=starts)
    position = position + (n_keys - n_query)
    reach = torch.maximum(last_key, position)
    # blocks follow one another, and some query sees no later key
    if bool((reach.diff(dim=1) >= 0).all()) and not bool((reach > position).all()):
        yield MaskForm("ahead", n_keys, valid=_unless_all(real), reach=reach)


def _last_visible(shown: Tensor) -> Tensor:
    """`[B, Nq]` the last key that each query sees, -1 where it sees none."""
    blocks = shown.split(_BLOCK, dim=1)
    back = torch.cat([block.flip(2).to(torch.uint8).argmax(dim=2) for block in blocks], dim=1)
    return torch.where(shown.any(dim=2), shown.shape[2] - 1 - back, -1)


def _matches(form: MaskForm, shown: Tensor) -> bool:
    n_query, starts = shown.shape[1], form.starts
    if form.n_keys < shown.shape[2] and bool(shown[:, :, form.n_keys :].any()):
        return False
    if starts is not None and not (
        # segments follow one another: starts never go back, and a segment's first query starts at itself
        bool((starts.diff(dim=1) >= 0).all()) and torch.equal(starts.gather(1, starts), starts)
    ):
        return False
    for first in range(0, n_query, _BLOCK):
        last = min(first + _BLOCK, n_query)
        block = shown[:, first:last, : form.n_keys]
        if not torch.equal(rebuild(form, first, last, n_query, shown.device).expand_as(block), block):
            return False
    return True


def _unless_all(valid: Tensor) -> Tensor | None:
    return None if bool(valid.all()) else valid


def prescored_under_mask(
    query: Tensor, key: Tensor, value: Tensor, form: MaskForm, config: Config, options: Options
) -> Result:
    """Pre-scored attention under a causal, full or packed mask; `Unsupported` under any other.

    The options say nothing of the mask.

    Queries that see to the end of a block, such as an image, are exact; all others are as under a causal mask.
    """
    if form.kind == "other":
        raise Unsupported("pre-scored attention", [NO_STRUCTURE])
    key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
    if form.starts is not None:
        return _per_segment(query, key, value, form, config, options)
    if form.reach is not None:
        return _ahead(query, key, value, form, config, options)
    dropout_seed = None
    if options.dropout_p:
        # the one exception to "no global seed is read": `torch.manual_seed` reproduces a training run, and
        # gradient checkpointing restores torch's generator, and no other, before it computes a layer again
        dropout_seed = int(torch.randint(_SEEDS, (), dtype=torch.int64, device="cpu"))
    is_causal = form.kind == "causal"
    options = options._replace(is_causal=is_causal, key_padding_mask=form.valid, dropout_generator=dropout_seed)
    result = attend(query, key, value, config, options)
    return replace(result, output=_with_last(result.output, query, key, value, form, options.scale))


def _with_last(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor, form: MaskForm, scale: float | None
) -> Tensor:
    """The last query reads all real keys where it is padding, as under the model's own mask.

    `generate` takes the first new token of a right-padded prompt from there. Other padding queries give 0.
    """
    valid = form.valid
    if form.kind != "causal" or valid is None or bool(valid[:, -1].all()):
        return output
    last = _masked(query[:, :, -1:], key, value, valid[:, None, None], scale, 0.0)
    is_padding = (~valid[:, -1] & valid.any(1))[:, None, None, None]
    return torch.cat((output[:, :, :-1], torch.where(is_padding, last, output[:, :, -1:])), dim=2)


def exact_under_mask(
    query: Tensor, key: Tensor, value: Tensor, form: MaskForm, *, scale: float | None, dropout: float = 0.0
) -> Tensor:
    """Exact attention under any mask; work and memory follow the structure where there is one."""
    key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
    if form.kind == "window":
        return _windowed(query, key, value, form, scale, dropout)
    is_full = form.kind == "full" or (form.kind != "other" and query.shape[2] == 1)
    if is_full and (form.valid is None or bool(form.valid.all())):
        # every query sees all keys: no checks and no copies, so that a step costs no more than reading them. The
        # query heads of a KV head are queries of one head: torch's grouped attention takes ten times as long
        groups = query.shape[1] // key.shape[1]
        together = query.reshape(*key.shape[:2], groups * query.shape[2], query.shape[-1])
        needs_torch = dropout or records_gradients(query, key, value) or torch.compiler.is_compiling()
        if not needs_torch and native.can_attend_step(together, key, value):
            output = native.attend_step(together, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
        else:
            output = scaled_dot_product_attention(together, key, value, dropout_p=dropout, scale=scale)
        return output.reshape(*query.shape[:3], value.shape[-1])
    if form.kind in ("causal", "full") and dropout == 0.0:
        options = Options(is_causal=form.kind == "causal", key_padding_mask=form.valid, scale=scale)
        output = attend(query, key, value, Exact(), options).output
        return _with_last(output, query, key, value, form, scale)
    return _masked(query, key, value, full_mask(form, query.shape[2], query.device), scale, dropout)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # masked grouped-query attention has no fused kernel, so heads are repeated, of a block at most
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, form: MaskForm, scale: float | None, dropout: float
) -> Tensor:
    """A sliding window, by native code, or a block of queries at a time over the keys that its windows reach."""
    n_query, window = query.shape[2], form.window or form.n_keys
    n_before = form.n_keys - n_query
    if n_query == 1 and form.valid is None:
        first = max(0, form.n_keys - window)
        seen = MaskForm("full", form.n_keys - first)
        return exact_under_mask(query, key[:, :, first:], value[:, :, first:], seen, scale=scale, dropout=dropout)
    ranges = _ranges(form, n_before, window, query.device)
    needs_torch = dropout or records_gradients(query, key, value)
    if ranges is not None and not needs_torch and native.can_run(query, value.shape[-1], native.WIDTH):
        with without_autocast(query, key, value) as tensors:
            q, k, v = map(readable, tensors)
            return native.attend_ranges(q, k, v, *ranges, q.shape[-1] ** -0.5 if scale is None else scale).output
    outputs = []
    for first in range(0, n_query, _WINDOW_BLOCK):
        last = min(first + _WINDOW_BLOCK, n_query)
        keys = slice(max(0, n_before + first - window + 1), n_before + last)
        mask = rebuild(form, first, last, n_query, query.device)[:, None, :, keys]
        outputs.append(_masked(query[:, :, first:last], key[:, :, keys], value[:, :, keys], mask, scale, dropout))
    return torch.cat(outputs, dim=2)


def _ranges(form: MaskForm, n_before: int, window: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """`[B or 1, Nq]` first key that each query sees, and one past its last; None if padding lies between."""
    position = torch.arange(n_before, form.n_keys, dtype=torch.int32, device=device)[None]
    start, stop = (position - (window - 1)).clamp_(min=0), position + 1
    if form.valid is None:
        return start, stop
    count = form.valid.sum(1, dtype=torch.int32)[:, None]
    first = form.valid.to(torch.uint8).argmax(1, keepdim=True).to(torch.int32)
    last = form.n_keys - form.valid.flip(1).to(torch.uint8).argmax(1, keepdim=True).to(torch.int32)
    if not bool(((last - first == count) | (count == 0)).all()):
        return None
    return torch.maximum(start, first), torch.minimum(stop, first + count)


def _ahead(query: Tensor, key: Tensor, value: Tensor, form: MaskForm, config: Config, options: Options) -> Result:
    """Causal attention, and exact attention for the queries that see later keys."""
    n_query, reach = query.shape[2], cast(Tensor, form.reach)
    causal = prescored_under_mask(query, key, value, replace(form, kind="causal", reach=None), config, options)
    ahead = reach > torch.arange(form.n_keys - n_query, form.n_keys, dtype=torch.int64, device=query.device)
    output = causal.output
    for first in range(0, n_query, _WINDOW_BLOCK):
        block = ahead[:, first : first + _WINDOW_BLOCK]
        some = block.any(0).nonzero().squeeze(1) + first
        if not len(some):
            continue
        mask = rebuild(form, first, first + block.shape[1], n_query, query.device)[:, None, some - first]
        exact = _masked(query[:, :, some], key, value, mask, options.scale, options.dropout_p)
        chosen = torch.where(ahead[:, None, some, None], exact, output[:, :, some])
        output = output.index_copy(2, some, chosen)
    return replace(causal, output=output)


def _per_segment(
    query: Tensor, key: Tensor, value: Tensor, form: MaskForm, config: Config, options: Options
) -> Result:
    """Packed sequences become a right-padded batch of sequences, and come back."""
    places, valid = _segments(cast(Tensor, form.starts), form.valid)

    def apart(tensor: Tensor) -> Tensor:  # [B, H, N, D] -> [segments, H, longest, D]
        return tensor.transpose(1, 2).flatten(0, 1)[places].transpose(1, 2)

    alone = MaskForm("causal", places.shape[1], valid=_unless_all(valid))
    options = options._replace(key_index=None)  # that of the unpacked keys
    attended = prescored_under_mask(apart(query), apart(key), apart(value), alone, config, options)
    output = attended.output.transpose(1, 2)[valid]
    batch, n_heads, n_query, _ = query.shape
    back = output.new_zeros(batch * n_query, n_heads, value.shape[-1])
    back = back.index_put((places[valid],), output)
    return replace(attended, output=back.view(batch, n_query, n_heads, -1).transpose(1, 2))


def _segments(starts: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """`[segments, longest]` flat positions of each segment's real tokens, and which of them are not filler."""
    batch, length = starts.shape
    offset = torch.arange(batch, dtype=torch.int64, device=starts.device)[:, None] * length
    segment = (starts + offset).flatten()
    positions = torch.arange(batch * length, dtype=torch.int64, device=segment.device)
    if valid is not None:
        positions, segment = positions[valid.flatten()], segment[valid.flatten()]
    _, number, counts = torch.unique_consecutive(segment, return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    column = torch.arange(len(positions), dtype=torch.int64, device=segment.device) - first[number]
    places = positions.new_zeros(len(counts), int(counts.max()) if len(counts) else 0)
    is_token = torch.zeros_like(places, dtype=torch.bool)
    places[number, column] = positions
    is_token[number, column] = True
    return places, is_token
