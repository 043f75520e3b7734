"""Synthetic retrieval: texts, the judging of answers, the table and the command."""

import re
from pathlib import Path

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model, tiny_language_model
from routed_checks import needs_native

from prescore import Routed
from prescore.bench.cli.main import main
from prescore.bench.language import retrieval
from prescore.bench.language.answers import retrieval_table
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.retrieval import CLEAR, MANY_NEEDLES, TASKS, Task, judge, make_problem
from prescore.bench.methods import local_only
from prescore.bench.observed import observed
from prescore.bench.records import Record

HAY = Document("hay", "Nothing to see in this sentence, nor in the next one. " * 60)
LENGTH = 1500
NEEDLES = Task(MANY_NEEDLES, LENGTH)


def text_of(model, tokens):
    return model.tokenizer.decode(tokens.tolist())


def one(model, name, length, depth, sample=0, haystack=HAY):
    """A text with one question, its words, and the answer."""
    problem = make_problem(model, haystack, Task(name, length, (depth,)), sample=sample)
    ((_, begin, end),) = problem.answers
    assert end == len(problem.tokens) == length
    return problem.tokens, text_of(model, problem.tokens), text_of(model, problem.tokens[begin:end]).strip()


def many(model, length=LENGTH, depths=retrieval.NEEDLE_DEPTHS, seed=0, sample=0):
    """A text with needles, and for each its depth, city, number and place in the text, counted in letters."""
    problem = make_problem(model, HAY, Task(MANY_NEEDLES, length, depths), seed=seed, sample=sample)
    assert len(problem.tokens) == length
    needles = []
    for depth, begin, end in problem.answers:
        number = text_of(model, problem.tokens[begin:end])
        city = re.search(r"\nNote: (\w+) =$", text_of(model, problem.tokens[:begin])).group(1)
        stated = f"\nNote: {city} ={number}\n"
        needles.append((depth, city, number.strip(), text_of(model, problem.tokens).index(stated), len(stated)))
    return problem, needles


@pytest.mark.parametrize("task", TASKS)
def test_a_problem_has_its_fact_at_its_depth_and_its_answer_last(tiny, task):
    for depth in (0.0, 0.3, 1.0):
        _, text, words = one(tiny, task, 900, depth, 1)
        assert text.endswith(words)
        assert text.count(words) == 2
        assert 0.6 * depth - 0.03 < text.index(words) / len(text) < depth + 0.1
    first, same, other = (one(tiny, task, 900, 0.5, sample) for sample in (0, 0, 1))
    assert torch.equal(first[0], same[0])
    assert first[2] != other[2]
    one(tiny, task, 900, 0.5, haystack=Document("tiny", "abc "))  # a short haystack is repeated
    with pytest.raises(ValueError, match="document none must have text, got none"):
        one(tiny, task, 900, 0.5, haystack=Document("none", ""))


def test_distractors_and_chains(tiny):
    _, text, words = one(tiny, "multi-key-needle", 900, 0.5, 2)
    facts = [line for line in text.split("\n") if line.startswith("The secret number")]
    assert len({fact.split(" is ")[1] for fact in facts}) == len(facts) == retrieval.N_DISTRACTORS + 1
    assert sum(words in fact for fact in facts) == 1
    _, text, words = one(tiny, "variable-tracking", 600, 0.2, 3)
    *_, question = lines = text.split("\n")
    names, values = zip(*(line.rstrip(".").split(" = ") for line in lines if line.startswith("VAR")), strict=True)
    assert list(values) == [words, *names[:-1]]
    assert question.endswith(f"{names[-1]} = {words}")


def test_a_beginning_of_text_token_stands_once():
    from tokenizers.processors import TemplateProcessing

    model, tokenizer = tiny_language_model()
    first = tokenizer.backend_tokenizer.token_to_id("~")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", first)])
    model = LanguageModel("tiny", model, tokenizer)
    assert model.encode("ab").tolist()[0] == first
    assert model.opening().tolist() == [first]
    for tokens in (*(one(model, task, 600, 0.3)[0] for task in TASKS), many(model)[0].tokens):
        assert (tokens == first).nonzero().tolist() == [[0]]


def test_what_greedy_decoding_writes_is_a_hit(tiny):
    tokens, spans = tiny.encode("Once upon a time"), []
    for _ in range(2):
        begin = len(tokens)
        for _ in range(3):
            with torch.no_grad():
                best = tiny.model(input_ids=tokens[None]).logits[0, -1].argmax()
            tokens = torch.cat((tokens, best[None]))
        spans.append((0.5, begin, len(tokens)))
        tokens = torch.cat((tokens, tiny.encode(" and then")))
    assert [hit for _, hit, _ in judge(tiny, tokens, spans)] == [1, 1]
    ((_, _, loss),) = judge(tiny, tokens, spans[:1])
    tokens[spans[0][2] - 1] += 1
    ((_, hit, worse),) = judge(tiny, tokens, spans[:1])
    assert hit == 0
    assert worse > loss


@pytest.mark.parametrize("length", [LENGTH, 1501, 4000])
@pytest.mark.parametrize("depths", [retrieval.NEEDLE_DEPTHS, (0.0, 1.0), (1.0,)])
def test_a_text_has_every_needle_in_its_place(tiny, length, depths):
    problem, needles = many(tiny, length, depths)
    assert [depth for depth, *_ in needles] == sorted(depths * retrieval.NEEDLES_PER_DEPTH)
    places = [place for *_, place, _ in needles]
    assert places == sorted(places)
    last = problem.questions - CLEAR
    for depth, _, _, place, size in needles:
        assert place + size <= last
        # needles take room themselves, and two lie side by side
        assert abs(place / last - depth) < 0.08
    assert 2 * Routed().chunk_size <= CLEAR  # no question has a needle among the local keys of the default


def test_every_needle_is_asked_once_in_any_order_and_no_answer_is_given_away(tiny):
    problem, needles = many(tiny)
    body, questions = (text_of(tiny, part) for part in problem.tokens.tensor_split([problem.questions]))
    numbers = {city: number for _, city, number, *_ in needles}
    assert len(numbers) == len(set(numbers.values())) == 10
    assert dict(re.findall(r"(\w+) = (\d+)", questions)) == numbers
    for words in (*numbers, *numbers.values()):
        assert body.count(words) == questions.count(words) == 1
    asked = [begin for _, begin, _ in problem.answers]
    assert asked != sorted(asked)
    assert torch.equal(problem.tokens, many(tiny)[0].tokens)
    for draw in ({"seed": 1}, {"sample": 1}):
        assert {needle[2] for needle in many(tiny, **draw)[1]}.isdisjoint(numbers.values())


def test_a_row_has_accuracy_or_every_needle_by_depth(tiny):
    row = retrieval.retrieval_row(tiny, HAY, local_only(32), Task(TASKS[0], 256, (0.1,)), range(2))
    results = row.measure()
    assert results["accuracy"] == sum(results["hits"]) / 2
    assert results["reads_per_query"] == 16.5
    assert row.config["part"] == "retrieval"
    task = Task(MANY_NEEDLES, LENGTH, (0.9, 0.1))
    results = retrieval.retrieval_row(tiny, HAY, local_only(50), task, range(1)).measure()
    problem = make_problem(tiny, HAY, task)
    with observed(tiny.model, local_only(50).config):
        judged = judge(tiny, problem.tokens, problem.answers)
    assert [entry["depth"] for entry in results["by_depth"]] == [0.9, 0.1]
    for entry in results["by_depth"]:
        own = [(hit, loss) for depth, hit, loss in judged if depth == entry["depth"]]
        assert entry["hits"] == [hit for hit, _ in own]
        assert entry["n_needles"] == len(own) == retrieval.NEEDLES_PER_DEPTH
        assert entry["answer_loss"] == pytest.approx(sum(loss for _, loss in own) / len(own))
    assert results["reads_per_query"] == 25.5
    assert results["attention_processor_seconds"] > 0


def record(label, sample, hits, *, n_tokens=4096):
    """One text; `hits` has the needles of each depth."""
    by_depth = [{"depth": d, "n_needles": len(own), "hits": own, "answer_loss": 0.5} for d, own in hits.items()]
    config = {"part": MANY_NEEDLES, "n_tokens": n_tokens, "sample": sample, "method": {"label": label}}
    return Record("retrieval", f"{label} {sample} {n_tokens}", config, 0, {"by_depth": by_depth}, 1.0)


def test_the_table_has_a_line_per_depth_and_one_over_all():
    records = [
        *(record("default", 0, {0.1: [1, 0], 0.9: [0, 1]}), record("exact", 0, {0.1: [0, 1], 0.9: [1, 1]})),
        *(record("exact", 1, {0.1: [1, 1], 0.9: [0, 1]}), record("default", 1, {0.1: [1, 1], 0.9: [0, 1]})),
    ]
    table = retrieval_table(records)
    dashes = ("-", "-", "-")
    assert [row[2:] for row in table.rows] == [
        ("10 %", "exact", "4", "75.0 %", "0.50", *dashes),
        ("10 %", "default", "4", "75.0 %", "0.50", "+0.0", "1", "1"),
        ("90 %", "exact", "4", "75.0 %", "0.50", *dashes),
        ("90 %", "default", "4", "50.0 %", "0.50", "-25.0", "1", "0"),
        ("all", "exact", "8", "75.0 %", "0.50", *dashes),
        ("all", "default", "8", "62.5 %", "0.50", "-12.5", "2", "1"),
    ]
    assert {row[:2] for row in table.rows} == {(MANY_NEEDLES, "4096")}


def test_tasks_and_lengths_stand_apart_and_unfinished_texts_are_not_compared():
    config = {"part": "retrieval", "task": TASKS[0], "n_tokens": 512, "depth": 0.5, "samples": 2}
    records = [record("exact", 0, {0.5: [1, 1]}), record("exact", 1, {0.5: [0, 0]}), record("x", 0, {0.5: [1, 0]})]
    records.append(record("x", 0, {0.5: [1, 1]}, n_tokens=8192))
    for label, hits in (("x", [0, 1]), ("exact", [1, 1])):
        results = {"hits": hits, "answer_loss": 0.25}
        records.insert(0, Record("retrieval", label, {**config, "method": {"label": label}}, 0, results, 1.0))
    assert retrieval_table(records).rows == (
        (TASKS[0], "512", "50 %", "exact", "2", "100.0 %", "0.25", "-", "-", "-"),
        (TASKS[0], "512", "50 %", "x", "2", "50.0 %", "0.25", "-50.0", "1", "0"),
        (MANY_NEEDLES, "4096", "50 %", "exact", "4", "50.0 %", "0.50", "-", "-", "-"),
        (MANY_NEEDLES, "4096", "50 %", "x", "2", "50.0 %", "0.50", "-50.0", "1", "0"),
        (MANY_NEEDLES, "8192", "50 %", "x", "2", "100.0 %", "0.50", "-", "-", "-"),
    )
    assert "RoPE scaling" not in retrieval_table(records).title
    records[0].results["position_scaling"] = {"rope": "yarn"}
    assert "RoPE scaling" in retrieval_table(records).title
    damaged = record("exact", 0, {0.5: [1, 0]})
    damaged.results["by_depth"][0]["hits"] = [1]
    with pytest.raises(ValueError, match=r"record exact 0 4096 must have a 0 or 1 for every needle, got \[1\]"):
        retrieval_table([damaged])


@pytest.fixture
def run(text, tmp_path):
    model = save_tiny_language_model(tmp_path / "long", max_positions=4096)
    given = ["retrieval", "--model", str(model), "-d", text, "--out", str(tmp_path / "run")]
    return lambda options: main([*given, *options.split()])


@needs_native
def test_a_row_is_one_text_under_one_method(run, lines, tmp_path, capsys):
    assert run("--task many-needles -n 2600 -n 1400 --method exact --method default --samples 2") == 0
    printed, said = capsys.readouterr()
    found = lines(tmp_path / "run")
    rows = [(r["config"]["n_tokens"], r["config"]["sample"], r["config"]["method"]["label"]) for r in found]
    assert rows == [(n, sample, name) for n in (2600, 1400) for sample in (0, 1) for name in ("exact", "default")]
    assert found[1]["config"]["method"]["config"] == Routed().to_dict()
    assert found[1]["results"]["reads_per_query"] != found[0]["results"]["reads_per_query"]
    assert "default is exact at 1400 tokens" in said
    assert "default is exact at 2600" not in said
    assert ["2600", "all", "default", "20"] in [line.split()[1:5] for line in printed.splitlines()]
    exact, default = (line["results"]["by_depth"] for line in found[4:6])
    assert exact == default  # the same texts, and at this length the same attention


def test_tasks_run_side_by_side_and_another_text_is_another_row(run, text, lines, tmp_path):
    options = "--task many-needles --task single-needle -n 1400 --depth 0.5 --samples 1 --method exact --resume"
    assert run(options) == 0
    single = [r for r in lines(tmp_path / "run") if r["config"]["part"] == "retrieval"]
    assert [line["config"]["method"]["label"] for line in single] == ["exact", "local only"]
    Path(text).write_text("straw " * 500)
    assert run(options) == 0
    assert len(lines(tmp_path / "run")) == 2 * (len(single) + 2)  # exact and local for needles too
