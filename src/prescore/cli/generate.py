"""`prescore generate`: continue a text with pre-scored attention, beside exact attention."""

from __future__ import annotations

import hashlib
import itertools
import json as jsonlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prescore.cli.options import Json, Out, Resume, Seed, Threads, open_session
from prescore.records import Record, Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from prescore.config import PrescoreConfig
    from prescore.evaluation.generation import Generated
    from prescore.report.tables import Table


def command(
    model: Annotated[
        str, typer.Option(help="smollm2, a directory, a GGUF file or a name on the hub.")
    ] = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A text file to continue.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut the prompt to this many tokens.  [default: all]")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Scorer.  [default: the measured default]")] = None,
    top_k: Annotated[str | None, typer.Option(help="Keys kept: a count, a fraction below 1, or none.")] = None,
    layers: Annotated[str, typer.Option(help="all, first:N, last:N, even, odd, or numbers: 0,3,5.")] = "all",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="FIELD=VALUE of the configuration, null = None; may be repeated."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    evict: Annotated[bool, typer.Option("--evict", help="Free the unselected keys and values.")] = False,
    beams: Annotated[int, typer.Option(min=1, help="Beam search with this many beams; 1 = greedy.")] = 1,
    exact: Annotated[bool, typer.Option(help="Run exact attention too, for comparison.")] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """Continue a text greedily; print the text, prefill and decode speed, cache memory and selection sizes.

    Example: prescore generate --prompt-file book.txt --prompt-tokens 4000 --top-k 512 --max-new-tokens 40
    """
    config, chosen = _config(method, top_k, setting), _layers(layers)
    text = _prompt(prompt, prompt_file)
    session = open_session("generate", out=out, json=json, resume=resume, threads=threads)
    from prescore.integrations.apply import apply
    from prescore.integrations.offline_model import load_model

    loaded, tokenizer = load_model(model, trust_remote_code=trust_remote_code)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :prompt_tokens]
    if ids.shape[1] == 0:
        raise ValueError("the prompt must have at least one token, got an empty text")
    apply(loaded, config, layers=chosen).undo()  # what is refused is refused before anything is computed
    job = _Job(loaded, tokenizer, ids, config, chosen, max_new_tokens, evict, beams, quiet=json)
    common = {
        "model": model,
        "prompt": hashlib.sha256(str(ids.tolist()).encode()).hexdigest()[:12],
        "prompt_tokens": int(ids.shape[1]),
        "max_new_tokens": max_new_tokens,
        "beams": beams,
    }
    own = {"config": config.to_dict(), "layers": layers, "evict": evict}
    rows = [Row({**common, "attention": "exact"}, seed, lambda: job.measure("exact"))] if exact else []
    rows.append(Row({**common, "attention": "prescored", **own}, seed, lambda: job.measure("prescored")))
    records = session.run(rows)
    session.show((_beam_table(records) if beams > 1 else _table(records)).to_rich())
    session.say(f"records: {session.file.path}")


@dataclass
class _Job:
    """One prompt, continued with exact and with pre-scored attention."""

    model: Any
    tokenizer: Any
    ids: Any
    config: PrescoreConfig
    layers: str | list[int]
    max_new_tokens: int
    evict: bool
    beams: int
    quiet: bool
    results: dict[str, Generated] = field(default_factory=dict)

    def measure(self, name: str) -> dict[str, Any]:
        """Figures of one row; the text is printed as it comes."""
        from prescore.evaluation.generation import agreement

        print(f"{name}: reading {self.ids.shape[1]} tokens", file=sys.stderr, flush=True)
        generated = self.results[name] = self._generate(None if name == "exact" else self.config)
        figures = dict(generated.figures)
        figures["text"] = self.tokenizer.decode(generated.tokens)
        if name != "exact" and "exact" in self.results:
            figures.update(agreement(self.results["exact"], generated))
        return figures

    def _generate(self, config: PrescoreConfig | None) -> Generated:
        from prescore.evaluation.generation import beams_measured, generate_measured

        show = _ignore if self.quiet else _streamer(self.tokenizer)
        if self.beams > 1:
            generated = beams_measured(
                self.model,
                self.ids,
                config=config,
                layers=self.layers,
                max_new_tokens=self.max_new_tokens,
                n_beams=self.beams,
            )
            for token in generated.tokens:
                show(token)
        else:
            generated = generate_measured(
                self.model,
                self.ids,
                config=config,
                layers=self.layers,
                max_new_tokens=self.max_new_tokens,
                evict=self.evict,
                on_token=show,
            )
        if not self.quiet:
            print(flush=True)
        return generated


def _config(method: str | None, top_k: str | None, settings: list[str] | None) -> PrescoreConfig:
    from prescore.config import PrescoreConfig

    fields: dict[str, Any] = {}
    for entry in settings or []:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ValueError(f"--set must be FIELD=VALUE, got {entry!r}")
        try:
            fields[name] = jsonlib.loads(value)
        except jsonlib.JSONDecodeError:
            fields[name] = value
    if method is not None:
        fields["method"] = method
    if top_k is not None:
        fields["top_k"] = _budget(top_k)
    return PrescoreConfig.from_dict(fields)


def _budget(text: str) -> int | float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ValueError(f"--top-k must be a count, a fraction or none, got {text!r}") from None


def _layers(text: str) -> str | list[int]:
    numbers = text.split(",")
    return [int(number) for number in numbers] if all(n.strip().lstrip("-").isdigit() for n in numbers) else text


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ValueError("exactly one of --prompt and --prompt-file must be given")
    if prompt is not None:
        return prompt
    from prescore.evaluation.documents import decode

    path = Path(prompt_file or "")
    return decode(path.read_bytes(), str(path))


def _ignore(token: int) -> None:
    """Show nothing."""


def _streamer(tokenizer: Any) -> Callable[[int], None]:
    """Print each token's text once it is complete (a letter may span several tokens)."""
    tokens: list[int] = []
    printed = 0

    def show(token: int) -> None:
        nonlocal printed
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[printed:])
            sys.stdout.flush()
            printed = len(text)

    return show


def _table(records: list[Record]) -> Table:
    from prescore.report.tables import Table

    rows = []
    for record in records:
        figures = record.figures
        speed, same = figures["decode_tokens_per_second"], figures.get("same_tokens")
        rows.append(
            (
                record.config["attention"],
                f"{figures['prefill_seconds']:.2f} s ({figures['prefill_tokens_per_second']:.0f} tok/s)",
                f"{figures['prefill_attention_seconds']:.2f} s",
                "-" if speed is None else f"{figures['decode_seconds']:.2f} s ({speed:.1f} tok/s)",
                f"{figures['decode_attention_seconds']:.2f} s",
                f"{figures['cache']['bytes'] / 2**20:.1f} MiB",
                "-" if same is None else f"{same} of {figures['new_tokens']}",
            )
        )
    columns = ("attention", "prefill", "attention part", "decode", "attention part", "cache", "tokens as exact")
    title = f"{records[0].config['model']}, {records[0].config['prompt_tokens']} prompt tokens"
    return Table(title, columns, tuple(rows), note=_selection_line(records[-1]))


def _beam_table(records: list[Record]) -> Table:
    from prescore.report.tables import Table

    rows = []
    for record in records:
        figures = record.figures
        same = figures.get("same_tokens")
        rows.append(
            (
                record.config["attention"],
                f"{figures['seconds']:.2f} s",
                f"{figures['score']:.4f}",
                f"{figures['exact_score']:.4f}",
                "-" if same is None else f"{same} of {figures['new_tokens']}",
            )
        )
    columns = ("attention", "time", "log-probability", "under exact attention", "tokens as exact")
    config = records[0].config
    title = f"{config['model']}, {config['prompt_tokens']} prompt tokens, {config['beams']} beams"
    return Table(title, columns, tuple(rows), note="summed log-probability of the best beam, in nats")


def _selection_line(record: Record) -> str:
    """Rows a decode step reads for the prompt; neighbouring layers with the same number share an entry."""
    entries = [entry for entry in record.figures["cache"]["layers"] if "rows" in entry]
    if not entries:
        return "no layer made a selection: every key was kept"
    groups = []
    for rows, group in itertools.groupby(entries, key=lambda entry: (entry["rows"], entry["selected_from"])):
        numbers = [entry["layer"] for entry in group]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        groups.append(f"layers {span}: {rows[0]} of {rows[1]}")
    return f"rows that stand for the prompt: {', '.join(groups)}"
