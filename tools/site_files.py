"""A hook of mkdocs: documents, pictures and examples outside of `docs` become part of the site.

Documents link to one another by their paths in the repository, so that links work there. In the site `docs` is the
top, and everything else keeps its path: the hook adds those files and rewrites the links.
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
    "README.md",  # the first page of the site
    "DESIGN.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "experiments/**/README.md",
    "experiments/**/*.png",
    "examples/*.py",
    "examples/*.ipynb",
)
_LINK = re.compile(r"(\[[\w/.-]+\.md)?(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
"""A link from the end of its label on, or with the full label where that is the name of a document."""
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of `docs`."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the relative links of a page to their targets in the site, and name pages by their titles."""
    in_site, titles = page.file.src_uri, dict(_titles(config.nav or []))
    in_docs = files.get_file_from_path(in_site).generated_by is None
    in_repository = DOCS + in_site if in_docs else in_site

    def rewrite(link: re.Match[str]) -> str:
        name, begin, target, end = link.groups(default="")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), target)).removeprefix(DOCS)
        if name and path in titles:
            name = f"[{titles[path]}"
        return name + begin + posixpath.relpath(path, posixpath.dirname(in_site) or ".") + end

    parts = _CODE.split(markdown)
    return "".join(part if _CODE.fullmatch(part) else _LINK.sub(rewrite, part) for part in parts)


def _titles(entries: list[dict[str, object]]) -> Iterator[tuple[str, str]]:
    """Pages of the navigation and their titles."""
    for entry in entries:
        for title, inner in entry.items():
            if isinstance(inner, list):
                yield from _titles(inner)
            else:
                yield str(inner), title
