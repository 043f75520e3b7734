"""Every example of the documents, every script and the notebook of `examples/` runs as written."""

import copy
import json
import re
import runpy
import socket
import sys
import warnings
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import transformers

import prescore.registry
from prescore.bench.baselines import REGISTERED
from prescore.integrations import offline
from prescore.routed.native import library

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (\w+) -->\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS = {"lm_eval", "bitsandbytes", "torchao"}
"""What an example may need that the package's extras do not install."""
ROUTE = {"long_prompt", "generate", "int8"}
"""Scripts that show the default on a prompt that it routes."""
SCRIPTS = {path.stem.partition("_")[2]: path for path in sorted(EXAMPLES.glob("*.py"))}
LOAD = cache(offline.load_model)
pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(autouse=True)
def _as_a_user(tmp_path, monkeypatch):
    """In a folder of its own; what examples register, draw and import is gone afterwards."""
    try:
        offline.smollm2_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "argv", ["example"])
    prescore.list_scorers()
    with patch.dict(prescore.registry._SCORERS), patch.dict(REGISTERED):
        yield


def load_a_small_model(monkeypatch):
    """Whatever examples load is like the offline model, but small and with random weights."""
    model, tokenizer = LOAD()
    config = copy.deepcopy(model.config)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers = 4, 2, 12
    for owner, name, loaded in (
        (offline, "load_model", lambda *_, **__: (type(model)(config).eval(), tokenizer)),
        (transformers.AutoModelForCausalLM, "from_pretrained", lambda _: type(model)(config).eval()),
        (transformers.AutoTokenizer, "from_pretrained", lambda _: tokenizer),
    ):
        monkeypatch.setattr(owner, name, loaded)


def blocks(text):
    """The Python blocks of a document that are meant to run, in order."""
    return re.findall(r"^```python\n(.*?)^```", NOT_RUN.sub("", text), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_prints(name, capsys, monkeypatch):
    if name == "vit":
        pytest.importorskip("timm")
    if name in ROUTE:  # which would take half a minute
        load_a_small_model(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    routes = name in ROUTE and library.loaded_level() != library.NO_LEVEL
    assert not routes or re.search(r"prefill +routed .*", printed)


def test_only_what_needs_another_package_is_not_run():
    assert {package for path in DOCUMENTS for package, _ in NOT_RUN.findall(path.read_text())} <= NEEDS
    assert blocks("```python\na\n```\n<!-- not run: lm_eval -->\n```python\nb\n```\n") == ["a\n"]


def test_the_notebook_runs(capsys, monkeypatch):
    (path,) = EXAMPLES.glob("*.ipynb")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    codes = ["".join(cell["source"]) for cell in cells]
    assert [bool(cell["outputs"]) for cell in cells] == [bool(re.search(r"\bprint\(|\bplt\.", c)) for c in codes]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    stored = "".join(line for output in outputs for line in output.get("text", ()))
    assert re.search(r"prefill +routed", stored)
    run_in_order(codes, path.name, monkeypatch)
    # the model of the tests is another one; tables must have the columns that the stored ones have
    heads = [
        {" ".join(line.split()) for line in text.splitlines() if line.startswith("layer ")}
        for text in (stored, capsys.readouterr().out)
    ]
    assert heads[0] == heads[1] != set()


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if blocks(p.read_text())], ids=lambda path: path.name)
def test_the_examples_of_a_document_run_in_order(path, monkeypatch):
    if path.name == "vision.md":
        pytest.importorskip("timm")
    if path.name == "parallel.md":  # as torchrun starts one rank
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            port = str(place.getsockname()[1])
        rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, setting in rank.items():
            monkeypatch.setenv(name, setting)
    run_in_order(blocks(path.read_text()), path.name, monkeypatch)


def run_in_order(codes, name, monkeypatch):
    """Run blocks of code in one module of its own, which classes look up by its name."""
    if any("load_model" in code or "from_pretrained(name)" in code for code in codes):
        load_a_small_model(monkeypatch)
    module = type(sys)("document_of_examples")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, code in enumerate(codes):
        exec(compile(code, f"{name}, block {number}", "exec"), module.__dict__)
