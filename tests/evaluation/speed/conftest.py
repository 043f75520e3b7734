"""Heads of a tiny model, saved once for all tests of this folder."""

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model

from prescore.bench.speed.heads import find_heads, save_heads

LENGTH = 2700
"""More than `exact_until` of the default: some queries are routed."""
IDS = torch.arange(LENGTH)[None] % 251


@pytest.fixture(scope="session")
def model():
    return tiny_language_model(max_positions=4096)[0]


@pytest.fixture(scope="session")
def directory(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    paths = save_heads(model, IDS, folder)
    assert [path.name for path in paths] == ["layer-00.safetensors", "layer-01.safetensors"]
    return folder


@pytest.fixture(scope="session")
def saved(directory):
    return find_heads(directory)
