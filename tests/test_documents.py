"""What the documents say can be followed: examples compile; names, options and links exist; there is no diary."""

import ast
import dataclasses
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import prescore

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "prescore"
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md"))
}
HISTORY = {"CHANGELOG.md"}
"""Names what there was."""
DIARY = re.compile(
    r"\b(this|last|earlier|previous|two|next) sessions?\b|\bsession \d|must / aim"
    r"|\bEVIDENCE\b|\bdemanded\b|closing note",
    re.IGNORECASE,
)
OF_ONE_MACHINE = re.compile(r"(?<![\w.])/(work|farm|root|tmp)/")
CONFIGURABLE = {
    name for name in prescore.__all__ if dataclasses.is_dataclass(getattr(prescore, name)) and name[0].isupper()
}


def blocks(text, *languages):
    """The code blocks in some languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for language, code in found if language in languages]


def prose(text):
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def inline_code(text):
    """The code spans of the text, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


@cache
def defined_in(module):
    """Names at the top of a module, read and not imported, so that no model library is; None = no such module."""
    folder = PACKAGE.parent / module.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not path.is_file():
        return None
    names = {inner.stem for inner in folder.iterdir()} if folder.is_dir() else set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names | (set(prescore.__all__) if module == "prescore" else set())


def wrong_names(code):
    """What code takes from prescore and is not there, and fields that a configuration or scorer does not have."""
    wrong = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.split(".")[0] == "prescore"]
            wrong += [name for name in ours if defined_in(name) is None]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "prescore":
            known = defined_in(node.module) or set()
            wrong += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in known]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "prescore":
            wrong += [] if node.attr in defined_in("prescore") else [f"prescore.{node.attr}"]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("prescore.")
            fields = dataclasses.fields(getattr(prescore, name)) if name in CONFIGURABLE else None
            given = {keyword.arg for keyword in node.keywords} - {None}
            known = given if fields is None else {field.name for field in fields}
            wrong += [f"{name}({field}=)" for field in sorted(given - known)]
    return wrong


def command_lines(text):
    """Every use of the command, whether in a block or in a sentence."""
    indented = re.findall(r"^    (prescore .*)$", prose(text), re.MULTILINE)
    in_blocks = [line for code in blocks(text, "", "bash") for line in code.replace("\\\n", " ").splitlines()]
    return [
        line for line in (*indented, *in_blocks, *inline_code(text)) if re.match(r"prescore [a-z]+( |$)", line)
    ]


@cache
def options_of_commands():
    """Subcommands and the options that each takes."""
    typer = pytest.importorskip("typer", reason="the command line needs the extra eval")
    application = typer.main.get_command(importlib.import_module("prescore.bench.cli.main")._build())
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in application.commands.items()
    }


def unknown_options(line):
    """What a command line uses and the command does not have."""
    name, *words = shlex.split(line, comments=True)[1:]
    known = options_of_commands().get(name)
    return [name] if known is None else [w for w in words if re.match(r"--?[a-z]", w) and w not in known]


def slug(heading):
    """The name of a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(path, text):
    """Relative links that lead nowhere, by file or by heading."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if heading and file.exists() else []
        if not file.exists() or (heading and heading not in map(slug, headings)):
            broken.append(target)
    return broken


def missing_files(text):
    """Source files that a document names and that do not exist below the top, the package or a folder of it."""
    named = {span for span in inline_code(text) if re.fullmatch(r"[\w./]+\.(py|c|h)", span)}
    places = [ROOT, *(path for path in (PACKAGE, *PACKAGE.rglob("*")) if path.is_dir())]
    return [name for name in sorted(named) if not any((place / name).is_file() for place in places)]


def offenders(check, skip=()):
    """Documents in which a check finds something, and what."""
    return {name: found for name, text in DOCUMENTS.items() if name not in skip and (found := check(name, text))}


def test_examples_compile_and_their_names_exist():
    def check(name, text):
        return [wrong for code in blocks(text, "python") for wrong in wrong_names(code)]

    assert offenders(check) == {}


def test_configurations_in_sentences_have_such_fields():
    def check(name, text):
        return [wrong for code in inline_code(text) if compiles(code) for wrong in wrong_names(code)]

    assert offenders(check, HISTORY) == {}


def compiles(code):
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def test_commands_and_options_exist():
    def check(name, text):
        return [line for line in command_lines(text) if unknown_options(line)]

    assert offenders(check, HISTORY) == {}


def test_links_lead_somewhere():
    assert offenders(lambda name, text: broken_links(ROOT / name, text)) == {}


def test_the_design_names_files_that_exist():
    assert missing_files(DOCUMENTS["DESIGN.md"]) == []


def test_no_diary_and_no_path_of_one_machine():
    def check(name, text):
        return [line for line in text.splitlines() if DIARY.search(line) or OF_ONE_MACHINE.search(line)]

    assert offenders(check) == {}


def test_the_checks_notice():
    assert wrong_names("from prescore import Selected, PrescoreConfig") == ["prescore.PrescoreConfig"]
    assert wrong_names("import prescore\nprescore.appply(model)") == ["prescore.appply"]
    assert wrong_names("import prescore.attention.exact") == ["prescore.attention.exact"]
    assert wrong_names("from prescore.integrations.transformers import PrescoredCache") == []
    assert wrong_names("prescore.Selected(method='kmeans', top_k=3)") == ["Selected(method=)"]
    assert wrong_names("Routed(rows=64)") == ["Routed(rows=)"]
    assert unknown_options("prescore speed --n 64 --inner exact  # --nothing") == ["--inner"]
    assert unknown_options("prescore sped --n 64") == ["sped"]
    both = "see\n\n    prescore info --json\n\nand `prescore\ndemo`"
    assert command_lines(both) == ["prescore info --json", "prescore demo"]
    assert missing_files("`ops/native/gone.c`, `ops/cpu.py`, `native/build.py`") == ["ops/native/gone.c"]
    assert broken_links(ROOT / "README.md", "[a](docs/gone.md), [b](docs/start.md#nowhere)") != []
    assert DIARY.search("as in the last session")
    assert slug("What a query reads: `k`, q") == "what-a-query-reads-k-q"
