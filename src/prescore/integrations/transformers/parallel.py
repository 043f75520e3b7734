"""Language models of transformers on several ranks: positions and cache of a shard, and greedy generation."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from prescore import checks
from prescore.errors import Unsupported
from prescore.integrations.parallel import ContextParallel
from prescore.integrations.patch import Undo
from prescore.parallel.comm import Group, agree, as_group
from prescore.types import Values


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


def prepare_shards(modules: list[nn.Module], parallel: ContextParallel) -> Undo:
    """Let every forward of some models of transformers begin where its shard does; returns the undo."""
    for module in modules:
        if "position_ids" not in inspect.signature(module.forward).parameters:
            reason = "its forward takes no position_ids, so that a shard cannot say where it begins"
            raise Unsupported(f"apply with a mesh on {type(module).__name__}", [reason])

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Values) -> tuple[tuple[Any, ...], Values]:
        return _before(module, args, kwargs, parallel) if parallel.enter() else (args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        parallel.leave()

    with ExitStack() as undo:
        for module in modules:
            undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(after, always_call=True).remove)
        return undo.pop_all().close


def _before(
    module: nn.Module, args: tuple[Any, ...], kwargs: Values, parallel: ContextParallel
) -> tuple[tuple[Any, ...], Values]:
    """Agree with the other ranks, then fill in positions and cache."""
    names = list(inspect.signature(module.forward).parameters)
    given: Values = {**dict(zip(names, args, strict=False)), **kwargs}
    embeddings = given.get("inputs_embeds")
    tokens: Tensor = given["input_ids"] if embeddings is None else embeddings
    cache: Cache | None = given.get("past_key_values")
    refusal = None
    if cache is not None and not isinstance(cache, ShardCache):
        name = type(cache).__name__
        refusal = Unsupported(f"a cache of type {name} on several ranks", ["it holds full sequences"])
    n_before = cache.n_tokens if isinstance(cache, ShardCache) else 0
    parallel.agree(tokens, given.get("attention_mask"), n_before, refusal)
    config: Any = module.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    if given.get("position_ids") is None:
        given["position_ids"] = parallel.positions(tokens.shape[1], tokens.device)
    use_cache = given.get("use_cache")
    use_cache = getattr(config, "use_cache", False) if use_cache is None else use_cache
    if cache is None and use_cache and not module.training and "past_key_values" in names:
        cache = given["past_key_values"] = ShardCache(config, parallel.group)
    if isinstance(cache, ShardCache):
        if n_before:
            if cache.valid is not None and parallel.group.rank == parallel.group.size - 1:
                cache.valid = torch.nn.functional.pad(cache.valid, (0, tokens.shape[1]), value=True)
            parallel.valid = cache.valid
            given["attention_mask"] = None  # padding is known from the prompt
        else:
            cache.valid = parallel.valid
    return (), given


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
