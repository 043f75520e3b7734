"""`prescore speed`: attention times as ratios to exact attention, on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from prescore.bench.cli.options import Layers, Model, Run, folder, read_layers
from prescore.bench.records import Values


def command(
    options: Run,
    n: list[int] | None = typer.Option(None, min=16, help="Length; may be repeated.  [default: 1024 ... 131072]"),
    method: list[str] | None = typer.Option(
        None,
        help="default, hyper or paper:SCORER (the paper's preset); of the study rivals an engine, such as "
        "'prescore int8'; may be repeated.  [default: all]",
    ),
    causal: bool | None = typer.Option(None, help="Only causal, or only full.  [default: both]"),
    backward: bool | None = typer.Option(None, help="Only forward + backward, or only forward.  [default: both]"),
    study: list[str] | None = typer.Option(
        None,
        help="lengths, top-k, clusters, decode, scoring (scorers alone), short (short inputs), heads (those "
        "of --heads, forward unless --backward), parts (of the default), steps (decode steps of the default), "
        "parallel (bytes and times on 2 and 4 processes), gpu-model (the time that GPUs would need, predicted "
        "from counts on --heads), rivals (a prompt of --text-file read and continued by --model, exactly, by the "
        "default and by other engines; alone); may be repeated.  [default: the first six, or heads with --heads]",
    ),
    heads: Path | None = typer.Option(
        None,
        file_okay=False,
        exists=True,
        help="Directory of saved attention inputs (--save-heads) for the studies heads, parts, steps and "
        "lengths; the first --n positions of files that have as many.  [default: all]",
    ),
    save_heads: Path | None = typer.Option(
        None,
        parser=folder("--save-heads"),
        metavar="DIRECTORY",
        help="Save the attention inputs of --model over the first --n tokens of --text-file here.",
    ),
    model: Model = "smollm2",
    text_file: Path | None = typer.Option(
        None, exists=True, dir_okay=False, help="The text that --save-heads and the study rivals read."
    ),
    openvino: Path | None = typer.Option(
        None,
        file_okay=False,
        exists=True,
        help="--model for OpenVINO in the study rivals: optimum-cli export openvino --weight-format int8.",
    ),
    gguf: Path | None = typer.Option(
        None, exists=True, dir_okay=False, help="--model for llama.cpp in the study rivals."
    ),
    part: list[str] | None = typer.Option(
        None, help="time or loss, of the study rivals; may be repeated.  [default: both]"
    ),
    layers: Layers = "all",
    n_heads: int | None = typer.Option(
        None, min=1, help="Random heads, for exact attention too.  [default: 4, 1 above 32768 tokens]"
    ),
    dim: int = typer.Option(64, min=1, help="Head dimension."),
    dtype: str = typer.Option("float32", help="float32, float64, bfloat16 or float16."),
    top_k: int = typer.Option(2048, min=1, help="Keys selected by the paper's preset."),
    min_seq_len: int = typer.Option(2048, min=1, help="Exact causal leaves of the paper's preset."),
    repeats: int = typer.Option(3, min=1, help="Timed rounds; the median counts."),
    device: str = typer.Option("cpu", help="Such as cpu or cuda."),
    memory: str = typer.Option(
        "kept",
        help="Memory that a call frees is kept for the next one (as jemalloc does), or goes back to the "
        "system, and its page faults count: kept or system.",
    ),
) -> None:
    """Time attention against exact attention: same heads, in turn, in one run, each output checked first.

    Example: prescore speed --n 8192 --n 32768 --causal --threads 2

    Example: prescore speed --save-heads heads --text-file book.txt --n 8192 --layers 0,12,24

    Example: prescore speed --heads heads --method default --threads 2

    Example: prescore speed --study rivals --model smollm2 --text-file book.txt --n 8192 --threads 2
    """
    if device != "cpu" and (save_heads is not None or study == ["rivals"]):
        raise ValueError(f"--device must be cpu with --save-heads and --study rivals, got {device!r}")
    if save_heads is not None:
        for path in _save(save_heads, model, text_file, n, layers):
            print(path)
        return
    if study == ["rivals"]:
        _rivals(options, n, model, text_file, engines=method, openvino=openvino, gguf=gguf, parts=part)
        return
    for name, given in {"openvino": openvino, "gguf": gguf}.items():
        if given is not None:
            raise ValueError(f"--{name} must come with --study rivals, got {given} without it")
    if layers != "all":
        raise ValueError(f"--layers must come with --save-heads, got {layers} without it")
    from prescore import checks
    from prescore.bench.memory import KEPT, choose_freed_memory
    from prescore.bench.speed import studies
    from prescore.bench.speed.heads import find_heads
    from prescore.bench.speed.tables import kinds, length_plot, tables

    checks.one_of("--dtype", dtype, ("float32", "float64", "bfloat16", "float16"))
    checks.device("--device", device)
    freed = choose_freed_memory(memory)
    settings: Values = {"heads": n_heads, "dim": dim, "dtype": dtype, "repeats": repeats, "top_k": top_k}
    settings |= {"min_seq_len": min_seq_len, "methods": list(method or studies.METHODS), "memory": freed}
    run = studies.Run(
        settings,
        n=sorted(set(n)) if n else None,
        lengths=sorted(set(n)) if n else studies.QUICK_LENGTHS if options.quick else studies.LENGTHS,
        causal=(False, True) if causal is None else (causal,),
        backward=(False, True) if backward is None else (backward,),
        saved=[] if heads is None else find_heads(heads),
        seed=options.seed,
        device=device,
    )
    chosen = study or (["heads"] if heads else ["lengths", "decode"] if options.quick else studies.DEFAULT_STUDIES)
    if heads and "lengths" in chosen:
        chosen = [*chosen, "heads"]
    rows = studies.plan_rows(run, chosen)
    session = options.open("speed", device, writes=["speed.png", "curves.png"])
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


def _rivals(
    options: Run, lengths: Sequence[int] | None, model: str, text_file: Path | None, **settings: Any
) -> None:
    """The study rivals: engines that cannot run are named with what they need."""
    import torch

    from prescore.bench.speed import rivals
    from prescore.bench.speed.tables import tables

    if text_file is None:
        raise ValueError("--study rivals must come with a --text-file, got none")
    chosen = sorted(set(lengths)) if lengths else rivals.QUICK_LENGTHS if options.quick else rivals.LENGTHS
    threads = options.threads or torch.get_num_threads()
    rows, skipped = rivals.plan(
        rivals.Request(model, text_file, chosen, threads=threads, **settings), options.seed
    )
    session = options.open("speed")
    for sentence in skipped:
        session.say(sentence)
    records = session.run(rows)
    with session.reading():
        session.show(*(table.to_rich() for table in tables(records)))
    session.say(f"records: {session.file.path}")


def _save(
    directory: Path, model: str, text_file: Path | None, lengths: Sequence[int] | None, layers: str
) -> list[Path]:
    """Save the heads of a model; positions past its trained length are scaled (YaRN)."""
    if text_file is None:
        raise ValueError("--save-heads must come with a --text-file, got none")
    for found in directory.glob("layer-*.safetensors"):
        raise ValueError(f"--save-heads must name a directory without saved heads, got {found}")
    chosen = read_layers(layers)
    from prescore.bench.language.documents import read_text
    from prescore.bench.language.model import load_language_model
    from prescore.bench.speed.heads import save_heads

    loaded = load_language_model(model)
    tokens = loaded.encode(read_text(text_file))
    n_tokens = max(lengths) if lengths else min(len(tokens), loaded.trained_length or len(tokens))
    if n_tokens > len(tokens):
        raise ValueError(f"--n must be at most the {len(tokens)} tokens of {text_file.name}, got {n_tokens}")
    print(f"reading {n_tokens} tokens", file=sys.stderr, flush=True)
    with loaded.extended(n_tokens):
        return save_heads(loaded.model, tokens[None, :n_tokens], directory, layers=chosen)
