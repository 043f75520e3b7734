"""What the sources keep: import arrows, a lean import, a dtype and device for every tensor, and SECURITY.md."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model, tiny_language_model

import prescore
from prescore.integrations.offline import load_model

SOURCE = Path(__file__).parent.parent / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for path in sorted((SOURCE / "prescore").rglob("*.py"))
}
BACKENDS = ("ops.cpu", "ops.cuda", "ops.plain", "routed.native", "routed.plain", "routed.triton")
LAYERS = (
    (
        "config",
        "types",
        "autograd",
        "devices",
        "errors",
        "checks",
        "rng",
        "registry",
        "testing",
        "scoring",
        "ops",
        "call",
    ),
    ("selected", "routed"),
    ("engines", "parallel"),
    ("attention",),
    ("integrations", "int8"),
    ("serving",),
    ("bench",),
    ("paper",),
)
"""Nothing imports from a layer below its line; DESIGN.md has the same lines."""
MODELS = ("transformers", "timm", "matplotlib", "sklearn")
HEAVY = {*MODELS, "torchvision", "typer", "rich", "PIL", "safetensors", "gguf", "triton"}
CODE_RUNNERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "runpy"}
"""Modules that make code or objects out of bytes."""
CALL_THAT_RUNS_CODE = re.compile(r"eval|exec|compile|os\.(system|popen)|torch\.(load|save)|(numpy|np)\.load")
LOADER = re.compile(r"(ctypes\.)?CDLL|ctypes\.cdll\.LoadLibrary|torch\.(ops|classes)\.load_library")
FACTORY = re.compile(
    r"torch\.(empty(_strided|_permuted)?|zeros|ones|full|arange|range|(as_|scalar_)?tensor|asarray|eye|normal"
    r"|(lin|log)space|rand(n|int|perm)?|tri[lu]_indices|\w*_window|\w*Tensor)"
)


def imports(tree):
    """Modules that are imported, also inside functions; none under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imports(node)


def below(module, *folders):
    return any(f"{module}.".startswith(f"prescore.{folder}.") for folder in folders)


def layer(module):
    return next((number for number, names in enumerate(LAYERS) if below(module, *names)), None)


def forbidden_imports(module, tree):
    """Imports of a module that break an arrow, or make code of data."""
    backend = next((backend for backend in BACKENDS if below(module, backend)), None)
    for name in imports(tree):
        if module != "prescore.__main__" and (layer(name) or 0) > (layer(module) or 0):
            yield f"imports {name} of a later layer"
        engines = [engine for engine in ("selected", "routed") if below(module, engine) or below(name, engine)]
        if len(engines) == 2 and below(module, *engines):
            yield f"imports {name}: the engines do not import each other"
        if backend and below(name, *BACKENDS) and not below(name, backend):
            yield f"imports {name}: backends do not import each other"
        if FACTORY.fullmatch(name) and not below(module, "bench", "paper") and not name.endswith("Tensor"):
            yield f"imports {name}, whose calls need a dtype and a device"
        if name.split(".")[0] in CODE_RUNNERS:
            yield f"imports {name}, which runs code"


def forbidden(module, text):
    """What a module does that it must not do."""
    tree = ast.parse(text)
    yield from forbidden_imports(module, tree)
    yield from (f"mentions {word}" for word in ("find_library", "LD_LIBRARY_PATH") if word in text)
    names_own_folder = "__file__" in text or "importlib.resources" in text
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments, defaults = node.args.posonlyargs + node.args.args, node.args.defaults
            pairs = list(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            remote = [default for argument, default in pairs if argument.arg == "trust_remote_code"]
            yield from (f"{node.name} trusts remote code" for d in remote if not d or ast.unparse(d) != "False")
        if not isinstance(node, ast.Call):
            continue
        function, given = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
        if CALL_THAT_RUNS_CODE.fullmatch(function) or "shell" in given:
            yield f"calls {function}, which runs code"
        # CDLL(None) is the C library that Python itself runs on
        is_loader = LOADER.fullmatch(function) and [ast.unparse(given) for given in node.args] != ["None"]
        if is_loader and not names_own_folder:
            yield f"calls {function} without naming its own folder"
        makes_tensor = FACTORY.fullmatch(function) and not below(module, "bench", "paper")
        if makes_tensor and not (None in given or {"dtype", "device"} <= given):
            yield f"line {node.lineno} calls {function} without dtype or device"


CORE = [
    name
    for name in MODULES
    if not below(name, "bench", "paper", "integrations", "serving", "__main__", "routed.triton_kernels")
]


def test_every_module_has_a_layer():
    assert {name for name in MODULES if layer(name) is None} == {"prescore", "prescore.__main__"}


def test_no_module_does_what_is_forbidden():
    assert {name: found for name, text in MODULES.items() if (found := set(forbidden(name, text)))} == {}


ALLOWED = [
    ("bench.tables", "import matplotlib\nfrom prescore.bench import plots"),
    ("paper.tables", "from prescore.bench import plots\nfrom prescore.paper import printed"),
    ("engines", "from prescore.selected import attention\nfrom prescore.routed import layout"),
    ("registry", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import prescore.bench"),
    ("call", "torch.zeros(2, dtype=t, device=d)\nx.new_zeros(2)\ntorch.zeros_like(x)\nnp.zeros(3)"),
    ("bench.a", "import json\nmodel.eval()\nre.compile('x')\nctypes.CDLL(None)"),
    ("ops.a", "ctypes.CDLL(Path(__file__).parent / 'x')\ndef load(path, trust_remote_code=False): pass"),
]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        *ALLOWED,
        ("call", "from prescore import bench"),
        ("integrations.apply", "def f():\n    import prescore.bench.tables"),
        ("bench.cli.vision", "from prescore.paper import printed"),
        ("call", "import prescore.paper"),
        ("selected.plan", "from prescore.routed import attention"),
        ("bench.a", "import prescore.paper.items"),
        ("routed.layout", "from prescore.engines import run_engine"),
        ("call", "from prescore.selected.plan import make_plan"),
        ("parallel.comm", "from prescore.attention import attend"),
        ("attention", "import prescore.integrations.apply"),
        ("int8.linear", "from prescore.serving import paged"),
        ("routed.layout", "from prescore.selected.plan import make_plan"),
        ("ops.cpu", "from prescore.ops import plain"),
        ("routed.native", "from prescore.routed.plain import attend"),
        ("call", "torch.zeros(2)"),
        ("call", "torch.arange(3, device=d)"),
        ("call", "torch.rand(2, dtype=t)"),
        ("call", "torch.as_tensor(3, dtype=t)"),
        ("call", "torch.Tensor([1.0])"),
        ("call", "from torch import zeros"),
        ("bench.a", "import pickle"),
        ("bench.a", "from pickle import loads"),
        ("bench.a", "x = eval('1')"),
        ("bench.a", "torch.load(path, weights_only=True)"),
        ("bench.a", "subprocess.run('ls', shell=True)"),
        ("ops.a", "ctypes.CDLL('libprescore.so')"),
        ("ops.a", "torch.ops.load_library(L)"),
        ("ops.a", "ctypes.util.find_library('m')"),
        ("bench.a", "def load(path, *, trust_remote_code=True): pass"),
    ],
)
def test_what_is_forbidden_is_found(module, text):
    assert bool(list(forbidden(f"prescore.{module}", text))) == ((module, text) not in ALLOWED)


@pytest.mark.parametrize(
    ("code", "libraries"),
    [
        (f"import {', '.join(CORE)}; prescore.prescored_attention", HEAVY),
        ("import prescore.bench.cli.main as m; m.main(['--help'])", {*MODELS, "torch"}),
    ],
    ids=["core", "help"],
)
def test_importing_or_asking_for_help_loads_no_heavy_library(code, libraries):
    check = f"{code}\nimport sys\nsys.exit(' '.join(n for n in {libraries!r} if n in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class _Bomb:
    """An object whose unpickling makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_pickled_weights_are_not_read(tmp_path):
    save_tiny_language_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    mark = tmp_path / "it-ran"
    # a harmful file, and a harmless one, which is refused too
    for weights in ({"model.embed_tokens.weight": _Bomb(mark)}, tiny_language_model()[0].state_dict()):
        torch.save(weights, tmp_path / "pytorch_model.bin")
        with pytest.raises(OSError, match=r"model must be 'smollm2', a directory of transformers.*safetensors"):
            load_model(str(tmp_path))
    assert not mark.exists()


def test_a_cache_file_names_configurations_and_nothing_else(tmp_path):
    """A type in a file is looked up among the configurations, and other files are refused before."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from prescore.integrations.transformers.cache import PrescoredCache

    model, _ = tiny_language_model()
    path = tmp_path / "cache.safetensors"
    cache = PrescoredCache(model.config)
    with torch.no_grad(), prescore.apply(model):
        model(torch.zeros(1, 3, dtype=torch.int64), past_key_values=cache)
    cache.save(path)
    PrescoredCache.load(path)
    with safe_open(path, framework="pt") as file:
        facts, tensors = file.metadata()["prescore"], load_file(path)
    assert facts.count('"Routed"') == len(cache.layers)
    for metadata, reason in (
        (facts.replace('"Routed"', '"os.system"'), "config type must be one of .*, got 'os.system'"),
        (facts.replace("prescore-cache-", "prescore-cache-1"), "its format is not prescore-cache-"),
        ("[]", "its format is not prescore-cache-"),
        (None, "its format is not prescore-cache-"),
    ):
        save_file(tensors, path, metadata={} if metadata is None else {"prescore": metadata})
        with pytest.raises(ValueError, match=rf"path must be a file of PrescoredCache.save, got .*\({reason}"):
            PrescoredCache.load(path)
