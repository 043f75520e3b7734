"""`experiments/speed/rivals.py` on a tiny saved model; what is not installed is skipped."""

import json

import pytest
from oracles.tiny_language_model import save_tiny_language_model

OURS = ("exact float32", "prescore int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_language_model(tmp_path_factory.mktemp("model"), max_positions=4096))


@pytest.fixture
def rivals(load_script):
    return load_script("speed/rivals.py")


def run(rivals, model, tmp_path, *extra):
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    common = ["--model", model, "-d", str(tmp_path / "text.txt"), "-n", "2304"]
    argv = [*common, "--out", str(tmp_path / "run"), "--resume", "--threads", "1", *extra]
    return rivals.script(rivals.command, argv)


@pytest.mark.slow
def test_engines_are_measured_in_processes_of_their_own(rivals, model, tmp_path, capsys):
    methods = [word for name in OURS for word in ("--method", name)]
    assert run(rivals, model, tmp_path, *methods, "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = {(record["config"]["engine"], record["config"]["part"]): record["results"] for record in records}
    assert set(found) == {(name, part) for name in OURS for part in rivals.PARTS}
    losses = {name: found[name, "loss"]["loss"] for name in OURS}
    # int8 weights and the default cost little, but are no figure of another engine by mistake
    assert 0 < abs(losses["prescore int8"] - losses["exact float32"]) < 0.05
    for name in OURS:
        assert found[name, "time"]["seconds_to_first_token"] > 0
        assert found[name, "time"]["peak_megabytes"] > 50
    # finished rows are not run again, and the table has them all
    assert run(rivals, model, tmp_path, *methods) == 0
    shown = capsys.readouterr()
    assert all(f"{loss:.4f}" in shown.out for loss in losses.values())
    assert "4 of 4 rows are finished" in shown.err


def test_what_is_not_there_is_skipped_with_the_line_that_installs_it(rivals, model, tmp_path, capsys, monkeypatch):
    find = rivals.importlib.util.find_spec
    missing = {"openvino_genai", "llama_cpp"}
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    assert run(rivals, model, tmp_path, "--method", "openvino", "--method", "llama.cpp") == 0
    said = capsys.readouterr().err
    assert "openvino is skipped: pip install openvino-genai" in said
    assert "llama.cpp is skipped: pip install llama-cpp-python" in said
    missing.clear()
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: name)
    assert run(rivals, model, tmp_path, "--method", "openvino", "--method", "llama.cpp") == 0
    said = capsys.readouterr().err
    assert "optimum-cli export openvino --weight-format int8" in said
    assert "--gguf must name the model's GGUF file" in said
