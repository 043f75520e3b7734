"""`prescore speed`: attention times as ratios to exact attention, on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prescore.bench.cli.options import (
    Json,
    Layers,
    Model,
    Out,
    Quick,
    Resume,
    Seed,
    Threads,
    open_session,
    read_layers,
)
from prescore.bench.records import Values


def command(
    n: Annotated[
        list[int] | None, typer.Option(min=16, help="Length; may be repeated.  [default: 1024 ... 131072]")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="default, hyper or paper:SCORER (the paper's preset); may be repeated.  [default: all]"),
    ] = None,
    causal: Annotated[bool | None, typer.Option(help="Only causal, or only full.  [default: both]")] = None,
    backward: Annotated[
        bool | None, typer.Option(help="Only forward + backward, or only forward.  [default: both]")
    ] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(
            help="lengths, top-k, clusters, decode, scoring (scorers alone), short (short inputs), heads (those "
            "of --heads), parts (of the default), steps (decode steps of the default), parallel (bytes and times "
            "on 2 and 4 processes); may be repeated.  [default: the first six, or heads with --heads]"
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help="Directory of saved attention inputs (--save-heads) for the studies heads, parts, steps and "
            "lengths; the first --n positions of files that have as many.  [default: all]",
        ),
    ] = None,
    save_heads: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Save the attention inputs of --model over the first --n tokens of --text-file here.",
        ),
    ] = None,
    model: Model = "smollm2",
    text_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The text that --save-heads reads.")
    ] = None,
    layers: Layers = "all",
    n_heads: Annotated[
        int | None,
        typer.Option(min=1, help="Random heads, for exact attention too.  [default: 4, 1 above 32768 tokens]"),
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    top_k: Annotated[int, typer.Option(min=1, help="Keys selected by the paper's preset.")] = 2048,
    min_seq_len: Annotated[int, typer.Option(min=1, help="Exact causal leaves of the paper's preset.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")] = 3,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory that a call frees is kept for the next one (as jemalloc does), or goes back to the "
            "system, and its page faults count: kept or system."
        ),
    ] = "kept",
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    quick: Quick = False,
    threads: Threads = None,
) -> None:
    """Time attention against exact attention: same heads, in turn, in one run, each output checked first.

    Example: prescore speed --n 8192 --n 32768 --causal --threads 2

    Example: prescore speed --save-heads heads --text-file book.txt --n 8192 --layers 0,12,24

    Example: prescore speed --heads heads --method default --threads 2
    """
    if save_heads is not None:
        for path in _save(save_heads, model, text_file, n, layers):
            print(path)
        return
    if layers != "all":
        raise ValueError(f"--layers must come with --save-heads, got {layers} without it")
    from prescore import checks
    from prescore.bench.memory import KEPT, choose_freed_memory
    from prescore.bench.speed import studies
    from prescore.bench.speed.heads import find_heads
    from prescore.bench.speed.tables import kinds, length_plot, tables

    checks.one_of("--dtype", dtype, ("float32", "float64", "bfloat16", "float16"))
    freed = choose_freed_memory(memory)
    settings: Values = {"heads": n_heads, "dim": dim, "dtype": dtype, "repeats": repeats, "top_k": top_k}
    settings |= {"min_seq_len": min_seq_len, "methods": list(method or studies.METHODS), "memory": freed}
    run = studies.Run(
        settings,
        n=sorted(set(n)) if n else None,
        lengths=sorted(set(n)) if n else studies.QUICK_LENGTHS if quick else studies.LENGTHS,
        causal=(False, True) if causal is None else (causal,),
        backward=(False, True) if backward is None else (backward,),
        saved=[] if heads is None else find_heads(heads),
        seed=seed,
    )
    chosen = study or (["heads"] if heads else ["lengths", "decode"] if quick else studies.DEFAULT_STUDIES)
    if heads and "lengths" in chosen:
        chosen = [*chosen, "heads"]
    rows = studies.plan_rows(run, chosen)
    session = open_session("speed", out=out, json=json, resume=resume, threads=threads)
    records = session.run(rows)
    session.show(*(table.to_rich() for table in tables(records)))
    if kinds(records):
        for name, field in (("speed.png", "seconds"), ("curves.png", "speedup")):
            length_plot(records, session.out / name, field)
            session.say(f"plot: {session.out / name}")
    kept = "kept for the next one" if freed == KEPT else "given back to the system"
    session.say(f"memory that a call frees: {kept}")
    session.say(f"records: {session.file.path}")


def _save(
    directory: Path, model: str, text_file: Path | None, lengths: Sequence[int] | None, layers: str
) -> list[Path]:
    """Save the heads of a model; positions past its trained length are scaled (YaRN)."""
    if text_file is None:
        raise ValueError("--save-heads must come with a --text-file, got none")
    chosen = read_layers(layers)
    from prescore.bench.language.documents import decode
    from prescore.bench.language.model import load_language_model
    from prescore.bench.speed.heads import save_heads

    loaded = load_language_model(model)
    tokens = loaded.encode(decode(text_file.read_bytes(), str(text_file)))
    n_tokens = max(lengths) if lengths else min(len(tokens), loaded.trained_length or len(tokens))
    if n_tokens > len(tokens):
        raise ValueError(f"--n must be at most the {len(tokens)} tokens of {text_file.name}, got {n_tokens}")
    print(f"reading {n_tokens} tokens", file=sys.stderr, flush=True)
    with loaded.extended(n_tokens):
        return save_heads(loaded.model, tokens[None, :n_tokens], directory, layers=chosen)
