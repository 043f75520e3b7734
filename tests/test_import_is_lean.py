"""Importing the package, or asking the command line for help, loads no heavy library."""

import subprocess
import sys

import pytest

HEAVY = ("transformers", "timm", "matplotlib", "sklearn")


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        ("import prescore", (*HEAVY, "typer", "rich")),
        ("import prescore; prescore.Selected", (*HEAVY, "typer", "rich")),
        ("import prescore.bench.cli.main as m; m.main(['--help'])", (*HEAVY, "torch")),
    ],
    ids=["import", "config", "help"],
)
def test_lean(code, banned):
    check = f"{code}\nimport sys\nsys.exit(' '.join(n for n in {banned!r} if n in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
