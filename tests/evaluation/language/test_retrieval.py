"""Synthetic retrieval: problems are what they say, answers are judged as greedy decoding would."""

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model

from prescore.bench.language import methods
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.retrieval import (
    N_DISTRACTORS,
    TASKS,
    Problem,
    Question,
    answer_figures,
    make_problem,
    retrieval_row,
)

HAY = Document("hay", "Nothing to see in this sentence, nor in the next one. " * 60)


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = tiny_language_model()
    return LanguageModel("tiny", model, tokenizer)


def text_of(tiny, problem):
    return tiny.tokenizer.decode(problem.tokens.tolist())


@pytest.mark.parametrize("task", TASKS)
def test_a_problem_has_its_length_its_fact_and_its_answer_last(tiny, task):
    problem = make_problem(tiny, HAY, Question(task, 600, 0.3), 1)
    text = text_of(tiny, problem)
    assert len(problem.tokens) == 600
    assert text.endswith(problem.words)
    assert text.count(problem.words) == 2
    assert tiny.tokenizer.decode(problem.tokens[-problem.answer :].tolist()).strip() == problem.words
    place = text.index(problem.words) / len(text)
    assert 0.15 < place < 0.4


def test_depth_moves_the_fact(tiny):
    places = []
    for depth in (0.0, 0.5, 1.0):
        problem = make_problem(tiny, HAY, Question("single-needle", 600, depth), 1)
        places.append(text_of(tiny, problem).index(problem.words))
    assert places == sorted(places)
    assert places[0] < 50
    assert places[2] > 400


def test_distractors_have_other_numbers(tiny):
    problem = make_problem(tiny, HAY, Question("multi-key-needle", 900, 0.5), 2)
    facts = [line for line in text_of(tiny, problem).split("\n") if line.startswith("The secret number")]
    assert len(facts) == N_DISTRACTORS + 1
    assert len({fact.split(" is ")[1] for fact in facts}) == N_DISTRACTORS + 1
    assert sum(problem.words in fact for fact in facts) == 1


def test_variable_tracking_is_a_chain(tiny):
    problem = make_problem(tiny, HAY, Question("variable-tracking", 600, 0.2), 3)
    links = [line for line in text_of(tiny, problem).split("\n") if line.startswith("VAR")]
    names = [line.split(" = ")[0] for line in links]
    values = [line.split(" = ")[1].rstrip(".") for line in links]
    assert values == [problem.words, *names[:-1]]
    assert text_of(tiny, problem).split("\n")[-1].endswith(f"{names[-1]} = {problem.words}")


def test_seed_decides(tiny):
    one, same, other = (make_problem(tiny, HAY, Question(TASKS[0], 400, 0.5), s) for s in (0, 0, 1))
    assert torch.equal(one.tokens, same.tokens)
    assert one.words != other.words


def test_a_short_haystack_is_repeated(tiny):
    problem = make_problem(tiny, Document("tiny", "abc "), Question(TASKS[0], 400, 0.5), 0)
    assert len(problem.tokens) == 400
    with pytest.raises(ValueError, match="document none must have text, got none"):
        make_problem(tiny, Document("none", ""), Question(TASKS[0], 400, 0.5), 0)


def test_a_beginning_of_text_token_stands_once_and_not_before_the_answer():
    from tokenizers.processors import TemplateProcessing

    model, tokenizer = tiny_language_model()
    first = tokenizer.backend_tokenizer.token_to_id("~")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", first)])
    beginning = LanguageModel("tiny", model, tokenizer)
    assert beginning.encode("ab").tolist()[0] == first
    assert beginning.opening().tolist() == [first]
    for task in TASKS:
        problem = make_problem(beginning, HAY, Question(task, 600, 0.3), 1)
        assert len(problem.tokens) == 600
        assert (problem.tokens == first).nonzero().tolist() == [[0]]
        assert tokenizer.decode(problem.tokens[-problem.answer :].tolist()) == f" {problem.words}"


def test_positions_past_the_trained_length_are_scaled_and_said(tiny):
    from prescore.bench.language.tables import retrieval_table
    from prescore.bench.records import measure

    short, long = (
        measure(
            "retrieval",
            retrieval_row(tiny, HAY, methods.exact(), Question(TASKS[0], length, 0.1), samples=1),
        )
        for length in (256, 768)
    )
    assert "position_scaling" not in short.figures
    assert long.figures["position_scaling"] == {"rope": "yarn", "factor": 1.5, "trained_length": 512}
    assert "RoPE scaling" not in retrieval_table([short]).title
    assert "RoPE scaling" in retrieval_table([short, long]).title


def test_answers_are_judged_as_greedy_decoding_would(tiny):
    prompt = tiny.encode("Once upon a time")
    tokens = prompt
    for _ in range(3):
        with torch.no_grad():
            best = tiny.model(input_ids=tokens[None]).logits[0, -1].argmax()
        tokens = torch.cat((tokens, best[None]))
    right, loss = answer_figures(tiny, Problem(tokens, 3, ""))
    assert right
    wrong = tokens.clone()
    wrong[-1] = (wrong[-1] + 1) % 256
    missed, worse = answer_figures(tiny, Problem(wrong, 3, ""))
    assert not missed
    assert worse > loss


def test_a_row_reports_accuracy_and_cost(tiny):
    row = retrieval_row(tiny, HAY, methods.local(32), Question(TASKS[0], 256, 0.1), samples=2)
    figures = row.measure()
    assert figures["accuracy"] == sum(figures["answers"]) / 2
    assert figures["keys_per_query"] == 16.5
    assert row.config["part"] == "retrieval"


def test_refusals(tiny):
    with pytest.raises(ValueError, match=r"task must be one of .* got 'haystack'"):
        Question("haystack", 400, 0.5)
    with pytest.raises(ValueError, match=r"length must leave room for the question, at least \d+ tokens, got 20"):
        make_problem(tiny, HAY, Question(TASKS[0], 20, 0.5), 0)
    for depth in (1.5, -0.1):
        with pytest.raises(ValueError, match=rf"depth must lie between 0 and 1, got {depth}"):
            Question(TASKS[0], 400, depth)
