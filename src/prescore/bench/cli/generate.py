"""`prescore generate`: continue a text with pre-scored attention, compared with exact attention."""

from __future__ import annotations

import hashlib
import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from prescore.bench.cli import options as cli
from prescore.bench.records import Row, Values, row_key

if TYPE_CHECKING:
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
        "default", help="default, hyper, exact or [paper:]SCORER[-RULE][-sample][+centroids]."
    ),
    top_k: str | None = typer.Option(
        None, help="Keys kept by a scorer, a count or a fraction.  [default: its own]"
    ),
    max_new_tokens: int | None = typer.Option(None, min=1, help="Tokens to generate at most.  [default: 64]"),
    prefill_chunk_size: int | None = typer.Option(
        None,
        min=1,
        help="Tokens of the prompt per forward; fewer need less memory.  [default: all]",
    ),
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
    from prescore.bench.language.generation import generation_table
    from prescore.integrations.apply import apply
    from prescore.integrations.decode import keeps_selection

    chosen, places = read_config(config, top_k, given.fields), cli.read_layers(given.layers)
    if agreement and (not exact or beams > 1):
        raise ValueError(f"--agreement must come with --exact and one beam, got exact={exact} and {beams} beams")
    if prefill_chunk_size is not None and beams > 1:
        raise ValueError(f"prefill_chunk_size must come with one beam, got {beams} beams")
    if ignore_end and beams > 1:
        raise ValueError(f"ignore_end must come with one beam, got {beams} beams")
    for name, value in {"evict": evict, "refresh_every": refresh_every}.items():
        if value and not keeps_selection(chosen):
            got = type(chosen).__name__
            raise ValueError(f"{name} must come with a Selected that leaves keys out, got {got}")
    if run.quick:
        prompt_tokens, max_new_tokens = prompt_tokens or _QUICK_PROMPT, max_new_tokens or _QUICK_TOKENS
    options: Values = {"layers": places, "max_new_tokens": max_new_tokens or 64}
    text = _prompt(prompt, prompt_file, run.quick)
    session = run.open("generate", given.device)
    loaded = given.load(check_head=False)  # before transformers is imported
    import torch
    from transformers import DynamicCache, TextStreamer

    from prescore.integrations.transformers.cache import PrescoredCache

    model, tokenizer, seed = loaded.model, loaded.tokenizer, run.seed
    ids = loaded.encode(text)[None, :prompt_tokens].to(given.device)
    if ids.shape[1] == 0:
        raise ValueError("the prompt must have at least one token, got an empty text")
    # a model that cannot run the configuration is refused before anything is computed
    apply(model, chosen, layers=places).undo()
    common = {
        "model": given.model,
        "dtype": loaded.dtype,
        "prompt": hashlib.sha256(str(ids.tolist()).encode()).hexdigest()[:12],
        "prompt_tokens": int(ids.shape[1]),
        "max_new_tokens": options["max_new_tokens"],
        "beams": beams,
        "ignore_end": ignore_end,
        **({} if prefill_chunk_size is None else {"prefill_chunk_size": prefill_chunk_size}),
    }
    exact_row = {**common, "attention": "exact"}
    own = {"config": chosen.to_dict(), "layers": places, "evict": evict, "refresh_every": refresh_every}
    first_logits: list[torch.Tensor] = []

    def cache(attention: Config | None) -> DynamicCache:
        of_text = model.config.get_text_config(decoder=True)
        if attention is None:
            return DynamicCache(config=of_text)
        return PrescoredCache(of_text, evict=evict, refresh_every=refresh_every)

    def exact_tokens() -> list[int]:
        with session.reading():
            return [int(token) for token in session.file[row_key("generate", exact_row, seed)].results["tokens"]]

    def measure(attention: Config | None) -> Values:
        """One generation; the text is printed as it is generated."""
        session.say(f"{'exact' if attention is None else 'prescored'}: reading {ids.shape[1]} tokens")
        new = cache(attention)
        streamer: Any = TextStreamer(tokenizer)

        def show(*tokens: int) -> None:
            if not run.json:
                streamer.put(torch.tensor(tokens, dtype=torch.int64, device="cpu"))

        if beams > 1:
            made = generation.beams_measured(model, ids, new, attention, **options, n_beams=beams)
            show(*made.tokens)
        else:
            end: Values = {"ignore_end": ignore_end, "on_token": show}
            chunks: Values = {"prefill_chunk_size": prefill_chunk_size}
            made = generation.generate_measured(model, ids, new, attention, **options, **end, **chunks)
        if not run.json:
            streamer.end()
        results = {**made.results, "text": tokenizer.decode(made.tokens), "tokens": made.tokens}
        if attention is not None and exact:
            same = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(exact_tokens(), made.tokens, strict=False)
            )
            results["same_tokens"] = len(list(same))
            if first_logits:  # of an exact generation in this process
                results["first_token_kl"] = generation.first_token_kl(first_logits[0], made.logits)
        elif attention is None:
            first_logits.append(made.logits)
        return results

    def measure_agreement() -> Values:
        """The choices after each token that exact attention chose."""
        session.say(f"after the exact text: reading {ids.shape[1]} tokens")
        tokens = exact_tokens()
        forced: Values = {"forced": tokens, "prefill_chunk_size": prefill_chunk_size}
        made = generation.generate_measured(model, ids, cache(chosen), chosen, layers=places, **forced)
        return {**made.results, **generation.agreement(tokens, made.tokens)}

    rows = [Row(exact_row, seed, partial(measure, None))] if exact else []
    rows.append(Row({**common, "attention": "prescored", **own}, seed, partial(measure, chosen)))
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
    from prescore.bench.methods import Baseline, Local, Sizes, change, parse_method
    from prescore.config import Selected

    named = parse_method(name, Sizes()).config
    if isinstance(named, Local | Baseline):
        raise ValueError(f"config must be a configuration of the library, got {name!r}")
    if top_k is not None:
        if not isinstance(named, Selected):
            raise ValueError(f"top_k must come with a scorer as --config, got {top_k} for {name!r}")
        fields = {"top_k": cli.read_budget(top_k), **fields}
    return change(named, fields)


def _prompt(prompt: str | None, prompt_file: Path | None, quick: bool) -> str:
    from prescore.bench.language.documents import TOPICS, load_documents, read_text

    if quick and prompt is None and prompt_file is None:
        return load_documents([TOPICS])[0].text
    if (prompt is None) == (prompt_file is None):
        raise ValueError("exactly one of --prompt and --prompt-file must be given")
    return read_text(prompt_file) if prompt_file else prompt or ""
