"""What SECURITY.md promises: nothing is unpickled or evaluated, and foreign code runs only on request."""

import ast
from pathlib import Path

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model, tiny_language_model

from prescore.bench import offline as offline_model

SOURCE = Path(__file__).parent.parent / "src" / "prescore"
FILES = sorted(SOURCE.rglob("*.py"))
CODE_RUNNERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "runpy"}
"""Modules that make code or objects out of bytes."""
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "torch.load",
    "torch.save",
    "numpy.load",
    "np.load",
    "os.system",
    "os.popen",
}
LOADERS = {
    "ctypes.CDLL",
    "CDLL",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "ctypes.cdll.LoadLibrary",
}
FINDERS = ("find_library", "LD_LIBRARY_PATH")
OF_THE_SYSTEM = {"evaluation/speed/freed_memory.py", "evaluation/peak_memory.py"}
"""CDLL(None) is the C library that Python itself runs on."""


def calls(tree):
    """Dotted names of everything that is called, and whether it has a keyword `shell`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg for keyword in node.keywords}


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def problems(text, name="some/file.py"):
    """What a file does that the package promises not to do."""
    tree = ast.parse(text)
    found = [f"imports {module}" for module in imports(tree) if module in CODE_RUNNERS]
    for function, keywords in calls(tree):
        if function in FORBIDDEN_CALLS:
            found.append(f"calls {function}")
        if "shell" in keywords:
            found.append(f"calls {function} with a shell")
        beside = "__file__" in text or "importlib.resources" in text
        if function in LOADERS and name not in OF_THE_SYSTEM and not beside:
            found.append(f"calls {function} without naming its own folder")
    return found + [f"mentions {word}" for word in FINDERS if word in text]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_makes_code_of_data(path):
    assert not problems(path.read_text(), path.relative_to(SOURCE).as_posix())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import pickle", "imports pickle"),
        ("from pickle import loads", "imports pickle"),
        ("x = eval('1')", "calls eval"),
        ("torch.load(path, weights_only=True)", "calls torch.load"),
        ("subprocess.run('ls', shell=True)", "calls subprocess.run with a shell"),
        ("ctypes.CDLL('libprescore.so')", "calls ctypes.CDLL without naming its own folder"),
        (
            "torch.ops.load_library(os.environ['LIB'])",
            "calls torch.ops.load_library without naming its own folder",
        ),
        ("ctypes.util.find_library('m')", "mentions find_library"),
    ],
)
def test_the_reader_sees_what_it_must(text, said):
    assert problems(text) == [said]
    assert problems("import json\nmodel.eval()\nre.compile('x')\nctypes.CDLL(Path(__file__).parent / 'x')") == []


def test_exceptions_are_needed():
    for name in OF_THE_SYSTEM:
        text = (SOURCE / name).read_text()
        assert problems(text), name
        assert "CDLL(None)" in text


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
    torch.save({"model.embed_tokens.weight": _Bomb(mark)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="model must be 'smollm2', a directory of transformers"):
        offline_model.load_model(str(tmp_path))
    torch.save(tiny_language_model()[0].state_dict(), tmp_path / "pytorch_model.bin")  # harmless, and refused too
    with pytest.raises(OSError, match="safetensors"):
        offline_model.load_model(str(tmp_path))
    assert not mark.exists()


def test_remote_code_is_off_in_every_signature():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            with_defaults = arguments[len(arguments) - len(defaults) :]
            for argument, default in zip(with_defaults, defaults, strict=True):
                if argument.arg == "trust_remote_code":
                    assert default is not None, f"{path.name}:{node.lineno}"
                    assert ast.unparse(default) == "False", f"{path.name}:{node.lineno}"


def test_a_cache_file_that_lies_is_refused(tmp_path):
    from safetensors.torch import save_file

    from prescore.integrations.transformers.cache import PrescoredCache

    lies = {
        "no cache": {},
        "an unknown configuration": {
            "prescore": '{"format": "prescore-cache-2", "evict": false, "refresh_every": null, "layers": '
            '[{"kind": "prescored", "n_seen": 1, "request": {"config": {"type": "os.system"}}}]}'
        },
        "another format": {"prescore": '{"format": "prescore-cache-1"}'},
        "no object": {"prescore": "[]"},
    }
    for metadata in lies.values():
        save_file({"0.key": torch.zeros(1)}, tmp_path / "cache.safetensors", metadata=metadata)
        with pytest.raises(ValueError, match="must"):
            PrescoredCache.load(tmp_path / "cache.safetensors")
