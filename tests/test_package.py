"""What is shipped: versions agree, the source distribution is complete, a wheel works in a fresh environment."""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import prescore
from prescore.routed.native.build import ABI, NOT_BUILT, levels_of_machine, library_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE_HERE = {"site", "runs", "report", "build", "dist"}
LIBRARIES = {f"prescore/routed/native/{library_name(level)}" for level in levels_of_machine()}
USE = """
import torch, prescore
from prescore.routed.native import library
library.load()
tensors = [torch.randn(1, 2, 300, 8) for _ in range(3)]
config = prescore.Selected("kmeans", 32, min_seq_len=64)
print(prescore.__file__, prescore.prescored_attention(*tensors, config, is_causal=True).shape, sep="\\n")
print(prescore.__version__, library.describe_native(), sep="\\n")
"""
REAL_COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
QUICK_COMPILER = f'#!/bin/sh\nexec {REAL_COMPILER} "$@" -O0\n'


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def not_shipped(folder, names):
    """What tools leave behind, and at the top what commands make."""
    left = {name for name in names if re.fullmatch(r"\..*|__pycache__|.*\.(egg-info|so|sha256)", name)}
    return left | (MADE_HERE & set(names) if Path(folder) == ROOT else set())


@pytest.fixture
def sources(tmp_path):
    """A copy of the sources, because building writes into the tree."""
    return shutil.copytree(ROOT, tmp_path / "tree", ignore=not_shipped)


def build(hook, sources, out, compiler=None):
    """Call a hook of the build backend as pip and `python -m build` do; the file it makes."""
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    if compiler is not None:
        environment["CC"] = str(compiler)
    run(sys.executable, "-c", code, str(out), cwd=sources, env=environment)
    (made,) = out.iterdir()
    return made


def script(folder, text):
    path = folder / "compiler"
    path.write_text(text)
    path.chmod(0o755)
    return path


def names_in(archive):
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            return set(file.namelist())
    with tarfile.open(archive) as file:
        return {name.partition("/")[2] for name in file.getnames()}


def used_in_a_fresh_environment(folder, wheel):
    """Install a wheel, use it as a library and as a command; what native code it runs."""
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages, scripts = (Path(sysconfig.get_path(name, "venv", paths)) for name in ("purelib", "scripts"))
    # torch and the command line's packages are borrowed, behind what is installed here
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("install", "--no-deps", "--no-index", "--force-reinstall", "--quiet", wheel)
    run(sys.executable, "-m", "pip", "--python", scripts / "python", *install, cwd=folder)
    bare = {"PATH": str(scripts), "HOME": str(folder)}
    file, shape, version, native = run(scripts / "python", "-c", USE, cwd=folder, env=bare).splitlines()
    assert Path(file).is_relative_to(packages)
    assert shape == "torch.Size([1, 2, 300, 8])"
    assert version == prescore.__version__
    assert run(scripts / "prescore", "--version", cwd=folder, env=bare) == f"prescore {version}\n"
    return native


def test_versions_agree_and_pictures_of_the_front_page_exist():
    version = PROJECT["version"]
    assert prescore.__version__ == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1) == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / PROJECT["readme"]).read_text())
    assert pictures
    assert [picture for picture in pictures if not (ROOT / picture).is_file()] == []


@pytest.mark.slow
@pytest.mark.skipif(REAL_COMPILER is None, reason="there is no C compiler here")
def test_the_source_distribution_is_complete_and_its_wheel_works(sources, tmp_path):
    (sources / "src/prescore/routed/native" / library_name("baseline")).write_text("of this machine")
    archive = build("build_sdist", sources, tmp_path / "sdist")
    shipped = names_in(archive)
    assert not any(name.endswith((".so", ".sha256")) for name in shipped)
    expected = {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md"} | {
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
    }
    for name in ("src/prescore", "tests", "docs", "examples", "experiments", "tools"):
        files = [
            path
            for path in (sources / name).rglob("*")
            if path.is_file() and path.suffix not in (".so", ".sha256")
        ]
        expected |= {path.relative_to(sources).as_posix() for path in files if path.name != NOT_BUILT}
    assert expected - shipped == set()
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    wheel = build("build_wheel", unpacked, tmp_path / "out", script(tmp_path, QUICK_COMPILER))
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    names = names_in(wheel)
    assert {*LIBRARIES, "prescore/py.typed", "prescore/bench/demo/templates/report.html"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"prescore"}
    assert not any(".data/" in name for name in names)  # all of it at the top, where the tag says it belongs
    with zipfile.ZipFile(wheel) as file:
        library = file.extract(f"prescore/routed/native/{library_name('baseline')}", tmp_path)
    assert ctypes.CDLL(library).prescore_native_abi() == ABI
    assert used_in_a_fresh_environment(tmp_path / "fresh", wheel).split()[0] in levels_of_machine()


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_no_extra_brings_another_build_of_torchvision(extra):
    """Beside a torch that it does not fit, torchvision keeps transformers from importing any model."""
    pending, seen = list(PROJECT["optional-dependencies"][extra]), set()
    while pending:
        requirement = pending.pop()
        name = re.match(r"[\w.-]+", requirement)[0].lower()
        if name not in seen and "extra ==" not in requirement:
            seen.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                pending += metadata.requires(name) or []
    assert "torchvision" not in seen
