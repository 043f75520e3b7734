"""Context parallel: a language model of transformers whose sequences lie on several ranks.

Each rank runs the model on its shard. Everything but attention works on single positions, so a rank needs to know
only where its shard begins, and attention needs the group. A forward without a cache reads a prompt. A forward
with one makes a step: its new tokens are the same on all ranks, and the last rank keeps their keys.
"""

from __future__ import annotations

import inspect
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from prescore import checks
from prescore.attention import Options, attend
from prescore.config import Config, Exact, check_config
from prescore.errors import Unsupported
from prescore.integrations.attention import AttentionContext, layer_seed
from prescore.integrations.decode import PROMPT
from prescore.integrations.patch import Undo
from prescore.integrations.report import CallTrace, Trace, what_ran
from prescore.parallel.comm import Group, agree, as_group
from prescore.parallel.entry import attend_step
from prescore.types import Values

STEP_OF_ALL = "step over the keys of all ranks"


class ContextParallel:
    """What the layers of a model on several ranks share: the group, and facts about the running forward.

    Attributes:
        group: The ranks.
        n_before: Tokens before this forward, on all ranks; 0 = it reads a prompt.
        valid: `[B, n]`, True = a real key of this rank; None = no rank has padding.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.n_before = 0
        self.valid: Tensor | None = None
        self._depth = 0

    def attach(self, modules: Sequence[nn.Module]) -> Undo:
        """Let every forward of some models of transformers begin where its shard does; returns the undo."""
        for module in modules:
            if "position_ids" not in inspect.signature(module.forward).parameters:
                reason = "its forward takes no position_ids, so that a shard cannot say where it begins"
                raise Unsupported(f"apply with a mesh on {type(module).__name__}", [reason])
        with ExitStack() as undo:
            for module in modules:
                undo.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(self._after, always_call=True).remove)
            return undo.pop_all().close

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Values
    ) -> tuple[tuple[Any, ...], Values] | None:
        """Agree with the other ranks, then fill in positions and cache."""
        self._depth += 1
        if self._depth > 1:
            return None  # a forward inside another has nothing to agree on
        names = list(inspect.signature(module.forward).parameters)
        given: Values = {**dict(zip(names, args, strict=False)), **kwargs}
        embeddings, mask = given.get("inputs_embeds"), given.get("attention_mask")
        tokens: Tensor = given["input_ids"] if embeddings is None else embeddings
        cache: Cache | None = given.get("past_key_values")
        self._agree(tokens, mask, cache)
        config: Any = module.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        if given.get("position_ids") is None:
            n_tokens = tokens.shape[1]
            first = self.n_before or self.group.rank * n_tokens
            positions = torch.arange(first, first + n_tokens, dtype=torch.int64, device=tokens.device)
            given["position_ids"] = positions[None]
        use_cache = given.get("use_cache")
        use_cache = getattr(config, "use_cache", False) if use_cache is None else use_cache
        if cache is None and use_cache and not module.training and "past_key_values" in names:
            cache = given["past_key_values"] = ShardCache(config, self.group)
        if isinstance(cache, ShardCache):
            if self.n_before:
                if cache.valid is not None and self.group.rank == self.group.size - 1:
                    cache.valid = torch.nn.functional.pad(cache.valid, (0, tokens.shape[1]), value=True)
                self.valid = cache.valid
                given["attention_mask"] = None  # padding is known from the prompt
            else:
                cache.valid = self.valid
        return (), given

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After a forward, also one that raised."""
        self._depth -= 1

    def _agree(self, tokens: Tensor, mask: Tensor | None, cache: Cache | None) -> None:
        """Make sure that all ranks run the same forward, each on its shard; a refusal of one is raised by all.

        Args:
            tokens: `[B, n]` token numbers, or `[B, n, C]` embeddings.
            mask: `[B, n]`, 1 = a real token; None = all are.
            cache: The cache; None = the forward reads a prompt.
        """
        shape = tuple(tokens.shape[:2])
        refusal: ValueError | None = None
        self.n_before = cache.n_tokens if isinstance(cache, ShardCache) else 0
        if cache is not None and not isinstance(cache, ShardCache):
            name = type(cache).__name__
            refusal = Unsupported(f"a cache of type {name} on several ranks", ["it holds full sequences"])
        elif mask is not None and (mask.ndim != 2 or (not self.n_before and mask.shape != shape)):
            refusal = ValueError(
                f"attention_mask must have the shape {shape} of this rank's tokens, got {tuple(mask.shape)}"
            )
        checksum = None  # steps have the same tokens on all ranks, prompts do not
        if self.n_before:
            checksum = zlib.crc32(tokens.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        facts = {"input_ids shape": list(tokens.shape), "tokens so far": self.n_before, "new tokens": checksum}
        agree(self.group, facts, refusal)
        if self.n_before:
            return
        padded = mask is not None and not bool(mask.bool().all())
        flag = torch.tensor([padded], dtype=torch.uint8, device=self.group.device)
        self.valid = None
        if bool(self.group.gather(flag).any()):
            real = torch.ones(shape, dtype=torch.bool, device=tokens.device)
            self.valid = real if mask is None else mask.bool()


class ContextParallelAttention:
    """Attention of one layer on several ranks; see `prescore.integrations.attention.Attend`.

    Args:
        config: How to attend; None = the default.
        parallel: What the layers share.
        seed: As of `PrescoredAttention`.

    Attributes:
        last: What the last call did, on this rank; None before the first.
        trace: What the calls since the last prompt began did.
    """

    def __init__(self, config: Config | None, parallel: ContextParallel, *, seed: int = 0) -> None:
        self.config = check_config(config)
        self.parallel = parallel
        self.seed = seed
        self.last: CallTrace | None = None
        self.trace = Trace()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Attend to the keys of all ranks; what one rank alone cannot run is refused by all."""
        begin = time.perf_counter()
        self.last = None
        parallel, n_query, scale = self.parallel, query.shape[2], context.scale
        group, valid, n_ranks = parallel.group, parallel.valid, parallel.group.size
        self.trace.begin(n_query)
        kind = "causal" if context.is_causal else "full"
        if parallel.n_before:
            output = attend_step(group, query, key, value, valid=valid, scale=scale).output
            seconds = time.perf_counter() - begin
            call = CallTrace(STEP_OF_ALL, STEP_OF_ALL, kind, n_query, parallel.n_before + n_query, seconds)
        else:
            seed, refusal = layer_seed(self.seed, context.layer), self._refusal(query, key, context)
            options = Options(context.is_causal, valid, scale, seed, dropout_p=context.dropout, group=group)
            result = attend(query, key, value, self.config, options, refusal=refusal)
            output, seconds, n_keys = result.output, time.perf_counter() - begin, key.shape[2] * n_ranks
            name = "exact" if isinstance(self.config, Exact) else PROMPT
            ran = what_ran(self.config, result.why_exact)
            path, ran = f"{name} on {n_ranks} ranks", f"{ran} on {n_ranks} ranks"
            count, stats = result.count_reads, result.stats
            call = CallTrace(path, ran, kind, n_keys, n_keys, seconds, lambda: (count(), None), stats)
        self.last = call
        self.trace.add(call)
        return output

    def _refusal(self, query: Tensor, key: Tensor, context: AttentionContext) -> ValueError | None:
        """Why ranks cannot do what a layer asks for."""
        reasons = list(context.obstacles)
        if context.is_local:
            reasons.append("it has a sliding window, which reaches into other ranks' shards")
        if query.shape[2] != key.shape[2]:
            reasons.append(f"it has {query.shape[2]} queries for {key.shape[2]} keys that no cache of ours holds")
        else:
            try:
                kind = context.form(query, key).kind
            except ValueError as error:
                return error
            if kind not in ("causal", "full"):
                rule = "the attention mask must be causal or full apart from padding on every rank"
                reasons.append(f"{rule}, got {kind}")
        what = f"attention on several ranks in layer {context.layer} ({context.owner})"
        return Unsupported(what, reasons) if reasons else None


class ShardLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """This rank's keys and values of one layer; the last rank alone keeps those of tokens after the prompt.

    Attributes:
        n_tokens: Tokens so far, on all ranks.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.group = group
        self.n_tokens = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take a shard of the prompt, or further tokens; returns what this rank holds."""
        is_step, n_new = self.n_tokens > 0, key_states.shape[2]
        self.n_tokens += n_new if is_step else n_new * self.group.size
        if not is_step or self.group.rank == self.group.size - 1:
            super().update(key_states, value_states)
        if self.keys is None or self.values is None:
            raise Unsupported("a cache of shards", ["a step came before any prompt"])
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: the tokens to forget may lie on another rank."""
        raise Unsupported("a crop of a cache of shards", ["the tokens to forget may lie on another rank"])


class ShardCache(DynamicCache):
    """A cache of which every rank holds a shard; `prescore.apply(model, mesh=...)` makes it by itself.

    Attributes:
        valid: `[B, n]`, True = a real key of this rank; None = no rank has padding.
    """

    def __init__(self, config: Any, group: Group) -> None:
        super().__init__(config=config)
        self.layers = [ShardLayer(group) for _ in self.layers]
        self.valid: Tensor | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens so far, on all ranks."""
        layer: Any = self.layers[0] if self.layers else None
        return 0 if layer is None else int(layer.n_tokens)


@torch.no_grad()
def generate_context_parallel(
    model: nn.Module, input_ids: Tensor, mesh: object, *, max_new_tokens: int, eos_token_id: int | None = None
) -> Tensor:
    """Greedy generation from a prompt that lies on several ranks; `model` must be applied with the same mesh.

    Args:
        model: A causal model of transformers inside `prescore.apply(model, ..., mesh=mesh)`.
        input_ids: `[B, n]`, this rank's shard of the prompt, without padding.
        mesh: The mesh or process group that the model was applied with.
        max_new_tokens: Tokens at most.
        eos_token_id: Stop when every sequence has ended, and fill ended ones with it; None = never.

    Returns:
        `[B, new tokens]`, the same on every rank.
    """
    group = as_group(mesh, "mesh")
    refusal = None
    try:
        checks.integer("max_new_tokens", max_new_tokens, minimum=1)
    except (ValueError, TypeError) as error:
        refusal = error
    facts = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
    # without agreement, some ranks would wait for steps that others do not make
    agree(group, {} if refusal else facts, refusal)
    call: Any = model
    step, cache = input_ids, None
    tokens: list[Tensor] = []
    ended = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    for _ in range(max_new_tokens):
        result = call(input_ids=step, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        # the last rank alone has the logits of the prompt's last position
        best = group.gather(result.logits[:, -1].argmax(-1))[-1]
        if eos_token_id is not None:
            best = best.masked_fill(ended, eos_token_id)
            ended = ended | (best == eos_token_id)
        tokens.append(best)
        if bool(ended.all()):
            break
        step = best[:, None]
    return torch.stack(tokens, dim=1)
