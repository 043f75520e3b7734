"""The report page: built from records alone, self-contained, and drawn by a real browser."""

import json
import re
import shutil
import struct
import subprocess
from html import unescape
from html.parser import HTMLParser

import pytest

from prescore.bench.demo.page import (
    DOCUMENTS,
    compare,
    comparison_table,
    demo_page,
    headline,
    reading_section,
    telling,
    token_map,
)

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def of_part(records, part):
    return next(record for record in records if record.config["part"] == part)


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


def test_headline_says_rows_loss_time_and_what_the_default_does_alone(records):
    said = headline(compare(records, "equal rows"))
    assert "512 of 2048 key rows" in said
    assert (
        "0.1000\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.0037 nats" in said
    )  # 32 stretches that are 0.01 above or below
    assert "1.0 s</strong> for attention instead of 4.0 s: <strong>4.0 times as fast" in said
    assert "does by itself at 4096 tokens; up to 2048 it reads everything" in said


def test_headline_of_a_short_text_says_that_the_default_alone_is_exact(records):
    for record in records:
        if record.config["part"] == "loss" and record.config["method"]["label"] == "default":
            record.config["method"]["settings"]["exact_until"] = 0
    said = headline(compare(records, "equal rows"))
    assert "Left alone" in said
    assert "reads everything at 4096 tokens" in said


def test_headline_without_exact_attention_claims_nothing(records):
    lines = compare(
        [r for r in records if r.config["part"] != "loss" or r.config["method"]["kind"] != "exact"], "equal rows"
    )
    assert not re.search(r"\d", headline(lines))


def test_intervals_are_over_stretches_of_all_windows(records):
    lines = {line.name: line for line in compare(records, "equal rows")}
    assert [lines["default"].n_windows, lines["default"].n_stretches] == [2, 32]
    assert lines["default"].above == pytest.approx(0.1)
    assert lines["exact"].half_width is None
    one = {line.name: line for line in compare(records[:5], "equal rows")}
    assert one["default"].n_stretches == 16
    assert one["default"].half_width > lines["default"].half_width
    records[1].figures.pop("stretch_losses")
    with pytest.raises(ValueError, match="must have losses by stretches of its text, got None"):
        compare(records, "equal rows")


def test_page_shows_the_figures_of_the_records(records):
    page = demo_page(records)
    assert "prescore demo --out &#x27;a b&#x27;" in page
    assert "torch 2.13" in page
    assert "a &lt;b&gt; &amp; c" in page
    assert "± is half of a 95 % interval over 32 stretches of 128 tokens from 2 windows" in page
    assert page.count("↓ lower is better") == 3
    figures = re.findall(r"<figure class='measure'>.*?</figure>", page)
    loss, seconds, rows = (
        re.findall(r"class='name'>([^<]*)<.*?class='fill' style='width:([\d.]+)%", f) for f in figures
    )
    assert [name for name, _ in loss] == [name for name, _ in seconds] == [name for name, _ in rows]
    # bars begin at the left and are as long as what they stand for; far too much is cut off
    assert dict(seconds)["exact"] == "100.0"
    assert dict(seconds)["default"] == "25.0"
    assert float(dict(loss)["default"]) == pytest.approx(100 * 0.1 / 1.3, abs=0.1)
    assert dict(loss)["selection + sinks"] == "100.0"
    assert "bar-row cut'><span class='name'>selection" in figures[0]


def test_page_of_a_run_without_time_says_how_to_get_the_rest(records):
    few = [r for r in records if r.config["part"] != "tokens" and "budgets" not in r.key]
    page = demo_page(few)
    assert page.count("No time was left for it") == 2
    assert '<svg class="chart' not in page


def test_documents_are_linked_where_they_are(records):
    page = demo_page(records, {"default": "../docs/default.md"})
    assert '<a href="../docs/default.md">' in page
    assert page.count("<a href=") == 1
    assert all(f"docs/{name}.md" in page for name in DOCUMENTS)


def test_table_for_the_terminal(records):
    table = comparison_table(records)
    assert [row[0] for row in table.rows] == [
        "exact",
        "default",
        "local only",
        "sliding window + sinks",
        "selection + sinks",
    ]
    assert table.rows[1][1:] == ("2", "2.1000", "0.1000 ± 0.0037", "90 %", "512", "1.00 s", "4.00x")


def test_reading_can_hold_any_text(records):
    record = of_part(records, "reading")
    section = reading_section(record)
    assert section.count("</script>") == 1
    data = json.loads(section[section.index('json">') + 6 : section.index("</script>")])
    assert data["pieces"][5] == "</script>"
    assert data["start"] == 3  # of the words, the one that found most
    record.figures["heads"] = []
    assert "local by design" in reading_section(record)


def test_the_first_token_shown_is_a_word_if_there_is_one():
    looks = [[0, 0, found] for found in (1, 9, 5)]
    assert telling(looks, [" cat", "..", " dog"]) == 2
    assert telling(looks, [".", "..", "!"]) == 1


def test_token_map_marks_what_was_kept(records):
    shown = token_map(of_part(records, "tokens"))
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
const left = (name) => [...document.querySelectorAll(name)].map((node) => node.getBoundingClientRect().left);
const words = (name) => [...document.querySelectorAll(name)].map((node) => node.textContent);
const state = () => ({
  picked: words(".token.picked"), asked: words(".asked")[0], weights: words(".weights"), rows: words(".rows li"),
  strokes: [...document.querySelectorAll(".card")].map((card) => card.querySelectorAll("rect.found").length),
  heads: words(".head .value"), pale: words(".token.later"),
  chosen: [...document.querySelectorAll(".card select")].map((choice) => choice.value),
});
const before = state();
document.querySelectorAll(".token")[1].click();
const clicked = state();
document.querySelectorAll(".head")[1].click();
const swapped = state();
const enter = new KeyboardEvent("keydown", { key: "Enter", bubbles: true });
document.querySelectorAll(".token")[2].dispatchEvent(enter);
const typed = state();
const tracks = [...document.querySelectorAll(".track")].map((node) => node.getBoundingClientRect());
document.body.dataset.found = JSON.stringify({
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  charts: shown.map((chart) => chart.classList[1]),
  smallest: Math.min(...shown.flatMap((chart) => [...chart.querySelectorAll("text")].map(pixels(chart)))),
  panels: new Set(left("figure.measure")).size,
  cards: new Set(left(".card")).size,
  shortest: Math.min(...tracks.map((box) => box.width)),
  offset: Math.max(...[...document.querySelectorAll(".track")].map(
    (node) => node.querySelector(".fill").getBoundingClientRect().left - node.getBoundingClientRect().left)),
  before, clicked, swapped, typed,
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize(("width", "chart", "columns"), [(400, "narrow", (1, 1)), (1200, "wide", (3, 2))])
def test_a_browser_draws_it_and_tokens_can_be_picked(records, tmp_path, width, chart, columns):
    page, picture = tmp_path / "index.html", tmp_path / "page.png"
    page.write_text(demo_page(records).replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    base = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    base += ["--no-first-run", "--disable-background-networking", "--disable-sync", f"--window-size={width},2400"]
    document = subprocess.run(
        [*base, f"--screenshot={picture}", "--dump-dom", page.as_uri()],
        check=True,
        capture_output=True,
        timeout=300,
        text=True,
    ).stdout
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (width, 2400)
    # after the script has run one view of the scorers is shown and the others are hidden
    views = re.findall(r'<div class="view"[^>]*>', document)
    assert [("hidden" in view) for view in views] == [False, True]
    found = json.loads(
        unescape(re.search(r'data-found="([^"]*)"', document)[1]).replace("\N{NO-BREAK SPACE}", " ")
    )
    assert found["overflow"] <= 0
    assert found["charts"] == [chart]
    assert found["smallest"] > 10  # pixels of the smallest words in the chart
    # methods stand below one another in every panel, with bars long enough to be compared, all from the left
    assert (found["panels"], found["cards"]) == columns
    assert found["shortest"] > 200
    assert found["offset"] == 0
    check_what_was_picked(found)


def check_what_was_picked(found):
    before, clicked, swapped, typed = (found[name] for name in ("before", "clicked", "swapped", "typed"))
    assert before["picked"] == [" came"]
    assert before["pale"] == []
    assert before["strokes"] == [2, 0]
    assert before["heads"] == ["2", "0"]
    assert before["rows"] == [
        "40.0 %9 before<b> the cat sat on</script> mat⏎ and a",
        "30.0 %6 before<b> the cat sat on</script> mat⏎ and a dog came",
    ]
    assert "Token 9,  a, may see 10 keys" in clicked["asked"]
    assert clicked["picked"] == [" a"]
    assert clicked["pale"] == [" dog", " came"]
    assert clicked["strokes"] == [1, 0]
    assert clicked["weights"] == [
        "Weight: first tokens 5 %, local part 25 % (3 keys), found 60 % (1 rows), centroids 10 % (for 5 keys).",
        "Weight: first tokens 5 %, local part 25 % (3 keys), found 0 % (0 rows), centroids 70 % (for 6 keys).",
    ]
    assert clicked["chosen"] == ["0", "1"]
    assert swapped["chosen"] == ["1", "1"]  # a head's bar puts it on the left
    assert swapped["weights"][0] == clicked["weights"][1]
    assert typed["picked"] == [" dog"]
