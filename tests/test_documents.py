"""What the documents say can be followed: examples compile; names, options and links exist; there is no diary."""

import ast
import dataclasses
import importlib
import itertools
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import prescore

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
]
DIARY = re.compile(
    r"\b(this|last|earlier|previous|two|next) sessions?\b|\bsession \d|must / aim"
    r"|\bEVIDENCE\b|\bdemanded\b|closing note",
    re.IGNORECASE,
)
OF_ONE_MACHINE = re.compile(r"(?<![\w.])/(work|farm|root|tmp)/")
WIDEST_TABLE = 200
MADE_BY_NAME = (
    *("Routed", "Selected", "Hyper", "Exact", "Lsh", "Coupling", "KMeans", "KMedian", "Minkowski"),
    *("GaussianKMeans", "Leverage", "KeyNorm", "KeyDiff", "Companions", "Uniform"),
)

FOLDERS = ("integrations", "selected", "routed", "scoring", "parallel")
"""Folders below which DESIGN.md names files without their folder."""

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(text, *languages):
    """The code blocks in one of some languages."""
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
    folder = SOURCE / module.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not path.is_file():
        return None
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    if folder.is_dir():
        names |= {inner.stem for inner in folder.iterdir() if inner.suffix == ".py" or inner.is_dir()}
    return names


def missing_names(code):
    """What a piece of code takes from prescore and is not there."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            missing += [a.name for a in node.names if is_ours(a.name) and defined_in(a.name) is None]
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module):
            here = public_names() if node.module == "prescore" else defined_in(node.module)
            missing += [f"{node.module}.{a.name}" for a in node.names if here is None or a.name not in here]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "prescore":
            missing += [] if node.attr in public_names() else [f"prescore.{node.attr}"]
    return missing


def unknown_fields(code):
    """Settings that a configuration or scorer is given and does not have."""
    unknown = []
    for node in ast.walk(ast.parse(code)):
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else name
        if name in MADE_BY_NAME:
            known = {field.name for field in dataclasses.fields(getattr(prescore, name))}
            given = {keyword.arg for keyword in node.keywords}
            unknown += [f"{name}({field}=)" for field in sorted(given - known - {None})]
    return unknown


def public_names():
    return set(prescore.__all__) | defined_in("prescore")


def is_ours(module):
    return (module or "").split(".")[0] == "prescore"


def command_lines(text):
    """Every use of the command, whether in a block or in a sentence."""
    indented = re.findall(r"^    (prescore .*)$", prose(text), re.MULTILINE)
    in_blocks = [line for code in blocks(text, "", "bash") for line in code.replace("\\\n", " ").splitlines()]
    lines = [*indented, *in_blocks, *inline_code(text)]
    return [line for line in lines if re.match(r"prescore [a-z]+( |$)", line)]


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
    """What a command line asks for and the command does not have."""
    name, *words = shlex.split(line, comments=True)[1:]
    known = options_of_commands().get(name)
    if known is None:
        return [name]
    return [word for word in words if re.match(r"--?[a-z]", word) and word not in known]


def slug(heading):
    """What a heading is called in a link."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def broken_links(path):
    """Relative links that lead nowhere, by file or by heading."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            broken.append(target)
        elif heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            broken += [] if heading in {slug(each) for each in headings} else [target]
    return broken


@each_document
def test_examples_compile_and_their_names_exist(path):
    for code in blocks(path.read_text(), "python"):
        compile(code, str(path), "exec")
        assert missing_names(code) == []
        assert unknown_fields(code) == []


@each_document
def test_configurations_in_sentences_have_such_fields(path):
    for code in inline_code(path.read_text()):
        try:
            ast.parse(code)
        except SyntaxError:
            continue
        assert unknown_fields(code) == [], code


@each_document
def test_command_lines_have_such_options(path):
    for line in command_lines(path.read_text()):
        assert unknown_options(line) == [], line


@each_document
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


@each_document
def test_no_diary_and_no_path_of_one_machine(path):
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        assert not DIARY.search(line), f"{number}: {line}"
        assert not OF_ONE_MACHINE.search(line), f"{number}: {line}"


def test_tables_of_the_front_page_are_short():
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    assert table
    assert max(len(line) for line in table) <= WIDEST_TABLE


def test_the_front_page_shows_both_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def source_file(name):
    """A file as DESIGN.md names it: below the package, below a folder of it, or at the top."""
    package = SOURCE / "prescore"
    places = (package, *(package / name for name in FOLDERS), ROOT)
    return next((place / name for place in places if (place / name).is_file()), None)


def test_design_names_files_that_exist():
    named = {span for span in inline_code((ROOT / "DESIGN.md").read_text()) if re.fullmatch(r"[\w/]+\.py", span)}
    assert len(named) > 20
    assert [name for name in sorted(named) if source_file(name) is None] == []


def test_walks_name_functions_that_exist():
    """A line of a walk has the file in its second cell and functions or classes of it in the third."""
    found = 0
    for line in (ROOT / "DESIGN.md").read_text().splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1]]
        files = [name for name in cells[1] if name.endswith(".py")] if len(cells) > 3 else []
        text = "".join(source_file(name).read_text() for name in files)
        for name in cells[2] if files else []:
            found += 1
            assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", text), f"{name} in {', '.join(files)}"
    assert found > 15


def members(text):
    """Spans such as `ops/exact.exact_output` whose module is ours, and whether it has that name."""
    package = SOURCE / "prescore"
    places = (package, *(package / name for name in FOLDERS))
    known = {}
    for span in inline_code(text):
        if not re.fullmatch(r"[a-z][\w/]*(\.\w+)+", span) or span.endswith((".py", ".md", ".toml")):
            continue
        parts = span.replace("/", ".").split(".")
        if (package / parts[0]).is_dir():  # of one of our folders: then it must be somewhere
            known[span] = (package / span).is_file() or package.joinpath(*parts).with_suffix(".py").is_file()
        for place, cut in itertools.product(places, range(1, len(parts))):
            file = place.joinpath(*parts[:cut]).with_suffix(".py")
            if file.is_file():
                here = all(is_defined(name, file.read_text()) for name in parts[cut:])
                known[span] = known.get(span, False) or here
    return known


def missing_members(text):
    return [span for span, exists in members(text).items() if not exists]


def is_defined(name, text):
    """Whether a module defines a function, a class, a value or an attribute of that name."""
    return re.search(rf"\b(def|class) {name}\b|^\s*{name}(: .*)? = |^\s*{name}: ", text, re.MULTILINE)


def test_design_names_members_that_exist():
    text = (ROOT / "DESIGN.md").read_text()
    assert missing_members(text) == []
    assert len(members(text)) > 15


def test_the_checks_notice():
    assert missing_members("`engines.run`, `ops/parts.nothing`") == ["engines.run", "ops/parts.nothing"]
    assert missing_members("`routed.gone.run`, `routed.reference`") == ["routed.gone.run"]
    assert missing_members("`ops/native/gone.c`, `ops/native/index.c`") == ["ops/native/gone.c"]
    known = "`engines.run_engine`, `config.TYPES`, `dataclasses.replace`, `ops.backend.Backend.at`"
    assert missing_members(known) == []
    assert missing_names("from prescore import Selected, PrescoreConfig") == ["prescore.PrescoreConfig"]
    assert missing_names("import prescore\nprescore.appply(model)") == ["prescore.appply"]
    assert missing_names("import prescore.attention.exact") == ["prescore.attention.exact"]
    assert missing_names("from prescore.integrations.transformers import PrescoredCache") == []
    assert unknown_fields("prescore.Selected(method='kmeans', top_k=3)") == ["Selected(method=)"]
    assert unknown_options("prescore speed --n 64 --inner exact  # --nothing") == ["--inner"]
    assert unknown_options("prescore sped --n 64") == ["sped"]
    assert command_lines("see\n\n    prescore info --json\n\nand `prescore\ndemo`") == [
        "prescore info --json",
        "prescore demo",
    ]
    assert DIARY.search("as in the last session")
    assert slug("What a query reads: `k`, q") == "what-a-query-reads-k-q"
