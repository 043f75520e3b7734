"""The report page: built from records alone, self-contained, and drawn by a real browser."""

import json
import re
import shutil
import struct
import subprocess
from html import unescape
from html.parser import HTMLParser

import pytest

from prescore.records import Record
from prescore.report.chart import HEIGHT, NARROW, WIDTH, Mark, Series, Words, line_chart
from prescore.report.html import demo_page, headline
from prescore.report.language_summary import summarise
from prescore.report.token_map import token_map

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def loss_record(label, kind, loss, rows, seconds, **axes):
    method = {"label": label, "kind": kind, "settings": {}, "axes": axes}
    return Record(
        command="demo",
        key=f"demo-{label}",
        config={
            "part": "loss",
            "model": "tiny",
            "dtype": "float32",
            "document": "a <b> & c",
            "digest": "00",
            "n_tokens": 512,
            "layers": "all",
            "method": method,
        },
        seed=0,
        figures={
            "loss": loss,
            "rows_per_query": rows,
            "attention_seconds": seconds,
            "forward_seconds": 2 * seconds,
        },
        seconds=3 * seconds,
        argv=["prescore", "demo", "--out", "a b"],
        versions={"python": "3.11", "torch": "2.13"},
        threads=2,
        created="2026-01-01T00:00:00Z",
    )


def token_record():
    kept = {"key-diff": {"3": [[0, 2], [0, 3]]}, "most attended": {"3": [[0, 1], [1, 2]]}}
    mass = {"key-diff": {"3": 0.25}, "most attended": {"3": 0.75}}
    return Record(
        command="demo",
        key="demo-tokens",
        config={"part": "tokens", "layers": [3]},
        seed=0,
        figures={"pieces": ["<The>", " cat", "\n", " sat"], "kept": kept, "mass": mass},
        seconds=1.0,
        created="2026-01-01T00:00:01Z",
    )


@pytest.fixture
def records():
    return [
        loss_record("exact", "exact", 2.0, 256.5, 1.0),
        loss_record("local only", "local", 3.0, 32.5, 0.25),
        loss_record("HyperAttention", "prescored", 3.5, 64.0, 0.5, series="HyperAttention", table=True),
        loss_record("default", "prescored", 2.1, 96.0, 0.5, series="default", table=True),
        loss_record("default, 32", "prescored", 2.3, 64.0, 0.4, series="default"),
        token_record(),
    ]


class Reader(HTMLParser):
    """Tags must nest, and nothing may be fetched from anywhere."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self):
        super().__init__()
        self.open, self.addresses = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_startendtag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_and_fetches_nothing(records):
    page = demo_page(records)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert [address for address in reader.addresses if not address.startswith("#")] == ["data:,"]
    assert "http" not in page
    assert not re.search(r"\$[a-z]+", page)


def test_the_reader_would_notice(records):
    with pytest.raises(AssertionError):
        Reader().feed(demo_page(records).replace("</section>", "", 1))


def test_figures_are_those_of_the_records(records):
    page = demo_page(records)
    assert "<strong>90 %</strong>" in page  # (3.0 - 2.1) / (3.0 - 2.0)
    assert "worse (-50 %)" in page
    assert "2.00x" in page
    assert "prescore demo --out &#x27;a b&#x27;" in page
    assert "torch 2.13" in page
    assert "a &lt;b&gt; &amp; c" in page
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    assert "default, 32" not in body
    assert body.count("<tr") == 4


def test_headline_without_a_gap_claims_nothing(records):
    table = summarise(records[2:4])
    assert "%" not in headline(table)


WORDS = Words("rows & <x>", "loss", "a <title>")


def places(chart):
    """Where the marks of the points are, by what is said about them."""
    point = r"<title>([^<]*)</title>.*?<use [^>]*x=\"([^\"]*)\" y=\"([^\"]*)\""
    return {words: (float(x), float(y)) for words, x, y in re.findall(point, chart, flags=re.DOTALL)}


def ends(chart, name):
    """First and last point of a line."""
    path = re.search(rf'<g id="\w+-{name}">\s*<path d="([^"]*)"', chart)[1]
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
    return numbers[:2], numbers[-2:]


def test_chart_has_one_mark_per_point_inside_its_frame():
    marks = [Mark("local only", 1.0)]
    series = [Series("good", ((64.0, 0.5), (128.0, 0.2), (256.0, -0.1)), 0), Series("bad", ((64.0, 9.0),), 1)]
    chart = line_chart(series, marks, WORDS)
    assert len(re.findall(r'<g id="wide-line-\d">', chart)) == 1  # one point is no line
    found = places(chart)
    assert list(found) == ["good: 0.500 at 64", "good: 0.200 at 128", "good: -0.100 at 256", "bad: 9.000 at 64"]
    heights = [y for _, y in found.values()]
    assert heights[0] < heights[1] < heights[2]  # lower loss is lower on the page
    assert heights[3] < heights[0]
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in found.values())
    assert ends(chart, "line-0") == (
        pytest.approx(found["good: 0.500 at 64"]),
        pytest.approx(found["good: -0.100 at 256"]),
    )
    assert "No points" in line_chart([], marks, WORDS)


def test_chart_marks_where_exact_attention_stands_and_fits_a_phone():
    marks = [Mark("local only", 1.0), Mark("exact", 512.0, upright=True)]
    series = [Series("good", ((64.0, 0.5), (128.0, 0.2)), 0)]
    for width in (NARROW, WIDTH):
        chart = line_chart(series, marks, WORDS, width=width, style="some")
        assert f'class="chart some" viewBox="0 0 {width:g} ' in chart
        across, upright = ends(chart, "mark-0"), ends(chart, "mark-1")
        assert across[0][1] == across[1][1]
        assert across[0][0] < upright[0][0] == upright[1][0] < across[1][0] < width
        assert all(x < upright[0][0] for x, _ in places(chart).values())
        assert "local only" in chart
        assert "rows &amp; &lt;x&gt;" in chart


def test_chart_is_the_pages_own():
    series = [Series("one", ((64.0, 0.5), (128.0, 0.2)), 0), Series("two", ((64.0, 0.4), (128.0, 0.1)), 5)]
    marks = [Mark("local only", 1.0), Mark("exact", 512.0, upright=True)]
    wide, narrow = (line_chart(series, marks, WORDS, style=style) for style in ("wide", "narrow"))
    assert wide == line_chart(series, marks, WORDS)  # the same figures give the same bytes
    for chart in (wide, narrow):
        assert "http" not in chart
        assert "<style" not in chart  # would hold for the whole page
        assert "font-family" not in chart
        # every colour is one of the style sheet, so that a dark page is dark all over
        assert set(re.findall(r"(?:stroke|fill): ([^;\"]*)", chart)) <= {
            "none",
            *(f"var(--{name})" for name in ("ink", "quiet", "rule", "series-0", "series-5")),
        }
        assert 'aria-label="a &lt;title&gt;"' in chart
    names, others = (set(re.findall(r'id="([^"]*)"', chart)) for chart in (wide, narrow))
    assert not names & others  # one page holds both
    for chart, own in ((wide, names), (narrow, others)):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', chart)) <= own


def test_token_map_marks_what_was_kept():
    shown = token_map(token_record())
    first = shown[shown.index('data-method="key-diff"') : shown.index('data-method="most attended"')]
    assert (
        '<mark class="s4">&lt;The&gt;</mark> cat<mark class="s2">⏎\n</mark><mark class="s2"> sat</mark>' in first
    )
    assert "<strong>25 %</strong>" in first
    assert first.count('class="bar"') == 2
    assert "hidden" not in first.split(">")[0]
    assert shown.count("hidden") == 1
    assert "<tr><th scope='row'>most attended</th><td>75 %</td></tr>" in shown


PROBE = """<script>
const width = (chart) => chart.getBoundingClientRect().width;
const shown = [...document.querySelectorAll("svg.chart")].filter((chart) => width(chart) > 0);
const pixels = (chart) => (text) => (
  parseFloat(getComputedStyle(text).fontSize) * width(chart) / chart.viewBox.baseVal.width
);
document.body.dataset.found = JSON.stringify({
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  charts: shown.map((chart) => chart.classList[1]),
  smallest: Math.min(...shown.flatMap((chart) => [...chart.querySelectorAll("text")].map(pixels(chart)))),
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize(("width", "chart"), [(400, "narrow"), (1100, "wide")])
def test_a_browser_draws_it(records, tmp_path, width, chart):
    page, picture = tmp_path / "index.html", tmp_path / "page.png"
    page.write_text(demo_page(records).replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    base = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    base += ["--no-first-run", "--disable-background-networking", "--disable-sync", f"--window-size={width},2400"]
    subprocess.run([*base, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=120)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (width, 2400)
    document = subprocess.run(
        [*base, "--dump-dom", page.as_uri()], check=True, capture_output=True, timeout=120, text=True
    ).stdout
    # after the script has run one view is shown and the others are hidden
    views = re.findall(r'<div class="view"[^>]*>', document)
    assert [("hidden" in view) for view in views] == [False, True]
    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', document)[1]))
    assert found["overflow"] <= 0
    assert found["charts"] == [chart]
    assert found["smallest"] > 10  # pixels of the smallest words in the chart
