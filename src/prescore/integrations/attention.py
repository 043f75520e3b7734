"""The function that replaces a layer's attention: of queries, keys, values and the layer's context.

The adapter of each library calls an `Attend` for every replaced layer. `prescore.apply` installs
`PrescoredAttention`; observers, timers and studies install their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeAlias

from torch import Tensor

from prescore import checks
from prescore.call import Options
from prescore.config import Config, Exact, Selected, check_config
from prescore.errors import Unsupported
from prescore.integrations.audit import measure_errors
from prescore.integrations.decode import NO_INDEX, PROMPT, CachedKeys, ExternalCache, LayerCache, warn_once
from prescore.integrations.masks import NO_STRUCTURE, MaskForm, exact_under_mask, prescored_under_mask, read_mask
from prescore.integrations.report import READS_ALL, CallTrace, Counts, Errors, Trace, what_ran
from prescore.rng import Streams, as_streams
from prescore.types import Reads, Result

ON_UNSUPPORTED = ("raise", "exact")


@dataclass(frozen=True, eq=False)
class AttentionContext:
    """What a layer's call says in addition to its queries, keys and values.

    Attributes:
        layer: The layer's number.
        n_prefix: Tokens before the image patches.
        scale: Factor of the logits; None = `D ** -0.5`.
        mask: The model's mask, as `read_mask` takes it.
        is_causal: Whether the layer asks for causal attention.
        dropout: Probability of dropping an attention weight, 0 outside training.
        owner: The layer's name in messages, such as `LlamaAttention`.
        obstacles: What the layer asks for that pre-scored attention cannot do, a sentence each.
        is_local: Whether the layer is local by design (a sliding window).
        cache: The cache of this layer, where it is one of ours.
        no_index: Why steps find no key index, where `cache` is None.
        original: The model's attention, where nothing else supports all that the layer asks for.
        first_head: The number of the first KV head, where other ranks have the heads before it.
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
    cache: LayerCache | None = None
    no_index: str = NO_INDEX
    original: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    first_head: int = 0

    def form(self, query: Tensor, key: Tensor) -> MaskForm:
        """The structure of the mask, for every sequence of the batch."""
        n_keys = key.shape[2] if self.cache is None else self.cache.n_tokens
        sizes = {"n_query": query.shape[2], "n_keys": n_keys}
        form = read_mask(self.mask, **sizes, is_causal=self.is_causal, layer=self.layer)
        return form.for_batch(query.shape[0])


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor]
"""`query [B, Hq, Nq, D]`, `key [B, Hkv, Nk, D]`, `value [B, Hkv, Nk, Dv]`, context -> `[B, Hq, Nq, Dv]`."""


def original_attention(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
    """The attention that the layer would run by itself."""
    return _original(query, key, value, context, None)


def _original(
    query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, form: MaskForm | None
) -> Tensor:
    if context.cache is not None:
        context.cache.require_all_keys()
        key, value = context.cache.all_keys(key, value)
    if context.original is not None:
        return context.original(query, key, value)
    form = form or context.form(query, key)
    return exact_under_mask(query, key, value, form, scale=context.scale, dropout=context.dropout)


class PrescoredAttention:
    """Attention of one layer as `prescore.apply` installs it: prompts, decode steps, refusals.

    Args:
        config: How to attend; None = the default.
        on_unsupported: What cannot be honoured raises, or runs exactly (`exact`) with one warning.
        protect_prefix: Always read the tokens before the image patches; False is for comparison only.
        seed: Each layer draws from its own stream of this seed, so that layers do not lose the same keys. One seed
            for each sequence of the batch gives each its own draws.
        warned: Warnings already given; layers that share the set warn once. With a set, also warn if the
            configuration is exact at the model's fixed input length.
        audit: Share of the queries whose error is measured, see `prescore.apply`; None = none.
        backend: As in `prescored_attention`.

    Attributes:
        last: What the last call did; None before the first, and while a call runs.
        trace: What the calls since the last prompt began did.
    """

    def __init__(
        self,
        config: Config | None = None,
        on_unsupported: str = "raise",
        *,
        protect_prefix: bool = True,
        seed: int | Sequence[int] = 0,
        warned: set[str] | None = None,
        audit: float | None = None,
        backend: str = "auto",
    ) -> None:
        checks.one_of("on_unsupported", on_unsupported, ON_UNSUPPORTED)
        self.config = check_config(config)
        self.on_unsupported = on_unsupported
        self.protect_prefix = protect_prefix
        self.backend = backend
        self.seed = seed
        self.last: CallTrace | None = None
        self.trace = Trace()
        self._audit, self._n_audits = audit, 0
        self._warns_if_idle = warned is not None
        self._warned = set() if warned is None else warned
        self._external = ExternalCache()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Attend; see `Attend`."""
        begin = time.perf_counter()
        n_query = query.shape[2]
        self.last = None
        self.trace.begin(n_query)
        form = context.form(query, key)
        result: Result | None = None
        reason = self._why_exact(form, context)
        if reason is not None:
            path = ran = reason
            output = _original(query, key, value, context, form)
        else:
            config = self.with_prefix(context.n_prefix, form.fewest_keys()) if context.n_prefix else self.config
            streams = replace(layer_streams(self.seed, context.layer), first_head=context.first_head)
            options = Options(
                scale=context.scale, dropout_p=context.dropout, generator=streams, backend=self.backend
            )
            key, value = key[:, :, : form.n_keys], value[:, :, : form.n_keys]
            in_order = n_query == 1 or form.kind == "causal"
            keys = CachedKeys(key, value, form.valid, form.n_keys, in_order)
            if context.cache is None:
                path, result, why_exact = self._external.step(query, keys, config, options, context.no_index)
            else:
                path, result, why_exact = context.cache.step(query, keys, config, options)
            if path == PROMPT:
                index = None if context.cache is None else context.cache.prompt_index(keys, config, options)
                result = prescored_under_mask(query, key, value, form, config, options._replace(key_index=index))
            if result is None:
                key, value = (key, value) if context.cache is None else context.cache.all_keys(key, value)
                output = exact_under_mask(query, key, value, form, scale=context.scale, dropout=context.dropout)
            else:
                output, why_exact = result.output, result.why_exact
            ran = what_ran(self.config, why_exact)
            self._warn_if_idle(ran, form, context)
        seconds = time.perf_counter() - begin
        count_reads, stats = (None, {}) if result is None else (result.count_reads, result.stats)
        counter = partial(_count, form, n_query, count_reads)
        if self._audit is not None and context.cache is not None:
            key, value = context.cache.all_keys(key, value)
        errors = Errors() if self._audit is None else self._errors(query, key, value, output, form, context)
        self.last = CallTrace(path, ran, form.kind, n_query, form.n_keys, seconds, counter, stats, errors)
        self.trace.add(self.last)
        return output

    def with_prefix(self, n_prefix: int, n_keys: int) -> Config:
        """The configuration whose sinks hold the prefix tokens, and whose budget has room for them.

        Args:
            n_prefix: Tokens before the image patches.
            n_keys: Real keys of a sequence, of the shortest one where they differ: `top_k` may be a share of them.
        """
        config = self.config
        if not self.protect_prefix or not n_prefix or isinstance(config, Exact):
            return config
        if isinstance(config, Selected) and config.top_k is not None:
            # sinks are inside the budget, and cut to it
            share = n_prefix / max(n_prefix, n_keys)
            needed = share if isinstance(config.top_k, float) else n_prefix
            config = config.replace(top_k=max(config.top_k, needed))
        return config.replace(sinks=max(config.sinks, n_prefix))

    def __repr__(self) -> str:
        return f"PrescoredAttention({self.config!r}, {self.on_unsupported!r})"

    def _why_exact(self, form: MaskForm, context: AttentionContext) -> str | None:
        """Why a call is exact, or None; raises where the user wants pre-scored attention and it cannot run."""
        if isinstance(self.config, Exact):
            return "exact"
        if form.kind == "window" or context.is_local:
            return f"{READS_ALL}a sliding window or chunk is local already"
        reasons = [*context.obstacles, *([NO_STRUCTURE] if form.kind == "other" else [])]
        if not reasons:
            return None
        self.refuse_or_warn(context.layer, context.owner, reasons)
        return f"{READS_ALL}unsupported because {'; '.join(reasons)}"

    def refuse_or_warn(self, layer: int, owner: str, reasons: Sequence[str]) -> None:
        """Where a layer asks for what pre-scored attention cannot do: raise, or warn that it runs exactly."""
        if isinstance(self.config, Exact):
            return
        if self.on_unsupported == "raise":
            raise refusal(layer, owner, reasons)
        warn_once(f"pre-scored attention in {owner} runs exactly: {'; '.join(reasons)}", self._warned)

    def _errors(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, form: MaskForm, context: AttentionContext
    ) -> Errors:
        """Errors of a random sample of the queries.

        Not audited are calls with dropout, calls that the model's own attention answered, masks of unknown
        structure (exact attention runs there), and steps whose keys were evicted.
        """
        is_own = context.original is not None and bool(context.obstacles)
        if self._audit is None or context.dropout or is_own or form.kind == "other" or key.shape[2] < form.n_keys:
            return Errors()
        self._n_audits += 1
        seed = layer_streams(self.seed, context.layer).child(f"call {self._n_audits}").seed
        share, scale = self._audit, context.scale
        return measure_errors(query, key, value, output, form, scale=scale, share=share, seed=seed)

    def _warn_if_idle(self, ran: str, form: MaskForm, context: AttentionContext) -> None:
        """Warn once where the configuration cannot act; not in causal layers, whose length varies."""
        if self._warns_if_idle and ran.startswith(READS_ALL) and form.kind == "full" and not context.is_causal:
            warn_once(f"{type(self.config).__name__} changes nothing at {form.n_keys} tokens: {ran}", self._warned)


def refusal(layer: int, owner: str, reasons: Sequence[str]) -> Unsupported:
    """Why pre-scored attention cannot run in a layer, and the cure."""
    what = f"pre-scored attention in layer {layer} ({owner})"
    return Unsupported(what, [*reasons, 'on_unsupported="exact" would run such layers exactly'])


def layer_streams(seed: int | Sequence[int], layer: int) -> Streams:
    """The streams of one layer, of one seed for all sequences or of one for each."""
    if isinstance(seed, int):
        return Streams(layer_seed(seed, layer))
    return as_streams([layer_seed(one, layer) for one in seed], batch=len(seed))


@lru_cache(maxsize=4096)  # of every step of every layer
def layer_seed(seed: int, layer: int) -> int:
    """The seed of one layer."""
    return Streams(seed).child(f"layer {layer}").seed


def _count(form: MaskForm, n_query: int, count_reads: Callable[[], Reads] | None) -> Counts:
    """What a query read and what it could see; without a count, it read all that it could see."""
    visible = form.visible_keys(n_query)
    if count_reads is not None:
        return count_reads(), visible
    return None if visible is None else Reads(visible), visible
