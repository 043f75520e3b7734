"""Attention of a sequence that lies on several ranks: which way each configuration goes.

| configuration | way | what travels |
|---|---|---|
| `Exact` | `gather` | all keys and values to every rank |
| `Selected` | `rows` where pieces are enough to score, else `heads` | a sample, scores, the selected rows |
| `Hyper`, `Routed` | `heads` | each rank gets all positions of some heads, outputs go back |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prescore.call import Call, make_call
from prescore.config import Config, Exact, Selected
from prescore.parallel.handshake import done_by_all
from prescore.parallel.heads import Change
from prescore.parallel.pieces import OwnPiece
from prescore.parallel.rows import attend_by_rows, why_not_rows
from prescore.types import Attended, Outcome
from prescore.values import Values

Run = Callable[[Call, Config, bool], Outcome]
"""The one-process engines: a call, its configuration, whether to explain."""

GATHER, HEADS, ROWS = "gather", "heads", "rows"
OWN_HEADS = "query_heads"
"""Figure of a call by heads: how many query heads this rank had, of which its other figures tell."""


def attend_pieces(piece: OwnPiece, config: Config, run: Run, *, explain: bool = False) -> Outcome:
    """This rank's piece of the result; `Outcome.attended` is where the queries were.

    Args:
        piece: What this rank holds, which all ranks agree upon.
        config: How to attend.
        run: The one-process engines.
        explain: Also tell figures, and lse, which is else empty where nobody had to know it.
    """
    if isinstance(config, Exact):
        way, outcome = GATHER, _by_gathering(piece, config, run, explain)
    elif isinstance(config, Selected) and not why_not_rows(piece, config):
        way, outcome = ROWS, attend_by_rows(piece, config, explain=explain)
    else:
        way, outcome = HEADS, _by_heads(piece, config, run, explain)
    if not explain:
        return outcome
    stats: Values = {**outcome.stats, "way": way, "ranks": piece.group.size}
    if way == HEADS and isinstance(config, Selected):
        stats["why_not_rows"] = why_not_rows(piece, config)
    return Outcome(outcome.attended, outcome.count_rows, [], stats)


def _by_gathering(piece: OwnPiece, config: Config, run: Run, explain: bool) -> Outcome:
    """All keys and values on every rank, own queries only."""
    width = piece.key.shape[-1]
    whole = piece.group.gather_learned(torch.cat((piece.key, piece.value), dim=-1))
    whole = whole.permute(1, 2, 0, 3, 4).flatten(2, 3)
    end = piece.end_query if piece.is_causal else piece.n_keys
    key, value = whole[:, :, :end, :width], whole[:, :, :end, width:]
    mask = None if piece.mask is None else piece.mask[:, :end]
    call = make_call(
        piece.query, key, value, mask, is_causal=piece.is_causal, scale=piece.scale, backend=piece.backend,
        streams=piece.streams, aligned=False,
    )  # fmt: skip
    outcome = run(call, config, explain)
    return Outcome(call.restore(outcome.attended), outcome.count_rows, [], outcome.stats)


def _by_heads(piece: OwnPiece, config: Config, run: Run, explain: bool) -> Outcome:
    """All positions of some heads on every rank."""
    change = Change(piece.group, piece.query.shape[1], piece.key.shape[1])
    query, key, value = change.there(piece.query, piece.key, piece.value)

    def own_heads() -> Outcome:
        if not change.own.n_query_heads:
            return _nothing(query, value, piece.backend.name)
        call = make_call(
            query, key, value, piece.mask, is_causal=piece.is_causal, scale=piece.scale, backend=piece.backend,
            streams=piece.streams,
        )  # fmt: skip
        outcome = run(call, config, explain)
        return Outcome(call.restore(outcome.attended), outcome.count_rows, [], outcome.stats)

    outcome = done_by_all(piece.group, own_heads)
    attended, stats = outcome.attended, {**outcome.stats, OWN_HEADS: change.own.n_query_heads}
    if not explain:
        (output,) = change.back(attended.output)
        return Outcome(Attended(output, attended.lse.new_empty(0)), outcome.count_rows, [], stats)
    output, lse = change.back(attended.output, attended.lse[..., None])
    return Outcome(Attended(output, lse.squeeze(-1)), outcome.count_rows, [], stats)


def _nothing(query: Tensor, value: Tensor, backend: str) -> Outcome:
    """Of a rank that got no head."""
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    lse = torch.empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    stats: Values = {"rows_per_query": 0.0, "keys_kept": 0.0, "seconds": {}, "backend": backend}
    return Outcome(Attended(output, lse), lambda: 0.0, [], stats)
