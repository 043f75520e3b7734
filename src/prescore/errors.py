"""Errors of this package; wrong arguments raise plain ValueError and TypeError."""

from __future__ import annotations

from collections.abc import Sequence


class PrescoreError(Exception):
    """Base of the errors this package defines."""


class Unsupported(PrescoreError, ValueError):
    """A request that cannot be honoured; `reasons` says why, one sentence each."""

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{what} cannot run: {'; '.join(self.reasons)}")
