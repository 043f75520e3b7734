"""Every example of the documents, every script and the notebook of `examples/` runs as written."""

import json
import re
import runpy
import socket
import sys
import warnings
from pathlib import Path

import pytest

import prescore.registry
from prescore.baselines import REGISTERED
from prescore.bench.offline import smollm2_file

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (\w+) -->\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MOST_LINES = 60
NEEDS = {"lm_eval"}
"""What an example may need that the package's extras do not install."""

SCRIPTS = {
    "01_tensors.py": ["Routed", "Selected", "centroids per query", "padded: (1, 4, 6000, 64)"],
    "02_long_prompt.py": ["prefill  exact", "prefill  routed", "loss of the last tokens"],
    "03_generate.py": ["0-29   prefill  selected", "0-29   steps    selected", "note: Routed changed nothing"],
    "04_save_a_cache.py": ["MiB on disk", "0-29   steps  selected"],
    "05_train.py": ["step  20", "0-1    prefill  selected"],
    "06_vit.py": ["0-11   prefill  selected", "warned: Routed changes nothing at 197 tokens", "routed"],
    "07_own_scorer.py": ["surprise", "Surprise(width=64)"],
}


def blocks(text):
    """The Python blocks of a document that are meant to run, in order."""
    return re.findall(r"^```python\n(.*?)^```", NOT_RUN.sub("", text), re.DOTALL | re.MULTILINE)


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def with_blocks():
    return [path for path in DOCUMENTS if blocks(path.read_text())]


@pytest.fixture(autouse=True)
def _as_a_user(tmp_path, monkeypatch):
    """In a folder of its own; what examples register, draw and import is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "argv", ["example"])
    prescore.list_scorers()
    known = [(names, dict(names)) for names in (prescore.registry._SCORERS, REGISTERED)]
    yield
    for names, before in known:
        names.clear()
        names.update(before)


@pytest.fixture
def _offline_model():
    try:
        smollm2_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_every_script_is_known_and_short():
    found = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert found == sorted(SCRIPTS)
    for name in found:
        assert len((EXAMPLES / name).read_text().splitlines()) <= MOST_LINES


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("_offline_model")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_shows_what_it_promises(name, capsys):
    if name == "06_vit.py":
        pytest.importorskip("timm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capsys.readouterr().out
    for words in SCRIPTS[name]:
        assert words in shown


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("_offline_model")
def test_the_notebook_runs(capsys, monkeypatch):
    notebook = json.loads((EXAMPLES / "08_tour.ipynb").read_text())
    monkeypatch.setitem(sys.modules, "notebook", module := type(sys)("notebook"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # results are made by the reader
            exec(compile("".join(cell["source"]), "08_tour.ipynb", "exec"), module.__dict__)
    shown = capsys.readouterr().out
    for words in ("prefill  selected", "leverage [", "26-29  Selected(top_k=128", " MiB", "peak      "):
        assert words in shown


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("_offline_model")
@pytest.mark.parametrize("path", with_blocks(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_document_run_in_order(path, monkeypatch):
    if path.name == "vision.md":
        pytest.importorskip("timm")
    if path.name == "parallel.md":
        # as torchrun starts one rank
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, setting in place.items():
            monkeypatch.setenv(name, setting)
    # a class of a block looks its module up by its name
    module = type(sys)("document_of_examples")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(module.__dict__)
    for number, code in enumerate(blocks(path.read_text())):
        exec(compile(code, f"{path.name}, block {number}", "exec"), module.__dict__)
    assert set(module.__dict__) > before  # and nothing was raised


def test_only_what_needs_another_package_is_not_run():
    found = [(path.name, package) for path in DOCUMENTS for package, _ in NOT_RUN.findall(path.read_text())]
    assert {package for _, package in found} <= NEEDS
    assert blocks("```python\na\n```\n<!-- not run: lm_eval -->\n```python\nb\n```\n") == ["a\n"]
