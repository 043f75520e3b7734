"""The repair of a torchvision that does not fit torch, in an environment of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prescore

TOOLS = Path(__file__).parents[2] / "tools"
HOOK = f"sys.path.insert(0, {str(TOOLS)!r}); import torchvision_hook as hook; hook.install(); hook.install()"
BROKEN = """
import torch
torch.library.register_fake("torchvision::nms")(lambda *args: None)
ready = True
"""


def run(path, *lines, packages=(torch, prescore)):
    """`-S` leaves out the .pth files of this environment; the packages come back by hand."""
    roots = [str(path), *(str(Path(package.__file__).parents[1]) for package in packages)]
    code = "\n".join((f"import sys; sys.path[:0] = {roots!r}", *lines))
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_a_missing_operator_is_mended_and_other_errors_stay(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import inner\n")
    (package / "inner.py").write_text(BROKEN)
    without = run(tmp_path, "import torchvision")
    assert without.returncode != 0
    assert "operator torchvision::nms does not exist" in without.stderr
    mended = run(tmp_path, HOOK, "import torchvision; assert torchvision.inner.ready")
    assert mended.returncode == 0, mended.stderr
    (package / "inner.py").write_text("raise RuntimeError('something else')\n")
    assert "something else" in run(tmp_path, HOOK, "import torchvision").stderr


def test_the_hook_is_installed_once_and_looks_at_nothing_else(tmp_path):
    found = "(one,) = [f for f in sys.meta_path if type(f).__name__ == '_Finder']"
    checks = "assert one.find_spec('json', None) is None", "assert not {'torch', 'prescore'} & set(sys.modules)"
    done = run(tmp_path, HOOK, found, *checks, packages=())
    assert done.returncode == 0, done.stderr
