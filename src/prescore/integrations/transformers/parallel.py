"""Language models of transformers on several ranks: where a piece begins, its cache, and a greedy generation."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from prescore import checks
from prescore.errors import Unsupported
from prescore.integrations.parallel import PIECES, ContextParallel, HeldShard
from prescore.integrations.patch import Undo
from prescore.parallel.comm import Group, agree, as_group
from prescore.types import Values


class ShardLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """This rank's keys and values of one layer; further tokens are kept by the last rank alone."""

    def __init__(self, group: Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.group = group
        self.held = HeldShard()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take a piece of the prompt, or further tokens; returns what this rank holds."""
        held, n_new = self.held, key_states.shape[2]
        held.is_step = held.n_all > 0
        if not held.is_step:
            held.n_all = n_new * self.group.size
            super().update(key_states, value_states)
        else:
            held.n_all += n_new
            if self.group.rank == self.group.size - 1:
                super().update(key_states, value_states)
                if held.valid is not None:
                    held.valid = torch.nn.functional.pad(held.valid, (0, n_new), value=True)
        keys, values = self.keys, self.values
        if keys is None or values is None:
            raise Unsupported("a cache of pieces", ["a step came before any prompt"])
        key = keys.view_as(keys)
        setattr(key, PIECES, held)
        return key, values

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what to forget may lie on another rank."""
        raise Unsupported("a crop of a cache of pieces", ["what to forget may lie on another rank"])


class ShardCache(DynamicCache):
    """A cache of which every rank holds a piece; `prescore.apply(model, mesh=...)` makes it by itself."""

    def __init__(self, config: Any, group: Group) -> None:
        super().__init__(config=config)
        self.layers = [ShardLayer(group) for _ in self.layers]

    @property
    def n_all(self) -> int:
        """Tokens so far, on all ranks."""
        layer: Any = self.layers[0] if self.layers else None
        return 0 if layer is None else int(layer.held.n_all)


def prepare_shards(modules: list[nn.Module], parallel_group: ContextParallel) -> Undo:
    """Let every forward of some models of transformers begin where its piece does; returns the undo."""
    for module in modules:
        if "position_ids" not in inspect.signature(module.forward).parameters:
            reason = "its forward takes no position_ids, so that a piece cannot say where it begins"
            raise Unsupported(f"apply with a mesh on {type(module).__name__}", [reason])

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Values) -> tuple[tuple[Any, ...], Values]:
        return _before(module, args, kwargs, parallel_group) if parallel_group.enter() else (args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        parallel_group.leave()

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(after, always_call=True) for module in modules]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _before(
    module: nn.Module, args: tuple[Any, ...], kwargs: Values, parallel_group: ContextParallel
) -> tuple[tuple[Any, ...], Values]:
    """Agree with the other ranks, then fill in positions and cache."""
    names = list(inspect.signature(module.forward).parameters)
    given: Values = {**dict(zip(names, args, strict=False)), **kwargs}
    embeddings = given.get("inputs_embeds")
    tokens: Tensor = given["input_ids"] if embeddings is None else embeddings
    cache: Cache | None = given.get("past_key_values")
    foreign, n_before = None, 0
    if isinstance(cache, ShardCache):
        n_before = cache.n_all
    elif cache is not None:
        name = type(cache).__name__
        foreign = Unsupported(f"a cache of type {name} on several ranks", ["it holds whole sequences"])
    parallel_group.agree(tokens, given.get("attention_mask"), n_before, foreign)
    config: Any = module.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    if given.get("position_ids") is None:
        given["position_ids"] = parallel_group.positions(tokens.shape[1], n_before, tokens.device)
    wanted = given.get("use_cache")
    wanted = getattr(config, "use_cache", False) if wanted is None else wanted
    if cache is None and wanted and not module.training and "past_key_values" in names:
        given["past_key_values"] = ShardCache(config, parallel_group.group)
    if n_before:
        given["attention_mask"] = None  # what is padding is known from the prompt
    return (), given


@torch.no_grad()
def generate_context_parallel(
    model: nn.Module, input_ids: Tensor, mesh: object, *, max_new_tokens: int, eos_token_id: int | None = None
) -> Tensor:
    """Greedy generation from a prompt that lies on several ranks; `model` must be applied with the same mesh.

    Args:
        model: A causal model of transformers inside `prescore.apply(model, ..., mesh=mesh)`.
        input_ids: `[B, n]`, this rank's piece of the prompt, without padding.
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
    agree(group, {} if refusal else facts, refusal, group.device)  # or some would wait for further steps of others
    call: Any = model
    step, cache = input_ids, None
    found: list[Tensor] = []
    ended = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    for _ in range(max_new_tokens):
        result = call(input_ids=step, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        # the last rank alone has the logits of the prompt's last position
        best = group.gather(result.logits[:, -1].argmax(-1))[-1]
        if eos_token_id is not None:
            best = best.masked_fill(ended, eos_token_id)
            ended = ended | (best == eos_token_id)
        found.append(best)
        if bool(ended.all()):
            break
        step = best[:, None]
    return torch.stack(found, dim=1)
