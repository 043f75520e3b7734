"""Many needles in one text: all in place, asked once and in any order, judged as one by one."""

import re

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model

from prescore import Routed
from prescore.bench.language import methods
from prescore.bench.language.documents import Document
from prescore.bench.language.methods import measured_attention
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.needles import (
    CLEAR,
    DEPTHS,
    PER_DEPTH,
    Needle,
    Needles,
    NeedleText,
    answers_to,
    make_needle_text,
    needles_row,
)
from prescore.bench.language.retrieval import Problem, answer_figures
from prescore.bench.records import row_key

HAY = Document("hay", "Nothing to see in this sentence, nor in the next one. " * 60)
LENGTH = 1500


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = tiny_language_model(max_positions=2048)
    return LanguageModel("tiny", model, tokenizer)


def made(tiny, length=LENGTH, depths=DEPTHS, seed=0, sample=0):
    return make_needle_text(tiny, HAY, Needles(length, depths), seed=seed, sample=sample)


def stated(needle):
    return f"\nNote: {needle.city} = {needle.number}\n"


def text_of(tiny, tokens):
    return tiny.tokenizer.decode(tokens.tolist())


@pytest.mark.parametrize("length", [LENGTH, 1501, 4000])
@pytest.mark.parametrize("sample", [0, 1])
def test_a_text_has_its_length_and_every_needle_in_its_place(tiny, length, sample):
    text = made(tiny, length, sample=sample)
    assert len(text.tokens) == length
    assert [needle.depth for needle in text.needles] == sorted(DEPTHS * PER_DEPTH)
    begins = [needle.begin for needle in text.needles]
    assert begins == sorted(begins)
    last = text.questions - CLEAR
    for needle in text.needles:
        words = stated(needle)
        end = needle.begin + len(tiny.encode(words))
        assert text_of(tiny, text.tokens[needle.begin : end]) == words
        assert end <= last
        # needles take room themselves, and two lie side by side
        assert abs(needle.begin / last - needle.depth) < 0.08


def test_no_question_has_a_needle_in_what_the_default_reads_nearby():
    assert 2 * Routed().chunk_size <= CLEAR


@pytest.mark.parametrize("depths", [(0.0, 1.0), (1.0,), (0.0, 0.01, 0.02)])
def test_needles_at_the_ends_stay_in_the_text_and_away_from_the_questions(tiny, depths):
    text = made(tiny, depths=depths)
    assert len(text.tokens) == LENGTH
    last = max(needle.begin + len(stated(needle)) for needle in text.needles)
    assert last <= text.questions - CLEAR
    assert (last == text.questions - CLEAR) == (1.0 in depths)
    for depth in depths:
        assert sum(needle.depth == depth for needle in text.needles) == PER_DEPTH


def test_every_needle_is_asked_once_and_no_answer_is_given_away(tiny):
    text = made(tiny)
    body, asked = (text_of(tiny, part) for part in text.tokens.tensor_split([text.questions]))
    cities, numbers = ({getattr(needle, name) for needle in text.needles} for name in ("city", "number"))
    assert len(cities) == len(numbers) == PER_DEPTH * len(DEPTHS)
    assert dict(re.findall(r"(\w+) = (\d+)", asked)) == {n.city: n.number for n in text.needles}
    for needle in text.needles:
        for words in (needle.city, needle.number):
            assert body.count(words) == asked.count(words) == 1
        begin, end = needle.answer
        assert text_of(tiny, text.tokens[begin:end]) == f" {needle.number}"
        assert text_of(tiny, text.tokens[:begin]).endswith(f"\nNote: {needle.city} =")


def test_seed_and_sample_decide_on_everything(tiny):
    one, same, *others = (made(tiny, seed=s, sample=k) for s, k in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert torch.equal(one.tokens, same.tokens)
    for other in others:
        assert {needle.number for needle in other.needles}.isdisjoint(needle.number for needle in one.needles)


def test_questions_come_in_any_order(tiny):
    orders = []
    for sample in range(5):
        needles = made(tiny, sample=sample).needles
        orders.append(tuple(sorted(range(len(needles)), key=lambda number: needles[number].answer)))
    assert len(set(orders)) == 5
    assert tuple(range(len(DEPTHS) * PER_DEPTH)) not in orders


def test_a_beginning_of_text_token_stands_once():
    from tokenizers.processors import TemplateProcessing

    model, tokenizer = tiny_language_model()
    first = tokenizer.backend_tokenizer.token_to_id("~")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", first)])
    text = made(LanguageModel("tiny", model, tokenizer))
    assert len(text.tokens) == LENGTH
    assert (text.tokens == first).nonzero().tolist() == [[0]]
    for needle in text.needles:
        words = stated(needle)
        assert tokenizer.decode(text.tokens[needle.begin :].tolist()).startswith(words)


def test_answers_are_those_of_one_problem_after_the_other(tiny):
    """Each answer as if the text ended with it, by the judge of single problems."""
    text = made(tiny)
    for needle, answer in zip(text.needles, answers_to(tiny, text), strict=True):
        begin, end = needle.answer
        found, loss = answer_figures(tiny, Problem(text.tokens[:end], end - begin, needle.number))
        assert answer.found == found
        # the same products over texts of other lengths, in float32
        assert answer.loss == pytest.approx(loss, rel=1e-3)


def test_what_greedy_decoding_writes_is_found(tiny):
    tokens = tiny.encode("Once upon a time")
    spans = []
    for _ in range(2):
        begin = len(tokens)
        for _ in range(3):
            with torch.no_grad():
                best = tiny.model(input_ids=tokens[None]).logits[0, -1].argmax()
            tokens = torch.cat((tokens, best[None]))
        spans.append((begin, len(tokens)))
        tokens = torch.cat((tokens, tiny.encode(" and then")))
    needles = tuple(Needle(0.5, "", "", 0, span) for span in spans)
    assert [answer.found for answer in answers_to(tiny, NeedleText(tokens, needles, 0))] == [True, True]
    tokens[spans[0][1] - 1] = (tokens[spans[0][1] - 1] + 1) % 256
    assert not answers_to(tiny, NeedleText(tokens, needles[:1], 0))[0].found


def test_a_row_has_every_needle_by_depth(tiny):
    row = needles_row(tiny, HAY, methods.local(50), Needles(LENGTH, (0.9, 0.1)), sample=0)
    figures = row.measure()
    assert [one["depth"] for one in figures["by_depth"]] == [0.9, 0.1]
    text = made(tiny, depths=(0.9, 0.1))
    with_method = {}
    with measured_attention(tiny.model, methods.local(50)):
        for needle, answer in zip(text.needles, answers_to(tiny, text), strict=True):
            with_method.setdefault(needle.depth, []).append(answer)
    for one in figures["by_depth"]:
        own = with_method[one["depth"]]
        assert one["asked"] == PER_DEPTH
        assert one["found"] == [int(answer.found) for answer in own]
        assert one["answer_loss"] == pytest.approx(sum(answer.loss for answer in own) / PER_DEPTH)
    assert figures["keys_per_query"] == 25.5
    assert figures["attention_processor_seconds"] > 0
    assert "position_scaling" not in figures


def test_texts_and_methods_are_rows_of_their_own(tiny):
    keys = {
        row_key("retrieval", row.config, row.seed)
        for sample in (0, 1)
        for depths in (DEPTHS, DEPTHS[:2])
        for method in (methods.exact(), methods.local(32))
        for row in [needles_row(tiny, HAY, method, Needles(LENGTH, depths), sample=sample)]
    }
    assert len(keys) == 8


def test_positions_past_the_trained_length_are_scaled_and_said():
    short = LanguageModel("tiny", *tiny_language_model(max_positions=1000))
    figures = needles_row(short, HAY, methods.exact(), Needles(LENGTH), sample=0).measure()
    assert figures["position_scaling"] == {"rope": "yarn", "factor": 1.5, "trained_length": 1000}


def test_refusals(tiny):
    said = r"length must leave room for 10 needles, their questions and 512 tokens between, at least (\d+) tokens"
    with pytest.raises(ValueError, match=rf"{said}, got 700") as refused:
        made(tiny, 700)
    least = int(re.search(said, str(refused.value)).group(1))
    # cities are drawn anew at another length, and differ by a few letters
    assert len(made(tiny, least + 60).tokens) == least + 60
    with pytest.raises(ValueError, match=rf"{said}, got {least - 60}"):
        made(tiny, least - 60)
    for depth in (1.5, -0.1):
        with pytest.raises(ValueError, match=rf"depth must lie between 0 and 1, got {depth}"):
            Needles(LENGTH, (0.5, depth))
    with pytest.raises(ValueError, match=r"depths must differ from each other, got \[0.5, 0.5\]"):
        Needles(LENGTH, (0.5, 0.5))
    for depths in ((), tuple(number / 10 for number in range(9))):
        with pytest.raises(ValueError, match=rf"depths must be 1 to 8 for many-needles, got {len(depths)}"):
            Needles(LENGTH, depths)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        Needles(0)
    with pytest.raises(ValueError, match="sample must be at least 0, got -1"):
        needles_row(tiny, HAY, methods.exact(), Needles(LENGTH), sample=-1)
    with pytest.raises(ValueError, match="document none must have text, got none"):
        make_needle_text(tiny, Document("none", ""), Needles(LENGTH), seed=0, sample=0)
