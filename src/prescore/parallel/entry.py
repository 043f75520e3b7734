"""How a public function enters a group: check on every rank, agree, make a piece, attend."""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.autograd import differentiable_once
from prescore.call import make_call, with_positive_scale
from prescore.config import Config, Exact, Selected, check_config
from prescore.engines import run_engine
from prescore.ops.backend import Backend, Needs, pick_backend
from prescore.ops.parts import merge
from prescore.ops.plain import Plain
from prescore.parallel.comm import Group, agree, as_group, done_by_all
from prescore.parallel.selected import attend_by_rows, why_not_selected
from prescore.parallel.shards import Shard, whole_mask
from prescore.parallel.ulysses import Change
from prescore.rng import Streams, as_streams
from prescore.types import Attended, Reads, Result, Values

_SHOWN = 600


@dataclass(frozen=True, eq=False)
class ShardRequest:
    """What one rank was asked for, not yet checked; the fields are arguments of `prescored_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    key_padding_mask: Tensor | None
    scale: float | None
    generator: torch.Generator | int | None
    explain: bool


def attend_in_group(
    group: object, request: ShardRequest, config: Config | None, backend: str, refusal: Exception | None
) -> Result:
    """This rank's shard of the result.

    Args:
        group: A process group or a one-dimensional device mesh.
        request: What this rank was asked for.
        config: How to attend, checked unless there is a refusal.
        backend: Name of the backend.
        refusal: Why this rank cannot run the call; every rank raises it.
    """
    ranks = as_group(group)
    generator, sent = request.generator, ranks.sent
    before = generator.get_state() if isinstance(generator, torch.Generator) else None
    facts: Values = {}
    config = check_config(config) if refusal is None else Exact()
    operator: Backend = Plain()
    streams = Streams()
    try:
        if refusal is None:
            operator, streams = pick_backend(Needs.of(request.query), backend), as_streams(generator)
            facts = _facts(request, config, backend, streams)
    except (ValueError, TypeError) as error:
        refusal = error
    try:
        agree(ranks, facts, refusal, ranks.device)
        mask = whole_mask(ranks, request.key_padding_mask)
    except (ValueError, TypeError):
        if before is not None and isinstance(generator, torch.Generator):
            generator.set_state(before)  # a refused call must not advance it
        raise
    query, key, value = differentiable_once(request.query, request.key, request.value)
    query, scale = with_positive_scale(query, request.scale)
    native = backend in ("auto", "native")
    shard = Shard(ranks, query, key, value, mask, request.is_causal, scale, operator, streams, native)
    result = attend_shards(shard, config, explain=request.explain)
    if not request.explain:
        return result
    return dataclasses.replace(result, stats={**result.stats, "bytes_sent": ranks.sent - sent})


def _facts(asked: ShardRequest, config: Config, backend: str, streams: Streams) -> Values:
    """What must be equal on all ranks, by the names of the arguments."""
    tensors = {"query": asked.query, "key": asked.key, "value": asked.value}
    learned = torch.is_grad_enabled()
    return {
        **{f"{name} shape": list(tensor.shape) for name, tensor in tensors.items()},
        "dtype": str(asked.query.dtype),
        "is_causal": asked.is_causal,
        "scale": asked.scale,
        "config": _short(json.dumps(config.to_dict(), sort_keys=True, default=repr)),
        "key_padding_mask": "none" if asked.key_padding_mask is None else "a mask",
        "generator's seed": streams.seed,
        "backend": backend,
        "return_aux": asked.explain,
        "requires_grad": [name for name, tensor in tensors.items() if learned and tensor.requires_grad],
    }


def _short(text: str) -> str:
    """A long text by its beginning and a number that changes with the rest."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({zlib.crc32(text.encode()):08x})"


# Attention of a sequence that lies on several ranks: which way each configuration goes.
#
# | configuration | way | what travels |
# |---|---|---|
# | `Exact` | `gather` | all keys and values to every rank |
# | `Selected` | `rows` where pieces are enough to score, else `heads` | a sample, scores, the selected rows |
# | `Hyper`, `Routed` | `heads` | each rank gets all positions of some heads, outputs go back |

GATHER, HEADS, ROWS = "all-gather", "ulysses", "selected"
OWN_HEADS = "query_heads"
"""Figure of a call by heads: how many query heads this rank had, of which its other figures tell."""


def attend_shards(piece: Shard, config: Config, *, explain: bool = False) -> Result:
    """This rank's piece of the result; the output is where the queries were.

    Args:
        piece: What this rank holds, which all ranks agree upon.
        config: How to attend.
        explain: Also tell figures, and lse, which is else empty where nobody had to know it.
    """
    if isinstance(config, Exact):
        way, outcome = GATHER, _by_gathering(piece, config, explain)
    elif isinstance(config, Selected) and not why_not_selected(piece, config):
        way, outcome = ROWS, attend_by_rows(piece, config, explain=explain)
    else:
        way, outcome = HEADS, _by_heads(piece, config, explain)
    if not explain:
        return outcome
    stats: Values = {**outcome.stats, "exchange": way, "ranks": piece.group.size}
    if way == HEADS and isinstance(config, Selected):
        stats["exchange_reason"] = why_not_selected(piece, config)
    return Result(*outcome.attended, outcome.count_reads, stats)


def _by_gathering(piece: Shard, config: Config, explain: bool) -> Result:
    """All keys and values on every rank, own queries only."""
    width = piece.key.shape[-1]
    whole = piece.group.gather_learned(torch.cat((piece.key, piece.value), dim=-1))
    whole = whole.permute(1, 2, 0, 3, 4).flatten(2, 3)
    end = piece.end_query if piece.is_causal else piece.n_keys
    key, value = whole[:, :, :end, :width], whole[:, :, :end, width:]
    mask = None if piece.mask is None else piece.mask[:, :end]
    call = make_call(
        piece.query, key, value, mask, is_causal=piece.is_causal, scale=piece.scale, backend=piece.backend,
        streams=piece.streams, aligned=False, native=piece.native,
    )  # fmt: skip
    outcome = run_engine(call, config, explain=explain, need_lse=explain)
    return Result(*call.restore(outcome.attended), outcome.count_reads, outcome.stats)


def _by_heads(piece: Shard, config: Config, explain: bool) -> Result:
    """All positions of some heads on every rank."""
    change = Change(piece.group, piece.query.shape[1], piece.key.shape[1])
    query, key, value = change.there(piece.query, piece.key, piece.value)

    def own_heads() -> Result:
        if not change.own.n_query_heads:
            return _nothing(query, value, piece.backend.name)
        call = make_call(
            query, key, value, piece.mask, is_causal=piece.is_causal, scale=piece.scale, backend=piece.backend,
            streams=piece.streams, native=piece.native,
        )  # fmt: skip
        outcome = run_engine(call, config, explain=explain, need_lse=explain)
        return Result(*call.restore(outcome.attended), outcome.count_reads, outcome.stats)

    outcome = done_by_all(piece.group, own_heads)
    attended, stats = outcome.attended, {**outcome.stats, OWN_HEADS: change.own.n_query_heads}
    if not explain:
        (output,) = change.back(attended.output)
        return Result(output, attended.lse.new_empty(0), outcome.count_reads, stats)
    output, lse = change.back(attended.output, attended.lse[..., None])
    return Result(output, lse.squeeze(-1), outcome.count_reads, stats)


def _nothing(query: Tensor, value: Tensor, backend: str) -> Result:
    """Of a rank that got no head."""
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    lse = torch.empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    stats: Values = {"keys_per_query": 0.0, "keys_selected": 0.0, "seconds": {}, "backend": backend}
    return Result(output, lse, lambda: Reads(0.0), stats)


# A decode step on keys that lie on several ranks: each rank attends to its own, results merge by log-sum-exp.
#
# New tokens are the same on all ranks, so their queries need not be sent: what travels is one output and one
# lse for
# each query and head, whatever the length of the past.


@torch.no_grad()
def attend_step(
    group: Group, query: Tensor, key: Tensor, value: Tensor, *, valid: Tensor | None, scale: float | None
) -> Attended:
    """Exact attention of the newest queries, which every rank has, to the keys of all ranks.

    Args:
        group: The ranks; the last one holds the new tokens' keys.
        query: `[B, Hq, Nq, D]`, the same on every rank.
        key: `[B, Hkv, n, D]`, this rank's keys.
        value: `[B, Hkv, n, Dv]`, likewise.
        valid: `[B, n]`, True = a real key; None = all.
        scale: Factor of the logits.
    """
    newest = group.rank == group.size - 1
    call = make_call(
        query,
        key,
        value,
        valid,
        is_causal=newest,
        scale=scale,
        backend=pick_backend(Needs.of(query)),
        aligned=False,
    )
    own = call.exactly()
    told = torch.cat((own.output.to(own.lse.dtype), own.lse[..., None]), dim=-1)
    parts = group.gather(told)
    merged = merge(*(Attended(part[..., :-1], part[..., -1]) for part in parts))
    return Attended(merged.output.to(query.dtype), merged.lse)
