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
FAILED_IMPORT = "try:\n    from transformers import LlamaModel\nexcept Exception:\n    pass"
NOTHING_HEAVY = (
    "import sys, prescore.integrations.torchvision",
    "sys.exit(' '.join(n for n in ('timm', 'torchvision', 'transformers') if n in sys.modules) or 0)",
)
NOT_INSTALLED = (
    "import sys; sys.modules['torchvision'] = None",
    "import torch, prescore.integrations.torchvision as t",
    "assert t.mend_torchvision() is False",
    "assert not hasattr(torch.ops.torchvision, 'nms')",
)


def run(*lines):
    code = "\n".join(lines)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("lines", "needs"),
    [
        pytest.param((TIMM, SMALL, LLAMA, VIT), ("timm", "torchvision"), marks=pytest.mark.slow),
        pytest.param(
            ("import transformers", TIMM, SMALL, LLAMA, VIT), ("timm", "torchvision"), marks=pytest.mark.slow
        ),
        pytest.param((MEND, LLAMA, VIT, TIMM, SMALL, MEND), ("timm", "torchvision"), marks=pytest.mark.slow),
        pytest.param((FAILED_IMPORT, MEND, LLAMA, VIT), ("torchvision",), marks=pytest.mark.slow),
        (NOTHING_HEAVY, ()),
        (NOT_INSTALLED, ()),
    ],
    ids=["timm first", "transformers first", "models first", "after a failure", "lean", "not installed"],
)
def test_any_order_of_imports_works(lines, needs):
    for package in needs:
        found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
        if run(found).returncode:
            pytest.skip(f"{package} is not installed")
    done = run(*lines)
    assert done.returncode == 0, done.stderr


def test_another_failure_of_torchvision_is_not_hidden(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::other does not exist')")
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})", MEND)
    assert done.returncode == 1
    assert "torchvision::other does not exist" in done.stderr
