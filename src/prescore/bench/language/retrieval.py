"""Can a model still find facts far back in a long text? Needles and chains of variables.

One task hides a single fact in each text and puts one question after it. `many-needles` hides several facts at
all depths of one text and puts all questions after it, so that every depth is measured in one forward.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import Document
from prescore.bench.language.methods import Method, measured_attention
from prescore.bench.language.model import LanguageModel
from prescore.bench.records import Row, Values
from prescore.integrations.apply import Layers

TASKS = ("single-needle", "multi-key-needle", "variable-tracking")
MANY_NEEDLES = "many-needles"
TASK_DEPTHS, NEEDLE_DEPTHS = (0.1, 0.5), (0.1, 0.3, 0.5, 0.7, 0.9)
N_DISTRACTORS = 3
N_HOPS = 1
CITIES = (
    *("Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Quito", "Dublin", "Tunis"),
    *("Riga", "Accra", "Bern", "Doha", "Minsk", "Sofia", "Cairo", "Vienna"),
)
NEEDLES_PER_DEPTH = 2
CLEAR = 512
"""Tokens before the first question of `many-needles` without needles: the default reads that many local keys."""
NEEDLE = "Note: {city} = {number}"
"""A needle, and a question with its answer. Of the wordings tried, exact attention finds this one most often."""
_DISTRACTOR_DEPTHS = (0.15, 0.4, 0.65, 0.9)
_APART = 0.02
_MOST_DEPTHS = len(CITIES) // NEEDLES_PER_DEPTH


def check_depth(depth: float) -> None:
    """Refuse a depth outside of the text."""
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must lie between 0 and 1, got {depth}")


@dataclass(frozen=True)
class Question:
    """What is asked, and where its answer is hidden.

    Attributes:
        task: `single-needle` (one fact), `multi-key-needle` (also facts about other cities), or
            `variable-tracking` (a value passed on from variable to variable).
        length: Tokens, answer included.
        depth: Where the fact stands: 0 = at the start of the text, 1 = just before the question.
    """

    task: str
    length: int
    depth: float

    def __post_init__(self) -> None:
        checks.one_of("task", self.task, TASKS)
        check_depth(self.depth)


@dataclass(frozen=True, eq=False)
class Problem:
    """A text with a fact, a question and its answer.

    Attributes:
        tokens: `[N]`.
        answer: Number of tokens of the answer, at the end.
        words: The answer as text.
    """

    tokens: Tensor
    answer: int
    words: str


def make_problem(language_model: LanguageModel, haystack: Document, question: Question, seed: int) -> Problem:
    """One problem of exactly `question.length` tokens.

    Args:
        language_model: Whose tokenizer counts.
        haystack: The text around the fact.
        question: What is asked.
        seed: Seed of names, values and the part of the haystack.
    """
    draw = random.Random(f"{question.task} {question.length} {question.depth} {seed}")
    facts, asked, answer = _task_facts(question.task, question.depth, draw)
    encode = partial(language_model.encode, special=False)
    tail, reply = encode(asked), encode(answer)
    inserts = sorted(((place, encode(f"\n{text}\n")) for place, text in facts), key=lambda insert: insert[0])
    tokens, _ = _hide(language_model, haystack, inserts, torch.cat((tail, reply)), question.length, draw)
    return Problem(tokens, len(reply), answer.strip())


def _hide(
    language_model: LanguageModel,
    haystack: Document,
    inserts: Sequence[tuple[float, Tensor]],
    tail: Tensor,
    length: int,
    draw: random.Random,
    clear: int = 0,
) -> tuple[Tensor, list[int]]:
    """A text of `length` tokens with inserts at their places and a tail, and where each insert begins.

    A beginning-of-text token stands before the whole text only. No insert lies in the last `clear` tokens before
    the tail.
    """
    opening = language_model.opening()
    n_others = len(opening) + len(tail) + sum(len(tokens) for _, tokens in inserts)
    room = length - n_others
    if room < clear:
        between = f" and {clear} tokens between" if clear else ""
        raise ValueError(
            f"length must leave room for the facts, the questions{between}, at least {n_others + clear} tokens, "
            f"got {length}"
        )
    text = _haystack_part(language_model, haystack, room, draw)
    parts, begins, taken, written = [opening], [], 0, len(opening)
    for place, tokens in inserts:
        end = round(place * (room - clear))
        written += end - taken
        begins.append(written)
        parts += [text[taken:end], tokens]
        taken, written = end, written + len(tokens)
    return torch.cat([*parts, text[taken:], tail]), begins


def _haystack_part(language_model: LanguageModel, haystack: Document, room: int, draw: random.Random) -> Tensor:
    """`room` tokens of the haystack from a random place; a short haystack is repeated."""
    characters = 12 * room + 1
    begin = draw.randrange(max(1, len(haystack.text) - characters))
    tokens = language_model.encode(haystack.text[begin : begin + characters], special=False)
    if len(tokens) < room:
        tokens = language_model.encode(haystack.text, special=False)
        if len(tokens) == 0:
            raise ValueError(f"document {haystack.name} must have text, got none")
        tokens = tokens.repeat(-(-room // len(tokens)))
    return tokens[:room]


def _task_facts(task: str, depth: float, draw: random.Random) -> tuple[list[tuple[float, str]], str, str]:
    """Sentences with their places, the question, and the answer."""
    number = str(draw.randrange(10_000, 100_000))
    if task == "variable-tracking":
        names = draw.sample([f"X{n}" for n in range(10, 100)], N_HOPS + 1)
        # the chain runs towards the question, its first link at the given depth
        places = [depth + (1 - depth) * 0.5 * step / N_HOPS for step in range(N_HOPS + 1)]
        sentences = [f"VAR {names[0]} = {number}."]
        sentences += [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(names)]
        question = f"\nFollowing the variables set above, their values are known. VAR {names[-1]} ="
        return list(zip(places, sentences, strict=True)), question, f" {number}"
    cities = draw.sample(CITIES, N_DISTRACTORS + 1)
    facts = [(depth, _secret(cities[0], number))]
    if task == "multi-key-needle":
        others = sorted(_DISTRACTOR_DEPTHS, key=lambda place: -abs(place - depth))[:N_DISTRACTORS]
        for place, city in zip(others, cities[1:], strict=True):
            facts.append((place, _secret(city, str(draw.randrange(10_000, 100_000)))))
    question = f"\nRemember what was said above. The secret number of {cities[0]} is"
    return facts, question, f" {number}"


def _secret(city: str, number: str) -> str:
    return f"The secret number of {city} is {number}. Remember it."


def judge(
    language_model: LanguageModel, tokens: Tensor, answers: Sequence[tuple[int, int]]
) -> list[tuple[bool, float]]:
    """For the answer at each span of tokens: whether it is a hit, and the mean loss of its tokens.

    An answer is a hit if all its tokens are the likeliest ones after what comes before, earlier questions with
    their right answers included: then greedy decoding writes it. All answers are read in one forward.
    """
    hidden = language_model.hidden(tokens)
    judged = []
    for begin, end in answers:
        logits = language_model.logits(hidden[begin - 1 : end - 1])
        expected = tokens[begin:end].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits, expected)
        judged.append((bool((logits.argmax(-1) == expected).all()), float(loss)))
    return judged


def retrieval_row(
    language_model: LanguageModel,
    haystack: Document,
    method: Method,
    question: Question,
    *,
    samples: int,
    layers: Layers | None = None,
    seed: int = 0,
) -> Row:
    """Accuracy of one method on one question, over `samples` problems, as a row."""
    checks.integer("samples", samples, minimum=1)

    def measure() -> Values:
        hits, losses, costs = [], [], []
        with language_model.extended(question.length) as scaling:
            for sample in range(samples):
                problem = make_problem(language_model, haystack, question, seed * 1000 + sample)
                with measured_attention(language_model.model, method, layers=layers, seed=seed) as cost:
                    span = (len(problem.tokens) - problem.answer, len(problem.tokens))
                    ((hit, loss),) = judge(language_model, problem.tokens, [span])
                    costs.append(cost())
                hits.append(int(hit))
                losses.append(loss)
        return {
            "accuracy": sum(hits) / samples,
            "answer_loss": sum(losses) / samples,
            "hits": hits,
            "reads_per_query": costs[0]["reads_per_query"],
            "attention_seconds": round(sum(cost["attention_seconds"] for cost in costs) / samples, 4),
            **({} if scaling is None else {"position_scaling": scaling}),
        }

    config = {
        "part": "retrieval",
        **_describe(language_model, haystack, method, layers),
        "task": question.task,
        "n_tokens": question.length,
        "depth": question.depth,
        "samples": samples,
    }
    return Row(config, seed, measure, cost=float(question.length * samples))


def _describe(language_model: LanguageModel, haystack: Document, method: Method, layers: Layers | None) -> Values:
    return {
        "model": language_model.name,
        "dtype": language_model.dtype,
        "document": haystack.name,
        "digest": haystack.digest,
        "layers": "all" if layers is None else layers,
        "method": method.describe(),
    }


# Many needles in one text.


@dataclass(frozen=True)
class Needles:
    """Where needles lie in texts of one length.

    Attributes:
        length: Tokens, questions and answers included.
        depths: Needles lie around these: 0 = at the start of the text, 1 = `CLEAR` tokens before the questions.
    """

    length: int
    depths: tuple[float, ...] = NEEDLE_DEPTHS

    def __post_init__(self) -> None:
        checks.integer("length", self.length, minimum=1)
        if not 1 <= len(self.depths) <= _MOST_DEPTHS:
            raise ValueError(f"depths must be 1 to {_MOST_DEPTHS} for {MANY_NEEDLES}, got {len(self.depths)}")
        for depth in self.depths:
            check_depth(depth)
        if len(set(self.depths)) < len(self.depths):
            raise ValueError(f"depths must differ from each other, got {list(self.depths)}")


@dataclass(frozen=True)
class Needle:
    """One fact, and where it stands.

    Attributes:
        depth: The depth that it lies around.
        city: What it is about.
        number: The answer.
        begin: Its first token in the text.
        answer: First token of the answer after the text, and the token after its last one.
    """

    depth: float
    city: str
    number: str
    begin: int
    answer: tuple[int, int]


@dataclass(frozen=True, eq=False)
class NeedleText:
    """A text with needles, and after it every question with its answer.

    Attributes:
        tokens: `[N]`.
        needles: In the order of the text.
        questions: Where the first question begins.
    """

    tokens: Tensor
    needles: tuple[Needle, ...]
    questions: int


def make_needle_text(
    language_model: LanguageModel, haystack: Document, needles: Needles, *, seed: int, sample: int
) -> NeedleText:
    """One text of exactly `needles.length` tokens.

    Args:
        language_model: Whose tokenizer counts.
        haystack: The text around the needles.
        needles: How long it is, and where needles lie.
        seed: Seed of cities, numbers, the order of questions and the part of the haystack.
        sample: Number of the text among those of a seed.
    """
    draw = random.Random(f"{MANY_NEEDLES} {needles.length} {needles.depths} {seed} {sample}")
    count = NEEDLES_PER_DEPTH * len(needles.depths)
    cities, numbers = draw.sample(CITIES, count), draw.sample(range(10_000, 100_000), count)
    # side by side around the depth, and inside the text at both of its ends
    around = [_APART * (step - (NEEDLES_PER_DEPTH - 1) / 2) for step in range(NEEDLES_PER_DEPTH)]
    places = [(depth, min(1.0, max(0.0, depth + aside))) for depth in sorted(needles.depths) for aside in around]
    facts = sorted(zip(places, cities, map(str, numbers), strict=True), key=lambda fact: fact[0][1])
    encode = partial(language_model.encode, special=False)
    inserts = [
        (place, encode(f"\n{NEEDLE.format(city=city, number=number)}\n")) for (_, place), city, number in facts
    ]
    order = draw.sample(range(count), count)
    questions, spans = _questions([facts[place][1:] for place in order], encode)
    tokens, begins = _hide(language_model, haystack, inserts, questions, needles.length, draw, CLEAR)
    first = needles.length - len(questions)
    answers = {place: (first + begin, first + end) for place, (begin, end) in zip(order, spans, strict=True)}
    placed = tuple(
        Needle(depth, city, number, begins[place], answers[place])
        for place, ((depth, _), city, number) in enumerate(facts)
    )
    return NeedleText(tokens, placed, first)


def _questions(
    facts: Sequence[tuple[str, str]], encode: Callable[[str], Tensor]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """All questions about (city, number) with their answers, and where each answer lies among their tokens."""
    parts: list[Tensor] = []
    spans = []
    for city, number in facts:
        question = encode(f"\n{NEEDLE.format(city=city, number='').rstrip()}")
        answer = encode(f" {number}")
        begin = sum(map(len, parts)) + len(question)
        spans.append((begin, begin + len(answer)))
        parts += [question, answer, encode("\n")]
    return torch.cat(parts), spans


def needles_row(
    language_model: LanguageModel,
    haystack: Document,
    method: Method,
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
            measured_attention(language_model.model, method, layers=layers, seed=seed) as cost,
        ):
            judged = judge(language_model, text.tokens, [needle.answer for needle in text.needles])
            costs = cost()
        by_depth = []
        for depth in needles.depths:
            own = [each for needle, each in zip(text.needles, judged, strict=True) if needle.depth == depth]
            loss = sum(loss for _, loss in own) / len(own)
            hits = [int(hit) for hit, _ in own]
            by_depth.append({"depth": depth, "n_needles": len(own), "hits": hits, "answer_loss": loss})
        names = ("reads_per_query", "attention_seconds", "attention_processor_seconds")
        return {
            "by_depth": by_depth,
            **{name: costs[name] for name in names},
            **({} if scaling is None else {"position_scaling": scaling}),
        }

    config = {
        "part": MANY_NEEDLES,
        **_describe(language_model, haystack, method, layers),
        "needle": NEEDLE,
        "n_tokens": needles.length,
        "depths": list(needles.depths),
        "needles_per_depth": NEEDLES_PER_DEPTH,
        "sample": sample,
    }
    return Row(config, seed, measure, cost=float(needles.length))
