"""`prescore generate`: continue a text with pre-scored attention, compared with exact attention."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prescore.bench.cli import options as cli
from prescore.bench.records import Row, Values, row_key

if TYPE_CHECKING:
    from prescore.bench.language.generation import Generated
    from prescore.config import Config


def command(
    model: cli.Model = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A text file to continue.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut the prompt to this many tokens.  [default: all]")
    ] = None,
    config: Annotated[
        str,
        typer.Option(help="default, hyper, exact, SCORER (Selected) or paper:SCORER (Selected.paper)."),
    ] = "default",
    top_k: Annotated[
        str | None,
        typer.Option(help="Keys kept by a scorer, a count or a fraction.  [default: its own]"),
    ] = None,
    layers: cli.Layers = "all",
    changes: cli.Changes = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    evict: Annotated[
        bool, typer.Option("--evict", help="Free the keys and values that a scorer left out.")
    ] = False,
    refresh_every: Annotated[
        int | None, typer.Option(min=1, help="Select again after so many tokens.  [default: never]")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beam search with this many beams; 1 = greedy.")] = 1,
    exact: Annotated[bool, typer.Option(help="Run exact attention too, for comparison.")] = True,
    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement",
            help="Also compare each choice with exact attention's after the same tokens.",
        ),
    ] = False,
    ignore_end: Annotated[bool, typer.Option("--ignore-end", help="Continue after the end token.")] = False,
    trust_remote_code: cli.RemoteCode = False,
    seed: cli.Seed = 0,
    out: cli.Out = None,
    json: cli.Json = False,
    resume: cli.Resume = False,
    threads: cli.Threads = None,
) -> None:
    """Continue a text greedily; print the text, prefill and decode speed, cache memory and selection sizes.

    Example: prescore generate --prompt-file book.txt --prompt-tokens 4000 --config key-diff --top-k 512

    Example: prescore generate --prompt-file book.txt --prompt-tokens 7936 --ignore-end --agreement
    """
    from prescore.bench.language import generation
    from prescore.bench.language.tables import beam_table, generation_table

    chosen, places = read_config(config, top_k, changes), cli.read_layers(layers)
    how = generation.Continuation(chosen, places, max_new_tokens, evict, refresh_every, beams, ignore_end)
    if agreement and (not exact or beams > 1):
        raise ValueError(f"--agreement must come with --exact and one beam, got exact={exact} and {beams} beams")
    text = _prompt(prompt, prompt_file)
    session = cli.open_session("generate", out=out, json=json, resume=resume, threads=threads)
    from prescore.bench.offline import load_model
    from prescore.integrations.apply import apply

    loaded, tokenizer = load_model(model, trust_remote_code=trust_remote_code)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :prompt_tokens]
    if ids.shape[1] == 0:
        raise ValueError("the prompt must have at least one token, got an empty text")
    # a model that cannot run the configuration is refused before anything is computed
    apply(loaded, how.config, layers=how.layers).undo()
    common = {
        "model": model,
        "prompt": hashlib.sha256(str(ids.tolist()).encode()).hexdigest()[:12],
        "prompt_tokens": int(ids.shape[1]),
        "max_new_tokens": max_new_tokens,
        "beams": beams,
        "ignore_end": ignore_end,
    }
    own = {"config": chosen.to_dict(), "layers": places, "evict": evict, "refresh_every": refresh_every}
    exact_row = {**common, "attention": "exact"}
    finished: dict[str, Generated] = {}

    def measure(name: str) -> Values:
        """One generation; the text is printed as it is generated."""
        session.say(f"{name}: reading {ids.shape[1]} tokens")
        mine = how if name != "exact" else replace(how, config=None, evict=False, refresh_every=None)
        show = (lambda token: None) if json else _streamer(tokenizer)
        if beams > 1:
            generated = generation.beams_measured(loaded, ids, mine)
            for token in generated.tokens:
                show(token)
        else:
            generated = generation.generate_measured(loaded, ids, mine, on_token=show)
        if not json:
            print(flush=True)
        finished[name] = generated
        results = {**generated.results, "text": tokenizer.decode(generated.tokens), "tokens": generated.tokens}
        if name != "exact" and "exact" in finished:
            results |= generation.agreement(finished["exact"], generated)
        return results

    def measure_agreement() -> Values:
        """The choices after each token that exact attention chose."""
        tokens = session.file[row_key("generate", exact_row, seed)].results["tokens"]
        session.say(f"after the exact text: reading {ids.shape[1]} tokens")
        generated = generation.generate_measured(loaded, ids, how, forced=tokens)
        return {**generated.results, **generation.forced_agreement(tokens, generated.tokens)}

    rows = [Row(exact_row, seed, lambda: measure("exact"))] if exact else []
    rows.append(Row({**common, "attention": "prescored", **own}, seed, lambda: measure("prescored")))
    if agreement:
        rows.append(
            Row({**common, "attention": "prescored, after the exact text", **own}, seed, measure_agreement)
        )
    records = session.run(rows)
    session.show((beam_table(records) if beams > 1 else generation_table(records)).to_rich())
    session.say(f"records: {session.file.path}")


def read_config(name: str, top_k: str | None, changes: list[str] | None) -> Config:
    """The configuration of the options: a name means what it means for `prescore perplexity`."""
    from prescore import checks
    from prescore.bench.language.methods import PAPER, change
    from prescore.config import Exact, Hyper, Routed, Selected
    from prescore.registry import list_scorers

    named: dict[str, Config] = {"default": Routed(), "hyper": Hyper.published(), "exact": Exact()}
    scorers = list_scorers()
    checks.one_of("config", name, (*named, *scorers, *(PAPER + scorer for scorer in scorers)))
    fields = cli.read_changes(changes)
    if top_k is not None:
        if name in named:
            raise ValueError(f"top_k must come with a scorer as --config, got {top_k} for {name!r}")
        fields = {"top_k": cli.read_budget(top_k), **fields}
    if name not in named:
        named[name] = Selected.paper(name.removeprefix(PAPER)) if name.startswith(PAPER) else Selected(name)
    return change(named[name], fields)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ValueError("exactly one of --prompt and --prompt-file must be given")
    if prompt_file is None:
        return prompt or ""
    from prescore.bench.language.documents import decode

    return decode(prompt_file.read_bytes(), str(prompt_file))


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
