"""`prescore generate`: continue a text with pre-scored attention, beside exact attention."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prescore.bench.cli.options import Json, Out, Resume, Seed, Threads, open_session
from prescore.bench.cli.settings import Changes, Layers, Model, RemoteCode, read_budget, read_changes, read_layers
from prescore.bench.records import RecordFile, Row, row_key
from prescore.types import Values

if TYPE_CHECKING:
    from collections.abc import Callable

    from prescore.bench.language.generation import Continuation, Generated
    from prescore.config import Config


def command(
    model: Model = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A text file to continue.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut the prompt to this many tokens.  [default: all]")
    ] = None,
    config: Annotated[
        str, typer.Option(help="default, hyper, exact, or a scorer, whose --top-k keys are kept.")
    ] = "default",
    top_k: Annotated[
        str | None, typer.Option(help="Keys kept by a scorer, a count or a fraction.  [default: 1024]")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Relative error allowed to the default: queries read on until they are within it."),
    ] = None,
    layers: Layers = "all",
    changes: Changes = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    evict: Annotated[
        bool, typer.Option("--evict", help="Free the keys and values that a scorer left out.")
    ] = False,
    refresh_every: Annotated[
        int | None, typer.Option(min=1, help="Let a scorer choose anew after so many tokens.  [default: never]")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beam search with this many beams; 1 = greedy.")] = 1,
    exact: Annotated[bool, typer.Option(help="Run exact attention too, for comparison.")] = True,
    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement",
            help="Also let it choose each token behind exact attention's: how many are the same.",
        ),
    ] = False,
    ignore_end: Annotated[bool, typer.Option("--ignore-end", help="Go on behind the model's end token.")] = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """Continue a text greedily; print the text, prefill and decode speed, cache memory and selection sizes.

    Example: prescore generate --prompt-file book.txt --prompt-tokens 4000 --config key-diff --top-k 512

    Example: prescore generate --prompt-file book.txt --prompt-tokens 7936 --ignore-end --agreement

    Example: prescore generate --prompt-file book.txt --prompt-tokens 4000 --tolerance 0.02
    """
    from prescore.bench.language.generation import Continuation, beam_table, error_table, generation_table

    how = Continuation(
        read_config(config, top_k, changes, tolerance),
        read_layers(layers),
        max_new_tokens,
        evict,
        refresh_every,
        beams,
        ignore_end,
    )
    if agreement and (not exact or beams > 1):
        raise ValueError(f"--agreement must come with --exact and one beam, got exact={exact} and {beams} beams")
    text = _prompt(prompt, prompt_file)
    session = open_session("generate", out=out, json=json, resume=resume, threads=threads)
    from prescore.bench.offline import load_model
    from prescore.integrations.apply import apply

    loaded, tokenizer = load_model(model, trust_remote_code=trust_remote_code)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :prompt_tokens]
    if ids.shape[1] == 0:
        raise ValueError("the prompt must have at least one token, got an empty text")
    # what is refused is refused before anything is computed
    apply(loaded, how.config, layers=how.layers).undo()
    job = _Job(loaded, tokenizer, ids, how, session.file, quiet=json)
    common = {
        "model": model,
        "prompt": hashlib.sha256(str(ids.tolist()).encode()).hexdigest()[:12],
        "prompt_tokens": int(ids.shape[1]),
        "max_new_tokens": max_new_tokens,
        "beams": beams,
        "ignore_end": ignore_end,
    }
    rows = [Row({**common, "attention": "exact"}, seed, lambda: job.measure("exact"))] if exact else []
    own = {"attention": "prescored", **_described(how)}
    rows.append(Row({**common, **own}, seed, lambda: job.measure("prescored")))
    if agreement:
        exact_key = row_key("generate", rows[0].config, seed)
        forced = {**own, "attention": "prescored, shown the exact text"}
        rows.append(Row({**common, **forced}, seed, lambda: job.measure_forced(exact_key)))
    records = session.run(rows)
    session.show((beam_table(records) if beams > 1 else generation_table(records)).to_rich())
    bars = error_table(records[-1])
    if bars is not None:
        session.show(bars.to_rich())
    session.say(f"records: {session.file.path}")


def read_config(name: str, top_k: str | None, changes: list[str] | None, tolerance: float | None = None) -> Config:
    """The configuration that the options ask for.

    `default`, `hyper` and `exact` are `Routed()`, `Hyper()` and `Exact()`; any other name is a scorer's.
    """
    from prescore import checks
    from prescore.bench.language.methods import changed
    from prescore.config import Exact, Hyper, Routed, Selected
    from prescore.registry import list_scorers

    own: dict[str, type[Routed | Hyper | Exact]] = {"default": Routed, "hyper": Hyper, "exact": Exact}
    checks.one_of("config", name, (*own, *list_scorers()))
    if tolerance is not None and name != "default":
        raise ValueError(f"tolerance must come with --config default, got {tolerance} for {name!r}")
    if name not in own:
        selected = Selected(name) if top_k is None else Selected(name, read_budget(top_k))
        return changed(selected, read_changes(changes))
    if top_k is not None:
        raise ValueError(f"top_k must come with a scorer as --config, got {top_k} for {name!r}")
    within = {} if tolerance is None else {"tolerance": tolerance}
    return changed(own[name](), {**within, **read_changes(changes)})


@dataclass
class _Job:
    """One prompt, continued with exact and with pre-scored attention."""

    model: Any
    tokenizer: Any
    ids: Any
    how: Continuation
    file: RecordFile
    quiet: bool
    results: dict[str, Generated] = field(default_factory=dict)

    def measure(self, name: str) -> Values:
        """Figures of one row; the text is printed as it comes."""
        from prescore.bench.language.generation import agreement

        print(f"{name}: reading {self.ids.shape[1]} tokens", file=sys.stderr, flush=True)
        how = self.how if name != "exact" else replace(self.how, config=None, evict=False, refresh_every=None)
        generated = self.results[name] = self._generate(how)
        figures = dict(generated.figures)
        figures["text"] = self.tokenizer.decode(generated.tokens)
        figures["tokens"] = generated.tokens
        if name != "exact" and "exact" in self.results:
            figures.update(agreement(self.results["exact"], generated))
        return figures

    def measure_forced(self, exact_key: str) -> Values:
        """Figures of the choices behind the tokens of the finished record `exact_key`."""
        from prescore.bench.language.generation import forced_agreement, generate_measured

        tokens = self.file[exact_key].figures["tokens"]
        print(f"shown the exact text: reading {self.ids.shape[1]} tokens", file=sys.stderr, flush=True)
        generated = generate_measured(self.model, self.ids, self.how, forced=tokens)
        return {**generated.figures, **forced_agreement(tokens, generated.tokens)}

    def _generate(self, how: Continuation) -> Generated:
        from prescore.bench.language.generation import beams_measured, generate_measured

        show = _ignore if self.quiet else _streamer(self.tokenizer)
        if how.n_beams > 1:
            generated = beams_measured(self.model, self.ids, how)
            for token in generated.tokens:
                show(token)
        else:
            generated = generate_measured(self.model, self.ids, how, on_token=show)
        if not self.quiet:
            print(flush=True)
        return generated


def _described(how: Continuation) -> Values:
    """What a record says about how a prompt was continued, beside what it shares with exact attention."""
    return {
        "config": None if how.config is None else how.config.to_dict(),
        "layers": how.layers,
        "evict": how.evict,
        "refresh_every": how.refresh_every,
    }


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ValueError("exactly one of --prompt and --prompt-file must be given")
    if prompt is not None:
        return prompt
    from prescore.bench.language.documents import decode

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
