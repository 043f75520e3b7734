"""What SECURITY.md promises: nothing is unpickled or evaluated, and foreign code runs only on request."""

import ast
from pathlib import Path

import pytest
import torch
from oracles.tiny_language_model import save_tiny_language_model, tiny_language_model

from prescore.bench.offline import load_model

SOURCE = Path(__file__).parent.parent / "src" / "prescore"
FILES = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
CODE_RUNNERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "runpy"}
"""Modules that make code or objects out of bytes."""
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "os.system", "os.popen"),
    *("torch.load", "torch.save", "numpy.load", "np.load"),
}
LOADERS = {
    *("ctypes.CDLL", "CDLL", "ctypes.cdll.LoadLibrary"),
    *("torch.ops.load_library", "torch.classes.load_library"),
}
FINDERS = ("find_library", "LD_LIBRARY_PATH")


def problems(text):
    """What a file does that the package promises not to do."""
    tree, found = ast.parse(text), [f"mentions {word}" for word in FINDERS if word in text]
    beside = "__file__" in text or "importlib.resources" in text
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found += [f"imports {name}" for name in modules if name.split(".")[0] in CODE_RUNNERS]
        if isinstance(node, ast.FunctionDef):
            arguments, defaults = node.args.posonlyargs + node.args.args, node.args.defaults
            pairs = list(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            remote = [default for argument, default in pairs if argument.arg == "trust_remote_code"]
            found += [f"{node.name} trusts remote code" for d in remote if d is None or ast.unparse(d) != "False"]
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        if function in FORBIDDEN_CALLS:
            found.append(f"calls {function}")
        if any(keyword.arg == "shell" for keyword in node.keywords):
            found.append(f"calls {function} with a shell")
        # CDLL(None) is the C library that Python itself runs on
        if function in LOADERS and not beside and [ast.unparse(given) for given in node.args] != ["None"]:
            found.append(f"calls {function} without naming its own folder")
    return found


def test_nothing_makes_code_of_data():
    assert {name: found for name, text in FILES.items() if (found := problems(text))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle", ["imports pickle"]),
        ("from pickle import loads", ["imports pickle"]),
        ("x = eval('1')", ["calls eval"]),
        ("torch.load(path, weights_only=True)", ["calls torch.load"]),
        ("subprocess.run('ls', shell=True)", ["calls subprocess.run with a shell"]),
        ("ctypes.CDLL('libprescore.so')", ["calls ctypes.CDLL without naming its own folder"]),
        ("torch.ops.load_library(L)", ["calls torch.ops.load_library without naming its own folder"]),
        ("ctypes.util.find_library('m')", ["mentions find_library"]),
        ("def load(path, *, trust_remote_code=True): pass", ["load trusts remote code"]),
        ("import json\nmodel.eval()\nre.compile('x')\nctypes.CDLL(None)", []),
        ("ctypes.CDLL(Path(__file__).parent / 'x')", []),
        ("def load(path, trust_remote_code=False): pass", []),
    ],
)
def test_the_reader_sees_what_it_must(text, found):
    assert problems(text) == found


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


def test_a_cache_file_that_lies_is_refused(tmp_path):
    from safetensors.torch import save_file

    from prescore.integrations.transformers.cache import PrescoredCache

    unknown = (
        '{"format": "prescore-cache-2", "evict": false, "refresh_every": null, "layers": '
        '[{"kind": "prescored", "n_seen": 1, "request": {"config": {"type": "os.system"}}}]}'
    )
    for metadata in ({}, *({"prescore": text} for text in (unknown, '{"format": "prescore-cache-1"}', "[]"))):
        save_file({"0.key": torch.zeros(1)}, tmp_path / "cache.safetensors", metadata=metadata)
        with pytest.raises(ValueError, match="must"):
            PrescoredCache.load(tmp_path / "cache.safetensors")
