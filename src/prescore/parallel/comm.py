"""The ranks that share a sequence, and the few ways in which they talk; every byte sent is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prescore.errors import PrescoreError, Unsupported
from prescore.ops.backend import accumulation_dtype
from prescore.types import Values


class RankLost(PrescoreError, RuntimeError):
    """A rank of the group did not answer: it died, or runs something else."""


class Group:
    """Ranks `0 .. size - 1`, of which this process is `rank`; rank r holds the r-th piece of the sequence.

    Args:
        process_group: What `torch.distributed` made.

    Attributes:
        sent: Bytes that this rank sent to others, forward and backward.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.sent = 0

    @property
    def device(self) -> torch.device:
        """Where tensors must live that the group itself makes."""
        nccl = "nccl" in str(dist.get_backend(self.process_group))
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def gather(self, tensor: Tensor) -> Tensor:
        """`[size, ...]`: the equally shaped tensors of all ranks, without gradients."""
        whole = tensor.new_empty(self.size, *tensor.shape)
        self.sent += (self.size - 1) * n_bytes(tensor)
        with self._talking():
            dist.all_gather(list(whole.unbind(0)), tensor.resolve_neg().contiguous(), group=self.process_group)
        return whole

    def gather_learned(self, tensor: Tensor) -> Tensor:
        """The same with gradients, which come back from every rank and are added up."""
        whole: Tensor = _Gather.apply(self, tensor)  # type: ignore[no-untyped-call]
        return whole

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send `parts[r]`, a flat tensor, to each rank r; receive `sizes[r]` numbers from each. No gradients."""
        with torch.no_grad():
            buffer = torch.cat(list(parts)) if parts else torch.empty(0)
            splits = [part.numel() for part in parts]
            return list(self._all_to_all(buffer, splits, list(sizes)).split(list(sizes)))

    def exchange(self, mails: Sequence[Message]) -> list[list[Tensor]]:
        """Several swaps with gradients, as one step of the graph: all ranks go through them in the same order.

        Received parts must take part in the result on every rank (see `tied`), or the ranks would wait for one
        another in the backward pass.
        """
        buffers = [torch.cat(list(mail.parts)) for mail in mails]
        splits = [([part.numel() for part in mail.parts], list(mail.sizes)) for mail in mails]
        received = _Exchange.apply(self, splits, *buffers)  # type: ignore[no-untyped-call]
        return [list(whole.split(own[1])) for whole, own in zip(received, splits, strict=True)]

    def _all_to_all(self, buffer: Tensor, splits: list[int], sizes: list[int]) -> Tensor:
        received, buffer = buffer.new_empty(sum(sizes)), buffer.resolve_neg().contiguous()
        self.sent += (buffer.numel() - splits[self.rank]) * buffer.element_size()
        with self._talking():
            dist.all_to_all_single(received, buffer, sizes, splits, group=self.process_group)
        return received

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RankLost(
                f"group must have {self.size} ranks that answer, got none from one of them on rank {self.rank} "
                f"({reason})"
            ) from error


class Message:
    """What goes to each rank (`parts`, flat, of one dtype), and how many numbers come from each (`sizes`)."""

    def __init__(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> None:
        self.parts = parts
        self.sizes = sizes


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor) -> Tensor:
        ctx.group = group
        return group.gather(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        size, shape = ctx.group.size, grad.shape[1:]
        equal = [shape.numel()] * size
        # a reduce-scatter whose sum is at least float32, at the bytes of the gradient's own dtype
        parts = ctx.group._all_to_all(grad.reshape(-1), equal, equal).view(size, *shape)
        return None, parts.sum(0, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, splits: list[tuple[list[int], list[int]]], *buffers: Tensor) -> Any:
        ctx.group, ctx.splits = group, splits
        return tuple(group._all_to_all(buffer, *own) for buffer, own in zip(buffers, splits, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = (ctx.group._all_to_all(grad, own[1], own[0]) for grad, own in zip(grads, ctx.splits, strict=True))
        return None, None, *back


def tied(output: Tensor, *received: Tensor) -> Tensor:
    """The output itself, whose backward pass reaches what was received even where nothing of it was used."""
    tied_output: Tensor = _Tied.apply(output, *received)  # type: ignore[no-untyped-call]
    return tied_output


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *received: Tensor) -> Tensor:
        ctx.n_received = len(received)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * ctx.n_received  # no gradient, but what sent it is asked for its own


def as_group(group: object, name: str = "group") -> Group:
    """A process group or a one-dimensional device mesh as a `Group`; anything else is refused."""
    if isinstance(group, Group):
        return group
    if not dist.is_available():
        raise Unsupported(name, ["this torch was built without torch.distributed"])
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{name} must be a DeviceMesh of one dimension (take one by name: mesh['cp']), got {group.ndim}"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name} must be a torch.distributed process group or DeviceMesh, got {type(group).__name__}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} must contain this process, got a group of {group.size()} other ranks")
    return Group(group)


def n_bytes(tensor: Tensor) -> int:
    """Memory of the entries."""
    return tensor.numel() * tensor.element_size()


# Before anything is computed: all ranks say what they were asked for, and refuse together if they disagree.
#
# A rank that raised alone would leave the others waiting, so every rank sends a note of fixed size: what it was
# asked for, or the sentence with which it refuses. All read the same notes and raise the same error. What a rank
# refuses only when it computes, the others hear of before they wait for its result.

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
