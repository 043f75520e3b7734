"""Synthetic retrieval: texts, the judging of answers, tables and the command."""

import json
import re

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model, tiny_language_model

from prescore import Routed
from prescore.bench.cli.main import main
from prescore.bench.language.documents import Document
from prescore.bench.language.methods import EXACT, local_only, measured_attention
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.retrieval import (
    CLEAR,
    N_DISTRACTORS,
    NEEDLE_DEPTHS,
    NEEDLES_PER_DEPTH,
    TASKS,
    Needles,
    Question,
    judge,
    make_needle_text,
    make_problem,
    needles_row,
    retrieval_row,
)
from prescore.bench.language.tables import needles_table, retrieval_table
from prescore.bench.records import Record, measure, row_key

HAY = Document("hay", "Nothing to see in this sentence, nor in the next one. " * 60)
LENGTH = 1500


def text_of(model, tokens):
    return model.tokenizer.decode(tokens.tolist())


@pytest.fixture(scope="module")
def beginning():
    """A model whose tokenizer puts a token before every text, and that token."""
    from tokenizers.processors import TemplateProcessing

    model, tokenizer = tiny_language_model()
    first = tokenizer.backend_tokenizer.token_to_id("~")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", first)])
    return LanguageModel("tiny", model, tokenizer), first


# One question.


@pytest.mark.parametrize("task", TASKS)
def test_a_problem_has_its_length_its_fact_and_its_answer_last(tiny, task):
    problem = make_problem(tiny, HAY, Question(task, 600, 0.3), 1)
    text = text_of(tiny, problem.tokens)
    assert len(problem.tokens) == 600
    assert text.endswith(problem.words)
    assert text.count(problem.words) == 2
    assert text_of(tiny, problem.tokens[-problem.answer :]).strip() == problem.words
    assert 0.15 < text.index(problem.words) / len(text) < 0.4


def test_depth_and_seed_decide(tiny):
    places = []
    for depth in (0.0, 0.5, 1.0):
        problem = make_problem(tiny, HAY, Question("single-needle", 600, depth), 1)
        places.append(text_of(tiny, problem.tokens).index(problem.words))
    assert places == sorted(places)
    assert places[0] < 50
    assert places[2] > 400
    one, same, other = (make_problem(tiny, HAY, Question(TASKS[0], 400, 0.5), seed) for seed in (0, 0, 1))
    assert torch.equal(one.tokens, same.tokens)
    assert one.words != other.words


def test_distractors_and_chains(tiny):
    problem = make_problem(tiny, HAY, Question("multi-key-needle", 900, 0.5), 2)
    facts = [line for line in text_of(tiny, problem.tokens).split("\n") if line.startswith("The secret number")]
    assert len({fact.split(" is ")[1] for fact in facts}) == len(facts) == N_DISTRACTORS + 1
    assert sum(problem.words in fact for fact in facts) == 1
    problem = make_problem(tiny, HAY, Question("variable-tracking", 600, 0.2), 3)
    *_, question = lines = text_of(tiny, problem.tokens).split("\n")
    names, values = zip(*(line.rstrip(".").split(" = ") for line in lines if line.startswith("VAR")), strict=True)
    assert list(values) == [problem.words, *names[:-1]]
    assert question.endswith(f"{names[-1]} = {problem.words}")


def test_a_short_haystack_is_repeated(tiny):
    assert len(make_problem(tiny, Document("tiny", "abc "), Question(TASKS[0], 400, 0.5), 0).tokens) == 400
    with pytest.raises(ValueError, match="document none must have text, got none"):
        make_problem(tiny, Document("none", ""), Question(TASKS[0], 400, 0.5), 0)


def test_a_beginning_of_text_token_stands_once(beginning):
    model, first = beginning
    assert model.encode("ab").tolist()[0] == first
    assert model.opening().tolist() == [first]
    for task in TASKS:
        problem = make_problem(model, HAY, Question(task, 600, 0.3), 1)
        assert len(problem.tokens) == 600
        assert (problem.tokens == first).nonzero().tolist() == [[0]]
        assert text_of(model, problem.tokens[-problem.answer :]) == f" {problem.words}"
    text = make_needle_text(model, HAY, Needles(LENGTH), seed=0, sample=0)
    assert len(text.tokens) == LENGTH
    assert (text.tokens == first).nonzero().tolist() == [[0]]
    assert all(text_of(model, text.tokens[needle.begin :]).startswith(stated(needle)) for needle in text.needles)


def test_what_greedy_decoding_writes_is_a_hit(tiny):
    tokens, spans = tiny.encode("Once upon a time"), []
    for _ in range(2):
        begin = len(tokens)
        for _ in range(3):
            with torch.no_grad():
                best = tiny.model(input_ids=tokens[None]).logits[0, -1].argmax()
            tokens = torch.cat((tokens, best[None]))
        spans.append((begin, len(tokens)))
        tokens = torch.cat((tokens, tiny.encode(" and then")))
    assert [hit for hit, _ in judge(tiny, tokens, spans)] == [True, True]
    ((_, loss),) = judge(tiny, tokens, spans[:1])
    tokens[spans[0][1] - 1] = (tokens[spans[0][1] - 1] + 1) % 256
    ((hit, worse),) = judge(tiny, tokens, spans[:1])
    assert not hit
    assert worse > loss


def test_a_row_reports_accuracy_and_cost(tiny):
    row = retrieval_row(tiny, HAY, local_only(32), Question(TASKS[0], 256, 0.1), samples=2)
    results = row.measure()
    assert results["accuracy"] == sum(results["hits"]) / 2
    assert results["reads_per_query"] == 16.5
    assert row.config["part"] == "retrieval"


def test_positions_past_the_trained_length_are_scaled_and_said(precise):
    rows = [retrieval_row(precise, HAY, EXACT, Question(TASKS[0], n, 0.1), samples=1) for n in (256, 768)]
    short, long = (measure("retrieval", row) for row in rows)
    assert "position_scaling" not in short.results
    assert long.results["position_scaling"] == {"rope": "yarn", "factor": 1.5, "trained_length": 512}
    assert "RoPE scaling" not in retrieval_table([short]).title
    assert "RoPE scaling" in retrieval_table([short, long]).title
    results = needles_row(precise, HAY, EXACT, Needles(LENGTH), sample=0).measure()
    assert results["position_scaling"]["trained_length"] == 512


# Many needles.


def made(tiny, length=LENGTH, depths=NEEDLE_DEPTHS, seed=0, sample=0):
    return make_needle_text(tiny, HAY, Needles(length, depths), seed=seed, sample=sample)


def stated(needle):
    return f"\nNote: {needle.city} = {needle.number}\n"


@pytest.mark.parametrize("length", [LENGTH, 1501, 4000])
@pytest.mark.parametrize("sample", [0, 1])
def test_a_text_has_its_length_and_every_needle_in_its_place(tiny, length, sample):
    text = made(tiny, length, sample=sample)
    assert len(text.tokens) == length
    assert [needle.depth for needle in text.needles] == sorted(NEEDLE_DEPTHS * NEEDLES_PER_DEPTH)
    begins = [needle.begin for needle in text.needles]
    assert begins == sorted(begins)
    last = text.questions - CLEAR
    for needle in text.needles:
        end = needle.begin + len(tiny.encode(stated(needle)))
        assert text_of(tiny, text.tokens[needle.begin : end]) == stated(needle)
        assert end <= last
        # needles take room themselves, and two lie side by side
        assert abs(needle.begin / last - needle.depth) < 0.08
    assert 2 * Routed().chunk_size <= CLEAR  # no question has a needle among the local keys of the default


@pytest.mark.parametrize("depths", [(0.0, 1.0), (1.0,), (0.0, 0.01, 0.02)])
def test_needles_at_the_ends_stay_in_the_text_and_away_from_the_questions(tiny, depths):
    text = made(tiny, depths=depths)
    last = max(needle.begin + len(stated(needle)) for needle in text.needles)
    assert last <= text.questions - CLEAR
    assert (last == text.questions - CLEAR) == (1.0 in depths)
    for depth in depths:
        assert sum(needle.depth == depth for needle in text.needles) == NEEDLES_PER_DEPTH


def test_every_needle_is_asked_once_in_any_order_and_no_answer_is_given_away(tiny):
    text = made(tiny)
    body, questions = (text_of(tiny, part) for part in text.tokens.tensor_split([text.questions]))
    assert len({n.city for n in text.needles}) == len({n.number for n in text.needles}) == 10
    assert dict(re.findall(r"(\w+) = (\d+)", questions)) == {n.city: n.number for n in text.needles}
    for needle in text.needles:
        for words in (needle.city, needle.number):
            assert body.count(words) == questions.count(words) == 1
        begin, end = needle.answer
        assert text_of(tiny, text.tokens[begin:end]) == f" {needle.number}"
        assert text_of(tiny, text.tokens[:begin]).endswith(f"\nNote: {needle.city} =")
    orders = []
    for sample in range(5):
        needles = made(tiny, sample=sample).needles
        orders.append(tuple(sorted(range(len(needles)), key=lambda number: needles[number].answer)))
    assert len(set(orders)) == 5
    assert tuple(range(10)) not in orders


def test_seed_and_sample_decide_on_everything(tiny):
    one, same, *others = (made(tiny, seed=s, sample=k) for s, k in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert torch.equal(one.tokens, same.tokens)
    for other in others:
        assert {needle.number for needle in other.needles}.isdisjoint(needle.number for needle in one.needles)


def test_answers_are_judged_as_if_the_text_ended_with_each(tiny):
    text = made(tiny)
    spans = [needle.answer for needle in text.needles]
    for (begin, end), (hit, loss) in zip(spans, judge(tiny, text.tokens, spans), strict=True):
        ((alone, own),) = judge(tiny, text.tokens[:end], [(begin, end)])
        assert hit == alone
        # the same products over texts of other lengths, in float32
        assert loss == pytest.approx(own, rel=1e-3)


def test_a_row_has_every_needle_by_depth(tiny):
    row = needles_row(tiny, HAY, local_only(50), Needles(LENGTH, (0.9, 0.1)), sample=0)
    results, text = row.measure(), made(tiny, depths=(0.9, 0.1))
    assert [one["depth"] for one in results["by_depth"]] == [0.9, 0.1]
    with measured_attention(tiny.model, local_only(50)):
        judged = judge(tiny, text.tokens, [needle.answer for needle in text.needles])
    for entry in results["by_depth"]:
        own = [each for needle, each in zip(text.needles, judged, strict=True) if needle.depth == entry["depth"]]
        assert entry["hits"] == [int(hit) for hit, _ in own]
        assert entry["n_needles"] == NEEDLES_PER_DEPTH
        assert entry["answer_loss"] == pytest.approx(sum(loss for _, loss in own) / NEEDLES_PER_DEPTH)
    assert results["reads_per_query"] == 25.5
    assert results["attention_processor_seconds"] > 0
    keys = {
        row_key("retrieval", row.config, row.seed)
        for sample in (0, 1)
        for depths in (NEEDLE_DEPTHS, NEEDLE_DEPTHS[:2])
        for method in (EXACT, local_only(32))
        for row in [needles_row(tiny, HAY, method, Needles(LENGTH, depths), sample=sample)]
    }
    assert len(keys) == 8


def test_a_length_without_room_is_refused_with_the_least(tiny):
    said = r"length must leave room for the facts, the questions and 512 tokens between, at least (\d+) tokens"
    with pytest.raises(ValueError, match=rf"{said}, got 700") as refused:
        made(tiny, 700)
    least = int(re.search(said, str(refused.value)).group(1))
    # other cities are drawn at another length, and differ by a few letters
    assert len(made(tiny, least + 60).tokens) == least + 60
    with pytest.raises(ValueError, match=rf"{said}, got {least - 60}"):
        made(tiny, least - 60)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: Question("haystack", 400, 0.5), r"task must be one of .* got 'haystack'"),
        (lambda: Question(TASKS[0], 400, 1.5), "depth must lie between 0 and 1, got 1.5"),
        (lambda: Needles(LENGTH, (0.5, -0.1)), "depth must lie between 0 and 1, got -0.1"),
        (lambda: Needles(LENGTH, (0.5, 0.5)), r"depths must differ from each other, got \[0.5, 0.5\]"),
        (lambda: Needles(LENGTH, ()), "depths must be 1 to 8 for many-needles, got 0"),
        (lambda: Needles(LENGTH, tuple(n / 10 for n in range(9))), "depths must be 1 to 8 .* got 9"),
        (lambda: Needles(0), "length must be at least 1, got 0"),
    ],
)
def test_refusals(make, refusal):
    with pytest.raises(ValueError, match=refusal):
        make()


# Tables.


def test_the_retrieval_table_puts_accuracy_beside_answer_loss():
    config = {"part": "retrieval", "task": "single-needle", "n_tokens": 512, "depth": 0.5}
    records = [
        Record(
            "retrieval",
            label,
            {**config, "method": {"label": label}},
            0,
            {"accuracy": a, "answer_loss": 0.25},
            1.0,
        )
        for label, a in (("exact", 1.0), ("x", 0.5))
    ]
    table = retrieval_table(records)
    assert table.columns[1] == "single-needle 512 at 50 %"
    assert [row[1] for row in table.rows] == ["100 % (0.25)", "50 % (0.25)"]
    assert needles_table(records).rows == ()


def record(label, sample, hits, *, n_tokens=4096, **results):
    """One text; `hits` has the needles of each depth."""
    by_depth = [{"depth": d, "n_needles": len(own), "hits": own, "answer_loss": 0.5} for d, own in hits.items()]
    config = {
        **{"part": "many-needles", "model": "m", "dtype": "float32", "document": "book", "digest": "d"},
        **{"needle": "{city} = {number}", "n_tokens": n_tokens, "depths": list(hits), "needles_per_depth": 2},
        **{"sample": sample, "layers": "all", "method": {"label": label}},
    }
    key = f"{label} {sample} {n_tokens}"
    return Record("retrieval", key, config, 0, {"by_depth": by_depth, **results}, 1.0)


def test_the_needles_table_has_a_line_per_depth_and_one_over_all():
    table = needles_table(
        [
            record("default", 0, {0.1: [1, 0], 0.9: [0, 1]}),
            record("exact", 0, {0.1: [0, 1], 0.9: [1, 1]}),
            record("exact", 1, {0.1: [1, 1], 0.9: [0, 1]}),
            record("default", 1, {0.1: [1, 1], 0.9: [0, 1]}),
        ]
    )
    assert table.columns == ("tokens", "depth", "needles", "exact", "default", "points", "lost", "gained")
    assert table.rows == (
        ("4096", "10 %", "4", "75.0 %", "75.0 %", "+0.0", "1", "1"),
        ("4096", "90 %", "4", "75.0 %", "50.0 %", "-25.0", "1", "0"),
        ("4096", "all", "8", "75.0 %", "62.5 %", "-12.5", "2", "1"),
    )


def test_lengths_stand_apart_and_unfinished_texts_are_not_compared():
    table = needles_table(
        [
            record("exact", 0, {0.5: [1, 1]}),
            record("exact", 1, {0.5: [0, 0]}),
            record("x", 0, {0.5: [1, 0]}),
            record("exact", 0, {0.5: [1, 1]}, n_tokens=8192, position_scaling={"rope": "yarn"}),
        ]
    )
    assert [row[:2] for row in table.rows] == [(n, d) for n in ("4096", "8192") for d in ("50 %", "all")]
    assert table.rows[0][2:] == ("4", "50.0 %", "50.0 %", "-50.0", "1", "0")
    assert table.rows[2][2:] == ("2", "100.0 %", "-", "-", "-", "-")
    assert "RoPE scaling" in table.title
    alone = needles_table([record("x", 0, {0.5: [1, 0]})])
    assert alone.rows[0] == ("4096", "50 %", "2", "50.0 %", "-", "-", "-")
    damaged = record("exact", 0, {0.5: [1, 0]})
    damaged.results["by_depth"][0]["hits"] = [1]
    with pytest.raises(ValueError, match=r"record exact 0 4096 must have a 0 or 1 for every needle, got \[1\]"):
        needles_table([damaged])


# The command.


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    return str(save_tiny_language_model(tmp_path_factory.mktemp("long"), max_positions=4096))


@pytest.fixture
def run(long_model, text, tmp_path):
    given = ["retrieval", "--model", long_model, "-d", text, "--out", str(tmp_path / "run")]
    return lambda *options: main([*given, *options])


def test_a_row_is_one_text_under_one_method(run, lines, tmp_path, capsys):
    many = ("--task", "many-needles", "-n", "2600", "-n", "1400", "--method", "exact", "--method", "default")
    assert run(*many, "--samples", "2") == 0
    printed, said = capsys.readouterr()
    found = lines(tmp_path / "run")
    rows = [(r["config"]["n_tokens"], r["config"]["sample"], r["config"]["method"]["label"]) for r in found]
    assert rows == [
        (n, sample, label) for n in (2600, 1400) for sample in (0, 1) for label in ("exact", "default")
    ]
    assert found[1]["config"]["method"]["config"] == Routed().to_dict()
    assert found[1]["results"]["reads_per_query"] < found[0]["results"]["reads_per_query"]
    assert "default is exact at 1400 tokens" in said
    assert "default is exact at 2600" not in said
    shown = [line.split() for line in printed.splitlines()]
    assert ["2600", "30", "%", "4"] in [words[:4] for words in shown]
    assert ["2600", "all", "20"] in [words[:3] for words in shown]
    exact, default = (line["results"]["by_depth"] for line in found[4:6])
    assert exact == default  # the same texts, and at this length the same attention


def test_a_run_is_continued_text_by_text(run, lines, tmp_path, capsys):
    options = ("--task", "many-needles", "-n", "1400", "--method", "default", "--depth", "0.5", "--resume")
    assert run(*options, "--samples", "2") == 0
    path = tmp_path / "run" / "records.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept[:3]))
    assert run(*options, "--samples", "3") == 0
    assert "3 of 6 rows are finished" in capsys.readouterr().err
    again, fourth = lines(tmp_path / "run"), json.loads(kept[3])
    assert len(again) == 6
    assert again[3]["key"] == fourth["key"]
    assert again[3]["results"]["by_depth"] == fourth["results"]["by_depth"]


def test_tasks_run_side_by_side_and_another_text_is_another_row(run, text, lines, tmp_path, capsys):
    from pathlib import Path

    options = (
        "--task",
        "many-needles",
        "--task",
        "single-needle",
        "-n",
        "1400",
        "--depth",
        "0.5",
        "--samples",
        "1",
    )
    assert run(*options, "--method", "exact", "--resume") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "single-needle 1400 at 50 %" in printed
    assert "Many needles" in printed
    single = [r for r in lines(tmp_path / "run") if r["config"]["part"] == "retrieval"]
    assert [line["config"]["method"]["label"] for line in single] == ["exact", "local only"]
    Path(text).write_text("straw " * 500)
    assert run(*options, "--method", "exact", "--resume") == 0
    assert len(lines(tmp_path / "run")) == 2 * (len(single) + 2)  # exact and local for needles too


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "--task many-needles -n 600",
            "length must leave room for the facts, the questions and 512 tokens between",
        ),
        ("--task single-needle -n 4", "length must leave room for the facts, the questions, at least"),
        ("--task many-needles --depth 1.5", "depth must lie between 0 and 1, got 1.5"),
        ("--task many-needles --depth 0.5 --depth 0.5", "depths must differ from each other, got [0.5, 0.5]"),
        ("--task some-needles", "task must be one of"),
        ("--method flash", "method must be one of"),
    ],
)
def test_refusals_of_the_command_leave_no_records(run, options, sentence, tmp_path, capsys):
    assert run(*options.split()) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.strip().count("\n") == 0
    path = tmp_path / "run" / "records.jsonl"
    assert not path.exists() or not path.read_text()
