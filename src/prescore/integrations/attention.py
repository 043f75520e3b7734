"""What stands in the place of a layer's attention: any function of queries, keys, values and the context.

Whatever the library a model is from, its adapter calls an `Attend` for every layer that was replaced.
`PrescoredAttention` is the one that `prescore.apply` puts there; observers, timers and studies put their own.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from prescore import checks
from prescore.autograd import records_gradients
from prescore.config import Config, Exact, Routed, Selected, check_config
from prescore.errors import Unsupported
from prescore.integrations.decode import PROMPT, CachedKeys, ExternalCache, LayerCache, Request
from prescore.integrations.masks import (
    MaskForm,
    exact_under_mask,
    inexpressible,
    padded_both_ways,
    prescored_under_mask,
    read_mask,
    visible_keys_under_mask,
)
from prescore.integrations.report import SHORT, CallTrace, CountRows, Trace, words_for_prompt, words_for_step
from prescore.rng import Streams

ON_UNSUPPORTED = ("raise", "exact")
BARS = ("error_estimate", "error_bound_max", "refined", "read_all")
"""Figures of a call with a tolerance that a report shows."""


class OwnedKeys(LayerCache, Protocol):
    """The layer of a cache of ours that keys came out of."""

    @property
    def n_seen(self) -> int:
        """Tokens so far, those evicted included."""

    def used_exactly(self) -> None:
        """Called when attention reads the keys as they are; refuses when some are gone."""


@dataclass(frozen=True, eq=False)
class AttentionContext:
    """What a layer knows beside its queries, keys and values.

    Attributes:
        layer: The layer's number.
        n_prefix: Tokens at the front that are no patches.
        scale: Factor of the logits; None = `D ** -0.5`.
        mask: The model's own mask, as `read_mask` takes it.
        is_causal: Whether the layer asked for causal attention.
        dropout: Probability of dropping an attention weight, 0 outside training.
        owner: What the layer is called in messages, such as `LlamaAttention`.
        obstacles: What the layer asks for that pre-scored attention cannot do, a sentence each.
        is_local: Whether the layer is local by design (a sliding window).
        cache: The cache layer that remembers for it; None when the keys came from elsewhere.
        own: The model's own attention, where nothing else knows all it asks for.
    """

    layer: int
    n_prefix: int = 0
    scale: float | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    dropout: float = 0.0
    owner: str = "attention"
    obstacles: tuple[str, ...] = ()
    is_local: bool = False
    cache: OwnedKeys | None = None
    own: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def form(self, query: Tensor, key: Tensor) -> MaskForm:
        """What each query may see, for every sequence of the batch."""
        n_keys = key.shape[2] if self.cache is None else self.cache.n_seen
        form = read_mask(self.mask, n_query=query.shape[2], n_keys=n_keys, is_causal=self.is_causal)
        return form.for_batch(query.shape[0])


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor]
"""`query [B, Hq, Nq, D]`, `key [B, Hkv, Nk, D]`, `value [B, Hkv, Nk, Dv]`, context -> `[B, Hq, Nq, Dv]`."""


def attend_exactly(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
    """The attention the layer would have run by itself."""
    if context.cache is not None:
        context.cache.used_exactly()
    if context.own is not None:
        return context.own(query, key, value)
    form = context.form(query, key)
    return exact_under_mask(query, key, value, form, scale=context.scale, dropout=context.dropout)


class PrescoredAttention:
    """Attention of one layer as users get it: prompts, decode steps, refusals.

    Args:
        config: How to attend; None = the default.
        on_unsupported: What cannot be honoured raises, or runs exactly (`exact`), which is said once.
        protect_prefix: Always keep the tokens before the patches; False is for comparison only.
        seed: Every layer draws from a stream of its own, made from this: the same keys drawn everywhere would
            lose the same keys everywhere.
        told: Warnings that were given already; layers that share it warn once together, also of a setting that
            cannot act at the length of a model's inputs.

    Attributes:
        last: What the last call did; None before the first, and while a call runs.
        history: What the calls since the last prompt began did.
    """

    def __init__(
        self,
        config: Config | None = None,
        on_unsupported: str = "raise",
        *,
        protect_prefix: bool = True,
        seed: int = 0,
        told: set[str] | None = None,
    ) -> None:
        checks.one_of("on_unsupported", on_unsupported, ON_UNSUPPORTED)
        self.config = check_config(config)
        self.on_unsupported = on_unsupported
        self.protect_prefix = protect_prefix
        self.seed = seed
        self.last: CallTrace | None = None
        self.history = Trace()
        self._announces = told is not None
        self._told = set() if told is None else told
        self._memory = _Memory()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Attend; see `Attend`."""
        begin = time.perf_counter()
        self.last = None  # and what it kept for counting
        n_query = query.shape[2]
        self.history.begin(n_query)
        form = _without_blind_padding(context.form(query, key)).for_batch(query.shape[0])
        rows: CountRows | float | None
        figures: Mapping[str, Any] = {}
        visible = _all_in_sight(form, n_query)
        exactly = self._why_exact(form, context, (query, key, value))
        if exactly is not None:
            output = attend_exactly(query, key, value, context)
            path, rows, ran = exactly, visible, exactly
        else:
            path, output, rows, figures = self._attend(query, key, value, form, context)
            ran = self._words(path, n_query, form, context)
        seconds = time.perf_counter() - begin
        bars = (figures.get(name) for name in BARS)
        told = *bars, figures.get("native")
        self.last = CallTrace(path, form.kind, n_query, form.n_keys, seconds, rows, visible, ran, *told)
        self.history.add(self.last)
        return output

    def for_prefix(self, n_prefix: int, n_keys: int) -> Config:
        """The configuration with room for the prefix tokens among the sinks, and for those in the budget.

        Args:
            n_prefix: Tokens before the patches.
            n_keys: Real keys of a sequence, of the shortest one where they differ: what a share is of.
        """
        config = self.config
        if not self.protect_prefix or not n_prefix or isinstance(config, Exact):
            return config
        if isinstance(config, Selected) and config.min_score is None:
            # sinks are kept inside the budget, and cut to it
            share = n_prefix / max(n_prefix, n_keys)
            least = share if isinstance(config.budget, float) else n_prefix
            config = config.replace(top_k=max(config.budget, least))
        return config.replace(sinks=max(config.sinks, n_prefix))

    def __repr__(self) -> str:
        return f"PrescoredAttention({self.config!r}, {self.on_unsupported!r})"

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, form: MaskForm, context: AttentionContext
    ) -> tuple[str, Tensor, CountRows | float | None, Mapping[str, Any]]:
        """The path, the output, the rows or what counts them, and figures at hand."""
        seed = layer_seed(self.seed, context.layer)
        config = self.config
        if context.n_prefix:
            config = self.for_prefix(context.n_prefix, form.fewest_keys())
        request = Request(config, context.scale, context.dropout, seed)
        layer_cache: LayerCache = self._memory.follower if context.cache is None else context.cache
        in_order = query.shape[2] == 1 or form.kind == "causal"
        shown = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
        step = layer_cache.step(query, CachedKeys(*shown, form.valid, form.n_keys, in_order), request)
        if step.output is not None:
            return step.path, step.output, step.count_keys, step.figures
        if step.path == PROMPT:
            attended = prescored_under_mask(query, *shown, form, request)
            count = attended.count_reads
            # the routed engine has counted already, and its function would keep the output alive
            rows = sum(count()) if isinstance(config, Routed) else lambda: sum(count())
            return step.path, attended.output, rows, attended.stats
        output = exact_under_mask(query, *shown, form, scale=request.scale, dropout=request.dropout)
        return step.path, output, _all_in_sight(form, query.shape[2]), {}

    def _words(self, path: str, n_query: int, form: MaskForm, context: AttentionContext) -> str:
        """What ran, for the report; where inputs of one length only can come, an idle setting is said once."""
        if path != PROMPT:
            return words_for_step(self.config, path, form.n_keys)
        is_causal = form.kind != "full"
        words = words_for_prompt(self.config, n_query, form.n_keys, is_causal=is_causal)
        # a causal layer may get more tokens at once; one token alone has no mask that says so
        if words.startswith(SHORT) and not is_causal and not context.is_causal and self._announces:
            self._warn(f"{type(self.config).__name__} changes nothing at {form.n_keys} tokens: {words}")
        return words

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=4)

    def _why_exact(
        self, form: MaskForm, context: AttentionContext, tensors: tuple[Tensor, Tensor, Tensor]
    ) -> str | None:
        """Why a call is exact, or None; raises when it should not be and must."""
        if isinstance(self.config, Exact):
            return "exact"
        if form.kind == "window" or context.is_local:
            return "exact: a sliding window is local already"
        reasons = [*context.obstacles, *inexpressible(form)]
        if isinstance(self.config, Routed) and self.config.tolerance is not None and records_gradients(*tensors):
            reasons.append("a tolerance has no gradients, which are recorded here and not in torch.no_grad()")
        if not reasons:
            return None
        if self.on_unsupported == "raise":
            what = f"pre-scored attention in layer {context.layer} ({context.owner})"
            raise Unsupported(what, [*reasons, 'on_unsupported="exact" would run such layers exactly'])
        text = f"pre-scored attention in {context.owner} runs exactly: {'; '.join(reasons)}"
        self._warn(text)
        return f"exact: unsupported because {'; '.join(reasons)}"


def layer_seed(seed: int, layer: int) -> int:
    """A seed of its own for every layer."""
    return Streams(seed).child(f"layer {layer}").seed


class _Memory(threading.local):
    """What follows keys that come from a foreign cache: one generation at a time, hence one per thread."""

    def __init__(self) -> None:
        self.follower = ExternalCache()

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        return _Memory, ()  # a copy of a model begins without memories


def _all_in_sight(form: MaskForm, n_query: int) -> CountRows | None:
    """What counts the keys that queries may see; None where only the mask itself would tell."""
    return partial(visible_keys_under_mask, form, n_query) if form.kind in ("full", "causal") else None


def _without_blind_padding(form: MaskForm) -> MaskForm:
    """A mask that also blinds padded queries is padding: nobody reads what those queries see."""
    if form.kind != "other" or form.mask is None or form.mask.dtype != torch.bool:
        return form
    valid = padded_both_ways(form.mask)
    return form if valid is None else MaskForm("full", form.n_keys, valid=valid)
