"""Randomness as an explicit input.

One call of a public function draws one seed from the caller's generator and derives named streams from it. The
first numbers of a stream do not depend on how many are drawn, and no stream depends on another. So the numbers
that a sequence gets do not depend on padding, on its batch, or on what else was computed.

Every KV head and every block pair has streams of its own. The sequences of a batch share theirs, so that a
sequence gives the same alone and in a batch, unless the caller passes one seed for each sequence.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prescore import checks
from prescore.devices import upload

DEFAULT_SEED = 0
_SEED_LIMIT = 2**63 - 1


Generator = torch.Generator | int | Sequence[int] | None
"""What the public functions take as `generator`."""


@dataclass(frozen=True)
class Streams:
    """A seed from which named, independent streams of uniforms are derived.

    Attributes:
        seed: Of the whole batch.
        rows: One seed for each row of the batch (a sequence, or a block pair of one), used for what is drawn per
            row; empty = all rows share `seed`.
        first_head: The number of the first KV head of this call, where other ranks have the heads before it.
    """

    seed: int = DEFAULT_SEED
    rows: tuple[int, ...] = ()
    first_head: int = 0

    def child(self, name: str) -> Streams:
        """Streams for a sub-task, independent of this one's other children."""
        rows = tuple(_child_seed(row, name) for row in self.rows)
        return replace(self, seed=_child_seed(self.seed, name), rows=rows)

    def blocks(self, names: Sequence[str], batch: int) -> Streams:
        """Streams for `batch * len(names)` rows: a child of each name for every sequence."""
        seeds = self.rows or (self.seed,) * batch
        return replace(self, rows=tuple(_child_seed(seed, name) for seed in seeds for name in names))

    def generator(self, name: str) -> torch.Generator:
        """A fresh CPU generator for one stream."""
        generator = torch.Generator("cpu")
        generator.manual_seed(self.child(name).seed)
        return generator

    def uniform(self, name: str, *size: int, like: Tensor) -> Tensor:
        """Uniforms in [0, 1) on `like`'s device, float64 so that `floor(u * n)` is fair for any n."""
        drawn = torch.rand(size, generator=self.generator(name), dtype=torch.float64, device="cpu")
        return upload(drawn, like.device)

    def normal(self, name: str, *size: int, like: Tensor) -> Tensor:
        """Standard normals in `like`'s dtype."""
        return as_normal(self.uniform(name, *size, like=like), like)

    def row_normal(self, name: str, *size: int, like: Tensor) -> Tensor:
        """Standard normals for each row, the same for its heads: `[B or 1, *size]`."""
        drawn = {row: Streams(row).uniform(name, *size, like=like) for row in set(self.rows or (self.seed,))}
        return as_normal(torch.stack([drawn[row] for row in self.rows or (self.seed,)]), like)

    def head_uniform(self, name: str, *size: int, like: Tensor) -> Tensor:
        """Uniforms for each KV head of each row: `[B, H, *size]` for `like [B, H, ...]`, float64."""
        batch, n_heads = like.shape[:2]
        heads = range(self.first_head, self.first_head + n_heads)
        rows = (self.rows or (self.seed,))[: max(1, batch)]
        drawn = {row: torch.empty(n_heads, *size, dtype=torch.float64, device="cpu") for row in rows}
        for row, table in drawn.items():
            for head, numbers in zip(heads, table, strict=True):
                generator = Streams(row).generator(f"{name}/head {head}")
                torch.rand(size, generator=generator, dtype=torch.float64, device="cpu", out=numbers)
        table = torch.stack([drawn[row] for row in rows]) if len(rows) > 1 else drawn[rows[0]][None]
        return upload(table, like.device).expand(batch, n_heads, *size)

    def head_normal(self, name: str, *size: int, like: Tensor) -> Tensor:
        """Standard normals in `like`'s dtype for each KV head of each row, as `head_uniform`."""
        return as_normal(self.head_uniform(name, *size, like=like), like)


def _child_seed(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed}/{name}".encode()) | (zlib.crc32(name.encode()) << 31)


def as_normal(uniform: Tensor, like: Tensor) -> Tensor:
    """Uniforms as standard normals, in `like`'s dtype."""
    # through the inverse error function, because `torch.randn` changes its first numbers with the size
    return (torch.erfinv(2 * uniform.clamp(1e-16, 1 - 1e-16) - 1) * 2**0.5).to(like.dtype)


def check_generator(generator: object, name: str = "generator", *, batch: int | None = None) -> None:
    """Refuse anything but an int, a `torch.Generator`, None or, with a `batch`, one int for each sequence.

    Our own code may pass streams.
    """
    if isinstance(generator, list | tuple) and batch is not None:
        for seed in generator:
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise TypeError(
                    f"{name} must hold one int for each sequence, got {type(seed).__name__} {checks.shown(seed)}"
                )
        if len(generator) != batch:
            raise ValueError(f"{name} must hold one seed for each of {batch} sequences, got {len(generator)}")
        return
    known = isinstance(generator, int | torch.Generator | Streams)
    if generator is None or (known and not isinstance(generator, bool)):
        return
    rule = "an int, a torch.Generator or None"
    rule = rule if batch is None else "an int, one int for each sequence, a torch.Generator or None"
    raise TypeError(f"{name} must be {rule}, got {type(generator).__name__} {checks.shown(generator)}")


def as_streams(generator: Generator | Streams, *, batch: int | None = None) -> Streams:
    """Turn the public `generator` argument into streams; a passed `torch.Generator` advances by one draw.

    With the size of a `batch`, a list of one seed for each sequence is taken too.
    """
    check_generator(generator, batch=batch)
    if isinstance(generator, Streams):
        return generator
    if generator is None:
        return Streams(DEFAULT_SEED)
    if isinstance(generator, int):
        return Streams(generator)
    if not isinstance(generator, torch.Generator):
        return Streams(_child_seed(DEFAULT_SEED, repr(tuple(generator))), tuple(generator))
    drawn = torch.randint(_SEED_LIMIT, (), generator=generator, device=generator.device, dtype=torch.int64)
    return Streams(int(drawn))
