"""`prescore perplexity --experiment default`: the default and its rivals on windows it was not tuned on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prescore.bench.cli.options import Session
from prescore.types import Values

if TYPE_CHECKING:
    from prescore.bench.language.held_out import TokenizedText
    from prescore.bench.language.methods import LanguageMethod
    from prescore.bench.language.model import LanguageModel
    from prescore.bench.language.perplexity import Window
    from prescore.bench.records import Record


Start = Callable[[], "tuple[Session, LanguageModel]"]
"""Opens the record file and loads the model, once nothing is left to refuse."""


@dataclass(frozen=True)
class HeldOutRun:
    """What was asked for.

    Attributes:
        documents: Sources of texts, beside Python's own; None = those alone.
        lengths: Tokens read; None = all lengths of the experiment.
        tuning: Read tuning windows instead of those that are reported.
        layers: Layers that attend by each method.
        changes: Fields of the default that are changed.
        seed: Of tuning windows, and of the methods' randomness.
    """

    documents: Sequence[str] | None = None
    lengths: Sequence[int] | None = None
    tuning: bool = False
    layers: str | list[int] = "all"
    changes: Values = field(default_factory=dict)
    seed: int = 0

    def check(self, beside: Mapping[str, Any]) -> None:
        """Refuse options that the experiment has no use for."""
        given = [name for name, value in beside.items() if value]
        if given:
            raise ValueError(
                f"the experiment default must be given without {', '.join(beside)}, got {given[0]} too"
            )

    def run(self, start: Start) -> None:
        """Measure every length in turn, and show the table of all that the record file holds."""
        from prescore.bench.language.held_out import (
            LENGTHS,
            held_out_tables,
            held_out_texts,
            measured_first,
            tokenized,
        )

        methods = measured_first(self.changes)
        documents = held_out_texts(self.documents)
        session, loaded = start()
        held_out_tables(list(session.file))  # a damaged figure is refused before hours are spent beside it
        texts = tokenized(loaded, documents)
        for length in self.lengths or LENGTHS:
            self._measure(session, loaded, self._windows(session, texts, length), methods)
        tables = held_out_tables(list(session.file))
        for table in tables:
            session.show(table.to_rich())
        written = session.out / "default.md"
        written.write_text("\n".join(table.to_markdown() for table in tables), encoding="utf-8")
        session.say(f"records: {session.file.path}; also {written.name}")

    def _windows(self, session: Session, texts: Sequence[TokenizedText], length: int) -> list[Window]:
        from prescore.bench.language.held_out import reported_windows, tuning_windows

        found: list[Window] = []
        for text in texts:
            own = tuning_windows(text, length, self.seed) if self.tuning else reported_windows(text, length)
            if not own:
                session.say(f"left out at {length} tokens: {text.name}, which has {len(text.tokens)}")
            found += own
        if not found:
            raise ValueError(f"length must be at most that of the longest text, got {length}")
        return found

    def _measure(
        self,
        session: Session,
        loaded: LanguageModel,
        windows: Sequence[Window],
        methods: Sequence[LanguageMethod],
    ) -> None:
        """The default first: how many rows it reads says how wide the window beside it is."""
        from prescore.bench.language.held_out import HELD_OUT, measured_after
        from prescore.bench.language.perplexity import loss_row

        def measure(pairs: Sequence[tuple[Window, LanguageMethod]]) -> list[Record]:
            rows = [
                loss_row(loaded, window, method, experiment=HELD_OUT, layers=self.layers, seed=self.seed)
                for window, method in pairs
            ]
            return session.run(rows)

        pairs = [(window, method) for window in windows for method in methods]
        records = measure(pairs)
        measure(
            [
                (window, measured_after(record))
                for (window, method), record in zip(pairs, records, strict=True)
                if method.kind == "prescored"
            ]
        )
