"""What every measuring command shares: its options, its record file, its progress, and ranks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from prescore.bench.busy import busy_words
from prescore.bench.records import Record, RecordFile, RecordFileError, Row, Values, measure, row_key

if TYPE_CHECKING:
    from rich.console import RenderableType

    from prescore.bench.language.model import LanguageModel
    from prescore.bench.methods import Method
    from prescore.parallel.comm import Group


def folder(option: str) -> Callable[[str], Path]:
    """How a directory is read: an empty word is not the current one."""

    def read(text: str) -> Path:
        path = Path(text)
        if not text.strip() or ((path.exists() or path.is_symlink()) and not path.is_dir()):
            raise ValueError(f"{option} must name a directory, got {text!r}")
        return path

    return read


# Options that several commands share, in groups: `with_groups` puts the fields in place of the parameter.

Json = Annotated[bool, typer.Option("--json", help="Print one JSON line per result instead of tables.")]
Model = Annotated[str, typer.Option(help="`smollm2`, a directory, a GGUF file, or a name on the hub.")]
Layers = Annotated[str, typer.Option(help="Layers replaced: all, first:N, last:N, even, odd, or numbers 0,3,7.")]


@dataclass(frozen=True)
class Run:
    """Options of every command that measures."""

    seed: int = typer.Option(0, min=0, help="Seed of all randomness.")
    out: Path | None = typer.Option(
        None,
        parser=folder("--out"),
        metavar="DIRECTORY",
        help="Directory for records.jsonl and plots.  [default: runs/COMMAND/TIME]",
    )
    json: Json = False
    resume: bool = typer.Option(
        False, "--resume", help="Continue the records in --out (else the newest run): finished rows stay."
    )
    quick: bool = typer.Option(False, "--quick", help="A small version that takes about a minute.")
    threads: int | None = typer.Option(None, min=1, max=1024, help="CPU threads.  [default: torch's choice]")

    def open(self, command: str, device: str = "cpu", *, writes: Sequence[str] = ()) -> Session:
        """Open the record file before any work is done, so that a refusal costs nothing.

        Args:
            command: Its name in records.
            device: Where it runs, for the records.
            writes: Patterns of the other files that it writes: a new run refuses a directory that has one.
        """
        path = run_directory(command, self.out, self.resume) / RECORDS
        if not (path.is_file() and path.stat().st_size):
            for present in (present for pattern in writes for present in path.parent.glob(pattern)):
                raise RecordFileError(
                    f"{present} must not be there before a new run, which would replace it; choose another --out"
                )
        file = RecordFile(path, resume=self.resume)
        if file.dropped is not None:
            print(file.dropped, file=sys.stderr, flush=True)
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return Session(command, file, self.json, torch.get_num_threads(), device, is_continued=len(file) > 0)


@dataclass(frozen=True)
class Language:
    """Options of commands on a language model."""

    model: Model = "smollm2"
    layers: Layers = "all"
    changes: list[str] | None = typer.Option(
        None,
        "--set",
        help="FIELD=VALUE of the configurations, in JSON or a word, nested fields by their path "
        "(scorer.n_clusters=64, inner.block_size=128, lsh.sample_size=0, coupling.mask=zero); repeatable.",
    )
    dtype: str = typer.Option("float32", help="float32, bfloat16, float16 or float64.")
    weights: str | None = typer.Option(
        None,
        help="int8 (with int8 activations, on CPUs; all else in bfloat16), bfloat16 or float32; replaces --dtype.",
    )
    device: str = typer.Option("cpu", help="Such as cpu or cuda.")
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="Run code that comes with the model."
    )

    @property
    def fields(self) -> Values:
        """Fields to change: `FIELD=VALUE` pairs; a value that is not JSON is a word."""
        values: Values = {}
        for change in self.changes or []:
            name, equals, value = change.partition("=")
            if not equals:
                raise ValueError(f"set must be FIELD=VALUE, got {change!r}")
            values[name.strip()] = read_value(value)
        return values

    def load(self, **options: bool) -> LanguageModel:
        """The model; options as of `load_language_model`."""
        from prescore.bench.language.model import load_language_model

        return load_language_model(
            self.model,
            dtype=self.dtype,
            weights=self.weights,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            **options,
        )


@dataclass(frozen=True)
class Comparison(Language):
    """Options of commands that compare methods on a language model."""

    method: list[str] | None = typer.Option(
        None,
        help="exact, local, default, hyper, [paper:]SCORER[-RULE][-sample][+centroids] or a baseline; repeatable.",
    )
    length: list[int] | None = typer.Option(
        None, "--length", "-n", help="Tokens read; repeatable. (default: 4096, or as the experiment says)"
    )
    leaf: int | None = typer.Option(
        None,
        min=1,
        help="Exact causal leaves, and chunks of the default. (default: length / 8, and the default as it is)",
    )

    def methods(
        self, lengths: Sequence[int], names: Iterable[str], *, leaf: int | None, top_k: str | None
    ) -> dict[int, list[Method]]:
        """Methods by their names with the sizes of each length, none twice; `--set` must fit one of them."""
        from prescore.bench.methods import Sizes, check_changes, parse_method

        budget, chosen, changes = read_budget(top_k or "256"), list(dict.fromkeys(names)), self.fields
        by_length = {
            n: [parse_method(name, Sizes.of_text(n, leaf, budget, changes)) for name in chosen] for n in lengths
        }
        check_changes(changes, [method for methods in by_length.values() for method in methods])
        return by_length


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer reads it: the fields of a group are options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        annotations = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            parameters.append(
                parameter.replace(
                    name=field.name,
                    kind=parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=annotations[field.name],
                )
            )

    def run(**options: Any) -> None:
        made = {
            name: group(**{f.name: options.pop(f.name) for f in fields(group)}) for name, group in groups.items()
        }
        command(**made, **options)

    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


ARGV: ContextVar[tuple[str, ...]] = ContextVar("ARGV", default=())
"""The command line being run, for the records."""

RUNS = Path("runs")
RECORDS = "records.jsonl"
QUICK_LENGTH, QUICK_LEAF, QUICK_TOP_K = 512, 64, "32"
"""Sizes of `--quick` on language models: every method reads less than exact attention."""
_LINE_EVERY = 5.0


def _show_version(is_given: bool) -> None:
    if is_given:
        from prescore import __version__

        print(f"prescore {__version__}")
        raise typer.Exit


def root(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error; anywhere."),
    imports: list[str] | None = typer.Option(
        None, "--import", help="Python file or module that registers scorers or baselines; repeatable, anywhere."
    ),
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_show_version, help="Show the version and stop."
    ),
) -> None:
    """Attention over long contexts in which each query reads the keys that matter to it."""


def load_imports(words: Sequence[str]) -> list[str]:
    """Run what `--import` names, wherever it stands on a command line; returns the other words."""
    others, remaining = [], iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name != "--import":
            others.append(word)
            continue
        module = value if equals else next(remaining, None)
        if not module:
            raise ValueError(f"--import must be followed by a Python file or module, got {word!r} alone")
        _load(module)
    return others


def _load(name: str) -> None:
    path = Path(name)
    try:
        if path.suffix != ".py":
            importlib.import_module(name)
        else:
            # a name that no module has: a file may be called as one of Python's
            unique = f"prescore --import {path.absolute()}"
            spec = importlib.util.spec_from_file_location(unique, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise FileNotFoundError("there is no such file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[unique] = module  # dataclasses look their module up by its name
            spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"--import must be a Python file or module that runs, got {name!r} ({reason})") from error


@dataclass(frozen=True)
class Session:
    """One run of a measuring command: it measures rows and appends their records to a file.

    Example:
        >>> session = run.open("planted")
        >>> records = session.run(rows)  # finished rows are not run again
        >>> session.show(table)  # printed unless --json
    """

    command: str
    file: RecordFile
    json: bool
    threads: int
    device: str
    quiet: bool = False
    is_continued: bool = False
    advance: Callable[[float], None] | None = None

    @property
    def out(self) -> Path:
        """The run's directory."""
        return self.file.path.parent

    @contextmanager
    def whole(self, cost: float) -> Iterator[Session]:
        """A session whose runs share one progress bar; `cost` is that of all rows that are not finished."""
        with progress(self.command, cost) as advance:
            yield replace(self, advance=advance)

    def run(self, rows: Sequence[Row]) -> list[Record]:
        """Measure the rows that are not finished; return the records of all, in the rows' order, each once."""
        # an option given twice repeats a row, which must not count as another seed or document
        by_key = {row_key(self.command, row.config, row.seed): row for row in rows}
        cost = sum(row.cost for key, row in by_key.items() if key not in self.file)
        finished = sum(key in self.file for key in by_key)
        if finished and self.advance is None:
            self.say(f"{finished} of {len(by_key)} rows are finished in {self.file.path}")
        argv = list(ARGV.get())
        try:
            with self._progress(cost) as advance:
                for key, row in by_key.items():
                    if key not in self.file:
                        record = measure(self.command, row, argv=argv, device=self.device, threads=self.threads)
                        self.file.append(record)
                        advance(row.cost)
                    if self.json:
                        print(self.file[key].to_json(), flush=True)
        except KeyboardInterrupt:
            self.say(
                f"interrupted; finished rows are in {self.file.path}; continue with --resume --out {self.out}"
            )
            raise SystemExit(130) from None
        return [self.file[key] for key in by_key]

    def _progress(self, cost: float) -> AbstractContextManager[Callable[[float], None]]:
        if self.advance is not None:
            return nullcontext(self.advance)
        return nullcontext(lambda amount: None) if self.quiet else progress(self.command, cost)

    def show(self, *renderables: RenderableType) -> None:
        """Print tables and text to stdout, unless `--json` was given, and whether the machine was busy."""
        if self.json or self.quiet:
            return
        from rich.console import Console

        console = Console()
        # piped output has no width, and a table squeezed to 80 columns loses its numbers
        console = console if console.is_terminal else Console(width=max(console.width, 160))
        for renderable in renderables:
            console.print(renderable)
        if words := busy_words(list(self.file)):
            console.print(words, style="bold")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Where records become tables and plots: those of an earlier run may have been edited."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            if not self.is_continued or isinstance(error, RecordFileError):
                raise
            reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise RecordFileError(
                f"{self.file.path} must hold results as they were measured, got others ({reason}); "
                "remove the lines that were edited or choose another --out"
            ) from error

    def say(self, text: str) -> None:
        """Print one line to stderr."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def run_directory(command: str, out: Path | None, resume: bool) -> Path:
    """Where a run writes: `--out`, with `--resume` the newest run of a command, or a new folder."""
    if out is not None:
        return out
    runs = (RUNS / command).glob(f"*/{RECORDS}") if resume else ()
    # a run that was refused after its file was made has nothing to continue
    earlier = [path.parent for path in runs if path.is_file() and path.stat().st_size]
    if earlier:
        return max(earlier)
    return RUNS / command / time.strftime("%Y%m%d-%H%M%S")


@contextmanager
def progress(title: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show the share done and the time left on stderr; yields `advance(amount)`.

    One line on a terminal; elsewhere a line now and then, so that a log stays readable.
    """
    started = last = time.monotonic()
    done, end = 0.0, "  \r" if sys.stderr.isatty() else "\n"

    def advance(amount: float) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if done > 0 and (end != "\n" or now - last >= _LINE_EVERY):
            last = now
            left = (now - started) * (total - done) / done
            words = f"{title}: {100 * done / total:.0f} %, {left:.0f} s left"
            print(words, end=end, file=sys.stderr, flush=True)

    yield advance


@contextmanager
def parallel_session(
    command: str, run: Run, parallel: bool, device: str, writes: Sequence[str]
) -> Iterator[tuple[Session, Group | None]]:
    """A session and the ranks that torchrun started, or None without `parallel`.

    Rank 0 writes the records and prints. Every other rank gets a silent session in a temporary folder, with the
    same finished rows.
    """
    if not parallel:
        yield run.open(command, device, writes=writes), None
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "parallel must be started by torchrun --nproc-per-node N -m prescore, got a single process"
        )
    import torch
    import torch.distributed as dist

    from prescore.parallel.comm import as_group

    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        ranks = as_group(dist.group.WORLD)
        session = run.open(command, f"{device} x {ranks.size}", writes=writes) if ranks.rank == 0 else None
        lines = [None if session is None else [record.to_json() for record in session.file]]
        dist.broadcast_object_list(lines, src=0)
        if session is not None:
            yield session, ranks
            return
        with tempfile.TemporaryDirectory() as folder:
            file = RecordFile(Path(folder) / RECORDS)
            for line in lines[0] or []:
                file.append(Record.from_json(line))
            yield Session(command, file, False, torch.get_num_threads(), device, quiet=True), ranks
    finally:
        dist.destroy_process_group()


# How the values of options are read.


def read_value(text: str) -> Any:
    """JSON, or else a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def read_budget(text: str) -> int | float:
    """`256` keys or `0.25` of them."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    raise ValueError(f"top_k must be a count or a fraction, got {text!r}")


def read_layers(text: str) -> str | list[int]:
    """A pattern, or numbers with commas."""
    numbers = text.split(",")
    if all(number.strip().lstrip("-").isdigit() for number in numbers):
        return [int(number) for number in numbers]
    return text


def refuse_options(context: typer.Context, names: Sequence[str], owner: str) -> None:
    """Refuse options on the command line that something else decides."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            options = ", ".join(f"--{option.replace('_', '-')}" for option in names)
            raise ValueError(f"{owner} must be given without {options}, got --{name.replace('_', '-')} too")


def say_what_is_exact(session: Session, methods: Mapping[int, Sequence[Method]]) -> None:
    """Say which methods read every key at a length: their results are those of exact attention."""
    from prescore.config import Routed

    for length, method in [(length, method) for length, chosen in methods.items() for method in chosen]:
        if isinstance(method.config, Routed) and method.config.exact_until >= length:
            session.say(
                f"{method.label} is exact at {length} tokens: it reads everything up to exact_until="
                f"{method.config.exact_until}; longer texts, --leaf or --set exact_until=N make it route"
            )
