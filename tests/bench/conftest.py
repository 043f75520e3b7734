"""A tiny language model, in memory and saved, and a text for it."""

import json

import pytest
from oracles.tiny_language_model import save_tiny_language_model, tiny_language_model

from prescore.bench.language.model import LanguageModel


@pytest.fixture(scope="session")
def tiny():
    model, tokenizer = tiny_language_model(max_positions=2048)
    return LanguageModel("tiny", model, tokenizer)


@pytest.fixture(scope="session")
def precise():
    """The same in float64, trained on 512 positions."""
    model, tokenizer = tiny_language_model()
    return LanguageModel("tiny", model.double(), tokenizer)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A directory for `--model`."""
    return str(save_tiny_language_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The keys that matter are few, and centroids represent the others. " * 20)
    return str(path)


@pytest.fixture
def lines():
    """The records of a directory as JSON values."""
    return lambda directory: [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
