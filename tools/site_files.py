"""A hook of mkdocs: documents, pictures and examples that lie outside of `docs` become part of the site.

Documents link to one another as they lie in the repository, so that links work there. In the site `docs` is the
top, and everything else keeps its path: the hook adds those files, and moves links to where they are.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = "docs/"
OUTSIDE = (
    "DESIGN.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "experiments/**/README.md",
    "experiments/**/*.png",
    "examples/*.py",
    "examples/*.ipynb",
)
_LINK = re.compile(r"(\[[\w/.-]+\.md)?(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
"""A link from its label's end on, or with the whole label where that is the name of a document."""
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of `docs`."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Move relative links of a page to where their targets are in the site, and call pages by their titles."""
    own, titles = page.file.src_uri, dict(_titles(config.nav or []))
    inside = files.get_file_from_path(own).generated_by is None
    here = DOCS + own if inside else own

    def moved(link: re.Match[str]) -> str:
        name, begin, target, end = link.groups(default="")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(here), target)).removeprefix(DOCS)
        if name and found in titles:
            name = f"[{titles[found]}"
        return name + begin + posixpath.relpath(found, posixpath.dirname(own) or ".") + end

    pieces = _CODE.split(markdown)
    return "".join(piece if _CODE.fullmatch(piece) else _LINK.sub(moved, piece) for piece in pieces)


def _titles(entries: list[dict[str, object]]) -> Iterator[tuple[str, str]]:
    """Pages of the navigation and their titles."""
    for entry in entries:
        for title, inner in entry.items():
            if isinstance(inner, list):
                yield from _titles(inner)
            else:
                yield str(inner), title
