"""The line chart inside the page: its points, its marks, its labels, its colours."""

import re
from itertools import pairwise

import pytest

from prescore.bench.demo.page import HEIGHT, NARROW, WIDTH, Mark, Series, Words, apart, line_chart

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


def test_every_line_is_named_in_its_colour_and_no_two_names_overlap():
    series = [Series(f"line {n}", ((64.0, 0.5 + n / 1000), (128.0, 0.2 + n / 1000)), n) for n in range(5)]
    named = r"<text ([^>]*)>(line \d)</text>"
    for width, style in ((WIDTH, "wide"), (NARROW, "narrow")):
        chart = line_chart(series, [], WORDS, width=width, style=style)
        places = []
        for look, name in re.findall(named, chart):
            assert f"var(--series-{name[-1]})" in look
            x, y = (float(re.search(rf' {axis}="([\d.]+)"', look)[1]) for axis in "xy")
            assert x < width
            places.append(y)
        assert len(places) == 5
        assert all(lower - upper > 11 for upper, lower in pairwise(sorted(places)))


def test_things_that_would_overlap_are_moved_apart():
    assert apart([0.1, 0.5, 0.9], [0.1] * 3) == [0.1, 0.5, 0.9]
    assert apart([0.5, 0.5, 0.5], [0.1] * 3) == pytest.approx([0.5, 0.6, 0.7])
    assert apart([0.98, 0.99, 1.0], [0.2] * 3) == pytest.approx([0.5, 0.7, 0.9])
    assert apart([], []) == []
