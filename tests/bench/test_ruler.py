"""RULER: samples of lm_eval, answers under a method, windows beside them, the table and the command."""

import importlib.util
import json
import re

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import BatchEncoding

from prescore import Routed
from prescore.bench.cli.main import main
from prescore.bench.language import ruler
from prescore.bench.language.answers import ruler_table, wilson_interval
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.methods import EXACT, Baseline, Local, Method
from prescore.bench.observed import WithoutState
from prescore.bench.records import Record, row_key
from prescore.integrations.attention import AttentionContext

HAY = Document("hay", "Nothing to see in this sentence. Nor is there anything in the next one! " * 400)
SAMPLE = ruler.Sample("tiny", "fwe", 512, 0, "", 0, "Words and other words, which occur often. " * 8, ["often"])


class Words:
    """A tokenizer with tokens of up to four letters, as long as usual."""

    def __call__(self, text, **options):
        tokens = re.findall(r"\s?\w{1,5}|\W", text)
        return BatchEncoding({"input_ids": list(range(len(tokens)))})


WORDS = LanguageModel("words", None, Words())
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason='lm_eval is not installed (pip install ".[ruler]")'
)
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"The river {name} is {long} miles long.",
                    "qas": [
                        {
                            "question": f"How long is the river {name}?",
                            "is_impossible": False,
                            "answers": [{"text": f"{long} miles"}],
                        }
                    ],
                }
                for long, name in enumerate(("Avon", "Tweed", "Clyde", "Dee"), start=20)
            ]
        }
    ]
}


def test_tasks_are_read_by_name(tiny):
    assert len(ruler.read_tasks("all")) == 11
    assert len(ruler.read_tasks("all", ["squad", "hotpot"])) == 13
    assert ruler.read_tasks("vt, ruler_cwe,vt") == ["vt", "cwe"]
    with pytest.raises(ValueError, match=r"tasks must be one of .*, got 'vtt'"):
        ruler.read_tasks("vtt")
    with pytest.raises(ValueError, match="got qa_squad without --squad"):
        ruler.read_tasks("qa_squad")
    with pytest.raises(ValueError, match="tasks must leave out vt where a token is fewer than two letters"):
        ruler.make_samples(tiny, "vt", 4096, 1, ruler.Source(0, HAY, {}))
    with pytest.raises(ValueError, match="length must be at least 1024 for the task vt, got 512"):
        ruler.check_lengths(["fwe", "vt"], [2048, 512])


@pytest.mark.parametrize(
    ("config", "visible"),
    [
        (Local(8), lambda n: list(range((n - 1) // 8 * 8, n))),
        (
            Local(8, previous_chunk=True, sinks=2),
            lambda n: sorted({*range(min(2, n)), *range(max(0, (n - 1) // 8 * 8 - 8), n)}),
        ),
        (
            Baseline("streaming", {"window": 6, "sinks": 3}),
            lambda n: sorted({*range(min(3, n)), *range(max(0, n - 6), n)}),
        ),
        (Baseline("oracle", {"budget": 4, "chunk_size": 8}), lambda n: list(range(n))),
    ],
    ids=["local", "local and before", "window", "other"],
)
def test_a_step_reads_what_the_last_query_would(config, visible):
    context = AttentionContext(layer=0, is_causal=True)
    query, key, value = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    attend = WithoutState(config)
    for n in (1, 8, 9, 40):
        keys = visible(n)
        # the prompt, and the same position as a step of its own
        step = attend(query[:, :, n - 1 : n], key[:, :, :n], value[:, :, :n], context)
        expected = scaled_dot_product_attention(query[:, :, n - 1 : n], key[:, :, keys], value[:, :, keys])
        torch.testing.assert_close(step, expected)
        if getattr(config, "name", "") != "oracle":
            prompt = attend(query[:, :, :n], key[:, :, :n], value[:, :, :n], context)
            torch.testing.assert_close(prompt[:, :, -1:], step)


def record(task, number, label, score, reads=None, compared_with=None):
    axes = {} if compared_with is None else {"compared_with": compared_with}
    method = {"label": label, "config": {"type": "Routed", "sinks": 4}, "axes": axes}
    config = {"part": "ruler", "model": "m", "n_tokens": 4096, "task": task, "digest": f"{task} {number}"}
    config |= {"method": method}
    results = {"score": score, "prompt_reads_per_query": reads, "prompt_tokens": 1000}
    return Record("ruler", row_key("ruler", config, 0), config, 0, results, 1.0)


def test_the_table_compares_the_same_samples_and_names_the_worst_task():
    records = [record("vt", number, "exact", score) for number, score in enumerate((1.0, 0.5, 1.0))]
    records += [record("vt", number, "default", score, 300.0) for number, score in enumerate((0.5, 0.5))]
    records += [record("vt", 0, "sliding window", 0.0, None, "default")]
    records += [record("cwe", 0, "exact", 0.1), record("cwe", 0, "default", 0.0, 300.0)]
    table = ruler_table(records)
    lines = {row[2:4]: row[4:] for row in table.rows}
    assert lines["vt", "exact"][:2] == ("3", "83.3 %")
    assert lines["vt", "default"][:2] == ("2", "50.0 %")
    assert lines["vt", "default"][3].startswith("-25.0 ± ")
    assert lines["vt", "default"][4:] == ("1", "0")
    assert lines["vt", "sliding window as wide as default"][3:] == ("-100.0", "1", "0")
    # exact attention does not solve cwe, and the window has read one sample
    assert [lines[group, "default"][:2] for group in ("solved", "all")] == [("1", "50.0 %")] * 2
    assert lines["solved", "exact"][:2] == ("1", "100.0 %")
    assert table.note.endswith("worst of them: vt at 4096 tokens with default, -25.0 points")
    same = [
        record("vt", at, name, 1.0, reads)
        for at in range(3)
        for name, reads in (("exact", None), ("default", 300.0))
    ]
    table = ruler_table(same)
    assert {row[7] for row in table.rows if row[3] == "default"} == {"+0.0"}
    assert table.note.endswith("no method loses points on one")


def test_intervals_and_windows():
    low, high = wilson_interval(0.5, 10)
    assert (low, high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert wilson_interval(1.0, 10)[0] == pytest.approx(0.7225, abs=1e-4)
    assert ruler.window_beside(record("vt", 0, "exact", 1.0)) is None
    assert ruler.window_beside(record("vt", 0, "default", 1.0, 500.5)) is None  # reads every key
    beside = ruler.window_beside(record("vt", 0, "default", 1.0, 300.0))
    assert 300 <= beside.config.reads(1000) < 301
    assert beside.axes == {"compared_with": "default"}


@needs_lm_eval
def test_an_answer_is_what_the_model_generates_under_the_method(tiny):
    routed = Routed(chunk_size=32, exact_until=32, min_weight=1.0)
    rows = {method.label: ruler.ruler_row(tiny, SAMPLE, method) for method in (EXACT, Method("default", routed))}
    results = {label: row.measure() for label, row in rows.items()}
    ids = tiny.encode(SAMPLE.prompt)[None]
    expected = tiny.model.generate(ids, max_new_tokens=50, do_sample=False)[0, ids.shape[1] :]
    assert results["exact"]["answer"] == tiny.tokenizer.decode(expected, skip_special_tokens=True)
    assert results["exact"][ruler.READS] is None
    assert 0 < results["default"][ruler.READS] < ids.shape[1] / 2
    assert ruler.score(SAMPLE, "most OFTEN") == 1.0
    assert ruler.score(SAMPLE, "rarely") == 0.0


@needs_lm_eval
@pytest.mark.parametrize("task", ruler.TASKS)
def test_samples_have_their_answers_and_depend_on_the_seed_alone(task, tmp_path):
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps(SQUAD))
    hotpot = tmp_path / "hotpot.json"
    stories = [[f"River {n}", [f"It is {n} miles long. " * 3]] for n in range(12)]
    hotpot.write_text(
        json.dumps([{"question": "How long?", "answer": f"{n} miles", "context": stories} for n in range(3)])
    )
    source = ruler.Source(3, HAY, {"squad": squad, "hotpot": hotpot})
    few, more = (ruler.make_samples(WORDS, task, 4096, count, source) for count in (1, 2))
    assert more[0] == few[0]
    assert more[1].prompt != more[0].prompt
    for sample in more:
        assert all(word in sample.prompt for word in sample.outputs)
        assert len(WORDS.encode(sample.prompt)) <= 4096
        assert ruler.score(sample, " ".join(sample.outputs)) == 1.0
    if not task.startswith("qa"):
        assert ruler.make_samples(WORDS, task, 4096, 1, source._replace(seed=4)) != few


@needs_lm_eval
def test_the_command_saves_samples_once_and_resumes(saved, tmp_path, lines, capsys):
    out = tmp_path / "run"
    command = ["ruler", "--model", saved, "-n", "1024", "--tasks", "fwe", "--leaf", "64"]
    command += ["--set", "min_weight=1.0", "--out", str(out)]
    assert main([*command, "--limit", "1"]) == 0
    first, samples = lines(out), (out / "samples.jsonl").read_text()
    assert [each["config"]["method"]["label"] for each in first] == ["exact", "default", "sliding window"]
    assert main([*command, "--limit", "1", "--resume"]) == 0
    assert lines(out) == first
    assert (out / "samples.jsonl").read_text() == samples
    assert main([*command, "--limit", "2", "--resume"]) == 0
    assert len(lines(out)) == 6
    assert (out / "samples.jsonl").read_text().startswith(samples)
    assert "sliding window as wide as default" in capsys.readouterr().out
    assert "| fwe | exact | 2 |" in (out / "ruler.md").read_text()


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_lm_eval_the_command_says_what_is_missing(tmp_path, capsys):
    assert main(["ruler", "--quick", "--out", str(tmp_path / "run")]) == 2
    assert "this command needs the package lm_eval" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
