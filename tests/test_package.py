"""What is shipped: versions agree, the source distribution is whole, a wheel works in a fresh environment."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import prescore

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE_HERE = {"site", "runs", "report", "build", "dist"}
USE = """
import torch, prescore
assert prescore.__file__.startswith({place!r}), prescore.__file__
tensors = [torch.randn(1, 2, 300, 8) for _ in range(3)]
config = prescore.Selected("kmeans", 32, min_seq_len=64)
print(prescore.prescored_attention(*tensors, config, is_causal=True).shape, prescore.__version__)
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def not_shipped(folder, names):
    """What tools leave behind, and at the top what commands make."""
    hidden = {name for name in names if name.startswith(".") or name in ("__pycache__", "prescore.egg-info")}
    return hidden | (MADE_HERE & set(names) if Path(folder) == ROOT else set())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that is made from it and nothing else."""
    pytest.importorskip("build", reason="the package is built by the extra dev")
    folder = tmp_path_factory.mktemp("package")
    # a copy, because building writes into the tree
    tree = shutil.copytree(ROOT, folder / "tree", ignore=not_shipped)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(tree))
    (source,), (wheel,) = ((folder / "dist").glob(pattern) for pattern in ("*.tar.gz", "*.whl"))
    return source, wheel


def test_versions_agree():
    version = PROJECT["version"]
    assert prescore.__version__ == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1) == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_paper_is_found_at_one_place():
    paper = PROJECT["urls"]["Paper"]
    for name in ("CITATION.cff", "README.md", "docs/methods.md", "docs/faq.md"):
        assert paper in (ROOT / name).read_text(), name


def test_the_front_page_needs_no_file_of_the_repository_to_be_seen():
    """It is also what a package index shows, where pictures by relative paths are broken."""
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / PROJECT["readme"]).read_text())
    assert [picture for picture in pictures if not picture.startswith("https://")] == []


def test_every_extra_is_explained():
    text = (ROOT / "docs" / "start.md").read_text()
    for extra in set(PROJECT["optional-dependencies"]) - {"dev", "docs"}:
        assert re.search(rf"\[[\w,]*\b{extra}\b[\w,]*\]", text), f"{extra}: say in docs/start.md what it is for"


@pytest.mark.slow
def test_the_source_distribution_is_whole(built):
    with tarfile.open(built[0]) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "CHANGELOG.md",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
    ):
        assert name in found
    for folder in ("src/prescore", "tests", "docs", "examples", "experiments", "tools"):
        files = [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts
        ]
        assert {path.relative_to(ROOT).as_posix() for path in files} - found == set()


@pytest.mark.slow
def test_a_wheel_works_in_a_fresh_environment(built, tmp_path):
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
    assert "prescore/py.typed" in names
    assert "prescore/report/templates/report.html" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"prescore"}
    place = tmp_path / "fresh"
    venv.create(place)
    own = {"base": str(place), "platbase": str(place)}
    packages, scripts = (Path(sysconfig.get_path(name, "venv", own)) for name in ("purelib", "scripts"))
    # torch and the command line's packages are borrowed, behind what is installed here
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("install", "--no-deps", "--no-index", "--force-reinstall", "--quiet", built[1])
    run(sys.executable, "-m", "pip", "--python", scripts / "python", *install, cwd=tmp_path)
    bare = {"PATH": str(scripts), "HOME": str(tmp_path)}
    shown = run(scripts / "python", "-c", USE.format(place=str(packages)), cwd=tmp_path, env=bare)
    assert shown == f"torch.Size([1, 2, 300, 8]) {prescore.__version__}\n"
    assert run(scripts / "prescore", "--version", cwd=tmp_path, env=bare) == f"prescore {prescore.__version__}\n"
