"""`prescore planted`: the paper's planted model, claim by claim and method by method."""

from __future__ import annotations

import typer

from prescore.bench.cli.options import Run
from prescore.bench.records import Values


def command(
    run: Run,
    n: list[int] | None = typer.Option(None, help="Keys; may be repeated.  [default: 4096, 16384]"),
    d: list[int] | None = typer.Option(None, help="Dimensions; may be repeated.  [default: 32]"),
    epsilon: list[float] | None = typer.Option(
        None, help="Heaviness, group size 1/epsilon; may be repeated.  [default: 0.1]"
    ),
    c_signal: list[float] | None = typer.Option(
        None, help="Signal noise constant; may be repeated.  [default: 0.1]"
    ),
    c_noise: list[float] | None = typer.Option(None, help="Noise constant; may be repeated.  [default: 0.1]"),
    method: list[str] | None = typer.Option(
        None, help="Scorer; may be repeated.  [default: all, see `prescore info`]"
    ),
    rule: list[str] | None = typer.Option(
        None, help="Rule of clustering scorers; may be repeated.  [default: all]"
    ),
    seeds: int | None = typer.Option(None, min=1, help="Seeds per setting, from --seed up.  [default: 10]"),
    degree: int = typer.Option(2, min=1, help="Degree of the polynomial attention kernel."),
    norm: float = typer.Option(100.0, help="Norm M of the noise rows in Appendix B."),
) -> None:
    """Check the paper's claims on the planted model and measure which methods find the planted keys.

    Example: prescore planted --n 4096 --seeds 3 --out runs/planted/first
    """
    import dataclasses

    from prescore.paper.planted import tables
    from prescore.paper.planted.study import QUICK, Sweep, planted_rows

    base = QUICK if run.quick else Sweep()
    lists: Values = {"n": n, "d": d, "epsilon": epsilon, "c_signal": c_signal, "c_noise": c_noise}
    lists |= {"methods": method, "rules": rule, "seeds": range(run.seed, run.seed + (seeds or len(base.seeds)))}
    given: Values = {name: tuple(values) for name, values in lists.items() if values}
    # settings are checked before a run is opened
    rows = planted_rows(dataclasses.replace(base, **given, degree=degree, norm=norm))
    session = run.open("planted", writes=["planted-*.png"])
    records = session.run(rows)
    with session.reading():
        for setting in tables.recall_settings(records):
            session.show(tables.recall_table(records, setting).to_rich())
            name = f"planted {tables.describe_setting(setting)}.png".replace(" ", "-").replace("=", "")
            tables.planted_plot(records, setting, session.out / name)
            session.say(f"plot: {session.out / name}")
        session.show(tables.claim_table(records).to_rich())
    session.say(f"records: {session.file.path}")
