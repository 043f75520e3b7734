"""Tiny models, texts, images and saved heads."""

import pytest
from oracles.inputs import attention_tensors
from oracles.tiny_language_model import save_tiny_language_model
from safetensors.torch import save_file
from tiny_images import save_tiny_images, save_tiny_vit


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A directory for `--model`."""
    return str(save_tiny_language_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The keys that matter are few, and centroids represent the others. " * 20)
    return str(path)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A vision model and images for it."""
    pytest.importorskip("PIL", reason="pillow is not installed")
    folder = tmp_path_factory.mktemp("vision")
    return save_tiny_vit(folder / "model"), save_tiny_images(folder / "images")


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """Saved attention inputs of one layer."""
    folder = tmp_path_factory.mktemp("heads")
    sizes = {"heads": 4, "kv_heads": 2, "n_query": 512, "n_keys": 512, "dim": 8, "value_dim": 8}
    query, key, value = (tensor.float() for tensor in attention_tensors(**sizes, seed=0, spread=2))
    save_file({"query": query, "key": key, "value": value}, folder / "layer-0.safetensors")
    return str(folder)
