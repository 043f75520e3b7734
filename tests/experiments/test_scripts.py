"""Every script of experiments runs, in its smallest size."""

import re
import sys
from pathlib import Path

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RANKS = {"RANKS": (2,), "PASSES": ((True, True),)}
SCRIPTS = {
    "gpu/gpu_model.py": ("--heads HEADS --out OUT --json", {"TILES": 1}),
    "parallel/ranks.py": (
        "-n 64 --n-heads 2 --dim 8 --repeats 1 --out OUT --json",
        {"RANKS": (2,), "PASSES": ((True, True),)},
    ),
    "routed/dropout.py": ("--n 128", {}),
    "routed/frontier.py": ("TEXT --model MODEL --length 64 --out OUT/frontier.jsonl --only 1/256", {}),
    "routed/long_text.py": (
        "TEXT --model MODEL --length 64 --chunk 32 --audit 0.1 --threads 1 --out OUT/long.jsonl",
        {},
    ),
    "routed/plain.py": ("HEADS --n 128 --threads 1 --only smooth,dropout", {}),
    "routed/search/reads.py": ("HEADS --to OUT/reads.png --position 3000", {}),
}
ELSEWHERE = {"figures.py", "speed/rivals.py"}
"""These have a test of their own."""


def test_the_table_has_every_script():
    paths = {str(path.relative_to(EXPERIMENTS)) for path in EXPERIMENTS.rglob("*.py")}
    runnable = {path for path in paths if "__main__" in (EXPERIMENTS / path).read_text()}
    assert runnable == {*SCRIPTS, *ELSEWHERE}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_language_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("path", SCRIPTS)
def test_a_script_runs_in_its_smallest_size(path, load_script, heads, model, tmp_path, monkeypatch, capsys):
    words, constants = SCRIPTS[path]
    text = tmp_path / "text.txt"
    text.write_text("Few keys matter to a query, and centroids represent the others. " * 60)
    threads = torch.get_num_threads()
    module = load_script(path)
    for name, value in constants.items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    known = {"HEADS": heads, "OUT": tmp_path / "out", "MODEL": model, "TEXT": text}
    (tmp_path / "out").mkdir()
    argv = [re.sub("|".join(known), lambda word: str(known[word[0]]), word) for word in words.split()]
    monkeypatch.setattr(sys, "argv", [path, *argv])
    try:
        assert (module.script(module.command) if hasattr(module, "command") else module.main()) in (0, None)
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out or list((tmp_path / "out").iterdir())
