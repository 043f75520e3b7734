"""Imports go down only, in every package, and files and folders stay small."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "prescore"
MAX_LINES = 400
MAX_FILES = 16

STAGES = {"ops", "clustering", "scorers", "selection"}
"""Tensors, points, keys and scores: what both engines see."""
LOW = {"types", "errors", "checks", "rng", "registry", "values"}
ENGINES = {"hyper", "routed", "exact"}
BELOW_API = LOW | STAGES | {"config", "call", "prescoring"}
MAY_IMPORT = {
    **{name: {"values"} for name in LOW | {"causal_sizes"}},
    "records": {"errors", "values"},
    "record_file": {"records"},
    "surroundings": {"errors"},
    "ops": {"types", "errors", "checks", "rng"},
    "clustering": {"checks", "rng"},
    "scorers": {"checks", "rng", "registry", "values", "clustering"},
    "selection": {"types", "checks", "rng"},
    "config": {"checks", "values", "scorers"},
    "call": {"types", "rng", "ops"},
    "prescoring": {"types", "rng", "config", "scorers", "selection"},
    "exact": LOW | {"call", "ops", "selection"},
    "hyper": BELOW_API,
    "routed": LOW | {"ops", "clustering", "call", "config"},
    "parallel": BELOW_API | {"hyper", "surroundings"},
    "api": BELOW_API | ENGINES | {"parallel", "surroundings"},
    "baselines": BELOW_API | {"api"},
    "decoding": BELOW_API | {"api", "hyper", "routed", "surroundings"},
    "integrations": LOW | {"config", "call", "api", "decoding", "parallel", "surroundings"},
    "testing": LOW | {"config", "clustering", "scorers", "selection", "prescoring"},
    "evaluation": BELOW_API
    | {"api", "baselines", "decoding", "integrations", "parallel", "testing", "records", "causal_sizes"},
    "report": {"records", "causal_sizes", "values"},
    "cli": LOW
    | {
        "config",
        "scorers",
        "api",
        "parallel",
        "integrations",
        "evaluation",
        "report",
        "records",
        "record_file",
        "causal_sizes",
    },
    "__main__": {"cli"},
}
"""What each folder and root module may import beside itself; `hyper` and `routed` never see each other."""
EXCEPTIONS = {
    "cli/info.py": {"ops"},  # says which native operators run
    "testing/tiny_language_model.py": {"integrations"},  # a whole model, which no oracle looks at
    "evaluation/speed/parts.py": {"routed"},  # times the pieces of a call by themselves
    "testing/transformers_plugin.py": {"integrations"},  # it tests those
    "evaluation/vision/routed.py": {"routed"},  # reports the sizes that the engine rounds to
}
ORACLES = {
    "testing/dense.py": {"types"},
    "testing/naive.py": {"types", "rng", "config", "scorers", "selection", "prescoring"},
    "testing/routed.py": {"types", "config"},
    "testing/routed_far.py": {"config", "clustering"},
}
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def layer(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(text, *, lazily=True):
    """What a module imports from `prescore`, type checking apart; with `lazily`, inside functions too."""
    found = set()
    for node in _run_time_nodes(ast.parse(text), lazily):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # what is imported from a module may be a module itself
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {name for name in names if name.startswith("prescore.")}
    return found


def imported_layers(text):
    return {name.split(".")[1] for name in imported(text)}


def _run_time_nodes(node, lazily):
    yield node
    for child in ast.iter_child_nodes(node):
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        deferred = isinstance(child, ast.FunctionDef) and not lazily
        if not guarded and not deferred:
            yield from _run_time_nodes(child, lazily)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path):
    own, name = layer(path), path.relative_to(SOURCE).as_posix()
    assert own in MAY_IMPORT, f"{own} has no place in the layer order; give it one here and in DESIGN.md"
    found = imported_layers(path.read_text()) - {own, "__version__"}
    public = found - set(MAY_IMPORT)
    assert not public, f"{sorted(public)} must be imported from where they are defined, not from the package"
    forbidden = found - MAY_IMPORT[own] - EXCEPTIONS.get(name, set())
    assert not forbidden, f"{own} may not import {sorted(forbidden)}"


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_share_nothing_with_what_they_check(name):
    found = imported_layers((SOURCE / name).read_text()) - {"testing"}
    assert found <= ORACLES[name], f"{name} may not import {sorted(found - ORACLES[name])}"


def test_exceptions_are_needed():
    for name, allowed in EXCEPTIONS.items():
        used = imported_layers((SOURCE / name).read_text())
        assert allowed <= used - MAY_IMPORT[layer(SOURCE / name)], f"{name} needs no exception"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_folders_stay_small():
    for folder in {path.parent for path in FILES}:
        n_files = len(list(folder.glob("*.py")))
        assert n_files <= MAX_FILES, f"{folder.relative_to(SOURCE)} has {n_files} files"


def test_every_layer_exists():
    assert {layer(path) for path in FILES} == set(MAY_IMPORT)


def _in_cycles(graph):
    """Nodes that are left when all that can go after what they point at are gone."""
    left = {node: set(targets) & set(graph) - {node} for node, targets in graph.items()}
    while free := {node for node, targets in left.items() if not targets & set(left)}:
        left = {node: targets for node, targets in left.items() if node not in free}
    return sorted(left)


def test_order_has_no_cycle():
    assert _in_cycles(MAY_IMPORT) == []
    assert _in_cycles({"a": {"b"}, "b": {"a"}, "c": set()}) == ["a", "b"]


def test_modules_have_no_cycle():
    """Counting what is imported when a module is; a function may import what its module cannot."""
    names = {
        path: f"prescore.{path.relative_to(SOURCE).with_suffix('').as_posix().replace('/', '.')}" for path in FILES
    }
    graph = {name: imported(path.read_text(), lazily=False) for path, name in names.items()}
    assert _in_cycles(graph) == []


def test_the_reader_of_imports_sees_what_it_must():
    text = (
        "from typing import TYPE_CHECKING\n"
        "from prescore import checks\n"
        "import prescore.scorers.base\n"
        "if TYPE_CHECKING:\n    from prescore.cli import main\n"
        "def lazy():\n    from prescore.ops.exact import exact_parts\n"
    )
    assert imported_layers(text) == {"checks", "scorers", "ops"}
    assert imported(text, lazily=False) == {"prescore.checks", "prescore.scorers.base"}
