"""A tiny model and a text to read."""

import pytest
from oracles.tiny_language_model import tiny_language_model

from prescore.bench.language.documents import Document
from prescore.bench.language.held_out import tokenized
from prescore.bench.language.model import LanguageModel


@pytest.fixture(scope="session")
def tiny():
    model, tokenizer = tiny_language_model()
    return LanguageModel("tiny", model, tokenizer)


@pytest.fixture(scope="session")
def text(tiny):
    words = "Some tokens are met by every query, most are met by none at all; number {} is one of them. "
    return tokenized(tiny, [Document("words", "".join(words.format(n) for n in range(22)))])[0]
