"""How a public call runs in context parallel: the handshake, then one of three exchanges.

| configuration | exchange | what is sent |
|---|---|---|
| `Exact` | `all-gather` | all keys and values to every rank |
| `Selected` | `selected`, else `ulysses` | score statistics, best scores, selected keys and values |
| `Hyper`, `Routed` | `ulysses` | each rank gets all positions of some heads, outputs go back |
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import torch
from torch import Tensor

from prescore.autograd import differentiable_once, records_gradients
from prescore.call import Options, make_call, with_positive_scale
from prescore.config import Config, Exact, Routed, Selected, check_config
from prescore.engines import run_engine
from prescore.ops.operators import pick_operator
from prescore.ops.parts import attend_parts, exact_parts, merge
from prescore.parallel.comm import Group, Shard, agree, as_group
from prescore.parallel.selected import attend_selected_shards, why_not_selected
from prescore.parallel.ulysses import attend_by_heads, share_heads
from prescore.rng import Streams, as_streams
from prescore.routed.backends import auto_config
from prescore.scoring.sampling import arange
from prescore.types import Attended, Reads, Result, Values

OWN_HEADS = "query_heads"
"""Name in the stats of a call by Ulysses: query heads of this rank, to which its other stats refer."""
_SHOWN = 600


def attend_in_group(
    tensors: tuple[Tensor, Tensor, Tensor],
    config: Config | None,
    options: Options,
    *,
    explain: bool,
    refusal: Exception | None,
) -> Result:
    """This rank's shard of the result for query, key and value.

    `explain` also returns lse and all stats. All arguments are checked unless there is a `refusal`: why this rank
    cannot run the call. Every rank raises it.
    """
    ranks, generator = as_group(options.group), options.generator
    sent, state = ranks.sent, generator.get_state() if isinstance(generator, torch.Generator) else None
    streams = as_streams(generator, batch=tensors[0].shape[0]) if refusal is None else Streams()
    try:
        agree(ranks, {} if refusal else _facts(tensors, check_config(config), options, streams, explain), refusal)
        mask = _full_mask(ranks, options.key_padding_mask)
    except (ValueError, TypeError):
        if isinstance(generator, torch.Generator) and state is not None:
            generator.set_state(state)  # a refused call must not advance it
        raise
    query, key, value = differentiable_once(*tensors)
    query, scale = with_positive_scale(query, options.scale)
    operator = pick_operator(query, options.backend)
    shard = Shard(ranks, query, key, value, mask, options.is_causal, scale, operator, streams, options.backend)
    config, reason, why_exact = check_config(config), None, ""
    if isinstance(config, Selected):
        reason = why_not_selected(shard, config) or None
    if isinstance(config, Routed) and options.backend == "auto":
        config, why_exact = auto_config(*tensors, config, is_causal=options.is_causal, ranks=ranks.size)
    if isinstance(config, Exact):
        exchange, result = "all-gather", _by_all_gather(shard, config, explain)
    elif isinstance(config, Selected) and reason is None:
        exchange, result = "selected", attend_selected_shards(shard, config, explain=explain)
    else:
        exchange, result = "ulysses", _by_ulysses(shard, config, explain)
    if why_exact:
        result = replace(result, why_exact=why_exact)
    if not explain:
        return result
    stats = {"exchange": exchange, "exchange_reason": reason, "ranks": ranks.size, "bytes_sent": ranks.sent - sent}
    return replace(result, stats={**result.stats, **stats}, selections=[])


def _facts(
    tensors: tuple[Tensor, Tensor, Tensor], config: Config, options: Options, streams: Streams, explain: bool
) -> Values:
    """What must be equal on all ranks, by the names of the arguments."""
    named = dict(zip(("query", "key", "value"), tensors, strict=True))
    text = json.dumps(config.to_dict(), sort_keys=True, default=repr)
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}... ({zlib.crc32(text.encode()):08x})"
    return {
        **{f"{name} shape": list(tensor.shape) for name, tensor in named.items()},
        "dtype": str(tensors[0].dtype),
        "is_causal": options.is_causal,
        "scale": options.scale,
        "config": text,
        "key_padding_mask": "none" if options.key_padding_mask is None else "a mask",
        "generator's seed": streams.seed,
        "backend": options.backend,
        "return_aux": explain,
        "requires_grad": [name for name, tensor in named.items() if records_gradients(tensor)],
    }


def _full_mask(group: Group, mask: Tensor | None) -> Tensor | None:
    """The masks of all ranks as one `[B, N]`, None where every key is real; padding between keys is refused."""
    if mask is None:
        return None
    full = group.gather(mask.to(torch.uint8)).bool().transpose(0, 1).flatten(1)
    if bool(full.all()):
        return None
    position = arange(full.shape[1], like=full)
    first = torch.where(full, position, full.shape[1]).amin(1, keepdim=True)
    last = torch.where(full, position, -1).amax(1, keepdim=True)
    holes = ~full & (position > first) & (position < last)
    if bool(holes.any()):
        row, column = holes.nonzero()[0].tolist()
        raise ValueError(
            f"key_padding_mask must have no padding between the real keys of a sequence on several ranks, "
            f"got some at position {column} of sequence {row}"
        )
    return full


def _by_all_gather(shard: Shard, config: Config, explain: bool) -> Result:
    """All keys and values on every rank, own queries only."""
    dim = shard.key.shape[-1]
    full = shard.group.gather_with_grad(torch.cat((shard.key, shard.value), dim=-1))
    full = full.permute(1, 2, 0, 3, 4).flatten(2, 3)
    end = shard.queries_of(shard.group.rank).stop if shard.is_causal else shard.n_keys
    key, value = full[:, :, :end, :dim], full[:, :, :end, dim:]
    return _run(shard, (shard.query, key, value), config, explain, aligned=False)


def _by_ulysses(shard: Shard, config: Config, explain: bool) -> Result:
    """All positions of some heads on every rank."""
    empty = shard.query.new_empty(0)
    stats: Values = {"keys_per_query": 0.0, "keys_selected": 0.0, "seconds": {}, "backend": shard.operator.name}
    result, n_heads = Result(empty, empty, lambda: Reads(0.0), stats), 0  # of a rank without heads
    share = share_heads(shard.query.shape[1], shard.key.shape[1], shard.group.size)[shard.group.rank]
    shard = replace(shard, streams=replace(shard.streams, first_head=share.kv_heads.start))

    def attend_heads(*tensors: Tensor) -> list[Tensor]:
        nonlocal result, n_heads
        result, n_heads = _run(shard, tensors, config, explain), tensors[0].shape[1]
        return [result.output, result.lse[..., None]] if explain else [result.output]

    tensors = shard.query, shard.key, shard.value
    output, *lse = attend_by_heads(shard.group, *tensors, attend_heads, with_lse=explain)
    stats = {**result.stats, OWN_HEADS: n_heads}
    return replace(result, output=output, lse=lse[0].squeeze(-1) if lse else empty, stats=stats)


def _run(
    shard: Shard, tensors: tuple[Tensor, ...], config: Config, explain: bool, *, aligned: bool = True
) -> Result:
    """The one-process engine over full sequences; the result lies where the queries were."""
    query, key, value = tensors
    mask = None if shard.mask is None else shard.mask[:, : key.shape[2]]
    options = Options(shard.is_causal, mask, shard.scale, backend=shard.backend)
    call = make_call(query, key, value, options, operator=shard.operator, streams=shard.streams, aligned=aligned)
    result = run_engine(call, config, explain=explain, need_lse=explain)
    output, lse = call.restore(result.attended)
    return replace(result, output=output, lse=lse)


@torch.no_grad()
def attend_step(
    group: Group, query: Tensor, key: Tensor, value: Tensor, *, valid: Tensor | None, scale: float | None
) -> Attended:
    """A decode step: exact attention of the newest queries to the keys of all ranks.

    Every rank has the queries and attends to its own keys, the real ones of which `valid [B, n]` marks. The last
    rank holds the new tokens' keys. The results merge by log-sum-exp. Each rank sends one output and one lse per
    query and head, whatever the length of the cache.
    """
    is_causal, operator = group.rank == group.size - 1, pick_operator(query)
    call = make_call(query, key, value, Options(is_causal, valid, scale), operator=operator, aligned=False)
    parts = exact_parts(call.query, call.key, is_causal=is_causal, valid=call.valid)
    local = attend_parts(call.query, call.key, call.value, parts, scale=call.scale, operator=operator)
    results = group.gather(torch.cat((local.output.to(local.lse.dtype), local.lse[..., None]), dim=-1))
    merged = merge(*(Attended(result[..., :-1], result[..., -1]) for result in results))
    return Attended(merged.output.to(query.dtype), merged.lse)
