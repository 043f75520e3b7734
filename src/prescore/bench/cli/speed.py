"""`prescore speed`: attention times as ratios to exact attention, on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from prescore.bench.cli.options import Json, Out, Quick, Resume, Seed, Session, Threads, open_session
from prescore.bench.cli.settings import Layers, Model
from prescore.bench.cli.speed_heads import Heads, SaveHeads, TextFile, save

if TYPE_CHECKING:
    from prescore.bench.records import Record


def command(
    n: Annotated[
        list[int] | None, typer.Option(min=16, help="Length; may be repeated.  [default: 1024 ... 131072]")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="hyper, default or a scorer of the paper's preset; may be repeated.  [default: all]"),
    ] = None,
    causal: Annotated[bool | None, typer.Option(help="Only causal, or only full.  [default: both]")] = None,
    backward: Annotated[
        bool | None, typer.Option(help="Only forward + backward, or only forward.  [default: both]")
    ] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(
            help="lengths, top-k, clusters, decode, scoring (each method alone), short (what short inputs lose), "
            "heads (those of --heads), parts (of the default, against the arithmetic limit), steps (the default's "
            "while decoding), parallel (bytes and times on 2 and 4 processes); may be repeated.  "
            "[default: the first six, or with --heads those]"
        ),
    ] = None,
    heads: Heads = None,
    save_heads: SaveHeads = None,
    model: Model = "smollm2",
    text_file: TextFile = None,
    layers: Layers = "all",
    n_heads: Annotated[int, typer.Option(min=1, help="Random heads.")] = 4,
    dim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    top_k: Annotated[int, typer.Option(min=1, help="Keys kept by the paper's preset.")] = 2048,
    min_seq_len: Annotated[int, typer.Option(min=1, help="Exact causal leaves of the paper's preset.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats; the median counts.")] = 3,
    exact_heads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Heads exact attention is measured on; its time is then scaled.  [default: 1 above 32768]"
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory that a call frees is kept for the next (as jemalloc does), or goes back to the system, "
            "whose page faults then count: kept or system."
        ),
    ] = "kept",
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    quick: Quick = False,
    threads: Threads = None,
) -> None:
    """Time exact, unfiltered and pre-scored attention, interleaved in one run, each output checked first.

    Example: prescore speed --n 8192 --n 32768 --causal --threads 2

    Example: prescore speed --save-heads heads --text-file book.txt --n 8192 --layers 0,12,24

    Example: prescore speed --heads heads --method default --threads 2
    """
    # the profiler behind the shares writes its own start and stop to stderr; read when torch is first imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if save_heads is not None:
        for path in save(save_heads, model, text_file, n, layers):
            print(path)
        return
    if layers != "all":
        raise ValueError(f"--layers must come with --save-heads, got {layers} without it")
    from prescore import checks
    from prescore.bench.memory import KEPT, choose_freed_memory
    from prescore.bench.speed.heads import find_heads
    from prescore.bench.speed.plan import SHORT, SpeedPlan
    from prescore.bench.speed.timing import METHODS, Setting

    checks.one_of("--dtype", dtype, ("float32", "float64", "bfloat16", "float16"))
    lengths = sorted(set(n or ([1024, 2048, 4096] if quick else [2**p for p in range(10, 18)])))
    freed = choose_freed_memory(memory)
    base = Setting(
        n=lengths[-1],
        causal=False,
        backward=False,
        heads=n_heads,
        dim=dim,
        dtype=dtype,
        repeats=repeats,
        top_k=top_k,
        min_seq_len=min_seq_len,
        methods=tuple(method or METHODS),
        memory=freed,
    )
    plan = SpeedPlan(
        base,
        lengths,
        studies=_studies(study, quick, heads is not None),
        causal=_both(causal),
        backward=_both(backward),
        exact_heads=exact_heads,
        caches=lengths[-1:] if n else [8192, lengths[-1]],
        short=[length for length in lengths if length <= SHORT[-1]] if n else SHORT,
        step_caches=lengths if n else [8192, 32768, 131072],
        heads=[] if heads is None else find_heads(heads),
        head_lengths=lengths if n else None,
    )
    session = open_session("speed", out=out, json=json, resume=resume, threads=threads)
    records = session.run(plan.rows(seed))
    _show(session, records)
    regime = "kept for the next" if freed == KEPT else "given back to the system"
    session.say(f"memory that a call frees: {regime}")
    session.say(f"records: {session.file.path}")


def _show(session: Session, records: list[Record]) -> None:
    """The tables of each study on the terminal, and the plots of the lengths in the run's directory."""
    from prescore.bench.speed import tables as closer
    from prescore.bench.speed import tables as report
    from prescore.bench.speed.tables import parallel_table

    studies = {record.config["study"] for record in records}
    kinds = report.kinds(records)
    for is_causal, is_backward in kinds:
        session.show(report.length_table(records, is_causal, is_backward).to_rich())
        if not is_backward:
            session.show(report.share_table(records, is_causal).to_rich())
    for name, field in (("top-k", "top_k"), ("clusters", "n_clusters")):
        if name in studies:
            session.show(report.sweep_table(records, name, field).to_rich())
    tables = {"decode": report.decode_table, "scoring": report.scoring_table, "short": report.short_table}
    tables |= {"heads": closer.heads_table, "parts": closer.parts_table, "steps": closer.steps_table}
    tables["parallel"] = parallel_table
    for name, table in tables.items():
        if name in studies:
            session.show(table(records).to_rich())
    if kinds:
        report.speed_plot(records, session.out / "speed.png")
        closer.curves_plot(records, session.out / "curves.png")
        session.say(f"plots: {session.out / 'speed.png'}, {session.out / 'curves.png'}")


def _studies(asked: list[str] | None, quick: bool, has_heads: bool) -> tuple[str, ...]:
    """Names of the studies; saved heads are part of the lengths."""
    from prescore.bench.speed.plan import EVERY_RUN

    if not asked:
        return ("heads",) if has_heads else ("lengths", "decode") if quick else EVERY_RUN
    return (*asked, *(["heads"] if has_heads and "lengths" in asked and "heads" not in asked else []))


def _both(choice: bool | None) -> tuple[bool, ...]:
    return (False, True) if choice is None else (choice,)
