"""Heads of a tiny model, saved once for all tests of this folder."""

import pytest
import torch
from oracles.tiny_language_model import tiny_language_model

from prescore.bench.speed.heads import find_heads, save_heads


@pytest.fixture(scope="session")
def model():
    return tiny_language_model(max_positions=4096)[0]


@pytest.fixture(scope="session")
def saved(model, tmp_path_factory):
    """2700 positions, more than `exact_until` of the default: some queries are routed."""
    folder = tmp_path_factory.mktemp("heads")
    paths = save_heads(model, torch.arange(2700)[None] % 251, folder)
    assert [path.name for path in paths] == ["layer-00.safetensors", "layer-01.safetensors"]
    return find_heads(folder)
