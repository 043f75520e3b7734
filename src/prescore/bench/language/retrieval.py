"""Can a model still find facts far back in a long text? Needles and chains of variables.

Most tasks hide one fact in each text and put one question after it. `many-needles` hides several facts at all
depths of one text and puts all questions after it, so that every depth is measured in one forward.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.methods import Method
from prescore.bench.observed import observed
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


@dataclass(frozen=True)
class Task:
    """What is hidden in texts of one length.

    Attributes:
        name: `single-needle` (one fact), `multi-key-needle` (also facts about other cities), `variable-tracking`
            (a value passed on from variable to variable), or `many-needles` (several facts, all asked for).
        length: Tokens, questions and answers included.
        depths: Where facts lie, one depth but for `many-needles`: 0 = at the start of the text, 1 = just before
            the question, for `many-needles` `CLEAR` tokens before it.
    """

    name: str
    length: int
    depths: tuple[float, ...] = NEEDLE_DEPTHS

    def __post_init__(self) -> None:
        checks.one_of("task", self.name, (*TASKS, MANY_NEEDLES))
        checks.integer("length", self.length, minimum=1)
        most = len(CITIES) // NEEDLES_PER_DEPTH if self.name == MANY_NEEDLES else 1
        if not 1 <= len(self.depths) <= most:
            raise ValueError(f"depths must be 1 to {most} for {self.name}, got {len(self.depths)}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must lie between 0 and 1, got {depth}")
        if len(set(self.depths)) < len(self.depths):
            raise ValueError(f"depths must differ from each other, got {list(self.depths)}")


class _Fact(NamedTuple):
    """A sentence, its position (0 to 1), and the depth, question and answer of a fact that is asked."""

    position: float
    sentence: str
    depth: float = 0.0
    question: str = ""
    answer: str = ""


class Problem(NamedTuple):
    """A text with facts, and after it every question with its answer.

    Attributes:
        tokens: `[N]`.
        answers: Depth, first token and end of every answer, in the order of the facts in the text.
        questions: Where the first question begins.
    """

    tokens: Tensor
    answers: list[tuple[float, int, int]]
    questions: int


def make_problem(
    language_model: LanguageModel, haystack: Document, task: Task, *, seed: int = 0, sample: int = 0
) -> Problem:
    """One text of exactly `task.length` tokens; a beginning-of-text token stands before the whole text only.

    Names, numbers, the order of questions and the part of the haystack are drawn by the seed and the sample.
    """
    is_many = task.name == MANY_NEEDLES
    where, which = (task.depths, f"{seed} {sample}") if is_many else (task.depths[0], seed * 1000 + sample)
    draw = random.Random(f"{task.name} {task.length} {where} {which}")
    facts = sorted((_needles if is_many else _one_fact)(task, draw), key=lambda fact: fact.position)
    order = [fact for fact in facts if fact.question]
    order = draw.sample(order, len(order)) if is_many else order
    encode, opening = partial(language_model.encode, special=False), language_model.opening()
    inserts = [(fact.position, encode(f"\n{fact.sentence}\n")) for fact in facts]
    tail: list[Tensor] = []
    spans = {}
    for fact in order:
        question, answer = encode(fact.question), encode(fact.answer)
        begin = sum(map(len, tail)) + len(question)
        spans[fact] = (begin, begin + len(answer))
        tail += [question, answer, *([encode("\n")] if is_many else [])]
    n_others = sum(map(len, (opening, *tail, *(tokens for _, tokens in inserts))))
    room, clear = task.length - n_others, CLEAR if is_many else 0
    if room < clear:
        between = f" and {clear} tokens between" if clear else ""
        raise ValueError(
            f"length must leave room for the facts, the questions{between}, at least {n_others + clear} tokens, "
            f"got {task.length}"
        )
    text, parts, taken = _haystack_part(language_model, haystack, room, draw), [opening], 0
    for position, tokens in inserts:
        end = round(position * (room - clear))
        parts += [text[taken:end], tokens]
        taken = end
    first = task.length - sum(map(len, tail))
    answers = [(fact.depth, first + spans[fact][0], first + spans[fact][1]) for fact in facts if fact in spans]
    return Problem(torch.cat([*parts, text[taken:], *tail]), answers, first)


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


def _needles(task: Task, draw: random.Random) -> list[_Fact]:
    """Needles side by side around each depth, and inside the text at both of its ends."""
    count = NEEDLES_PER_DEPTH * len(task.depths)
    cities, numbers = draw.sample(CITIES, count), draw.sample(range(10_000, 100_000), count)
    around = [_APART * (step - (NEEDLES_PER_DEPTH - 1) / 2) for step in range(NEEDLES_PER_DEPTH)]
    places = [(depth, min(1.0, max(0.0, depth + aside))) for depth in sorted(task.depths) for aside in around]
    facts = []
    for (depth, place), city, number in zip(places, cities, numbers, strict=True):
        question = f"\n{NEEDLE.format(city=city, number='').rstrip()}"
        facts.append(_Fact(place, NEEDLE.format(city=city, number=number), depth, question, f" {number}"))
    return facts


def _one_fact(task: Task, draw: random.Random) -> list[_Fact]:
    """A fact with its question, and what else the task puts into the text."""
    (depth,), number = task.depths, str(draw.randrange(10_000, 100_000))
    if task.name == "variable-tracking":
        names = draw.sample([f"X{n}" for n in range(10, 100)], N_HOPS + 1)
        question = f"\nFollowing the variables set above, their values are known. VAR {names[-1]} ="
        facts = [_Fact(depth, f"VAR {names[0]} = {number}.", depth, question, f" {number}")]
        for step, (old, new) in enumerate(itertools.pairwise(names), start=1):
            # the chain runs towards the question, its first link at the given depth
            facts.append(_Fact(depth + (1 - depth) * 0.5 * step / N_HOPS, f"VAR {new} = VAR {old}."))
        return facts
    sentence = "The secret number of {} is {}. Remember it."
    cities = draw.sample(CITIES, N_DISTRACTORS + 1)
    question = f"\nRemember what was said above. The secret number of {cities[0]} is"
    facts = [_Fact(depth, sentence.format(cities[0], number), depth, question, f" {number}")]
    if task.name == "multi-key-needle":
        others = sorted(_DISTRACTOR_DEPTHS, key=lambda other: -abs(other - depth))[:N_DISTRACTORS]
        for other, city in zip(others, cities[1:], strict=True):
            facts.append(_Fact(other, sentence.format(city, draw.randrange(10_000, 100_000))))
    return facts


def judge(
    language_model: LanguageModel, tokens: Tensor, answers: Sequence[tuple[float, int, int]]
) -> list[tuple[float, int, float]]:
    """For every answer its depth, whether it is a hit (1 or 0), and the mean loss of its tokens.

    An answer is a hit if all its tokens are the likeliest ones after what comes before, earlier questions with
    their right answers included: then greedy decoding writes it. All answers are read in one forward.
    """
    hidden = language_model.hidden(tokens)
    judged = []
    for depth, begin, end in answers:
        logits = language_model.logits(hidden[begin - 1 : end - 1])
        expected = tokens[begin:end].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits, expected)
        judged.append((depth, int((logits.argmax(-1) == expected).all()), float(loss)))
    return judged


def retrieval_row(
    language_model: LanguageModel,
    haystack: Document,
    method: Method,
    task: Task,
    samples: range,
    *,
    layers: Layers | None = None,
    seed: int = 0,
) -> Row:
    """One method on texts of a task as a row; `many-needles` has a row for every text."""
    is_many = task.name == MANY_NEEDLES

    def measure() -> Values:
        judged, costs = [], []
        with language_model.extended(task.length) as scaling:
            for sample in samples:
                problem = make_problem(language_model, haystack, task, seed=seed, sample=sample)
                with observed(language_model.model, method.config, layers=layers, seed=seed) as observer:
                    judged += judge(language_model, problem.tokens, problem.answers)
                    costs.append(observer.results())
        by_depth = [_at_depth(depth, judged) for depth in task.depths]
        first, (one, *_) = costs[0], by_depth
        seconds = round(fmean(spent["attention_seconds"] for spent in costs), 4)
        results: Values = {"reads_per_query": first["reads_per_query"], "attention_seconds": seconds}
        if is_many:
            results |= {"by_depth": by_depth, "attention_processor_seconds": first["attention_processor_seconds"]}
        else:
            results |= {"accuracy": fmean(one["hits"]), "answer_loss": one["answer_loss"], "hits": one["hits"]}
        return results if scaling is None else {**results, "position_scaling": scaling}

    config: Values = {
        "part": MANY_NEEDLES if is_many else "retrieval",
        "model": language_model.name,
        "dtype": language_model.dtype,
        "document": haystack.name,
        "digest": haystack.digest,
        "layers": "all" if layers is None else layers,
        "method": method.describe(),
        "n_tokens": task.length,
    }
    if is_many:
        config |= {"needle": NEEDLE, "depths": list(task.depths), "needles_per_depth": NEEDLES_PER_DEPTH}
        config["sample"] = samples[0]
    else:
        config |= {"task": task.name, "depth": task.depths[0], "samples": len(samples)}
    return Row(config, seed, measure, cost=float(task.length * len(samples)))


def _at_depth(depth: float, judged: Sequence[tuple[float, int, float]]) -> Values:
    """Hits and mean loss of the answers at a depth."""
    hits, losses = zip(*((hit, loss) for at, hit, loss in judged if at == depth), strict=True)
    return {"depth": depth, "n_needles": len(hits), "hits": list(hits), "answer_loss": fmean(losses)}
