"""Randomness as an explicit input.

One call of a public function draws one seed from the caller's generator and derives named streams from it. The
first numbers of a stream do not depend on how many are drawn, and no stream depends on another. So the numbers
that a sequence gets do not depend on padding, on its batch, or on what else was computed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore.devices import upload

DEFAULT_SEED = 0
_SEED_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Streams:
    """A seed from which named, independent streams of uniforms are derived."""

    seed: int = DEFAULT_SEED

    def child(self, name: str) -> Streams:
        """Streams for a sub-task, independent of this one's other children."""
        return Streams(zlib.crc32(f"{self.seed}/{name}".encode()) | (zlib.crc32(name.encode()) << 31))

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
        """Standard normals in `like`'s dtype.

        Through the inverse error function, because `torch.randn` changes its first numbers with the size.
        """
        uniform = self.uniform(name, *size, like=like).clamp_(1e-16, 1 - 1e-16)
        return (torch.erfinv(2 * uniform - 1) * 2**0.5).to(like.dtype)


def check_generator(generator: object, name: str = "generator") -> None:
    """Refuse anything but an int, a `torch.Generator` or None."""
    if generator is None or (isinstance(generator, int | torch.Generator) and not isinstance(generator, bool)):
        return
    raise TypeError(
        f"{name} must be an int, a torch.Generator or None, got {type(generator).__name__} {generator!r}"
    )


def as_streams(generator: torch.Generator | int | None) -> Streams:
    """Turn the public `generator` argument into streams; a passed `torch.Generator` advances by one draw."""
    check_generator(generator)
    if generator is None:
        return Streams(DEFAULT_SEED)
    if isinstance(generator, int):
        return Streams(generator)
    drawn = torch.randint(_SEED_LIMIT, (), generator=generator, device=generator.device, dtype=torch.int64)
    return Streams(int(drawn))
