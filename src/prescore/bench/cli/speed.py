"""`prescore speed`: attention times as ratios to exact attention, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from prescore.bench.cli.options import Run
from prescore.bench.records import Values

DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Heads:
    """Options: queries, keys and values."""

    length: list[int] | None = typer.Option(
        None,
        "--length",
        "-n",
        min=16,
        help="Tokens; of --heads the first so many, where a file has them; repeatable.  [default: 1024 ... 32768]",
    )
    heads: Path | None = typer.Option(
        None, file_okay=False, exists=True, help="Attention inputs of a model, as prescore save-heads writes them."
    )
    n_heads: int | None = typer.Option(
        None, min=1, help="Random heads, for exact attention too.  [default: 4, 2 above 32768 tokens]"
    )
    dim: int = typer.Option(64, min=1, help="Dimension of random heads.")
    dtype: str = typer.Option("float32", help="float32, float64, bfloat16 or float16.")
    device: str = typer.Option("cpu", help="Such as cpu or cuda.")


@dataclass(frozen=True)
class Timing:
    """Options: what is timed."""

    method: list[str] | None = typer.Option(
        None, help="default, hyper or [paper:]SCORER[-RULE][-sample][+centroids]; repeatable."
    )
    study: list[str] | None = typer.Option(
        None,
        help="lengths (random heads), heads (those of --heads), steps (decode steps of the default); repeatable."
        "  [default: lengths and steps, or heads and steps]",
    )
    causal: bool | None = typer.Option(None, help="Only causal, or only full.  [default: both]")
    backward: bool | None = typer.Option(None, help="Only forward + backward, or only forward.  [default: both]")
    top_k: int = typer.Option(2048, min=1, help="Keys kept by scorers.")
    leaf: int = typer.Option(2048, min=1, help="Exact causal leaves of scorers and of hyper.")
    repeats: int = typer.Option(3, min=1, help="Timed rounds; the median counts.")
    memory: str = typer.Option(
        "kept",
        help="Memory that a call frees is kept for the next one (as jemalloc does), or goes back to the "
        "system, and its page faults count: kept or system.",
    )


def command(options: Run, given: Heads, timing: Timing) -> None:
    """Time attention against exact attention: same heads, in turn, in one run, each output checked first.

    Example: prescore speed -n 8192 -n 32768 --method default --causal --threads 2

    Example: prescore speed --heads heads --method default --threads 2
    """
    from prescore import checks
    from prescore.bench.memory import KEPT, choose_freed_memory
    from prescore.bench.speed import studies
    from prescore.bench.speed.heads import find_heads
    from prescore.bench.speed.tables import kinds, length_plot, tables

    checks.one_of("--dtype", given.dtype, DTYPES)
    checks.device("--device", given.device)
    freed = choose_freed_memory(timing.memory)
    settings: Values = {"heads": given.n_heads, "dim": given.dim, "dtype": given.dtype, "repeats": timing.repeats}
    settings |= {"top_k": timing.top_k, "min_seq_len": timing.leaf, "memory": freed}
    usual = studies.QUICK_LENGTHS if options.quick and not given.heads else None
    run = studies.Run(
        {**settings, "methods": list(timing.method or studies.METHODS)},
        lengths=sorted(set(given.length)) if given.length else usual,
        causal=(False, True) if timing.causal is None else (timing.causal,),
        backward=(False, True) if timing.backward is None else (timing.backward,),
        saved=[] if given.heads is None else find_heads(given.heads),
        seed=options.seed,
        device=given.device,
    )
    rows = studies.plan_rows(run, timing.study or ["heads" if given.heads else "lengths", "steps"])
    session = options.open("speed", given.device, writes=["speed.png", "curves.png"])
    records = session.run(rows)
    with session.reading():
        session.show(*(table.to_rich() for table in tables(records)))
        if kinds(records):
            for name, field in (("speed.png", "seconds"), ("curves.png", "speedup")):
                length_plot(records, session.out / name, field)
                session.say(f"plot: {session.out / name}")
    kept = "kept for the next one" if freed == KEPT else "given back to the system"
    session.say(f"memory that a call frees: {kept}")
    session.say(f"records: {session.file.path}")
