"""A long prompt read and continued, ours beside other engines, each in a process of its own.

    python experiments/speed/rivals.py --model smollm2 -d book.txt -n 8192 --gguf FILE --openvino FOLDER

A process is given its work as JSON on the command line and prints its results as JSON. Nothing of one engine is in
memory while another is measured.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer

from prescore import checks
from prescore.bench.cli.main import script
from prescore.bench.cli.options import Model, Run
from prescore.bench.memory import KEPT, choose_freed_memory, peak_megabytes, reset_peak
from prescore.bench.records import Record, Row, Values
from prescore.bench.tables import MISSING, Table

LENGTHS, QUICK_LENGTHS = (8192, 16384, 32768), (512,)
PARTS = ("time", "loss")
NEW_TOKENS = 32
CHARACTERS_PER_TOKEN = 12
"""More than any tokenizer in use makes one token of: a novel is not tokenized for one page."""
POSITIONS_AT_ONCE = 256
"""Positions whose logits are in memory at the same time."""


class Engine(NamedTuple):
    """How a prompt is read.

    Attributes:
        run: Measures a job.
        weights: Of our process: int8, bfloat16 or float32; "" = what the engine's file holds.
        option: Option of its attention.
        package: What must be installed.
    """

    run: Callable[[Values, list[int]], Values]
    weights: str = ""
    option: str = ""
    package: str = "transformers"


class Request(NamedTuple):
    """What one run of the study measures.

    Attributes:
        model: As `load_language_model` takes it.
        text: The text whose first tokens are the prompt.
        lengths: Tokens of the prompt.
        engines: Names among `ENGINES`; None = all.
        openvino: Directory of the model converted for OpenVINO.
        gguf: The model as GGUF, for llama.cpp.
        parts: Of `PARTS`; None = all.
        threads: Of every engine.
    """

    model: str
    text: Path
    lengths: Sequence[int]
    engines: Sequence[str] | None
    openvino: Path | None
    gguf: Path | None
    parts: Sequence[str] | None
    threads: int


def plan(request: Request, seed: int) -> tuple[list[Row], list[str]]:
    """Rows of the engines that can run, and a sentence for each that cannot."""
    names = list(ENGINES) if request.engines is None else list(request.engines)
    for name in names:
        checks.one_of("--method", name, tuple(ENGINES))
    for part in request.parts or ():
        checks.one_of("--part", part, PARTS)
    skipped = {name: _missing(name, request) for name in names}
    with request.text.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    rows = []
    for n in request.lengths:
        for part in request.parts or PARTS:
            for name in (name for name in names if not skipped[name]):
                config = {"study": "rivals", "part": part, "engine": name, "n": n, "model": request.model}
                config |= {"digest": digest}
                if part == "time":
                    config |= {"new_tokens": NEW_TOKENS, "threads": request.threads}
                rows.append(Row(config, seed, _measured(request, name, part, n), cost=n))
    return rows, [f"{name} is skipped: {reason}" for name, reason in skipped.items() if reason]


def _missing(name: str, request: Request) -> str:
    """Why an engine cannot run; empty = it can."""
    package = ENGINES[name].package
    if importlib.util.find_spec(package) is None:
        return f"pip install {INSTALL[package]}"
    if package == "openvino_genai" and request.openvino is None:
        return (
            "--openvino must name the model as optimum-cli export openvino --weight-format int8 writes it "
            "(pip install optimum-intel[openvino])"
        )
    if package == "llama_cpp" and request.gguf is None:
        return "--gguf must name the model's GGUF file"
    return ""


def _measured(request: Request, name: str, part: str, n: int) -> Callable[[], Values]:
    """Measures a row in a process of its own."""

    def measure() -> Values:
        job = {"engine": name, "part": part, "n": n, "model": request.model, "threads": request.threads}
        job |= {"openvino": str(request.openvino), "gguf": str(request.gguf)}
        return _in_a_process({**job, "tokens": str(_tokens(request, max(request.lengths)))})

    return measure


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _tokens(request: Request, n: int) -> Path:
    """The tokens of the text in a file; every engine reads the same."""
    path = Path(_folder().name) / f"{n}.json"
    if not path.exists():
        _in_a_process(
            {"engine": "", "model": request.model, "text": str(request.text), "n": n, "tokens": str(path)}
        )
    return path


def _in_a_process(job: Values) -> Values:
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.get("threads", 1))}
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        reason = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
        raise ValueError(f"the engine {job['engine'] or 'tokenizer'} must end without an error, got {reason}")
    results: Values = json.loads(ended.stdout.splitlines()[-1])
    return results


# --- in the process of an engine


def run_job(text: str) -> None:
    """Run a job and print its results."""
    job = json.loads(text)
    if not job["engine"]:
        results = _write_tokens(job)
    else:
        ids = json.loads(Path(job["tokens"]).read_text(encoding="utf-8"))[: job["n"]]
        results = ENGINES[job["engine"]].run(job, ids)
    print(json.dumps(results))


def _write_tokens(job: Values) -> Values:
    from prescore.bench.language.documents import read_text
    from prescore.bench.language.model import load_language_model

    text = read_text(Path(job["text"]))[: CHARACTERS_PER_TOKEN * job["n"]]
    tokens = load_language_model(job["model"], check_head=False).encode(text).tolist()
    if len(tokens) < job["n"]:
        raise ValueError(f"--n must be at most the {len(tokens)} tokens of the text, got {job['n']}")
    Path(job["tokens"]).write_text(json.dumps(tokens[: job["n"]]), encoding="utf-8")
    return {}


def _times(read: Callable[[], int], step: Callable[[int], int]) -> Values:
    """Time to the first token, tokens per second after it, and the peak memory, weights included."""
    reset_peak()
    begin = time.perf_counter()
    token = read()
    first = time.perf_counter()
    for _ in range(NEW_TOKENS):
        token = step(token)
    seconds = time.perf_counter() - first
    return {
        "seconds_to_first_token": first - begin,
        "tokens_per_second": NEW_TOKENS / seconds,
        "peak_megabytes": peak_megabytes(),
    }


def _versions(*packages: str) -> Values:
    return {package: metadata.version(package) for package in packages}


def run_transformers(job: Values, ids: list[int]) -> Values:
    """A model of transformers, with the default where the engine is ours, else with its own attention."""
    import torch
    from transformers import DynamicCache

    import prescore
    from prescore.bench.language.generation import prefill
    from prescore.bench.language.model import load_language_model
    from prescore.integrations.transformers.cache import PrescoredCache

    engine = ENGINES[job["engine"]]
    kept = choose_freed_memory(KEPT)
    torch.set_num_threads(job["threads"])
    loaded = load_language_model(job["model"], weights=engine.weights, check_head=False)
    model, is_ours = loaded.model, engine.option == "default"
    config = model.config.get_text_config(decoder=True)
    new_cache: Callable[[], Any] = lambda: PrescoredCache(config) if is_ours else DynamicCache(config=config)  # noqa: E731
    tokens = torch.tensor([ids], dtype=torch.int64, device="cpu")
    results: Values = {"memory": kept, "versions": _versions("torch", "transformers")}
    with loaded.extended(len(ids)) as scaled, torch.no_grad():
        results |= {"positions": scaled} if scaled else {}
        with prescore.apply(model) if is_ours else nullcontext():
            prefill(model, tokens[:, :64], new_cache())  # what is made at the first call
            if job["part"] == "loss":
                parts = tokens.split(PREFILL_CHUNK, dim=1)
                held, states = new_cache(), []
                for part in parts:
                    output = model.base_model(input_ids=part, past_key_values=held, use_cache=True)
                    states.append(output.last_hidden_state[0])
                blocks = torch.cat(states)[len(ids) // 2 - 1 : -1].split(POSITIONS_AT_ONCE)
                return results | {"loss": _loss(map(loaded.logits, blocks), ids)}
            held = new_cache()

            def step(token: int) -> int:
                last = torch.tensor([[token]], dtype=torch.int64, device="cpu")
                return int(model(last, past_key_values=held, use_cache=True).logits[0, -1].argmax())

            return results | _times(
                lambda: int(prefill(model, tokens, held, chunk_size=PREFILL_CHUNK).argmax()), step
            )


def run_openvino(job: Values, ids: list[int]) -> Values:
    """OpenVINO GenAI, with its block-sparse XAttention in prefill where the engine says so."""
    import numpy
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    # in chunks its XAttention loses more than 1 nat: the prompt is read in one forward
    scheduler.max_num_batched_tokens = len(ids) + NEW_TOKENS
    if ENGINES[job["engine"]].option:
        scheduler.use_sparse_attention = True
        scheduler.sparse_attention_config = genai.SparseAttentionConfig(mode=genai.SparseAttentionMode.XATTENTION)
    threads = {"INFERENCE_NUM_THREADS": job["threads"]}
    pipeline = genai.ContinuousBatchingPipeline(job["openvino"], scheduler, "CPU", threads)
    results: Values = {"versions": _versions("openvino", "openvino-genai")}
    prompt = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
    config = genai.GenerationConfig(max_new_tokens=1 + NEW_TOKENS, do_sample=False, ignore_eos=True)
    if job["part"] == "loss":
        config = genai.GenerationConfig(max_new_tokens=1, do_sample=False, ignore_eos=True, echo=True, logprobs=1)
        handle = pipeline.add_request(0, prompt, config)
        found: list[float] = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
        for output in handle.read_all():
            found += output.generated_log_probs
        # the first token has no prediction, the last one is new
        own = found[len(ids) // 2 : len(ids)]
        if len(found) != len(ids) + 1 or not any(own):
            raise RuntimeError(
                f"OpenVINO must give a log-probability for each token, got {len(found)} for {len(ids)}"
            )
        return results | {"loss": -sum(own) / len(own)}
    handle = pipeline.add_request(0, prompt, config)

    def token(_last: int = 0) -> int:
        while not handle.can_read():
            pipeline.step()
        return int(next(iter(handle.read().values())).generated_ids[-1])

    return results | _times(token, token)


def run_llama(job: Values, ids: list[int]) -> Values:
    """llama.cpp with flash attention."""
    import llama_cpp
    import numpy
    import torch

    n_batch = 512
    options = {"n_ctx": len(ids) + NEW_TOKENS + 8, "n_batch": n_batch, "n_ubatch": n_batch, "verbose": False}
    llama: Any = llama_cpp.Llama(
        job["gguf"], n_threads=job["threads"], n_threads_batch=job["threads"], flash_attn=True, **options
    )
    results: Values = {"versions": _versions("llama-cpp-python")}
    n_vocabulary = llama.n_vocab()

    def read(tokens: list[int], start: int, every: bool) -> Any:
        """Logits of all the tokens, or of the last one."""
        llama._batch.set_batch(batch=tokens, n_past=start, logits_all=every)
        llama._ctx.decode(llama._batch)
        shape = (len(tokens) if every else 1, n_vocabulary)
        pointer: Any = ctypes.cast(llama._ctx.get_logits(), ctypes.POINTER(ctypes.c_float))
        return numpy.ctypeslib.as_array(pointer, shape=shape)

    if job["part"] == "loss":
        first = len(ids) // 2 - 1

        def logits() -> Iterator[torch.Tensor]:
            for start in range(0, len(ids) - 1, n_batch):
                some = ids[start : min(start + n_batch, len(ids) - 1)]
                found = read(some, start, start + len(some) > first)
                if start + len(some) > first:
                    yield torch.from_numpy(found[max(0, first - start) :].copy())

        return results | {"loss": _loss(logits(), ids)}
    length = len(ids)

    def prompt() -> int:
        for start in range(0, length, n_batch):
            last = read(ids[start : start + n_batch], start, False)
        return int(last[0].argmax())

    def step(token: int) -> int:
        nonlocal length
        length += 1
        return int(read([token], length - 1, False)[0].argmax())

    return results | _times(prompt, step)


def _loss(logits: Any, ids: list[int]) -> float:
    """Mean negative log-likelihood of the second half, from blocks of logits of the positions before it."""
    import torch

    targets = torch.tensor(ids[len(ids) // 2 :], dtype=torch.int64, device="cpu")
    total, done = 0.0, 0
    for block in logits:
        wanted = targets[done : done + len(block)]
        total += float(torch.nn.functional.cross_entropy(block.float(), wanted, reduction="sum"))
        done += len(block)
    if done != len(targets):
        raise RuntimeError(f"logits must be those of {len(targets)} positions, got {done}")
    return total / done


PREFILL_CHUNK = 2048
"""Tokens of the prompt per forward of transformers."""
INSTALL = {
    "transformers": '".[hf]" in a clone of prescore',
    "openvino_genai": "openvino-genai",
    "llama_cpp": "llama-cpp-python",
}
ENGINES = {
    "exact float32": Engine(run_transformers, "float32"),
    "exact bfloat16": Engine(run_transformers, "bfloat16"),
    "exact int8": Engine(run_transformers, "int8"),
    "prescore float32": Engine(run_transformers, "float32", "default"),
    "prescore bfloat16": Engine(run_transformers, "bfloat16", "default"),
    "prescore int8": Engine(run_transformers, "int8", "default"),
    "openvino": Engine(run_openvino, package="openvino_genai"),
    "openvino xattention": Engine(run_openvino, option="xattention", package="openvino_genai"),
    "llama.cpp": Engine(run_llama, package="llama_cpp"),
}


def tables(records: Sequence[Record]) -> list[Table]:
    """A table for each length."""
    lengths = sorted({record.config["n"] for record in records})
    return [rivals_table([record for record in records if record.config["n"] == n], n) for n in lengths]


def rivals_table(records: Sequence[Record], n: int) -> Table:
    """Engines on a prompt of `n` tokens: time to the first token, decode speed, memory, loss."""
    engines: dict[str, Values] = {}
    for record in records:
        entry = engines.setdefault(record.config["engine"], {})
        known = {**entry.get("versions", {}), **record.results.get("versions", {})}
        entry |= {**record.results, "versions": known}
    shown = {
        "first token": ("seconds_to_first_token", "{:.1f} s"),
        "tokens/s": ("tokens_per_second", "{:.1f}"),
        "peak memory": ("peak_megabytes", "{:.0f} MB"),
        "loss": ("loss", "{:.4f}"),
    }
    rows = [
        (name, *(form.format(entry[field]) if field in entry else MISSING for field, form in shown.values()))
        for name, entry in engines.items()
    ]
    versions = {package: version for entry in engines.values() for package, version in entry["versions"].items()}
    named = ", ".join(f"{package} {version}" for package, version in versions.items())
    timed = [record.config for record in records if "threads" in record.config]
    words = [f"{timed[0]['new_tokens']} new tokens, {timed[0]['threads']} threads"] if timed else []
    note = "; ".join([*words, "loss over the second half of the prompt", named])
    title = f"{records[0].config['model']}, {n} tokens"
    return Table(title, ("engine", *shown), tuple(rows), note)


def command(
    options: Run,
    document: Path = typer.Option(..., "--document", "-d", exists=True, dir_okay=False, help="The text read."),
    length: list[int] | None = typer.Option(
        None, "--length", "-n", help="Tokens; repeatable.  [default: 8192, 16384, 32768]"
    ),
    method: list[str] | None = typer.Option(
        None, help="An engine, such as 'prescore int8'; repeatable.  [default: all]"
    ),
    model: Model = "smollm2",
    openvino: Path | None = typer.Option(
        None, file_okay=False, exists=True, help="--model, by optimum-cli export openvino --weight-format int8."
    ),
    gguf: Path | None = typer.Option(None, exists=True, dir_okay=False, help="--model for llama.cpp."),
    part: list[str] | None = typer.Option(None, help="time or loss; repeatable.  [default: both]"),
) -> None:
    """Read and continue a prompt exactly, by the default, in OpenVINO and in llama.cpp; time, memory and loss."""
    chosen = sorted(set(length)) if length else QUICK_LENGTHS if options.quick else LENGTHS
    request = Request(
        model, document, chosen, method, openvino, gguf, part, options.threads or torch.get_num_threads()
    )
    rows, skipped = plan(request, options.seed)
    session = options.open("speed")
    for sentence in skipped:
        session.say(sentence)
    session.show(*(table.to_rich() for table in tables(session.run(rows))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        run_job(sys.argv[2])
    else:
        sys.exit(script(command))
