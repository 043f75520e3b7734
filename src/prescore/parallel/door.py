"""How a public function enters a group: check on every rank, agree, make a piece, attend."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.call import with_positive_scale
from prescore.config import Config
from prescore.errors import Unsupported
from prescore.ops.backend import Backend
from prescore.parallel.engine import Run, attend_pieces
from prescore.parallel.group import as_group
from prescore.parallel.handshake import agree
from prescore.parallel.pieces import OwnPiece, whole_mask
from prescore.rng import Streams, as_streams
from prescore.surroundings import differentiable_once
from prescore.types import Outcome
from prescore.values import Values

_SHOWN = 600


@dataclass(frozen=True, eq=False)
class PieceRequest:
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
    group: object, asked: PieceRequest, check: Callable[[], tuple[Config, Backend]], run: Run
) -> Outcome:
    """This rank's piece of the result.

    Args:
        group: A process group or a one-dimensional device mesh.
        asked: What this rank was asked for.
        check: Refuses what one process would refuse; gives the configuration and the operator.
        run: The one-process engines.
    """
    ranks = as_group(group)
    generator, sent = asked.generator, ranks.sent
    before = generator.get_state() if isinstance(generator, torch.Generator) else None
    refusal: Exception | None = None
    facts: Values = {}
    checked: tuple[Config, Backend, Streams] | None = None
    try:
        checked = (*check(), as_streams(generator))
        facts = _facts(asked, *checked)
    except (ValueError, TypeError) as error:
        refusal = error
    try:
        agree(ranks, facts, refusal, ranks.device)
        mask = whole_mask(ranks, asked.key_padding_mask)
    except (ValueError, TypeError):
        if before is not None and isinstance(generator, torch.Generator):
            generator.set_state(before)  # a refused call must not advance it
        raise
    if checked is None:
        raise RuntimeError("a rank that refuses must have raised")
    config, backend, streams = checked
    query, key, value = differentiable_once(asked.query, asked.key, asked.value)
    query, scale = with_positive_scale(query, asked.scale)
    piece = OwnPiece(ranks, query, key, value, mask, asked.is_causal, scale, backend, streams)
    outcome = attend_pieces(piece, config, run, explain=asked.explain)
    if not asked.explain:
        return outcome
    return dataclasses.replace(outcome, stats={**outcome.stats, "bytes_sent": ranks.sent - sent})


def refuse_in_group(has_selection: bool, dropout_p: float) -> None:
    """Refuse what one process can do and several cannot."""
    reasons = []
    if has_selection:
        reasons.append("a selection cannot be given for a sequence that lies on several ranks")
    if dropout_p:
        reasons.append(f"dropout_p must be 0, for one process would drop other weights, got {dropout_p}")
    if reasons:
        raise Unsupported("group", reasons)


def _facts(asked: PieceRequest, config: Config, backend: Backend, streams: Streams) -> Values:
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
        "backend": backend.name,
        "return_aux": asked.explain,
        "requires_grad": [name for name, tensor in tensors.items() if learned and tensor.requires_grad],
    }


def _short(text: str) -> str:
    """A long text by its beginning and a number that changes with the rest."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({zlib.crc32(text.encode()):08x})"
