"""timm, torchvision and transformers import side by side, whichever comes first."""

import importlib.util
import subprocess
import sys
from functools import partial

import pytest

from prescore.bench.vision.models import load_vision_model
from prescore.integrations.torchvision import import_timm

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
BOTH = ("timm", "torchvision")
slow = partial(pytest.param, marks=pytest.mark.slow)
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
        slow((TIMM, SMALL, LLAMA, VIT), BOTH),
        slow(("import transformers", TIMM, SMALL, LLAMA, VIT), BOTH),
        slow((MEND, LLAMA, VIT, TIMM, SMALL, MEND), BOTH),
        slow((FAILED_IMPORT, MEND, LLAMA, VIT), BOTH[1:]),
        (NOTHING_HEAVY, ()),
        (NOT_INSTALLED, ()),
    ],
    ids=["timm first", "transformers first", "models first", "after a failure", "lean", "not installed"],
)
def test_any_order_of_imports_works(lines, needs):
    if not all(map(importlib.util.find_spec, needs)):
        pytest.skip(f"{' or '.join(needs)} is not installed")
    done = run(*lines)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_without_timm_or_torchvision_the_cure_is_named(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else object())
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"{name} must be installed .*: pip install timm, and the torch"):
        import_timm()
    with pytest.raises(OSError, match="pip install timm"):
        load_vision_model("vit_tiny_patch16_224")


def test_another_failure_of_torchvision_is_not_hidden(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::other does not exist')")
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})", MEND)
    assert done.returncode == 1
    assert "torchvision::other does not exist" in done.stderr
