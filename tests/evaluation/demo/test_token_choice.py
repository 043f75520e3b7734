"""Which tokens are kept: the row's figures against plain computations."""

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model

from prescore import Selected
from prescore.bench.demo.run import ATTENDED, attention_received, token_row
from prescore.bench.language.documents import Document
from prescore.bench.language.model import LanguageModel
from prescore.bench.language.perplexity import make_windows

TEXT = "Some tokens are met by every query, most are met by none at all. " * 8


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = tiny_language_model()
    return LanguageModel("tiny", model, tokenizer)


def test_attention_received_is_the_sum_of_softmax_columns():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 6, 8, generator=generator), torch.randn(1, 2, 10, 8, generator=generator)
    repeated = key.repeat_interleave(2, dim=1)
    logits = query @ repeated.transpose(-1, -2) * 8**-0.5
    seen = torch.ones(6, 10).tril(4).bool()  # the queries are the last 6 of 10 positions
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    columns = weights.sum(2)[0].view(2, 2, 10).sum(1)[:, :5]
    torch.testing.assert_close(attention_received(query, key, 5), columns)


def test_row_tells_what_each_configuration_keeps(tiny):
    window = make_windows(tiny, [Document("text", TEXT)], 200)[0]
    configs = {
        "few": Selected.paper("key-norm", 10),
        "all": Selected.paper("key-norm", 100),
    }
    row = token_row(tiny, window, configs, layers=[1], budget=10)
    figures = row.measure()
    assert "".join(figures["pieces"]) == TEXT[:100]
    assert list(figures["kept"]) == ["few", "all", ATTENDED]
    assert [len(head) for head in figures["kept"]["few"]["1"]] == [10, 10]
    assert figures["kept"]["all"]["1"] == [list(range(100))] * 2
    assert figures["mass"]["all"]["1"] == pytest.approx(1.0)
    # no ten keys receive more than the ten that receive most
    assert figures["mass"]["few"]["1"] <= figures["mass"][ATTENDED]["1"] < 1
    assert row.config["part"] == "tokens"
