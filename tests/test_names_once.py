"""Each name once: no class and no public function of a module has a namesake elsewhere in the package."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "prescore"
ALLOWED = {
    "command": "every file of the command line has one, which typer calls",
}
"""Public names that may be defined more than once, and why; keep this short."""
ADAPTERS = {"detect", "layers", "replace_attention"}
"""What every adapter of a model library defines, and `integrations/apply.py` where it chooses one of them."""


def definitions(text):
    """Public classes and functions of a module, not those inside of others; overloads count once."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name for node in ast.parse(text).body if isinstance(node, kinds) and not node.name.startswith("_")
    }


def homes():
    found = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in definitions(path.read_text()):
            found[name].append(path.relative_to(SOURCE).as_posix())
    return found


def test_each_name_is_defined_once():
    repeated = {name: files for name, files in homes().items() if len(files) > 1 and name not in ALLOWED}
    for name in ADAPTERS & set(repeated):
        if all(file.startswith("integrations/") for file in repeated[name]):
            del repeated[name]
    assert not repeated, "\n".join(f"{name}: {', '.join(files)}" for name, files in sorted(repeated.items()))


def test_exceptions_are_needed():
    found = homes()
    for name in (*ALLOWED, *ADAPTERS):
        assert len(found[name]) > 1, f"{name} is defined once and needs no exception"
    for file in found["command"]:
        assert file.startswith("cli/")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("class Plan: ...", {"Plan"}),
        ("def attend(): ...\nasync def attend_later(): ...", {"attend", "attend_later"}),
        ("class _Plan: ...\ndef _attend(): ...", set()),
        ("class Plan:\n    def run(self): ...", {"Plan"}),
        ("@overload\ndef run(x: int): ...\n@overload\ndef run(x: str): ...\ndef run(x): ...", {"run"}),
        ("from prescore.types import Attended\nPlan = Attended", set()),
    ],
)
def test_the_reader_of_definitions_sees_what_it_must(text, names):
    assert definitions(text) == names
