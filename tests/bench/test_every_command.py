"""Every command runs as docs/evaluation.md says; what third parties register can be named on the command line."""

import random
import re
import shlex
import sys
from pathlib import Path

import pytest

import prescore.registry
from prescore.bench.baselines import REGISTERED
from prescore.bench.cli.main import _build, main

ROOT = Path(__file__).parent.parent.parent
ELSEWHERE = ("paper", "speed", "demo")
"""Commands that take more than a few seconds as written. Tests of their own run smaller calls."""
WITHOUT_RECORDS = ("info", "save-heads", "records", "plot")


def documented():
    """The command lines of the page's block of quick commands."""
    text = (ROOT / "docs" / "evaluation.md").read_text()
    block = re.search(r"^```bash\n(prescore info.*?)^```", text, re.DOTALL | re.MULTILINE).group(1)
    return [shlex.split(line)[1:] for line in block.splitlines()]


@pytest.fixture
def extension(tmp_path):
    """Writes a complete file that docs/methods.md shows. What it registers is gone afterwards."""

    def write(name):
        text = (ROOT / "docs" / "methods.md").read_text()
        code = re.search(rf"^```python\n(# {name}\n.*?)^```", text, re.DOTALL | re.MULTILINE).group(1)
        (tmp_path / name).write_text(code)
        return tmp_path / name

    prescore.list_scorers()
    known = [(names, dict(names)) for names in (prescore.registry._SCORERS, REGISTERED)]
    yield write
    for names, before in known:
        names.clear()
        names.update(before)


def test_the_page_has_every_command():
    application = _build()
    commands = {group.name for group in (*application.registered_commands, *application.registered_groups)}
    assert {line[0] for line in documented()} | {"demo"} == commands


def test_the_examples_of_the_help_have_such_options():
    typer = pytest.importorskip("typer")
    common, found = {"--seed", "--out", "--json", "--resume", "--quick", "--threads"}, 0
    commands = typer.main.get_command(_build()).commands
    items = {f"paper {name}": command for name, command in commands.pop("paper").commands.items()}
    for name, command in {**commands, **items}.items():
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert name in WITHOUT_RECORDS or known >= common  # every command that measures has them
        for line in re.findall(r"Example: prescore ([^\n(]*)", command.help):
            words = shlex.split(line)
            found += 1
            assert " ".join(words[: len(name.split())]) == name
            assert [word for word in words if re.match(r"--?[a-z]", word) and word not in known] == []
    assert found >= 9


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("argv", [line for line in documented() if line[0] not in ELSEWHERE], ids=" ".join)
def test_a_command_runs_as_documented(argv, tmp_path, monkeypatch, capsys):
    if argv[0] == "ruler":
        pytest.importorskip("lm_eval", reason='lm_eval is not installed (pip install ".[ruler]")')
    monkeypatch.chdir(tmp_path)
    if argv[0] in ("records", "plot"):  # of an earlier command of the page
        line = "perplexity --quick --method exact --method local --out runs/perplexity/first"
        assert main(line.split()) == 0
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert shown.out or argv[0] == "records"
    assert "Traceback" not in shown.err
    if argv[0] not in WITHOUT_RECORDS:
        assert list(tmp_path.glob("runs/**/records.jsonl"))


@pytest.mark.parametrize("place", ["before", "behind", "equals"])
def test_an_imported_scorer_is_known_to_commands(place, saved, text, tmp_path, lines, extension):
    file = str(extension("my_scorer.py"))
    command = ["generate", "--model", saved, "-d", text, "--method", "peak", "--top-k", "16"]
    command += ["--max-new-tokens", "2", "--set", "scorer.power=2", "--set", "min_seq_len=64"]
    command += ["--no-exact", "--out", str(tmp_path / "run")]
    own = [f"--import={file}"] if place == "equals" else ["--import", file]
    assert main([*command, *own] if place == "behind" else [*own, *command]) == 0
    (record,) = lines(tmp_path / "run")
    assert record["config"]["config"]["scorer"] == {"name": "peak", "power": 2}
    assert record["argv"].count(own[0]) == 1


def test_an_imported_baseline_is_compared_like_ours(saved, text, tmp_path, lines, extension, capsys):
    imports = [f"--import={extension(name)}" for name in ("my_scorer.py", "my_baseline.py")]
    command = ["perplexity", "--model", saved, "-d", text, "-n", "256", "--top-k", "16", "--leaf", "32"]
    methods = ["--method", "peak", "--method", "blocks", "--method", "streaming"]
    assert main([*imports, *command, *methods, "--out", str(tmp_path / "run")]) == 0
    records = lines(tmp_path / "run")
    results = {record["config"]["method"]["label"].split(",")[0]: record["results"] for record in records}
    assert set(results) == {"exact", "local only", "peak", "blocks", "streaming"}
    # blocks of 64: a query reads 32.5 of their keys on average
    assert results["blocks"]["reads_per_query"] == 32.5
    assert results["exact"]["loss"] != results["blocks"]["loss"]
    assert "blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.py", "FileNotFoundError: there is no such file"),
        ("broken.py", "ZeroDivisionError: division by zero"),
        ("no.such.module", "ModuleNotFoundError: No module named 'no'"),
    ],
)
def test_an_import_that_fails_is_one_sentence(name, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0")
    assert main(["--import", name, "info"]) == 2
    refusal = f"prescore: --import must be a Python file or module that runs, got {name!r} ({said})\n"
    assert capsys.readouterr().err == refusal
    assert main(["info", "--import"]) == 2
    assert "--import must be followed by a Python file or module" in capsys.readouterr().err
    assert main(["--import", "prescore.errors", "--version"]) == 0  # a module by its name


def test_an_imported_file_may_be_called_as_a_module_of_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "from dataclasses import dataclass\n\n@dataclass\nclass Mine:\n    a: int\n\nprint(Mine(3))"
    (tmp_path / "random.py").write_text(code)
    assert main(["--import", "./random.py", "--version"]) == 0
    assert "Mine(a=3)" in capsys.readouterr().out
    assert sys.modules["random"] is random
