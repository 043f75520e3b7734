"""The repair of a torchvision that does not fit torch, in an environment of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
HOOK = f"sys.path.insert(0, {str(TOOLS)!r}); import torchvision_hook as hook; hook.install(); hook.install()"
BROKEN = """
import torch
torch.library.register_fake("torchvision::nms")(lambda *args: None)
ready = True
"""


def run(path, *lines):
    code = "\n".join((f"import sys; sys.path.insert(0, {str(path)!r})", *lines))
    return subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def site(path):
    """`-S` leaves out the .pth files of this environment; the packages come back by hand."""
    import torch

    import prescore

    for module in (torch, prescore):
        root = str(next(iter(module.__path__))).rsplit("/", 1)[0]
        yield f"sys.path.append({root!r})"


@pytest.mark.slow
def test_a_package_that_misses_an_operator_is_imported_all_the_same(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import inner\n")
    (package / "inner.py").write_text(BROKEN)
    roots = tuple(site(tmp_path))
    without = run(tmp_path, *roots, "import torchvision")
    assert without.returncode != 0
    assert "operator torchvision::nms does not exist" in without.stderr
    mended = run(tmp_path, *roots, HOOK, "import torchvision; assert torchvision.inner.ready")
    assert mended.returncode == 0, mended.stderr


@pytest.mark.slow
def test_other_errors_stay_what_they_are(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('something else')\n")
    failed = run(tmp_path, *site(tmp_path), HOOK, "import torchvision")
    assert "something else" in failed.stderr


def test_the_hook_is_installed_once_and_looks_at_nothing_else(tmp_path):
    lines = (
        HOOK,
        "found = [f for f in sys.meta_path if type(f).__name__ == '_Finder']",
        "assert len(found) == 1",
        "assert found[0].find_spec('json', None) is None",
        "assert 'torch' not in sys.modules",
        "assert 'prescore' not in sys.modules",
    )
    done = run(tmp_path, *lines)  # without any package: an interpreter starts with nothing else
    assert done.returncode == 0, done.stderr
