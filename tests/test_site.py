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


class Page(HTMLParser):
    """Links, pictures and places of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.places = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


def build(target, **environment):
    """Build the site as `make docs` does, with every way to a network closed."""
    closed = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    settings = {**os.environ, **closed, **environment}
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    done = build(target)
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


def test_every_link_leads_somewhere(pages):
    assert len(pages) > 20
    assert {path.name: found for path, page in pages.items() if (found := broken(path, page, pages))} == {}


def test_a_broken_link_is_noticed(pages, site):
    page = Page("<a href='start.html#install'></a><a href='start.html#nowhere'></a><img src='gone.png'>")
    assert broken(site / "index.html", page, pages) == ["start.html#nowhere", "gone.png"]


def test_nothing_is_fetched_when_a_page_is_read(pages):
    """Links to other places may be followed; scripts, styles, fonts and pictures must be here."""
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<(script|img|iframe)[^>]+src=[\"']?https?:", text), path.name
        assert not re.search(r"<link[^>]+rel=[\"']?(stylesheet|preconnect)[^>]+https?:", text), path.name


def test_pages_are_called_by_their_titles(pages):
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    named = re.findall(r"<a href=[^>]+>(?:<code>)?([\w/.-]+\.md)(?:</code>)?</a>", text)
    assert named == []
    assert '<a href="default.html#native-code">' in text


def test_every_example_can_be_had_from_the_site(site):
    for path in (ROOT / "examples").glob("0*"):
        assert (site / "examples" / path.name).read_bytes() == path.read_bytes()
        assert f'href="examples/{path.name}"' in (site / "index.html").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation(pages, site):
    index = pages[site / "index.html"]
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).with_suffix(".html").as_posix()
        assert {name, "./" if name == "index.html" else name} & set(index.links), f"{name}: add it to mkdocs.yml"


def test_the_reference_has_every_public_name(pages, site):
    places = {place.split(".")[-1] for place in pages[site / "reference.html"].places}
    missing = set(prescore.__all__) - places - {"__version__", "Config"}
    assert missing == set()


def test_the_report_page_has_every_field_of_stats():
    text = (DOCS / "report.md").read_text()
    for name in Stats.__dataclass_fields__:
        assert f"`{name}`" in text, f"{name}: add it to docs/report.md"
        assert f"        {name}: " in Stats.__doc__, f"{name}: describe it in prescore.Stats"


def test_every_method_has_its_source():
    text = (DOCS / "methods.md").read_text()
    for name in (*prescore.list_scorers(), *BASELINES):
        assert f"`{name}`" in text, f"{name}: say in docs/methods.md where it comes from"
