"""What the documents say can be followed: names, commands, options, links and files exist; the site builds."""

import ast
import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import prescore
from prescore.bench.baselines import BASELINES
from prescore.types import Stats

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "prescore"
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md"))
}
HISTORY = {"CHANGELOG.md"}
"""Names what there was."""
OF_ONE_MACHINE = re.compile(r"(?<![\w.])/(work|farm|root|tmp)/")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def inline_code(text):
    """The code spans of the text outside its blocks, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]


def exists(module, name=None):
    """Whether a module of the package, and a name in it, can be imported."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return name is None or hasattr(found, name) or exists(f"{module}.{name}")


def wrong_names(code):
    """What code takes from prescore and is not there, and fields that a configuration or scorer does not have."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a code span need not be Python
        return []
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [(module, alias.name) if module else (alias.name,) for alias in node.names]
            wrong += [
                ".".join(name) for name in names if name[0].split(".")[0] == "prescore" and not exists(*name)
            ]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "prescore":
            wrong += [] if exists("prescore", node.attr) else [f"prescore.{node.attr}"]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("prescore.")
            kind = getattr(prescore, name, None) if name in prescore.__all__ else None
            if dataclasses.is_dataclass(kind):
                known = {None, *(field.name for field in dataclasses.fields(kind))}
                wrong += [f"{name}({keyword.arg}=)" for keyword in node.keywords if keyword.arg not in known]
    return wrong


@cache
def options_of_commands():
    """Subcommands, those of groups by both words, and the options that each takes."""
    typer = pytest.importorskip("typer", reason="the command line needs the extra eval")
    application = typer.main.get_command(importlib.import_module("prescore.bench.cli.main")._build())
    commands = dict(application.commands)
    for group, command in application.commands.items():
        commands |= {f"{group} {name}": inner for name, inner in getattr(command, "commands", {}).items()}
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands.items()
    }


def wrong_commands(text):
    """Uses of the command, in a block or in a sentence, with a subcommand or an option that it does not have."""
    lines = re.findall(r"^    (prescore .*)$", BLOCK.sub("", text), re.MULTILINE) + inline_code(text)
    for language, code in BLOCK.findall(text):
        lines += code.replace("\\\n", " ").splitlines() if language in ("", "bash") else []
    wrong = []
    for line in lines:
        if re.match(r"prescore [a-z]+( |$)", line):
            name, *words = shlex.split(line, comments=True)[1:]
            if words and f"{name} {words[0]}" in options_of_commands():
                name, words = f"{name} {words[0]}", words[1:]
            known = options_of_commands().get(name, ())
            wrong += [word for word in words if re.match(r"--?[a-z]", word) and word not in known]
            wrong += [] if known else [name]
    return wrong


def broken_links(name, text):
    """Relative links that lead nowhere, by file or by heading."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if heading and path.exists() else []
        slugs = [re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in headings]
        if not path.exists() or (heading and heading not in slugs):
            broken.append(target)
    return broken


def missing_files(text):
    """Source files that a document names and that do not exist below the top, the package or a folder of it."""
    named = {span for span in inline_code(text) if re.fullmatch(r"[\w./]+\.(py|c|h)", span)}
    places = [ROOT, *(path for path in (PACKAGE, *PACKAGE.rglob("*")) if path.is_dir())]
    return [name for name in sorted(named) if not any((place / name).is_file() for place in places)]


def problems(name, text):
    """What cannot be followed in a document."""
    blocks = [code for language, code in BLOCK.findall(text) if language == "python"]
    for code in blocks:
        ast.parse(code, name)
    found = [wrong for code in blocks for wrong in wrong_names(code)]
    found += broken_links(name, text) + OF_ONE_MACHINE.findall(text)
    if name not in HISTORY:
        found += [wrong for code in inline_code(text) for wrong in wrong_names(code)] + wrong_commands(text)
    return found + (missing_files(text) if name == "DESIGN.md" else [])


def test_every_document_can_be_followed():
    assert {name: found for name, text in DOCUMENTS.items() if (found := problems(name, text))} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`from prescore import Selected, PrescoreConfig`", ["prescore.PrescoreConfig"]),
        ("```python\nimport prescore\nprescore.appply(model)\n```", ["prescore.appply"]),
        ("`import prescore.attention.exact`", ["prescore.attention.exact"]),
        ("`from prescore.integrations.transformers import PrescoredCache`", []),
        ("`prescore.Selected(method='k', top_k=3)` or `Routed(rows=6)`", ["Selected(method=)", "Routed(rows=)"]),
        ("`prescore speed -n 64 --inner exact  # --nothing`", ["--inner"]),
        ("see\n\n    prescore sped\n\nand `prescore\ninfo --jsn`", ["sped", "--jsn"]),
        ("`routed/native/gone.c`, `ops/cpu.py`, `native/build.py`", ["routed/native/gone.c"]),
        ("[a](docs/gone.md), [b](docs/start.md#nowhere)", ["docs/gone.md", "docs/start.md#nowhere"]),
        ("kept in /tmp/runs", ["tmp"]),
    ],
)
def test_the_checks_notice(text, wrong):
    assert problems("DESIGN.md", text) == wrong


# The site builds without a network and without a warning.

FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=[\"']?https?:|<link[^>]+rel=[\"']?(?:stylesheet|preconnect)[^>]+https?:"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, with every way to a network closed. Broken links are warnings."""
    for package in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(package, reason="the site needs the extra docs")
    target = tmp_path_factory.mktemp("site")
    closed = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = {**os.environ, **closed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return target


def test_nothing_is_fetched_and_every_page_and_example_is_linked(site):
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert [path.name for path, text in pages.items() if FETCHED.search(text)] == []
    links = {
        target
        for name in ("index.html", "start.html")
        for target in re.findall(r"href=[\"']?([^\"' >]+)", pages[site / name])
    }
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.as_posix() for path in documents} - links == set()
    for path in (ROOT / "examples").glob("0*"):
        assert (site / "examples" / path.name).read_bytes() == path.read_bytes()
        assert f"examples/{path.name}" in links


def test_the_reference_has_every_public_name(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    places = {place.split(".")[-1] for place in re.findall(r"id=[\"']?([\w.]+)", text)}
    assert set(prescore.__all__) - places - {"__version__", "Config"} == set()


def test_every_number_of_a_call_and_every_method_is_explained():
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    named = (*Stats.__dataclass_fields__, *prescore.list_scorers(), *BASELINES)
    assert [name for name in named if f"`{name}`" not in text] == []
    assert [name for name in Stats.__dataclass_fields__ if f"        {name}: " not in Stats.__doc__] == []
