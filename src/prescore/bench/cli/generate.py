"""`prescore generate`: continue a text with pre-scored attention, compared with exact attention."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from prescore.bench.cli import options as cli
from prescore.bench.records import Row, Values, row_key

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

    from prescore.bench.language.generation import Generated
    from prescore.bench.language.model import LanguageModel
    from prescore.config import Config

_QUICK_PROMPT, _QUICK_TOKENS, _TOKENS = 2560, 8, 64
"""Sizes of `--quick`: the default routes after 2048 tokens; tokens generated otherwise."""


@dataclass(frozen=True)
class Prompt:
    """Options: the text that is continued."""

    prompt: str | None = typer.Option(None, help="The prompt itself.")
    document: str | None = typer.Option(
        None, "--document", "-d", help="The text to continue: a file or a name of the corpus."
    )
    length: int | None = typer.Option(
        None, "--length", "-n", min=1, help="Cut the prompt to this many tokens.  [default: all]"
    )

    def read(self, quick: bool) -> Prompt:
        """The text itself in place of its document, and how much of it is read."""
        from prescore.bench.language.documents import TOPICS, load_documents

        document = TOPICS if quick and self.prompt is None and self.document is None else self.document
        if (self.prompt is None) == (document is None):
            raise ValueError("exactly one of --prompt and --document must be given")
        text = self.prompt if document is None else load_documents([document], limit=1)[0].text
        return Prompt(text, None, self.length or (_QUICK_PROMPT if quick else None))


@dataclass(frozen=True)
class Settings:
    """Options: how it is continued."""

    method: str = typer.Option(
        "default", help="default, hyper, exact or [paper:]SCORER[-RULE][-sample][+centroids]."
    )
    top_k: str | None = typer.Option(
        None, help="Keys kept by a scorer, a count or a fraction.  [default: its own]"
    )
    max_new_tokens: int | None = typer.Option(None, min=1, help="Tokens to generate at most.  [default: 64]")
    prefill_chunk_size: int | None = typer.Option(
        None, min=1, help="Tokens of the prompt per forward; fewer need less memory.  [default: all]"
    )
    evict: bool = typer.Option(False, "--evict", help="Free the keys and values that a scorer left out.")
    refresh_every: int | None = typer.Option(
        None, min=1, help="Select again after so many tokens.  [default: never]"
    )
    beams: int = typer.Option(1, min=1, help="Beam search with this many beams; 1 = greedy.")
    ignore_end: bool = typer.Option(False, "--ignore-end", help="Continue after the end token.")

    @property
    def title(self) -> str:
        """What its rows are called, beside those of the model's own attention, `exact`."""
        return "exact by prescore" if self.method == "exact" else self.method

    def check(self, config: Config) -> None:
        """Refuse what would have no effect."""
        from prescore.integrations.decode import keeps_selection

        for name in ("prefill_chunk_size", "ignore_end"):
            if getattr(self, name) and self.beams > 1:
                raise ValueError(f"{name} must come with one beam, got {self.beams} beams")
        for name in ("evict", "refresh_every"):
            if getattr(self, name) and not keeps_selection(config):
                kind = type(config).__name__
                raise ValueError(f"{name} must come with a Selected that leaves keys out, got {kind}")


def command(
    given: cli.Language,
    run: cli.Run,
    prompt: Prompt,
    settings: Settings,
    exact: bool = typer.Option(True, help="Run exact attention too, for comparison."),
    agreement: bool = typer.Option(
        False, "--agreement", help="Also compare each choice with exact attention's after the same tokens."
    ),
) -> None:
    """Continue a text greedily; print the text, prefill and decode speed, cache memory and selection sizes.

    Example: prescore generate -d book.txt -n 4000 --method key-diff --top-k 512

    Example: prescore generate -d book.txt -n 7936 --ignore-end --agreement
    """
    from prescore.bench.language.generation import generation_table

    n_tokens = settings.max_new_tokens or (_QUICK_TOKENS if run.quick else _TOKENS)
    settings = replace(settings, max_new_tokens=n_tokens)
    config = read_config(settings.method, settings.top_k, given.fields)
    if agreement and (not exact or settings.beams > 1):
        raise ValueError(
            f"--agreement must come with --exact and one beam, got exact={exact} and {settings.beams} beams"
        )
    settings.check(config)
    prompt = prompt.read(run.quick)
    session = run.open("generate", given.device)
    comparison = Comparison.load(given, run, session, prompt, settings, config)
    records = session.run(comparison.rows(exact, agreement))
    with session.reading():
        session.show(generation_table(records).to_rich())
    session.say(f"records: {session.file.path}")


@dataclass(frozen=True)
class Comparison:
    """A prompt that is continued by exact attention, and by a configuration.

    Attributes:
        session: Where rows are kept.
        loaded: The model.
        config: What it is continued by beside exact attention.
        layers: In which layers.
        settings: How it is continued.
        ids: The prompt, `[1, N]`.
        described: What all records say.
        seed: Of the rows.
        first_logits: Of exact attention's first choice, where it was made in this process.
    """

    session: cli.Session
    loaded: LanguageModel
    config: Config
    layers: str | list[int]
    settings: Settings
    ids: torch.Tensor
    described: Values
    seed: int
    first_logits: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        given: cli.Language,
        run: cli.Run,
        session: cli.Session,
        prompt: Prompt,
        settings: Settings,
        config: Config,
    ) -> Comparison:
        """Load the model; one that cannot run the configuration is refused before anything is computed."""
        from prescore.integrations.apply import apply

        loaded, layers = given.load(check_head=False), cli.read_layers(given.layers)
        ids = loaded.encode(prompt.prompt or "")[None, : prompt.length].to(given.device)
        if ids.shape[1] == 0:
            raise ValueError("the prompt must have at least one token, got an empty text")
        apply(loaded.model, config, layers=layers).undo()
        chunks, size = {}, settings.prefill_chunk_size
        if size is not None:
            chunks = {"prefill_chunk_size": size}
        described = {
            "model": given.model,
            "dtype": loaded.dtype,
            "prompt": hashlib.sha256(str(ids.tolist()).encode()).hexdigest()[:12],
            "prompt_tokens": int(ids.shape[1]),
            "max_new_tokens": settings.max_new_tokens,
            "beams": settings.beams,
            "ignore_end": settings.ignore_end,
            **chunks,
        }
        return cls(session, loaded, config, layers, settings, ids, described, run.seed)

    def rows(self, exact: bool, agreement: bool) -> list[Row]:
        """What is measured, exact attention first."""
        settings = self.settings
        options: Values = {"config": self.config.to_dict(), "layers": self.layers}
        options |= {"evict": settings.evict, "refresh_every": settings.refresh_every}

        def row(attention: str, fields: Values, measure: Callable[[], Values]) -> Row:
            return Row({**self.described, "attention": attention, **fields}, self.seed, measure)

        rows = [row("exact", {}, self.measure_exact)] if exact else []
        rows.append(row(settings.title, options, partial(self.measure, exact)))
        if agreement:
            rows.append(row(f"{settings.title}, after the exact text", options, self.measure_agreement))
        return rows

    def measure_exact(self) -> Values:
        """Exact attention's text."""
        made = self.generate(None)
        self.first_logits.append(made.logits)
        return self._results(made)

    def measure(self, compare: bool) -> Values:
        """The configuration's text, and how far it is exact attention's."""
        from prescore.bench.language.generation import first_token_kl

        made = self.generate(self.config)
        results = self._results(made)
        if compare:
            pairs = zip(self._exact_tokens(), made.tokens, strict=False)
            results["same_tokens"] = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if self.first_logits:
                results["first_token_kl"] = first_token_kl(self.first_logits[0], made.logits)
        return results

    def measure_agreement(self) -> Values:
        """The configuration's choices after each token that exact attention chose."""
        from prescore.bench.language import generation

        self.session.say(f"after the exact text: reading {self.ids.shape[1]} tokens")
        tokens, config = self._exact_tokens(), self.config
        forced: Values = {"forced": tokens, "prefill_chunk_size": self.settings.prefill_chunk_size}
        model, cache = self.loaded.model, self._cache(config)
        made = generation.generate_measured(model, self.ids, cache, config, layers=self.layers, **forced)
        return {**made.results, **generation.agreement(tokens, made.tokens)}

    def generate(self, attention: Config | None) -> Generated:
        """One generation; None = exact. The text is printed as it is generated."""
        import torch
        from transformers import TextStreamer

        from prescore.bench.language import generation

        name = "exact" if attention is None else self.settings.title
        self.session.say(f"{name}: reading {self.ids.shape[1]} tokens")
        streamer: Any = TextStreamer(self.loaded.tokenizer)

        def show(*tokens: int) -> None:
            if not self.session.json:
                streamer.put(torch.tensor(tokens, dtype=torch.int64, device="cpu"))

        settings, call = self.settings, (self.loaded.model, self.ids, self._cache(attention), attention)
        options: Values = {"layers": self.layers, "max_new_tokens": settings.max_new_tokens}
        if settings.beams > 1:
            made = generation.beams_measured(*call, **options, n_beams=settings.beams)
            show(*made.tokens)
        else:
            options |= {"ignore_end": settings.ignore_end, "prefill_chunk_size": settings.prefill_chunk_size}
            made = generation.generate_measured(*call, **options, on_token=show)
        if not self.session.json:
            streamer.end()
        return made

    def _cache(self, attention: Config | None) -> DynamicCache:
        from transformers import DynamicCache

        from prescore.integrations.transformers.cache import PrescoredCache

        config = self.loaded.model.config.get_text_config(decoder=True)
        if attention is None:
            return DynamicCache(config=config)
        return PrescoredCache(config, evict=self.settings.evict, refresh_every=self.settings.refresh_every)

    def _results(self, made: Generated) -> Values:
        text = self.loaded.tokenizer.decode(made.tokens)
        return {**made.results, "text": text, "tokens": made.tokens}

    def _exact_tokens(self) -> Sequence[int]:
        key = row_key("generate", {**self.described, "attention": "exact"}, self.seed)
        with self.session.reading():
            return [int(token) for token in self.session.file[key].results["tokens"]]


def read_config(name: str, top_k: str | None, fields: Values) -> Config:
    """The configuration of the options."""
    from prescore.bench.methods import Baseline, Local, Sizes, change, parse_method
    from prescore.config import Selected

    named = parse_method(name, Sizes()).config
    if isinstance(named, Local | Baseline):
        raise ValueError(f"--method must be a configuration of the library, got {name!r}")
    if top_k is not None:
        if not isinstance(named, Selected):
            raise ValueError(f"--top-k must come with a scorer as --method, got {top_k} for {name!r}")
        fields = {"top_k": cli.read_budget(top_k), **fields}
    return change(named, fields)
