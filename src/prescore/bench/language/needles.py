"""Many facts in one long text, all asked behind it: every depth is measured in one forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import Document
from prescore.bench.language.methods import LanguageMethod, measured_attention
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.retrieval import CITIES, haystack_piece
from prescore.bench.records import Record, Row
from prescore.bench.tables import MISSING, Table
from prescore.integrations.apply import Layers
from prescore.types import Values

TASK = "many-needles"
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
PER_DEPTH = 2
"""Needles at each depth of a text."""
CLEAR = 512
"""Tokens before the first question that hold no needle: the default reads so many nearby keys exactly, at most."""
NEEDLE = "Note: {city} = {number}"
"""A needle, and a question with its answer: of the wordings tried, exact attention found this one most often."""
_APART = 0.02
_COST = ("keys_per_query", "attention_seconds", "attention_processor_seconds")
_MOST_DEPTHS = len(CITIES) // PER_DEPTH


@dataclass(frozen=True)
class Needles:
    """Where needles lie in texts of one length.

    Attributes:
        length: Tokens, questions and answers included.
        depths: Around which needles lie, 0 = at the start of the text, 1 = `CLEAR` tokens before the questions.
    """

    length: int
    depths: tuple[float, ...] = DEPTHS

    def __post_init__(self) -> None:
        checks.integer("length", self.length, minimum=1)
        if not 1 <= len(self.depths) <= _MOST_DEPTHS:
            raise ValueError(f"depths must be 1 to {_MOST_DEPTHS} for {TASK}, got {len(self.depths)}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must lie between 0 and 1, got {depth}")
        if len(set(self.depths)) < len(self.depths):
            raise ValueError(f"depths must differ from each other, got {list(self.depths)}")


@dataclass(frozen=True)
class Needle:
    """One fact, and where it was put and asked.

    Attributes:
        depth: Around which of the depths it lies.
        city: What it is about.
        number: The answer.
        begin: Its first token in the text.
        answer: First token of the answer behind the text, and the token behind its last one.
    """

    depth: float
    city: str
    number: str
    begin: int
    answer: tuple[int, int]


@dataclass(frozen=True, eq=False)
class NeedleText:
    """A text with needles, and behind it every question with its answer.

    Attributes:
        tokens: `[N]`.
        needles: In the order of the text.
        questions: Where the first question begins.
    """

    tokens: Tensor
    needles: tuple[Needle, ...]
    questions: int


@dataclass(frozen=True)
class NeedleAnswer:
    """How a model answered: whether greedily, and the mean loss of the answer's tokens."""

    found: bool
    loss: float


@dataclass(frozen=True)
class _Fact:
    depth: float
    place: float
    city: str
    number: str


def make_needle_text(
    language_model: LanguageModel, haystack: Document, needles: Needles, *, seed: int, sample: int
) -> NeedleText:
    """One text of exactly `needles.length` tokens.

    Args:
        language_model: Whose tokenizer counts.
        haystack: The text around the needles.
        needles: How long it is, and where needles lie.
        seed: Of the cities, the numbers, the order of the questions and the piece of the haystack.
        sample: Number of the text among those of a seed.
    """
    draw = random.Random(f"{TASK} {needles.length} {needles.depths} {seed} {sample}")
    facts = _facts(needles.depths, draw)

    def encode(text: str) -> Tensor:
        # a beginning-of-text token belongs before the whole, not before every piece
        return language_model.encode(text, special=False)

    opening, inserts = language_model.opening(), [encode(f"\n{_statement(fact)}\n") for fact in facts]
    order = draw.sample(range(len(facts)), len(facts))
    questions, answers = _questions([facts[number] for number in order], encode)
    others = len(opening) + sum(map(len, inserts)) + len(questions)
    room = needles.length - others
    if room < CLEAR:
        least = others + CLEAR
        raise ValueError(
            f"length must leave room for {len(facts)} needles, their questions and {CLEAR} tokens between, "
            f"at least {least} tokens, got {needles.length}"
        )
    text = haystack_piece(language_model, haystack, room, draw)
    pieces, begins, before, written = [opening], [], 0, len(opening)
    for fact, insert in zip(facts, inserts, strict=True):
        end = round(fact.place * (room - CLEAR))
        written += end - before
        begins.append(written)
        pieces += [text[before:end], insert]
        before, written = end, written + len(insert)
    first = needles.length - len(questions)
    asked = {number: (first + begin, first + end) for number, (begin, end) in zip(order, answers, strict=True)}
    placed = tuple(
        Needle(fact.depth, fact.city, fact.number, begins[number], asked[number])
        for number, fact in enumerate(facts)
    )
    return NeedleText(torch.cat([*pieces, text[before:], questions]), placed, first)


def answers_to(language_model: LanguageModel, text: NeedleText) -> list[NeedleAnswer]:
    """How every needle is answered, in the order of the text; all answers are read in one forward.

    An answer is found if all its tokens are the likeliest ones after what comes before, earlier questions with
    their right answers included.
    """
    hidden = language_model.hidden(text.tokens)
    found = []
    for needle in text.needles:
        begin, end = needle.answer
        logits = language_model.logits(hidden[begin - 1 : end - 1])
        wanted = text.tokens[begin:end].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        found.append(NeedleAnswer(bool((logits.argmax(-1) == wanted).all()), float(loss)))
    return found


def needles_row(
    language_model: LanguageModel,
    haystack: Document,
    method: LanguageMethod,
    needles: Needles,
    *,
    sample: int,
    layers: Layers | None = None,
    seed: int = 0,
) -> Row:
    """One text under one method as a row, so that little is lost when a run is killed."""
    checks.integer("sample", sample, minimum=0)

    def measure() -> Values:
        text = make_needle_text(language_model, haystack, needles, seed=seed, sample=sample)
        with (
            language_model.extended(needles.length) as scaling,
            measured_attention(language_model.model, method, layers=layers, seed=seed) as meter,
        ):
            answers = answers_to(language_model, text)
        cost = meter.figures()
        return {
            "by_depth": [_at_depth(depth, text.needles, answers) for depth in needles.depths],
            **{name: cost[name] for name in _COST},
            **({} if scaling is None else {"position_scaling": scaling}),
        }

    config = {
        "part": TASK,
        "model": language_model.name,
        "dtype": language_model.dtype,
        "document": haystack.name,
        "digest": haystack.digest,
        "needle": NEEDLE,
        "n_tokens": needles.length,
        "depths": list(needles.depths),
        "per_depth": PER_DEPTH,
        "sample": sample,
        "layers": "all" if layers is None else layers,
        "method": method.describe(),
    }
    return Row(config=config, seed=seed, measure=measure, cost=float(needles.length))


def _at_depth(depth: float, needles: Sequence[Needle], answers: Sequence[NeedleAnswer]) -> Values:
    """Needles of one depth in the order of the text, which is the same for every method."""
    own = [answer for needle, answer in zip(needles, answers, strict=True) if needle.depth == depth]
    return {
        "depth": depth,
        "asked": len(own),
        "found": [int(answer.found) for answer in own],
        "answer_loss": sum(answer.loss for answer in own) / len(own),
    }


def _facts(depths: Sequence[float], draw: random.Random) -> list[_Fact]:
    """Distinct cities and numbers, in the order of their places."""
    count = PER_DEPTH * len(depths)
    cities = draw.sample(CITIES, count)
    numbers = draw.sample(range(10_000, 100_000), count)
    # side by side around the depth, and inside the text at both of its ends
    around = [_APART * (step - (PER_DEPTH - 1) / 2) for step in range(PER_DEPTH)]
    places = [(depth, min(1.0, max(0.0, depth + aside))) for depth in sorted(depths) for aside in around]
    facts = [
        _Fact(depth, place, city, str(number))
        for (depth, place), city, number in zip(places, cities, numbers, strict=True)
    ]
    return sorted(facts, key=lambda fact: fact.place)


def _statement(fact: _Fact) -> str:
    return NEEDLE.format(city=fact.city, number=fact.number)


def _questions(facts: Sequence[_Fact], encode: Callable[[str], Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
    """All questions with their answers, one behind the other, and where each answer lies among their tokens."""
    pieces, answers, written = [], [], 0
    for fact in facts:
        asked = NEEDLE.format(city=fact.city, number="").rstrip()
        own = [encode(f"\n{asked}"), encode(f" {fact.number}"), encode("\n")]
        begin = written + len(own[0])
        answers.append((begin, begin + len(own[1])))
        pieces += own
        written += sum(map(len, own))
    return torch.cat(pieces), answers


# Many needles as a table: what every method found at each depth, beside exact attention, needle by needle.

PART = "many-needles"
"""What such records call themselves."""
_EXACT = "exact"
_NOTE = (
    "share of needles whose every token is the likeliest one; points: above exact attention on the same texts; "
    "lost: exact attention alone found them, gained: the method alone; where exact attention fails, the model "
    "cannot do the task"
)
_Text = tuple[Any, ...]
_Depth = float | None


@dataclass(frozen=True)
class _Method:
    """What one method found in texts of one length: by text, and there by depth, needles in a fixed order."""

    texts: dict[_Text, dict[float, list[int]]]

    def found(self, depth: _Depth, among: Sequence[_Text] | None = None) -> list[int]:
        """1 and 0 of every needle at a depth, or of all needles."""
        texts = self.texts if among is None else among
        return [
            one
            for text in texts
            for place, found in self.texts[text].items()
            if depth in (None, place)
            for one in found
        ]


def needles_table(records: Sequence[Record]) -> Table:
    """A line for every length and depth, and one over all depths of a length.

    Methods are compared with exact attention on texts that both have read.
    """
    own = [record for record in records if record.config.get("part") == PART]
    labels = list(dict.fromkeys(record.config["method"]["label"] for record in own))
    labels.sort(key=lambda label: label != _EXACT)
    rows = []
    for length in dict.fromkeys(record.config["n_tokens"] for record in own):
        inside = [record for record in own if record.config["n_tokens"] == length]
        methods = {label: _gathered(inside, label) for label in labels}
        depths = sorted({float(depth) for record in inside for depth in record.config["depths"]})
        rows += [_line(str(length), depth, methods) for depth in (*depths, None)]
    columns = ["tokens", "depth", "needles"]
    for label in labels:
        columns += [label] if label == _EXACT else [label, "points", "lost", "gained"]
    scaled = any(record.figures.get("position_scaling") for record in own)
    return Table(
        title="Many needles" + ("; positions past the trained length by RoPE scaling (YaRN)" if scaled else ""),
        columns=tuple(columns),
        rows=tuple(rows),
        note=_NOTE,
        left=2,
    )


def _line(length: str, depth: _Depth, methods: dict[str, _Method]) -> tuple[str, ...]:
    exact = methods.get(_EXACT)
    asked = max(len(method.found(depth)) for method in methods.values())
    cells = [length, "all" if depth is None else f"{100 * depth:.0f} %", str(asked)]
    for label, method in methods.items():
        cells.append(_share(method.found(depth)))
        if label != _EXACT:
            cells += _beside(exact, method, depth)
    return tuple(cells)


def _beside(exact: _Method | None, method: _Method, depth: _Depth) -> tuple[str, str, str]:
    """Points above exact attention, needles lost and needles gained."""
    both = [] if exact is None else [text for text in method.texts if text in exact.texts]
    if exact is None or not method.found(depth, both):
        return MISSING, MISSING, MISSING
    pairs = list(zip(exact.found(depth, both), method.found(depth, both), strict=True))
    lost, gained = pairs.count((1, 0)), pairs.count((0, 1))
    return f"{100 * (gained - lost) / len(pairs):+.1f}", str(lost), str(gained)


def _gathered(records: Sequence[Record], label: str) -> _Method:
    return _Method(
        {
            _text(record): {float(one["depth"]): _needles(record, one) for one in record.figures["by_depth"]}
            for record in records
            if record.config["method"]["label"] == label
        }
    )


def _needles(record: Record, at_depth: dict[str, Any]) -> list[int]:
    found = at_depth.get("found")
    if not isinstance(found, list) or len(found) != at_depth.get("asked"):
        raise ValueError(f"record {record.key} must have a 0 or 1 for every needle asked, got {found!r}")
    return found


def _text(record: Record) -> _Text:
    """What names a text among those of one length, whatever the method."""
    config = record.config
    names = ("model", "dtype", "document", "digest", "needle", "per_depth", "sample")
    return (*(config[name] for name in names), tuple(config["depths"]), str(config["layers"]), record.seed)


def _share(found: Sequence[int]) -> str:
    return f"{100 * sum(found) / len(found):.1f} %" if found else MISSING
