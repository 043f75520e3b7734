"""timm, torchvision and transformers import side by side, whichever comes first."""

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

TIMM = "from prescore.integrations.torchvision import import_timm; timm = import_timm()"
LLAMA = "from transformers import LlamaConfig, LlamaModel; LlamaModel"
VIT = "from transformers import ViTConfig, ViTModel; ViTModel"
SMALL = "timm.create_model('vit_tiny_patch16_224', depth=1, embed_dim=48, num_heads=3)"
MEND = "from prescore.integrations.torchvision import mend_torchvision; mend_torchvision()"


def run(*lines):
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stderr


def installed(package):
    return run(f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        (TIMM, SMALL, LLAMA, VIT),
        ("import transformers", TIMM, SMALL, LLAMA, VIT),
        (MEND, LLAMA, VIT, TIMM, SMALL, MEND),
    ],
    ids=["timm-first", "transformers-first", "models-first"],
)
def test_any_order_of_imports_works(lines):
    if not installed("timm") or not installed("torchvision"):
        pytest.skip("timm or torchvision is not installed")
    code, said = run(*lines)
    assert code == 0, said


@pytest.mark.slow
def test_a_failed_import_of_a_model_can_be_repeated_after_mending():
    if not installed("torchvision"):
        pytest.skip("torchvision is not installed")
    first = "try:\n    from transformers import LlamaModel\nexcept Exception:\n    pass"
    code, said = run(first, MEND, LLAMA, VIT)
    assert code == 0, said


def test_the_module_itself_imports_nothing_heavy():
    code, said = run(
        "import sys, prescore.integrations.torchvision",
        "sys.exit(' '.join(n for n in ('timm', 'torchvision', 'transformers') if n in sys.modules) or 0)",
    )
    assert code == 0, said


def test_without_torchvision_nothing_is_defined():
    code, said = run(
        "import sys; sys.modules['torchvision'] = None",
        "import torch, prescore.integrations.torchvision as t",
        "assert t.mend_torchvision() is False",
        "assert not hasattr(torch.ops.torchvision, 'nms')",
    )
    assert code == 0, said


def test_another_failure_of_torchvision_is_not_hidden(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::other does not exist')")
    code, said = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})",
        "from prescore.integrations.torchvision import mend_torchvision",
        "mend_torchvision()",
    )
    assert code == 1
    assert "torchvision::other does not exist" in said
