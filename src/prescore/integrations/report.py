"""What the layers of a model did in their last call, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prescore.config import Config
from prescore.integrations.attend import Did

_COLUMNS = ("layer", "name", "configuration", "path", "rows read", "of", "queries", "seconds")
_LEFT = ("name", "configuration", "path")


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        layer: Its number.
        name: Its name in the model.
        config: How it was asked to attend.
        last: What it did in its last call; None = it was not called yet.
    """

    layer: int
    name: str
    config: Config
    last: Did | None

    @property
    def path(self) -> str | None:
        """The way the last call went; None = there was none."""
        return None if self.last is None else self.last.path

    def cells(self) -> tuple[str, ...]:
        """The line of a table."""
        about = (str(self.layer), self.name, describe(self.config))
        if self.last is None:
            return (*about, "not called yet", "-", "-", "-", "-")
        last = self.last
        rows = "-" if last.rows is None else f"{last.rows:.0f}"
        return (*about, last.path, rows, str(last.n_keys), str(last.n_query), f"{last.seconds:.4f}")


@dataclass(frozen=True)
class Report:
    """What every replaced layer did in its last call; `str` of it is a table, `report[3]` is layer 3."""

    layers: tuple[LayerReport, ...]

    def __getitem__(self, layer: int) -> LayerReport:
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        raise KeyError(f"layer must be one that was replaced, got {layer}")

    def __str__(self) -> str:
        if not self.layers:
            return "no layer was replaced: all attention is exact"
        return _table([entry.cells() for entry in self.layers])


def describe(config: Config) -> str:
    """A configuration in one line: its type, and what differs from the defaults."""
    return _brief(config, dict(vars(type(config)())))


def _brief(value: object, usual: Mapping[str, object] | None = None) -> str:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    fields = dataclasses.fields(value)
    defaults = {field.name: field.default for field in fields} if usual is None else usual
    changed = [
        f"{field.name}={_brief(own)}"
        for field in fields
        if (own := getattr(value, field.name)) != defaults[field.name]
    ]
    return f"{type(value).__name__}({', '.join(changed)})"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = [_COLUMNS, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, cell, width in zip(_COLUMNS, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
