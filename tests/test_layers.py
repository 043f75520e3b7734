"""Import arrows: which modules may import which."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "prescore"
BACKENDS = ("ops.cpu", "ops.cuda", "ops.plain", "routed.native", "routed.plain", "routed.triton")
HEAVY = {
    "transformers",
    "timm",
    "torchvision",
    "typer",
    "rich",
    "matplotlib",
    "sklearn",
    "PIL",
    "safetensors",
    "gguf",
}


def module_of(path):
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree, *, at_import_time=False):
    """Modules that are imported; those under `if TYPE_CHECKING` are not, functions count unless told otherwise."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not (at_import_time and isinstance(node, ast.FunctionDef | ast.Lambda)):
            yield from imports(node, at_import_time=at_import_time)


def below(module, *folders):
    return any(module == f"prescore.{folder}" or module.startswith(f"prescore.{folder}.") for folder in folders)


def forbidden(module, text):
    """Imports of a module that break an arrow, each with the reason."""
    tree = ast.parse(text)
    own_backend = next((backend for backend in BACKENDS if below(module, backend)), None)
    for name in imports(tree):
        if below(name, "bench") and not below(module, "bench") and module != "prescore.__main__":
            yield f"{module} imports {name}: nothing but bench imports bench"
        engines = [engine for engine in ("selected", "routed") if below(module, engine) or below(name, engine)]
        if len(engines) == 2 and below(module, *engines):
            yield f"{module} imports {name}: the engines do not import each other"
        other = next((backend for backend in BACKENDS if below(name, backend)), None)
        if own_backend and other and other != own_backend:
            yield f"{module} imports {name}: backends do not import each other"
    if not below(module, "bench", "integrations"):
        for name in imports(tree, at_import_time=True):
            if name.split(".")[0] in HEAVY:
                yield f"{module} imports {name} at import time"


def test_arrows():
    found = [line for module, path in MODULES.items() for line in forbidden(module, path.read_text())]
    assert sorted(set(found)) == []


def test_the_reader_sees_what_it_must():
    wrong = {
        "prescore.call": "from prescore import bench",
        "prescore.integrations.apply": "def f():\n    import prescore.bench.tables",
        "prescore.selected.plan": "from prescore.routed import attention",
        "prescore.routed.layout": "from prescore.selected.plan import make_plan",
        "prescore.ops.cpu": "from prescore.ops import plain",
        "prescore.routed.native": "from prescore.routed.plain import attend",
        "prescore.scoring.select": "import transformers.models",
    }
    for module, text in wrong.items():
        assert list(forbidden(module, text)), module
    right = {
        "prescore.bench.tables": "import matplotlib\nfrom prescore.bench import plots",
        "prescore.engines": "from prescore.selected import attention\nfrom prescore.routed import layout",
        "prescore.registry": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers",
        "prescore.parallel.comm": "def f():\n    import transformers",
    }
    for module, text in right.items():
        assert list(forbidden(module, text)) == [], module
