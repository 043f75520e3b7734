"""Imports go down only, and files stay small."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "prescore"
MAX_LINES = 400

LOW = {"types", "errors", "rng", "checks", "registry", "records", "layout", "packing", "planted", "causal_sizes"}
PARTS = LOW | {"config", "clustering", "scorers", "selection", "scoring", "attention"}
STAGES = PARTS | {"blocks", "plan", "route", "statistics", "pipeline"}
MAY_IMPORT = {
    **dict.fromkeys(LOW, LOW),
    "config": LOW,
    "clustering": LOW | {"config"},
    "scorers": LOW | {"config", "clustering"},
    "selection": LOW | {"config"},
    "scoring": LOW | {"config", "clustering", "scorers", "selection"},
    "attention": {"types", "errors", "rng", "checks", "layout", "config"},
    "blocks": PARTS,
    "plan": PARTS | {"blocks"},
    "route": PARTS,
    "statistics": PARTS | {"plan"},
    "pipeline": PARTS | {"blocks", "plan", "route", "statistics"},
    "baselines": STAGES,
    "decoding": STAGES,
    "integrations": STAGES | {"decoding"},
    "evaluation": STAGES | {"baselines", "decoding", "integrations"},
    "report": {"records", "causal_sizes"},
    "testing": STAGES | {"baselines", "decoding", "integrations"},
}
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def layer(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_layers(text):
    """Layers of `prescore` that a module imports, also inside functions; type-checking imports do not count."""
    found = set()
    for node in _run_time_nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "prescore":
            names = [f"prescore.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("prescore.")}
    return found


def _run_time_nodes(node):
    yield node
    for child in ast.iter_child_nodes(node):
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not guarded:
            yield from _run_time_nodes(child)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path):
    own = layer(path)
    if own == "cli":
        return
    assert own in MAY_IMPORT, f"{own} has no place in the layer order; give it one here and in DESIGN.md"
    forbidden = imported_layers(path.read_text()) - MAY_IMPORT[own] - {own}
    assert not forbidden, f"{own} may not import {sorted(forbidden)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_order_has_no_cycle():
    above_low = {name: allowed - LOW for name, allowed in MAY_IMPORT.items() if name not in LOW}
    while above_low:
        free = {name for name, allowed in above_low.items() if not (allowed - {name}) & set(above_low)}
        assert free, f"layers import each other: {sorted(above_low)}"
        above_low = {name: allowed for name, allowed in above_low.items() if name not in free}


def test_the_reader_of_imports_sees_what_it_must():
    text = (
        "from typing import TYPE_CHECKING\n"
        "from prescore import checks\n"
        "import prescore.scorers.base\n"
        "if TYPE_CHECKING:\n    from prescore.cli import main\n"
        "def lazy():\n    from prescore.attention.exact import exact_attention\n"
    )
    assert imported_layers(text) == {"checks", "scorers", "attention"}
