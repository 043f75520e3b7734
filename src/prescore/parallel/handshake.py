"""Before anything is computed: all ranks say what they were asked for, and refuse together if they disagree.

A rank that raised alone would leave the others waiting, so every rank sends a note of fixed size: what it was
asked for, or the sentence with which it refuses. All read the same notes and raise the same error. What a rank
refuses only when it computes, the others hear of before they wait for its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from prescore.parallel.group import Group
from prescore.values import Values

NOTE = 2048
"""Bytes of a note."""
_REFUSED = "refused"
Result = TypeVar("Result")
_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError}


def agree(group: Group, facts: Values, refusal: Exception | None, device: torch.device) -> None:
    """Return if every rank has the same facts and none refuses; else raise the same sentence on every rank.

    Args:
        group: The ranks.
        facts: What must be equal, by the name a user knows it under, in JSON values.
        refusal: What this rank alone would raise; None = nothing.
        device: Where the group's tensors live.
    """
    note: Values = facts if refusal is None else {_REFUSED: [type(refusal).__name__, str(refusal)]}
    notes = [_read(row) for row in group.gather(_written(note, device)).cpu()]
    for rank, other in enumerate(notes):
        if _REFUSED in other:
            kind, sentence = other[_REFUSED]
            if refusal is not None and str(refusal).startswith(sentence):
                raise refusal  # this rank's own, or the same on several
            raise _KINDS.get(kind, ValueError)(f"rank {rank} of {group.size} refused: {sentence}")
    for name, value in notes[0].items():
        for rank, other in enumerate(notes):
            if other.get(name) != value:
                raise ValueError(
                    f"{name} must be the same on all ranks of the group, got {value} on rank 0 "
                    f"and {other.get(name)} on rank {rank}"
                )


def done_by_all(group: Group, work: Callable[[], Result]) -> Result:
    """What this rank's work gives; if a rank refuses its own, every rank raises its sentence. One byte is sent.

    Ranks may have different work, some none: what all of them would refuse is not refused by those.
    """
    try:
        result = work()
    except (ValueError, TypeError) as error:
        _refused_by_some(group, error)
        raise
    _refused_by_some(group, None)
    return result


def _refused_by_some(group: Group, refusal: Exception | None) -> None:
    flag = torch.tensor([refusal is not None], dtype=torch.uint8, device=group.device)
    if bool(group.gather(flag).any()):
        agree(group, {}, refusal, group.device)


def _written(note: Values, device: torch.device) -> Tensor:
    text = json.dumps(note).encode()
    if len(text) > NOTE:
        kind, sentence = note.get(
            _REFUSED, ["ValueError", f"a note must have {NOTE} bytes at most, got {len(text)}"]
        )
        text = json.dumps({_REFUSED: [kind, sentence[: NOTE // 8]]}).encode()
    return torch.frombuffer(bytearray(text.ljust(NOTE)), dtype=torch.uint8).to(device)


def _read(note: Tensor) -> Values:
    read: Values = json.loads(bytes(note.tolist()).decode())
    return read
