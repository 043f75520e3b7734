"""The documentation site: it builds without a network and without a warning, which covers its links."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import prescore
from prescore.baselines import BASELINES
from prescore.types import Stats

pytest.importorskip("mkdocs", reason="the site needs the extra docs")
pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=[\"']?https?:|<link[^>]+rel=[\"']?(?:stylesheet|preconnect)[^>]+https?:"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, with every way to a network closed."""
    target = tmp_path_factory.mktemp("site")
    closed = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = {**os.environ, **closed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return target


def test_nothing_is_fetched_and_every_page_and_example_is_linked(site):
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert [path.name for path, text in pages.items() if FETCHED.search(text)] == []
    links = set(re.findall(r"href=[\"']?([^\"' >]+)", pages[site / "index.html"])) | {"index.html"}
    names = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert len(names) > 10
    assert names - links == set()
    for path in (ROOT / "examples").glob("0*"):
        assert (site / "examples" / path.name).read_bytes() == path.read_bytes()
        assert f"examples/{path.name}" in links


def test_the_reference_has_every_public_name(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    places = {place.split(".")[-1] for place in re.findall(r"id=[\"']?([\w.]+)", text)}
    assert set(prescore.__all__) - places - {"__version__", "Config"} == set()


def test_every_number_of_a_call_and_every_method_is_explained():
    text = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    named = (*Stats.__dataclass_fields__, *prescore.list_scorers(), *BASELINES)
    assert [name for name in named if f"`{name}`" not in text] == []
    assert [name for name in Stats.__dataclass_fields__ if f"        {name}: " not in Stats.__doc__] == []
