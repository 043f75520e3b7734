"""What the sources keep: import arrows, a lean import, and a dtype and device for every tensor that they make."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for path in sorted((SOURCE / "prescore").rglob("*.py"))
}
BACKENDS = ("ops.cpu", "ops.cuda", "ops.plain", "routed.native", "routed.plain", "routed.triton")
MODELS = ("transformers", "timm", "matplotlib", "sklearn")
HEAVY = {*MODELS, "torchvision", "typer", "rich", "PIL", "safetensors", "gguf"}
FACTORIES = {
    *("empty", "zeros", "ones", "full", "arange", "tensor", "eye", "linspace", "logspace"),
    *("rand", "randn", "randint", "randperm"),
}


def imports(tree, *, at_import_time=False):
    """Modules that are imported, also inside functions unless told otherwise; none under `if TYPE_CHECKING`."""
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
    return any(f"{module}.".startswith(f"prescore.{folder}.") for folder in folders)


def forbidden(module, text):
    """Imports of a module that break an arrow, and tensors that it makes with torch's default dtype or device."""
    tree = ast.parse(text)
    backend = next((backend for backend in BACKENDS if below(module, backend)), None)
    for name in imports(tree):
        if below(name, "bench") and not below(module, "bench") and module != "prescore.__main__":
            yield f"{module} imports {name}: nothing but bench imports bench"
        engines = [engine for engine in ("selected", "routed") if below(module, engine) or below(name, engine)]
        if len(engines) == 2 and below(module, *engines):
            yield f"{module} imports {name}: the engines do not import each other"
        if backend and below(name, *BACKENDS) and not below(name, backend):
            yield f"{module} imports {name}: backends do not import each other"
    if not below(module, "bench", "integrations"):
        for name in imports(tree, at_import_time=True):
            if name.split(".")[0] in HEAVY:
                yield f"{module} imports {name} at import time"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not below(module, "bench"):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            given = {keyword.arg for keyword in node.keywords}
            if owner == "torch" and name in FACTORIES and not (None in given or {"dtype", "device"} <= given):
                yield f"{module}:{node.lineno} calls torch.{name} without dtype or device"


def test_no_module_does_what_is_forbidden():
    assert sorted({line for module, text in MODULES.items() for line in forbidden(module, text)}) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("call", "from prescore import bench"),
        ("integrations.apply", "def f():\n    import prescore.bench.tables"),
        ("selected.plan", "from prescore.routed import attention"),
        ("routed.layout", "from prescore.selected.plan import make_plan"),
        ("ops.cpu", "from prescore.ops import plain"),
        ("routed.native", "from prescore.routed.plain import attend"),
        ("scoring.select", "import transformers.models"),
        ("call", "torch.zeros(2)"),
        ("call", "torch.arange(3, device=d)"),
        ("call", "torch.rand(2, dtype=t)"),
    ],
)
def test_what_is_forbidden_is_found(module, text):
    assert list(forbidden(f"prescore.{module}", text))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("bench.tables", "import matplotlib\nfrom prescore.bench import plots"),
        ("engines", "from prescore.selected import attention\nfrom prescore.routed import layout"),
        ("registry", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"),
        ("parallel.comm", "def f():\n    import transformers"),
        ("call", "torch.zeros(2, dtype=t, device=d)\nx.new_zeros(2)\ntorch.zeros_like(x)\nnp.zeros(3)"),
    ],
)
def test_what_is_allowed_is_not_found(module, text):
    assert list(forbidden(f"prescore.{module}", text)) == []


@pytest.mark.parametrize(
    ("code", "libraries"),
    [
        ("import prescore; prescore.Selected, prescore.prescored_attention", (*MODELS, "typer", "rich")),
        ("import prescore.bench.cli.main as m; m.main(['--help'])", (*MODELS, "torch")),
    ],
)
def test_importing_or_asking_for_help_loads_no_heavy_library(code, libraries):
    check = f"{code}\nimport sys\nsys.exit(' '.join(n for n in {libraries!r} if n in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
