"""Wheels with and without the libraries, built as pip builds them and used in an environment of their own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from prescore.ops.native.build import levels_of_machine, library_name

ROOT = Path(__file__).parents[3]
PARTS = ("src", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
LIBRARIES = {f"prescore/ops/native/{library_name(level)}" for level in levels_of_machine()}
USED = """
import prescore, torch
from prescore.ops.native import library
found = library.load()
print(prescore.__file__, library.describe_native(), sep="\\n")
print(prescore.exact_attention(*torch.ones(3, 1, 1, 2, 4), is_causal=True).output.sum().item())
"""

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler here"
)


@pytest.fixture
def sources(tmp_path):
    """What a fresh clone holds, so that nothing is written into this one."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in PARTS:
        part = ROOT / name
        if part.is_dir():
            unwanted = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
            shutil.copytree(part, folder / name, ignore=unwanted)
        else:
            shutil.copy(part, folder / name)
    return folder


def backend(function, sources, out, compiler=None):
    """Call a hook of the build backend as pip and `python -m build` do; the file made."""
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; build_meta.{function}(sys.argv[1])"
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    if compiler is not None:
        environment["CC"] = compiler
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


def used_in_a_fresh_environment(folder, wheel):
    """Install a wheel where nothing but torch is and use it: where it was imported from, the level, a result."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, capture_output=True, text=True, check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # torch from here; the installed package comes first
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PRESCORE"))
    }
    command = [str(python), "-c", USED]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path, level, result = done.stdout.splitlines()
    assert Path(path).is_relative_to(site)
    assert float(result) == 8
    return level


@needs_compiler
def test_a_wheel_with_the_libraries_is_of_one_platform(sources, tmp_path):
    wheel = backend("build_wheel", sources, tmp_path / "out")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= LIBRARIES
    assert not any(".data/" in name for name in names)  # all of it at the top, where the tag says it belongs
    level = used_in_a_fresh_environment(tmp_path / "fresh", wheel)
    assert level.split()[0] in levels_of_machine()


def test_a_wheel_without_a_compiler_is_pure(sources, tmp_path):
    # what an earlier build left behind must not get in
    for folder in (sources / "src/prescore/ops/native", sources / "build/lib/prescore/ops/native"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / library_name("baseline")).write_text("of other sources")
    wheel = backend("build_wheel", sources, tmp_path / "out", compiler="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())
    assert used_in_a_fresh_environment(tmp_path / "fresh", wheel).startswith("none (")


@needs_compiler
def test_a_source_distribution_can_be_built_from(sources, tmp_path):
    (sources / "src/prescore/ops/native" / library_name("baseline")).write_text("of this machine")
    archive = backend("build_sdist", sources, tmp_path / "sdist")
    with tarfile.open(archive) as file:
        assert not any(name.endswith(".so") for name in file.getnames())
        file.extractall(tmp_path, filter="data")
    wheel = backend("build_wheel", tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "out")
    with zipfile.ZipFile(wheel) as file:
        assert set(file.namelist()) >= LIBRARIES


@needs_compiler
def test_an_editable_installation_builds_beside_the_sources(sources, tmp_path):
    backend("build_editable", sources, tmp_path / "out")
    assert {
        f"prescore/ops/native/{path.name}" for path in sources.glob("src/prescore/ops/native/*.so")
    } == LIBRARIES


def test_an_editable_installation_needs_no_compiler(sources, tmp_path):
    backend("build_editable", sources, tmp_path / "out", compiler="/bin/false")
    assert list(sources.glob("src/prescore/ops/native/*.so")) == []
