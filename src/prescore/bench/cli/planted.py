"""`prescore planted`: the paper's planted model, claim by claim and method by method."""

from __future__ import annotations

from typing import Annotated

import typer

from prescore.bench.cli.options import Json, Out, Quick, Resume, Seed, Threads, open_session
from prescore.bench.records import Values


def command(
    n: Annotated[list[int] | None, typer.Option(help="Keys; may be repeated.  [default: 4096, 16384]")] = None,
    d: Annotated[list[int] | None, typer.Option(help="Dimensions; may be repeated.  [default: 32]")] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Heaviness, group size 1/epsilon; may be repeated.  [default: 0.1]")
    ] = None,
    c_signal: Annotated[
        list[float] | None, typer.Option(help="Signal noise constant; may be repeated.  [default: 0.1]")
    ] = None,
    c_noise: Annotated[
        list[float] | None, typer.Option(help="Noise constant; may be repeated.  [default: 0.1]")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Scorer; may be repeated.  [default: all, see `prescore info`]")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="Rule of clustering scorers; may be repeated.  [default: all]")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per setting, from --seed up.  [default: 10]")
    ] = None,
    degree: Annotated[int, typer.Option(min=1, help="Degree of the polynomial attention kernel.")] = 2,
    norm: Annotated[float, typer.Option(help="Norm M of the noise rows in Appendix B.")] = 100.0,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    quick: Quick = False,
    threads: Threads = None,
) -> None:
    """Check the paper's claims on the planted model and measure which methods find the planted keys.

    Example: prescore planted --n 4096 --seeds 3 --out runs/planted/first
    """
    import dataclasses

    from prescore.bench.planted import tables
    from prescore.bench.planted.study import QUICK, Sweep, planted_rows

    base = QUICK if quick else Sweep()
    lists: Values = {"n": n, "d": d, "epsilon": epsilon, "c_signal": c_signal, "c_noise": c_noise}
    lists |= {"methods": method, "rules": rule, "seeds": range(seed, seed + (seeds or len(base.seeds)))}
    given: Values = {name: tuple(values) for name, values in lists.items() if values}
    # settings are checked before a run is opened
    rows = planted_rows(dataclasses.replace(base, **given, degree=degree, norm=norm))
    session = open_session("planted", out=out, json=json, resume=resume, threads=threads)
    records = session.run(rows)
    for setting in tables.recall_settings(records):
        session.show(tables.recall_table(records, setting).to_rich())
        name = f"planted {tables.describe_setting(setting)}.png".replace(" ", "-").replace("=", "")
        tables.planted_plot(records, setting, session.out / name)
        session.say(f"plot: {session.out / name}")
    session.show(tables.claim_table(records).to_rich())
    session.say(f"records: {session.file.path}")
