"""The ranks that share a sequence: collectives whose bytes are counted, the handshake, and what one rank holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prescore.errors import PrescoreError, Unsupported
from prescore.ops.operators import Operator, accumulation_dtype
from prescore.rng import Streams
from prescore.types import Values

Tensors = Sequence[Sequence[Tensor]]
"""By rank: tensors of one dtype that go there."""
Shapes = Sequence[Sequence[Sequence[int]]]
"""By rank: shapes of the tensors that come from there."""


class RankLost(PrescoreError, RuntimeError):
    """A rank of the group did not answer: it died, or runs something else."""


class Group:
    """Ranks `0 .. size - 1`, of which this process is `rank`; rank r holds the r-th shard of the sequence.

    `sent` counts the bytes that this rank sent to others, forward and backward.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.sent = 0

    @property
    def device(self) -> torch.device:
        """Where the tensors of the handshake live."""
        nccl = "nccl" in str(dist.get_backend(self.process_group))
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def gather(self, tensor: Tensor) -> Tensor:
        """`[size, ...]`: the equally shaped tensors of all ranks, without gradients."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self.sent += (self.size - 1) * tensor.numel() * tensor.element_size()
        with self._rank_errors():
            dist.all_gather(list(gathered.unbind(0)), tensor.resolve_neg().contiguous(), group=self.process_group)
        return gathered

    def gather_with_grad(self, tensor: Tensor) -> Tensor:
        """`gather` with gradients, which come back from every rank and are added up."""
        gathered: Tensor = _Gather.apply(self, tensor)  # type: ignore[no-untyped-call]
        return gathered

    @torch.no_grad()
    def all_to_all(self, outgoing: Tensors, shapes: Shapes, *, like: Tensor) -> list[list[Tensor]]:
        """Send `outgoing[r]` to each rank r, receive tensors of `shapes[r]` in `like`'s dtype; no gradients."""
        buffer, splits, sizes = _packed(outgoing, shapes, like)
        return _unpacked(self._all_to_all(buffer, splits, sizes), shapes)

    def all_to_all_with_grad(
        self, *messages: tuple[Tensors, Shapes], like: Sequence[Tensor]
    ) -> tuple[list[list[list[Tensor]]], Tensor]:
        """Several all-to-alls with gradients as one step of the graph, so that all ranks keep their order.

        Returns what each of them received; and a tensor for `tied`, as every rank must take part in the backward
        pass. `like` has the dtype and device of each message.
        """
        packed = [_packed(*message, like=empty) for message, empty in zip(messages, like, strict=True)]
        splits = [(sent, received) for _, sent, received in packed]
        buffers = _AllToAll.apply(self, splits, *(buffer for buffer, _, _ in packed))  # type: ignore[no-untyped-call]
        received = [_unpacked(buffer, shapes) for buffer, (_, shapes) in zip(buffers, messages, strict=True)]
        return received, buffers[0]

    def _all_to_all(self, buffer: Tensor, splits: list[int], sizes: list[int]) -> Tensor:
        """Send `splits[r]` numbers of a flat buffer to each rank r, receive `sizes[r]`."""
        received, buffer = buffer.new_empty(sum(sizes)), buffer.resolve_neg().contiguous()
        self.sent += (buffer.numel() - splits[self.rank]) * buffer.element_size()
        with self._rank_errors():
            dist.all_to_all_single(received, buffer, sizes, splits, group=self.process_group)
        return received

    @contextmanager
    def _rank_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RankLost(
                f"group must have {self.size} ranks that answer, got none from one of them on rank {self.rank} "
                f"({reason})"
            ) from error


def _packed(outgoing: Tensors, shapes: Shapes, like: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """All tensors as one flat buffer; numbers sent to, and received from, each rank."""
    flat = [tensor.reshape(-1) for tensors in outgoing for tensor in tensors]
    splits = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    sizes = [sum(math.prod(shape) for shape in rank_shapes) for rank_shapes in shapes]
    return torch.cat([like.new_empty(0), *flat]), splits, sizes


def _unpacked(buffer: Tensor, shapes: Shapes) -> list[list[Tensor]]:
    flat = [shape for rank_shapes in shapes for shape in rank_shapes]
    parts = iter(buffer.split([math.prod(shape) for shape in flat]) if flat else ())
    return [[next(parts).view(*shape) for shape in rank_shapes] for rank_shapes in shapes]


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


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, splits: list[tuple[list[int], list[int]]], *buffers: Tensor) -> Any:
        ctx.group, ctx.splits = group, splits
        return tuple(group._all_to_all(buffer, *sizes) for buffer, sizes in zip(buffers, splits, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = (
            ctx.group._all_to_all(grad, sizes[1], sizes[0]) for grad, sizes in zip(grads, ctx.splits, strict=True)
        )
        return None, None, *back


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, received: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def tied(output: Tensor, received: Tensor) -> Tensor:
    """The output itself; its backward pass reaches `received` even where nothing of it was used."""
    tied_output: Tensor = _Tied.apply(output, received)  # type: ignore[no-untyped-call]
    return tied_output


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


# The handshake. A rank that raised alone would leave the others waiting. So before anything is computed, every
# rank sends a note of fixed size with what it was asked for, or with the sentence by which it refuses. All read
# the same notes and raise the same error.

NOTE = 2048
"""Bytes of a note."""
_REFUSED = "refused"
Value = TypeVar("Value")


def agree(group: Group, facts: Values, refusal: Exception | None) -> None:
    """Return if every rank has the same facts and none refuses; else raise the same sentence on every rank.

    `facts` are JSON values by the names a user knows them under; `refusal` is what this rank alone would raise.
    """
    note: Values = facts if refusal is None else {_REFUSED: [type(refusal).__name__, str(refusal)]}
    notes = [
        json.loads(bytes(row.tolist()).decode()) for row in group.gather(_encoded(note).to(group.device)).cpu()
    ]
    for rank, other in enumerate(notes):
        if _REFUSED in other:
            kind, sentence = other[_REFUSED]
            if refusal is not None and str(refusal).startswith(sentence):
                raise refusal  # this rank's own, or the same on several
            error = TypeError if kind == "TypeError" else ValueError
            raise error(f"rank {rank} of {group.size} refused: {sentence}")
    for name, value in notes[0].items():
        for rank, other in enumerate(notes):
            if other.get(name) != value:
                raise ValueError(
                    f"{name} must be the same on all ranks of the group, got {value} on rank 0 "
                    f"and {other.get(name)} on rank {rank}"
                )


def done_by_all(group: Group, work: Callable[[], Value]) -> Value:
    """The result of this rank's work; if one rank refuses, all raise its sentence. One byte is sent."""
    result, refusal = None, None
    try:
        result = work()
    except (ValueError, TypeError) as error:
        refusal = error
    flag = torch.tensor([refusal is not None], dtype=torch.uint8, device=group.device)
    if bool(group.gather(flag).any()):
        agree(group, {}, refusal)
    return result  # type: ignore[return-value]


def _encoded(note: Values) -> Tensor:
    text = json.dumps(note).encode()
    if len(text) > NOTE:
        too_long = ["ValueError", f"a note must have {NOTE} bytes at most, got {len(text)}"]
        kind, sentence = note.get(_REFUSED, too_long)
        text = json.dumps({_REFUSED: [kind, sentence[: NOTE // 8]]}).encode()
    return torch.frombuffer(bytearray(text.ljust(NOTE)), dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Shard:
    """What this rank holds of a call that all ranks agreed upon.

    Attributes:
        group: The ranks.
        query, key, value: `[B, Hq, nq, D]`, `[B, Hkv, nk, D]`, `[B, Hkv, nk, Dv]`.
        mask: `[B, size * nk]` of the full sequence, True = a real key; None = all are.
        is_causal: The queries of all ranks are the last positions and see no later key.
        scale: Factor of the logits, above 0.
        operator: The operator.
        streams: Randomness, the same on every rank.
        backend: What runs the far keys, see `Call`.
    """

    group: Group
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    operator: Operator
    streams: Streams
    backend: str = "auto"

    @property
    def n_query(self) -> int:
        """Queries of all ranks."""
        return self.query.shape[2] * self.group.size

    @property
    def n_keys(self) -> int:
        """Keys of all ranks."""
        return self.key.shape[2] * self.group.size

    def keys_of(self, rank: int) -> range:
        """Positions of a rank's keys."""
        length = self.key.shape[2]
        return range(rank * length, (rank + 1) * length)

    def queries_of(self, rank: int) -> range:
        """Positions of a rank's queries; without causality they only number the queries."""
        first, length = (self.n_keys - self.n_query if self.is_causal else 0), self.query.shape[2]
        return range(first + rank * length, first + (rank + 1) * length)
