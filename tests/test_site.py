"""The documentation site: it builds without a network and without a warning, and every link leads somewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import prescore
from prescore.baselines import BASELINES
from prescore.types import Stats

pytest.importorskip("mkdocs", reason="the site needs the extra docs")
pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OUTSIDE = ("http:", "https:", "mailto:", "data:", "javascript:")
FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=[\"']?https?:|<link[^>]+rel=[\"']?(?:stylesheet|preconnect)[^>]+https?:"
)


class Page(HTMLParser):
    """Links, pictures and places of a page."""

    def __init__(self, text):
        super().__init__()
        self.text, self.links, self.places = text, [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


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


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def broken(path, page, pages):
    """Links of a page that lead to no file, or to no place in one."""
    found = []
    for link in page.links:
        if link.startswith(OUTSIDE) or path.name == "404.html":
            continue
        name, _, place = unquote(link.split("?")[0]).partition("#")
        file = (path.parent / name).resolve() if name else path
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file() or (place and file in pages and place not in pages[file].places):
            found.append(link)
    return found


def test_every_link_leads_somewhere_and_nothing_is_fetched(pages, site):
    assert len(pages) > 20
    assert {path.name: found for path, page in pages.items() if (found := broken(path, page, pages))} == {}
    assert [path.name for path, page in pages.items() if FETCHED.search(page.text)] == []
    wrong = Page("<a href='start.html#install'></a><a href='start.html#nowhere'></a><img src='gone.png'>")
    assert broken(site / "index.html", wrong, pages) == ["start.html#nowhere", "gone.png"]


def test_every_page_is_in_the_navigation_and_every_example_can_be_had(pages, site):
    index = pages[site / "index.html"]
    names = [path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")]
    assert [name for name in names if not {name, "./" if name == "index.html" else name} & set(index.links)] == []
    for path in (ROOT / "examples").glob("0*"):
        assert (site / "examples" / path.name).read_bytes() == path.read_bytes()
        assert f"examples/{path.name}" in index.links


def test_the_reference_has_every_public_name(pages, site):
    places = {place.split(".")[-1] for place in pages[site / "reference.html"].places}
    assert set(prescore.__all__) - places - {"__version__", "Config"} == set()


def test_every_number_of_a_call_and_every_method_is_explained():
    text = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    named = (*Stats.__dataclass_fields__, *prescore.list_scorers(), *BASELINES)
    assert [name for name in named if f"`{name}`" not in text] == []
    assert [name for name in Stats.__dataclass_fields__ if f"        {name}: " not in Stats.__doc__] == []
