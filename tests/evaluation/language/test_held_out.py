"""Held-out windows: fixed, apart from what was tuned on, and measured beside a rival that reads as much."""

import json
from types import SimpleNamespace

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model

from prescore.bench.language import documents, methods
from prescore.bench.language.documents import SOURCE, SOURCE_MODULES, TOPICS, Document, load_documents
from prescore.bench.language.held_out import (
    LENGTHS,
    REPORTED,
    SEEN,
    SEEN_TOKENS,
    TokenizedText,
    held_out_texts,
    measured_after,
    measured_first,
    reported_windows,
    tokenized,
    tuning_windows,
)
from prescore.bench.language.methods import baseline_rows, near_rows
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import loss_row, measure_loss
from prescore.bench.records import measure
from prescore.config import Routed
from prescore.integrations.attention import AttentionContext

NOVEL = 325_000
"""Tokens of the shorter of two novels."""


def numbered(total, begin=None):
    """A text whose tokens are their own positions."""
    return TokenizedText("text", torch.arange(total), begin)


def interval(window):
    """First and one past the last position of a window of a numbered text."""
    return int(window.tokens[0]), int(window.tokens[-1]) + 1


def apart(one, other):
    return one[1] <= other[0] or other[1] <= one[0]


def test_reported_windows_are_a_fixed_list():
    """Changing one of these after something was measured would be choosing by the result."""
    text = numbered(100_000)
    starts = {length: [interval(w)[0] for w in reported_windows(text, length)] for length in LENGTHS}
    assert starts == {8192: [41314, 73446], 16384: [33446], 32768: [33616]}
    assert [w.document for w in reported_windows(text, 8192)] == [
        "text, reported window 1",
        "text, reported window 2",
    ]
    assert {window.first for window in reported_windows(text, 8192)} == {4096}
    assert reported_windows(numbered(8191), 8192) == []


@pytest.mark.parametrize("total", [NOVEL, 460_000])
def test_no_reported_window_was_seen(total):
    seen = [(round(s * (total - n)), round(s * (total - n)) + n) for n, shares in SEEN.items() for s in shares]
    for length in LENGTHS:
        for window in reported_windows(numbered(total), length):
            assert all(apart(interval(window), other) for other in (*seen, SEEN_TOKENS))


@pytest.mark.parametrize("length", LENGTHS)
def test_tuning_windows_are_drawn_by_their_seed_apart_from_the_reported(length):
    text = numbered(NOVEL)
    reported = [interval(window) for n in REPORTED for window in reported_windows(text, n)]
    drawn = [tuning_windows(text, length, seed)[0] for seed in range(30)]
    assert all(apart(interval(window), other) for window in drawn for other in reported)
    assert len({interval(window) for window in drawn}) > 25
    assert interval(tuning_windows(text, length, 7)[0]) == interval(drawn[7])
    assert drawn[7].document == "text, tuning window 7"


def test_where_no_tuning_window_fits_there_is_none():
    assert tuning_windows(numbered(8191), 8192, 0) == []
    assert tuning_windows(numbered(8193), 8192, 0) == []  # the reported window leaves no room


def test_a_beginning_token_takes_the_first_place():
    window = reported_windows(numbered(1000, begin=5), 100)[0]
    assert len(window.tokens) == 100
    assert int(window.tokens[0]) == 5
    assert window.tokens[1:].tolist() == list(range(406, 505))
    model = LanguageModel("m", None, _Letters())
    assert tokenized(model, [Document("a", "word")])[0].begin == 2
    assert tokenized(model, [Document("a", "word")])[0].tokens.tolist() == [4] * 4


class _Letters:
    bos_token_id = 2

    def __call__(self, text, *, verbose, add_special_tokens):
        return {"input_ids": [2] * add_special_tokens + [4] * len(text)}


def test_texts_are_those_given_one_record_of_a_file_and_pythons_own(tmp_path):
    records = tmp_path / "bench.jsonl"
    records.write_text("\n".join(json.dumps({"context": f"story {n}", "_id": str(n)}) for n in range(3)))
    novel = tmp_path / "novel.txt"
    novel.write_text("Once")
    names = [document.name for document in held_out_texts([str(novel), str(records), TOPICS])]
    assert names == ["novel.txt", "bench.jsonl#0", TOPICS, SOURCE]
    assert [document.name for document in held_out_texts(None)] == [TOPICS, SOURCE]


def test_source_code_is_long_and_none_of_it_in_the_default_corpus():
    text = load_documents([SOURCE])[0].text
    assert len(text) > 400_000
    assert "class SequenceMatcher" in text
    assert not set(SOURCE_MODULES) & set(documents.DEFAULT_MODULES)


@pytest.mark.parametrize("length", [12, 32, 53])
@pytest.mark.parametrize("sinks", [0, 3])
def test_nearby_is_attention_to_two_chunks_and_sinks(length, sinks):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, length, 8, generator=generator, dtype=torch.float64)
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (column <= row) & ((column // 16 >= row // 16 - 1) | (column < sinks))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    context = AttentionContext(layer=0, is_causal=True, scale=0.3)
    output, rows, _ = methods.nearby(16, sinks).attention(0)(query, key, value, context)
    torch.testing.assert_close(output, wanted)
    assert rows() == near_rows(length, 16, sinks) == pytest.approx(float(seen.sum(1).double().mean()))


@pytest.mark.parametrize("rows", [1.0, 3.5, 60.2, 90.0, 128.5])
def test_the_window_reads_as_many_rows_and_not_one_key_more(rows):
    method = methods.sliding_window(256, rows, sinks=2)
    window = method.settings["window"]
    assert baseline_rows("streaming", 256, {"window": window, "sinks": 2}) >= rows
    if window > 1:
        assert baseline_rows("streaming", 256, {"window": window - 1, "sinks": 2}) < rows


def test_the_default_is_untouched_unless_its_label_says_otherwise():
    exact, default, local = measured_first()
    assert (exact.kind, default.label, default.config) == ("exact", "default", Routed())
    assert local.settings == {"leaf": Routed().chunk_size, "before": Routed().chunk_size, "sinks": Routed().sinks}
    assert measured_first({"rows": 64})[1].label == "default, rows=64"
    with pytest.raises(ValueError, match="got 'top_k'"):
        measured_first({"top_k": 64})


def test_the_window_follows_what_the_default_read():
    model, tokenizer = tiny_language_model()
    tiny = LanguageModel("tiny", model, tokenizer)
    window = reported_windows(TokenizedText("text", torch.arange(300) % 50), 128)[0]
    method = measured_first({"chunk_size": 16, "exact_until": 32, "leaf_size": 4, "rows": 8})[1]
    record = measure("perplexity", loss_row(tiny, window, method, experiment="default"))
    rival = measured_after(record)
    assert rival.axes == {"beside": method.label}
    read = measure_loss(tiny, window, rival)["keys_per_query"]
    assert 0 <= read - record.figures["replaced_rows_per_query"] < 1
    damaged = SimpleNamespace(figures={}, config=record.config, key="k")
    with pytest.raises(ValueError, match="record k must have the rows that the default read, got None"):
        measured_after(damaged)
