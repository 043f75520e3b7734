"""Options that commands on language models share, and how their values are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from prescore.bench.records import Values

if TYPE_CHECKING:
    from prescore.bench.cli.options import Session
    from prescore.bench.language.methods import Method


Model = Annotated[str, typer.Option(help="`smollm2`, a directory, a GGUF file, or a name on the hub.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="Such as cpu or cuda.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", help="exact, local, default, hyper, SCORER, paper:SCORER or a baseline; repeatable."),
]
Lengths = Annotated[
    list[int] | None,
    typer.Option("--length", "-n", help="Tokens read; repeatable. (default: 4096, or as the experiment says)"),
]
Leaf = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Exact causal leaves, and chunks of the default. (default: length / 8, and the default as it is)",
    ),
]
Layers = Annotated[str, typer.Option(help="Layers replaced: all, first:N, last:N, even, odd, or numbers 0,3,7.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="FIELD=VALUE of the configurations, in JSON or a word, nested fields by their path "
        "(scorer.n_clusters=64, inner.block_size=128, lsh.sample_size=0, coupling.mask=zero); repeatable.",
    ),
]


def read_changes(changes: Sequence[str] | None) -> Values:
    """`FIELD=VALUE` pairs; a value that is not JSON is a word."""
    values: Values = {}
    for change in changes or []:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"set must be FIELD=VALUE, got {change!r}")
        try:
            values[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            values[name.strip()] = value
    return values


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
            options = ", ".join(f"--{each.replace('_', '-')}" for each in names)
            raise ValueError(f"{owner} must be given without {options}, got --{name.replace('_', '-')} too")


def say_what_is_exact(session: Session, methods: Mapping[int, Sequence[Method]]) -> None:
    """Say which methods read every key at a length: their results are those of exact attention."""
    from prescore.config import Routed

    for length, method in [(length, method) for length, own in methods.items() for method in own]:
        if isinstance(method.config, Routed) and method.config.exact_until >= length:
            session.say(
                f"{method.label} is exact at {length} tokens: it reads everything up to exact_until="
                f"{method.config.exact_until}; longer texts, --leaf or --set exact_until=N make it route"
            )
