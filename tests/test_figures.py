"""Tables and figures of the documents are those that `make figures` writes from the records."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(root):
    """The generators of a copy of the repository."""
    spec = importlib.util.spec_from_file_location("figures", root / "experiments" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figures = load(ROOT)


def test_writing_every_page_anew_changes_nothing_and_every_figure_is_used():
    used = set()
    pages = {path: path.read_text() for path in figures.documents()}
    changed = [str(path) for path, text in pages.items() if figures.regenerated(text, path.name, used) != text]
    assert changed == [], "run make figures"
    assert figures.FIGURES.keys() - used == set()


PAGE = """Lost: <!-- = loss default 8192 default worst -->?<!-- -->.
<!-- figure: held_out default -->
<!-- end -->
"""


def test_a_changed_record_changes_table_and_sentence_and_figures_in_no_page_are_named(tmp_path, capsys):
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    page, records = tmp_path / "README.md", tmp_path / "experiments/language/default/records.jsonl"
    page.write_text(PAGE)
    assert load(tmp_path).main() == 1
    assert "in no page: " in capsys.readouterr().err
    before = page.read_text()
    lines = list(map(json.loads, records.read_text().splitlines()))
    label, document, n_tokens = "default", "Moby-Dick--Or-The-Whale_2701.txt, reported window 1", 8192
    (line,) = [
        line
        for line in lines
        if (line["config"]["method"]["label"], line["config"]["document"], line["config"]["n_tokens"])
        == (label, document, n_tokens)
    ]
    line["results"]["loss"] += 7
    records.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    load(tmp_path).main()
    after = page.read_text()
    assert "changed: README.md\n" in capsys.readouterr().out
    assert [text.partition("-->")[2][:2] for text in (before, after)] == ["+0", "+6"]
    changed = [new for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new][1:]
    assert [line.split(" | ")[:2] for line in changed] == [["| 8,192", "*Moby-Dick*"], ["| 8,192", "**all**"]]


TABLE = "<!-- figure: needles -->\n<!-- end -->\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n<!-- figure: no_such -->\n<!-- end -->", "page.md:2: <!-- figure: no_such --> must name one of "),
        (f"{TABLE}\n{TABLE}", "page.md:4: <!-- figure: needles --> must stand once in a page"),
        ("a\n\n<!-- figure: needles -->\n| a |", "page.md:3: <!-- figure: needles --> must be closed"),
        (
            f"<!-- figure: min_weights -->\n{TABLE}",
            "page.md:1: <!-- figure: min_weights --> must be closed before",
        ),
        ("a <!-- = needles_found 8192 exact -->3<!-- end -->", "page.md:1: <!-- end --> must close a mark of its"),
        ("a <!-- end -->", "page.md:1: <!-- end --> must close a mark of its kind"),
        ("a\n <!-- = needles_found 8192 exact -->3<!-- -->", "page.md:2: .* must not begin a line"),
        ("a <!-- = needles -->3<!-- -->", "page.md:1: <!-- = needles --> is a table"),
        (
            "a <!-- = loss default 77 default -->3<!-- -->",
            "page.md:1: .* LookupError: none in language/default .*77",
        ),
        ("a <!-- = loss default -->3<!-- -->", "page.md:1: .* has no records, TypeError: .* missing 2"),
    ],
)
def test_a_wrong_mark_is_refused_with_its_line(text, message):
    with pytest.raises(figures.FigureError, match=f"^{message}"):
        figures.regenerated(text, "page.md", set())
