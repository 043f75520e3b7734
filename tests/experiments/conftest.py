"""Scripts of experiments as modules, and attention inputs for them."""

import importlib.util
import sys
from pathlib import Path

import pytest
from oracles.inputs import attention_tensors
from safetensors.torch import save_file

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def load_script(monkeypatch):
    """A script by its path, imported afresh: a test may change what it measures."""

    def load(path):
        name = Path(path).stem
        spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.syspath_prepend((EXPERIMENTS / path).parent)  # processes that a script starts import it again
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """Inputs of two layers."""
    folder = tmp_path_factory.mktemp("heads")
    for seed, name in enumerate(("smooth", "retrieval")):
        query, key, value = attention_tensors(
            heads=4, kv_heads=2, n_query=4096, n_keys=4096, dim=16, value_dim=16, seed=seed, spread=2
        )
        tensors = {"query": query.float(), "key": key.float(), "value": value.float()}
        save_file(tensors, folder / f"{name}.safetensors")
    return folder
