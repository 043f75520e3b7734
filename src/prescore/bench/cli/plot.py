"""`prescore plot`: a picture of finished records, with the axes and lines that are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prescore.bench.cli.records import Paths
from prescore.bench.records import find_records, flat_rows

_USUAL = {
    "perplexity": ("reads_per_query", "loss", "method.axes.series"),
    "speed": ("n", "seconds", "method"),
    "ruler": ("length", "score", "method.label"),
    "retrieval": ("length", "accuracy", "method.label"),
}
"""Axes and lines of a command's plot."""


def command(
    paths: Paths,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The picture; its suffix is the format.")],
    x: Annotated[str | None, typer.Option("-x", help="Column across, named as in records --csv.")] = None,
    y: Annotated[str | None, typer.Option("-y", help="Column upwards; rows that share a point: mean.")] = None,
    by: Annotated[str | None, typer.Option(help="Column whose values are the lines.")] = None,
    where: Annotated[list[str] | None, typer.Option(help="COLUMN=VALUE of the rows drawn; repeatable.")] = None,
    log_x: Annotated[bool, typer.Option("--log-x", help="Powers of two across.")] = False,
    log_y: Annotated[bool, typer.Option("--log-y", help="A logarithmic scale upwards.")] = False,
) -> None:
    """Draw finished records: one column against another, a line for each value of a third.

    Example: prescore plot runs/perplexity/first --out loss.png

    Example: prescore plot runs/speed -x n -y speedup --by method --where causal=True --log-x --out s.png
    """
    if not out.suffix:
        raise ValueError(f"--out must end in a suffix that names the format, such as .png, got {str(out)!r}")
    records = find_records(paths)
    usual = _USUAL.get(records[0].command, (None, None, None))
    columns = [given or name for given, name in zip((x, y, by), usual, strict=True)]
    rows = [row for record in records for row in flat_rows(record)]
    if None in columns:
        known = ", ".join(sorted({name for row in rows for name in row}))
        raise ValueError(f"-x, -y and --by must be given for records of {records[0].command}, which have {known}")
    for condition in where or []:
        name, _, value = condition.partition("=")
        rows = [row for row in rows if str(row.get(name)) == value]
    from prescore.bench.plots import line_plot

    across, upwards, lines = map(str, columns)
    for row in rows:  # exact and local attention, and the default, are no series of budgets
        row.setdefault("method.axes.series", row.get("method.label"))
    line_plot(rows, out, x=across, y=upwards, by=lines, log_x=log_x, log_y=log_y)
    print(out)
