"""Finding one fact in a long text: needles and chains of variables, answered by a language model."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import Document
from prescore.bench.language.methods import LanguageMethod, measured_attention
from prescore.bench.language.model import LanguageModel
from prescore.bench.records import Row
from prescore.integrations.apply import Layers
from prescore.types import Values

TASKS = ("single-needle", "multi-key-needle", "variable-tracking")
N_DISTRACTORS = 3
N_HOPS = 1
CITIES = (
    *("Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Quito", "Dublin", "Tunis"),
    *("Riga", "Accra", "Bern", "Doha", "Minsk", "Sofia", "Cairo", "Vienna"),
)
_FALLBACK_DEPTHS = (0.15, 0.4, 0.65, 0.9)


@dataclass(frozen=True)
class Question:
    """What is asked, and where its answer is hidden.

    Attributes:
        task: `single-needle` (one fact), `multi-key-needle` (the same kind of fact about other cities as well), or
            `variable-tracking` (a value passed on from variable to variable).
        length: Tokens, answer included.
        depth: Where the fact stands: 0 = at the start of the text, 1 = just before the question.
    """

    task: str
    length: int
    depth: float

    def __post_init__(self) -> None:
        checks.one_of("task", self.task, TASKS)
        if not 0 <= self.depth <= 1:
            raise ValueError(f"depth must lie between 0 and 1, got {self.depth}")


@dataclass(frozen=True, eq=False)
class Problem:
    """A text with a fact in it, and the answer that must follow.

    Attributes:
        tokens: `[N]`, text, question and answer.
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
        seed: Of the names, values and the piece of the haystack.
    """
    length = question.length
    draw = random.Random(f"{question.task} {length} {question.depth} {seed}")
    facts, asked, answer = _facts(question.task, question.depth, draw)

    def encode(text: str) -> Tensor:
        # a beginning-of-text token belongs before the whole, not before every piece and the answer
        return language_model.encode(text, special=False)

    opening, tail, reply = language_model.opening(), encode(asked), encode(answer)
    inserts = [(place, encode(f"\n{sentence}\n")) for place, sentence in facts]
    room = length - len(opening) - len(tail) - len(reply) - sum(len(tokens) for _, tokens in inserts)
    if room < 0:
        raise ValueError(f"length must leave room for the question, at least {length - room} tokens, got {length}")
    text = haystack_piece(language_model, haystack, room, draw)
    pieces, begin = [opening], 0
    for place, tokens in sorted(inserts, key=lambda insert: insert[0]):
        end = round(place * room)
        pieces += [text[begin:end], tokens]
        begin = end
    return Problem(torch.cat([*pieces, text[begin:], tail, reply]), len(reply), answer.strip())


def answer_figures(language_model: LanguageModel, problem: Problem) -> tuple[bool, float]:
    """Whether greedy decoding would give the answer, and the mean loss of its tokens.

    The answer is read in the same forward: all its tokens are the likeliest ones after what comes before exactly
    when greedy decoding under exact attention writes it.
    """
    hidden = language_model.hidden(problem.tokens)[-problem.answer - 1 : -1]
    logits = language_model.logits(hidden)
    wanted = problem.tokens[-problem.answer :].to(logits.device)
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    return bool((logits.argmax(-1) == wanted).all()), float(loss)


def retrieval_row(
    language_model: LanguageModel,
    haystack: Document,
    method: LanguageMethod,
    question: Question,
    *,
    samples: int,
    layers: Layers | None = None,
    seed: int = 0,
) -> Row:
    """Accuracy of one method on one question, over `samples` problems, as a row."""
    checks.integer("samples", samples, minimum=1)

    def measure() -> Values:
        found, losses, meters = [], [], []
        with language_model.extended(question.length) as scaling:
            for sample in range(samples):
                problem = make_problem(language_model, haystack, question, seed * 1000 + sample)
                with measured_attention(language_model.model, method, layers=layers, seed=seed) as meter:
                    right, loss = answer_figures(language_model, problem)
                found.append(right)
                losses.append(loss)
                meters.append(meter.figures())
        return {
            "accuracy": sum(found) / samples,
            "answer_loss": sum(losses) / samples,
            "answers": [int(right) for right in found],
            "keys_per_query": meters[0]["keys_per_query"],
            "attention_seconds": round(sum(figures["attention_seconds"] for figures in meters) / samples, 4),
            **({} if scaling is None else {"position_scaling": scaling}),
        }

    config = {
        "part": "retrieval",
        "model": language_model.name,
        "dtype": language_model.dtype,
        "document": haystack.name,
        "digest": haystack.digest,
        "task": question.task,
        "n_tokens": question.length,
        "depth": question.depth,
        "samples": samples,
        "layers": "all" if layers is None else layers,
        "method": method.describe(),
    }
    return Row(config=config, seed=seed, measure=measure, cost=float(question.length * samples))


def haystack_piece(language_model: LanguageModel, haystack: Document, room: int, draw: random.Random) -> Tensor:
    """`room` tokens of the haystack from a place drawn at random, again from its start where it ends."""
    characters = 12 * room + 1
    begin = draw.randrange(max(1, len(haystack.text) - characters))
    tokens = language_model.encode(haystack.text[begin : begin + characters], special=False)
    if len(tokens) < room:
        tokens = language_model.encode(haystack.text, special=False)
        if len(tokens) == 0:
            raise ValueError(f"document {haystack.name} must have text, got none")
        tokens = tokens.repeat(-(-room // len(tokens)))
    return tokens[:room]


def _facts(task: str, depth: float, draw: random.Random) -> tuple[list[tuple[float, str]], str, str]:
    """Sentences with their places, the question, and the answer."""
    number = str(draw.randrange(10_000, 100_000))
    if task == "variable-tracking":
        names = draw.sample([f"X{n}" for n in range(10, 100)], N_HOPS + 1)
        # the chain runs towards the question, its first link at the depth asked for
        places = [depth + (1 - depth) * 0.5 * step / N_HOPS for step in range(N_HOPS + 1)]
        sentences = [f"VAR {names[0]} = {number}."]
        sentences += [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(names)]
        question = f"\nFollowing the variables set above, their values are known. VAR {names[-1]} ="
        return list(zip(places, sentences, strict=True)), question, f" {number}"
    cities = draw.sample(CITIES, N_DISTRACTORS + 1)
    facts = [(depth, _secret(cities[0], number))]
    if task == "multi-key-needle":
        others = zip(_other_places(depth), cities[1:], strict=True)
        facts += [(place, _secret(city, str(draw.randrange(10_000, 100_000)))) for place, city in others]
    question = f"\nRemember what was said above. The secret number of {cities[0]} is"
    return facts, question, f" {number}"


def _secret(city: str, number: str) -> str:
    return f"The secret number of {city} is {number}. Remember it."


def _other_places(depth: float) -> list[float]:
    return sorted(_FALLBACK_DEPTHS, key=lambda place: -abs(place - depth))[:N_DISTRACTORS]
