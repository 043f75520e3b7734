"""`prescore speed`: attention times as ratios to exact attention, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from prescore.cli.options import Json, Out, Quick, Resume, Seed, Threads, open_session

_STUDIES = ("lengths", "top-k", "clusters", "decode", "scoring", "short")
_SHORT = (64, 128, 256, 512, 1024, 2048, 4096)


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
            help="lengths, top-k, clusters, decode, scoring (each method alone), short (what short inputs lose); "
            "may be repeated.  [default: all]"
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
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
    """
    import os

    # the profiler behind the shares writes its own start and stop to stderr; read when torch is first imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from prescore import checks
    from prescore.evaluation.freed_memory import KEPT, choose_freed_memory
    from prescore.evaluation.speed import METHODS, Setting, decode_rows, length_rows
    from prescore.evaluation.speed_studies import scoring_rows, short_rows
    from prescore.report import speed as report

    checks.one_of("--dtype", dtype, ("float32", "float64", "bfloat16", "float16"))
    studies = tuple(study or (("lengths", "decode") if quick else _STUDIES))
    for name in studies:
        checks.one_of("--study", name, _STUDIES)
    lengths = sorted(set(n or ([1024, 2048, 4096] if quick else [2**p for p in range(10, 18)])))
    methods = tuple(method or METHODS)
    freed = choose_freed_memory(memory)

    def setting(length: int, is_causal: bool, is_backward: bool, **changes: int) -> Setting:
        few = exact_heads or (1 if length > 32768 else heads)
        fields = {"top_k": top_k, **changes}
        made = Setting(
            length, is_causal, is_backward, heads, dim, dtype, min(few, heads), repeats,
            min_seq_len=min_seq_len, methods=methods, memory=freed, **fields,
        )  # fmt: skip
        for name in methods:
            made.config(name)
        return made

    planned = []
    if "lengths" in studies:
        for is_causal in (False, True) if causal is None else (causal,):
            for is_backward in (False, True) if backward is None else (backward,):
                planned += length_rows([setting(length, is_causal, is_backward) for length in lengths], seed)
    longest = min(lengths[-1], 32768)
    if "top-k" in studies:
        budgets = [k for k in (256, 512, 1024, 2048, 4096, 8192) if k < longest]
        planned += length_rows([setting(longest, False, False, top_k=k) for k in budgets], seed, "top-k")
    if "clusters" in studies:
        numbers = (8, 16, 32, 65, 128, 256)
        planned += length_rows([setting(longest, False, False, n_clusters=k) for k in numbers], seed, "clusters")
    if "decode" in studies:
        planned += decode_rows(lengths[-1:] if n else (8192, lengths[-1]), top_k, heads, dim, 20, seed)
    if "scoring" in studies:
        planned += scoring_rows(longest, heads, dim, max(repeats, 5), seed)
    if "short" in studies:
        short = [length for length in (n or _SHORT) if length <= _SHORT[-1]]
        planned += short_rows(sorted(set(short)), heads, dim, max(repeats, 5), seed)
    session = open_session("speed", out=out, json=json, resume=resume, threads=threads)
    records = session.run(planned)
    for is_causal, is_backward in report.kinds(records):
        session.show(report.length_table(records, is_causal, is_backward).to_rich())
        if not is_backward:
            session.show(report.share_table(records, is_causal).to_rich())
    for name, field in (("top-k", "top_k"), ("clusters", "n_clusters")):
        if name in studies:
            session.show(report.sweep_table(records, name, field).to_rich())
    if "decode" in studies:
        session.show(report.decode_table(records).to_rich())
    if "scoring" in studies:
        session.show(report.scoring_table(records).to_rich())
    if "short" in studies:
        session.show(report.short_table(records).to_rich())
    if report.kinds(records):
        report.plot(records, session.out / "speed.png")
        session.say(f"plot: {session.out / 'speed.png'}")
    regime = "kept for the next" if freed == KEPT else "given back to the system"
    session.say(f"memory that a call frees: {regime}")
    session.say(f"records: {session.file.path}")
