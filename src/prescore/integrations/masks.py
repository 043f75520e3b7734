"""What an attention mask says: causal, padded, windowed, packed, or something that has no short name.

transformers hands over a bool mask `[B, 1, Nq, Nk]`, True = attend. A sparse attention cannot take that as it
is; it needs to know the structure. `read_mask` guesses the structure from the mask's margins and believes the
guess only if the mask rebuilt from it equals the given one, row block by row block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prescore.attention import Options, attend
from prescore.config import Exact
from prescore.errors import Unsupported
from prescore.integrations.decode import Request
from prescore.types import Result

_ROWS_AT_ONCE = 512
_HIDDEN_BELOW = -1e4
_KEPT = "_prescore_form"


@dataclass(frozen=True, eq=False)
class MaskForm:
    """A mask in words.

    Attributes:
        kind: `causal`, `full`, `window` (causal, and at most `window` keys back), `packed` (causal inside
            segments), `ahead` (causal, and some queries see on to the end of a block: a prefix, an image), or
            `other`.
        valid: `[B, Nk]`, True = a real key; None = all are.
        window: Keys a query sees, itself included, for `window`.
        starts: `[B, Nq]` first position of each query's segment, for `packed`.
        reach: `[B, Nq]` last position that each query sees, itself at least, for `ahead`.
        n_keys: Keys that count; later ones (the unused end of a static cache) are seen by no query.
        mask: The mask itself, bool and of 4 dimensions, for `other`.
    """

    kind: str
    n_keys: int
    valid: Tensor | None = None
    window: int | None = None
    starts: Tensor | None = None
    reach: Tensor | None = None
    mask: Tensor | None = None

    def fewest_keys(self) -> int:
        """Real keys of the shortest sequence that has any."""
        if self.valid is None:
            return self.n_keys
        counts = self.valid.sum(1)
        counts = counts[counts > 0]
        return int(counts.min()) if counts.numel() else 0

    def for_batch(self, size: int) -> MaskForm:
        """The same for every sequence of a batch, where the mask was given once for all."""
        own = (self.valid, self.starts, self.reach)
        if all(tensor is None or tensor.shape[0] == size for tensor in own):
            return self
        valid, starts, reach = (None if tensor is None else tensor.expand(size, -1) for tensor in own)
        return replace(self, valid=valid, starts=starts, reach=reach)


def read_mask(mask: Tensor | None, *, n_query: int, n_keys: int, is_causal: bool) -> MaskForm:
    """The structure of a mask.

    Args:
        mask: None (nothing but `is_causal`), `[B, Nk]` or `[B, 1, 1, Nk]` (real keys, beside `is_causal`),
            or `[B, 1 or H, Nq, Nk]`; bool with True = attend, or float with very negative = hidden.
        n_query: Queries; with `is_causal` they are the last positions.
        n_keys: Keys.
        is_causal: Whether a mask without a query dimension of its own is causal.
    """
    plain = "causal" if is_causal and n_query > 1 else "full"
    if mask is None:
        return MaskForm(plain, n_keys)
    # tensors of inference mode count no versions; those are made anew for every forward pass
    question = (None if mask.is_inference() else mask._version, plain, n_query, n_keys)
    kept: tuple[object, MaskForm] | None = getattr(mask, _KEPT, None)
    if kept is not None and kept[0] == question:
        return kept[1]
    form = _read(mask, plain, n_query, n_keys)
    if form.kind != "other":  # that one holds the mask, and would keep it alive
        # all layers of a model receive the same tensor: the answer travels with it
        setattr(mask, _KEPT, (question, form))
    return form


def _read(mask: Tensor, plain: str, n_query: int, n_keys: int) -> MaskForm:
    _check_shape(mask, n_query, n_keys)
    seen = as_bool(mask)
    if seen is None:
        return MaskForm("other", n_keys, mask=mask)
    if seen.ndim == 2:
        return MaskForm(plain, n_keys, valid=_unless_all(seen))
    if seen.shape[1] > 1:
        if not torch.equal(seen, seen[:, :1].expand_as(seen)):
            return MaskForm("other", n_keys, mask=seen)
        seen = seen[:, :1]
    if seen.shape[2] == 1:
        return MaskForm(plain, n_keys, valid=_unless_all(seen[:, 0, 0]))
    found = next((form for form in _guesses(seen[:, 0]) if _same(form, seen[:, 0])), None)
    return found or MaskForm("other", n_keys, mask=seen)


def as_bool(mask: Tensor) -> Tensor | None:
    """True = attend; None when a float mask holds more than shown and hidden."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask.bool() if mask.ndim == 2 else None
    hidden = mask <= _HIDDEN_BELOW
    return None if bool((mask.masked_fill(hidden, 0) != 0).any()) else ~hidden


def padded_both_ways(mask: Tensor) -> Tensor | None:
    """Real tokens `[B, N]` of a bool mask that also blinds padded queries (as NaFlex's does); None for another."""
    if mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    seen = mask[:, 0]
    real = seen.any(dim=1)
    return real if torch.equal(seen, real[:, None, :] & real[:, :, None]) else None


def rebuild(form: MaskForm, first: int, last: int, n_query: int, device: torch.device) -> Tensor:
    """Rows `first` to `last` of the mask that a form describes, `[B or 1, rows, Nk]` bool."""
    key = torch.arange(form.n_keys, device=device)
    query = torch.arange(first, last, device=device)[:, None] + (form.n_keys - n_query)
    rows = torch.ones(1, last - first, form.n_keys, dtype=torch.bool, device=device)
    if form.kind in ("causal", "window", "packed"):
        rows = rows & (key <= query)
    if form.reach is not None:
        rows = rows & (key <= form.reach[:, first:last, None])
    if form.window is not None:
        rows = rows & (key > query - form.window)
    if form.starts is not None:
        rows = rows & (key >= form.starts[:, first:last, None])
    return rows if form.valid is None else rows & form.valid[:, None, :]


def full_mask(form: MaskForm, n_query: int, device: torch.device) -> Tensor | None:
    """The whole mask `[B or 1, 1, Nq, Nk]`; None when it hides nothing."""
    if form.mask is not None:
        return form.mask
    if form.kind == "full" and form.valid is None:
        return None
    return rebuild(form, 0, n_query, n_query, device)[:, None]


def _guesses(seen: Tensor) -> Iterator[MaskForm]:
    """Forms that the margins of `seen [B, Nq, Nk]` allow, most likely first."""
    n_query, n_keys = seen.shape[1:]
    real = seen.any(dim=1)
    for end in _possible_ends(seen):
        causal = MaskForm("causal", end, valid=_unless_all(real[:, :end]))
        yield causal
        if end == n_keys:
            yield replace(causal, kind="full")
        window = int(seen.sum(dim=2).max())
        # keys that left every window are not padding
        inside = real[:, :end] | (torch.arange(end, device=seen.device) <= end - n_query - window)
        yield MaskForm("window", end, valid=_unless_all(inside), window=window)
        yield MaskForm("window", end, valid=_unless_all(real[:, :end]), window=window)
    if n_query == n_keys:
        position = torch.arange(n_query, device=seen.device)
        starts = torch.where(seen.any(dim=2), seen.to(torch.uint8).argmax(dim=2), position)
        yield MaskForm("packed", n_keys, valid=_unless_all(real), starts=starts)
    own = torch.arange(n_keys - n_query, n_keys, device=seen.device)
    reach = torch.maximum(_last_seen(seen), own)
    if _in_blocks(reach, own):
        yield MaskForm("ahead", n_keys, valid=_unless_all(real), reach=reach)


def _possible_ends(seen: Tensor) -> Iterator[int]:
    """How many keys count: all, or those before the unused room of a static cache.

    Which keys are seen does not tell, for all sequences may end in padding: but no causal query sees further than
    its own key, and a real one sees that.
    """
    n_query, n_keys = seen.shape[1:]
    yield n_keys
    past = int((_last_seen(seen) - torch.arange(n_query, device=seen.device)).max()) if seen.numel() else 0
    if n_query + max(0, past) < n_keys:
        yield n_query + max(0, past)


def _last_seen(seen: Tensor) -> Tensor:
    """`[B, Nq]` the last key that each query sees, -1 where it sees none."""
    rows = seen.split(_ROWS_AT_ONCE, dim=1)
    back = torch.cat([part.flip(2).to(torch.uint8).argmax(dim=2) for part in rows], dim=1)
    return torch.where(seen.any(dim=2), seen.shape[2] - 1 - back, -1)


def _same(form: MaskForm, seen: Tensor) -> bool:
    n_query = seen.shape[1]
    if form.n_keys < seen.shape[2] and bool(seen[:, :, form.n_keys :].any()):
        return False
    if form.starts is not None and not _contiguous(form.starts):
        return False
    for first in range(0, n_query, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, n_query)
        rows = seen[:, first:last, : form.n_keys]
        if not torch.equal(rebuild(form, first, last, n_query, seen.device).expand_as(rows), rows):
            return False
    return True


def _in_blocks(reach: Tensor, own: Tensor) -> bool:
    """Most queries see no later key, and those that do see to the end of their block: reaches never go back."""
    ahead = reach > own
    return bool((reach.diff(dim=1) >= 0).all()) and not bool(ahead.all())


def _contiguous(starts: Tensor) -> bool:
    """Segments follow one another: a segment's first row starts at itself, and starts never go back."""
    ordered = starts.diff(dim=1) >= 0
    return bool(ordered.all()) and torch.equal(starts.gather(1, starts), starts)


def _unless_all(valid: Tensor) -> Tensor | None:
    return None if bool(valid.all()) else valid


def _check_shape(mask: Tensor, n_query: int, n_keys: int) -> None:
    fits = mask.ndim in (2, 4) and mask.shape[-1] == n_keys
    if mask.ndim == 4:
        fits = fits and mask.shape[2] in (1, n_query)
    if not fits:
        raise ValueError(
            f"attention_mask must end in {(n_query, n_keys)} [queries, keys] or be [batch, {n_keys}], "
            f"got {tuple(mask.shape)}"
        )


# Attention under a mask's structure: exactly, or pre-scored.

_LEAST_WINDOW_BLOCK = 256


def prescored_under_mask(query: Tensor, key: Tensor, value: Tensor, form: MaskForm, request: Request) -> Result:
    """Pre-scored attention under a causal, full or packed mask; `Unsupported` under any other.

    Queries that see on to the end of a block, such as an image, are exact; all others are as under a causal mask.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        form: What each query may see.
        request: How to attend.
    """
    reasons = inexpressible(form)
    if reasons:
        raise Unsupported("pre-scored attention", reasons)
    key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
    if form.kind == "packed":
        return _per_segment(query, key, value, form, request)
    if form.reach is not None:
        return _looking_ahead(query, key, value, form, form.reach, request)
    options = Options(
        is_causal=form.kind == "causal",
        key_padding_mask=form.valid,
        scale=request.scale,
        generator=request.seed,
        dropout_p=request.dropout,
        dropout_generator=dropout_seed() if request.dropout else None,
    )
    return attend(query, key, value, request.config, options)


def inexpressible(form: MaskForm) -> list[str]:
    """Reasons why pre-scored attention cannot follow a mask; empty = it can."""
    if form.kind == "other":
        return ["the attention mask is neither causal, full, packed nor a sliding window beside padding"]
    return []


def exact_under_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: MaskForm,
    *,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Exact attention under any mask; work and memory follow the structure where there is one."""
    key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
    if form.kind == "window":
        return _windowed(query, key, value, form, scale, dropout)
    plain = form.kind in ("causal", "full")
    if (form.kind == "full" or query.shape[2] == 1) and (form.valid is None or bool(form.valid.all())):
        # every query sees all keys: nothing to check or to copy, a step must cost no more than reading them
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    if plain and dropout == 0.0:
        options = Options(is_causal=form.kind == "causal", key_padding_mask=form.valid, scale=scale)
        return attend(query, key, value, Exact(), options).output
    mask = full_mask(form, query.shape[2], query.device)
    return _sdpa(query, key, value, mask, scale, dropout)


def visible_keys_under_mask(form: MaskForm, n_query: int) -> float | None:
    """Real keys that a real query may see, on average; None under a mask that is neither full nor causal."""
    if form.kind not in ("full", "causal"):
        return None
    causal = form.kind == "causal"
    if form.valid is None:
        return form.n_keys - ((n_query - 1) / 2 if causal else 0.0)
    seen = form.valid.cumsum(1)
    seen = seen[:, form.n_keys - n_query :] if causal else seen[:, -1:].expand(-1, n_query)
    # with as many queries as keys, padded queries are those of padded keys
    real = form.valid if n_query == form.n_keys else torch.ones_like(seen, dtype=torch.bool)
    return float(seen[real].double().mean()) if bool(real.any()) else 0.0


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, form: MaskForm, scale: float | None, dropout: float
) -> Tensor:
    """A sliding window, one block of queries at a time against the keys its windows reach."""
    n_query, window = query.shape[2], form.window or form.n_keys
    past = form.n_keys - n_query
    size = max(window, _LEAST_WINDOW_BLOCK)
    outputs = []
    for first in range(0, n_query, size):
        last = min(first + size, n_query)
        low, high = max(0, past + first - window + 1), past + last
        mask = rebuild(form, first, last, n_query, query.device)[:, None, :, low:high]
        keys, values = key[:, :, low:high], value[:, :, low:high]
        outputs.append(_sdpa(query[:, :, first:last], keys, values, mask, scale, dropout))
    return torch.cat(outputs, dim=2)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # masked grouped-query attention has no fused kernel: repeat what is at hand, a block at most
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )


def _per_segment(query: Tensor, key: Tensor, value: Tensor, form: MaskForm, request: Request) -> Result:
    """Packed sequences become a right-padded batch of sequences, and come back."""
    rows, valid = _segment_rows(form)

    def apart(tensor: Tensor) -> Tensor:  # [B, H, N, D] -> [segments, H, longest, D]
        return tensor.transpose(1, 2).flatten(0, 1)[rows].transpose(1, 2)

    alone = MaskForm("causal", rows.shape[1], valid=None if bool(valid.all()) else valid)
    attended = prescored_under_mask(apart(query), apart(key), apart(value), alone, request)
    output = attended.output.transpose(1, 2)[valid]
    batch, n_heads, n_query, _ = query.shape
    back = output.new_zeros(batch * n_query, n_heads, value.shape[-1])
    back = back.index_put((rows[valid],), output)
    return replace(attended, output=back.view(batch, n_query, n_heads, -1).transpose(1, 2))


def _looking_ahead(
    query: Tensor, key: Tensor, value: Tensor, form: MaskForm, reach: Tensor, request: Request
) -> Result:
    """Causal attention, and exact attention in the rows of queries that see later keys."""
    n_query = query.shape[2]
    causal = prescored_under_mask(query, key, value, replace(form, kind="causal", reach=None), request)
    ahead = reach > torch.arange(form.n_keys - n_query, form.n_keys, device=query.device)
    output = causal.output
    for first in range(0, n_query, _LEAST_WINDOW_BLOCK):
        own = ahead[:, first : first + _LEAST_WINDOW_BLOCK]
        some = own.any(0).nonzero().squeeze(1) + first
        if not len(some):
            continue
        mask = rebuild(form, first, first + own.shape[1], n_query, query.device)[:, None, some - first]
        exact = _sdpa(query[:, :, some], key, value, mask, request.scale, request.dropout)
        chosen = torch.where(ahead[:, None, some, None], exact, output[:, :, some])
        output = output.index_copy(2, some, chosen)
    return replace(causal, output=output)


def _segment_rows(form: MaskForm) -> tuple[Tensor, Tensor]:
    """`[segments, longest]` flat positions of each segment's real tokens, and which of them are not filler."""
    if form.starts is None:
        raise ValueError(f"form must be packed, got {form.kind!r}")
    batch, length = form.starts.shape
    offset = torch.arange(batch, device=form.starts.device)[:, None] * length
    segment = (form.starts + offset).flatten()
    positions = torch.arange(batch * length, device=segment.device)
    if form.valid is not None:
        positions = positions[form.valid.flatten()]
        segment = segment[form.valid.flatten()]
    _, number, counts = torch.unique_consecutive(segment, return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(positions), device=segment.device) - first[number]
    longest = int(counts.max()) if len(counts) else 0
    rows = positions.new_zeros(len(counts), longest)
    valid = torch.zeros_like(rows, dtype=torch.bool)
    rows[number, place] = positions
    valid[number, place] = True
    return rows, valid


# Where a model's attention dropout comes from.
#
# The one exception to "no global seed is read": users expect `torch.manual_seed` to reproduce a training run, and
# gradient checkpointing restores torch's generator, and no other, before it computes a layer again. So with
# dropout,
# and only then, a call draws one number from it.

_SEEDS = 2**62


def dropout_seed() -> int:
    """The seed of one call's dropout, drawn from torch's own generator."""
    return int(torch.randint(_SEEDS, (), dtype=torch.int64, device="cpu"))
