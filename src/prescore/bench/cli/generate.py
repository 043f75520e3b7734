"""`prescore generate`: continue a text with pre-scored attention, compared with exact attention."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from prescore.bench.cli import options as cli
from prescore.bench.records import Row, Values, row_key

if TYPE_CHECKING:
    from prescore.bench.language.generation import Generated
    from prescore.config import Config

_QUICK_PROMPT, _QUICK_TOKENS = 2560, 8
"""Sizes of `--quick`: the default routes after 2048 tokens."""


def command(
    given: cli.Language,
    run: cli.Run,
    prompt: str | None = typer.Option(None, help="The prompt itself."),
    prompt_file: Path | None = typer.Option(None, exists=True, dir_okay=False, help="A text file to continue."),
    prompt_tokens: int | None = typer.Option(
        None, min=1, help="Cut the prompt to this many tokens.  [default: all]"
    ),
    config: str = typer.Option(
        "default", help="default, hyper, exact, SCORER (Selected) or paper:SCORER (Selected.paper)."
    ),
    top_k: str | None = typer.Option(
        None, help="Keys kept by a scorer, a count or a fraction.  [default: its own]"
    ),
    max_new_tokens: int | None = typer.Option(None, min=1, help="Tokens to generate at most.  [default: 64]"),
    evict: bool = typer.Option(False, "--evict", help="Free the keys and values that a scorer left out."),
    refresh_every: int | None = typer.Option(
        None, min=1, help="Select again after so many tokens.  [default: never]"
    ),
    beams: int = typer.Option(1, min=1, help="Beam search with this many beams; 1 = greedy."),
    exact: bool = typer.Option(True, help="Run exact attention too, for comparison."),
    agreement: bool = typer.Option(
        False, "--agreement", help="Also compare each choice with exact attention's after the same tokens."
    ),
    ignore_end: bool = typer.Option(False, "--ignore-end", help="Continue after the end token."),
) -> None:
    """Continue a text greedily; print the text, prefill and decode speed, cache memory and selection sizes.

    Example: prescore generate --prompt-file book.txt --prompt-tokens 4000 --config key-diff --top-k 512

    Example: prescore generate --prompt-file book.txt --prompt-tokens 7936 --ignore-end --agreement
    """
    from prescore.bench.language import generation
    from prescore.bench.language.tables import generation_table

    chosen, places = read_config(config, top_k, given.fields), cli.read_layers(given.layers)
    if run.quick:
        prompt_tokens, max_new_tokens = prompt_tokens or _QUICK_PROMPT, max_new_tokens or _QUICK_TOKENS
    max_new_tokens = max_new_tokens or 64
    how = generation.Continuation(chosen, places, max_new_tokens, evict, refresh_every, beams, ignore_end)
    if agreement and (not exact or beams > 1):
        raise ValueError(f"--agreement must come with --exact and one beam, got exact={exact} and {beams} beams")
    text = _prompt(prompt, prompt_file, run.quick)
    session = run.open("generate", given.device)
    from prescore.integrations.apply import apply

    language_model = given.load(check_head=False)
    loaded, tokenizer, seed, json = language_model.model, language_model.tokenizer, run.seed, run.json
    ids = language_model.encode(text)[None, :prompt_tokens].to(given.device)
    if ids.shape[1] == 0:
        raise ValueError("the prompt must have at least one token, got an empty text")
    # a model that cannot run the configuration is refused before anything is computed
    apply(loaded, how.config, layers=how.layers).undo()
    common = {
        "model": given.model,
        "dtype": given.dtype,
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
    with session.reading():
        session.show(generation_table(records).to_rich())
    session.say(f"records: {session.file.path}")


def read_config(name: str, top_k: str | None, fields: Values) -> Config:
    """The configuration of the options."""
    from prescore.bench.language.methods import change, named_config
    from prescore.config import Selected

    named = named_config(name)
    if top_k is not None:
        if not isinstance(named, Selected):
            raise ValueError(f"top_k must come with a scorer as --config, got {top_k} for {name!r}")
        fields = {"top_k": cli.read_budget(top_k), **fields}
    return change(named, fields)


def _prompt(prompt: str | None, prompt_file: Path | None, quick: bool) -> str:
    from prescore.bench.language.documents import TOPICS, decode, load_documents

    if quick and prompt is None and prompt_file is None:
        return load_documents([TOPICS])[0].text
    if (prompt is None) == (prompt_file is None):
        raise ValueError("exactly one of --prompt and --prompt-file must be given")
    return decode(prompt_file.read_bytes(), str(prompt_file)) if prompt_file else prompt or ""


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
