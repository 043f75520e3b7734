"""Importing the package, or asking the command line for help, loads no heavy library."""

import subprocess
import sys

import pytest

MODELS = ("transformers", "timm", "matplotlib", "sklearn")
CODE = {
    "import prescore; prescore.Selected, prescore.prescored_attention": (*MODELS, "typer", "rich"),
    "import prescore.bench.cli.main as m; m.main(['--help'])": (*MODELS, "torch"),
}


@pytest.mark.parametrize("code", CODE)
def test_lean(code):
    check = f"{code}\nimport sys\nsys.exit(' '.join(n for n in {CODE[code]!r} if n in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
