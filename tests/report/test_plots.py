"""Curves that can be told apart: colours, markers, equal values, and notes that no curve crosses."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from prescore.bench.language.tables import Summary, _count_hidden
from prescore.bench.plots import line_style
from prescore.bench.records import Record
from prescore.bench.vision import tables as coverage_plots


def test_no_two_lines_look_the_same():
    styles = [line_style(place) for place in range(30)]
    assert len({str(style) for style in styles}) == 30
    for name in ("color", "marker"):
        assert len({style[name] for style in styles[:10]}) == 10
    assert not {style["color"] for style in styles} & {"#000000", "#F0E442"}  # kept apart, and lost on white


@pytest.fixture
def drawn(monkeypatch):
    """The panels of the next plot, which is not saved."""
    panels = []

    @contextmanager
    def keep(path, size, **subplots):
        figure = Figure()
        panels.extend(figure.subplots(**subplots))
        yield figure, panels

    monkeypatch.setattr(coverage_plots, "figure", keep)
    return panels


def coverage_record(method, budget, covered):
    config = {"method": method, "n_clusters": None, "keep_prefix": False, "budget": budget, "thresholds": [0.3]}
    results = {"heavy_0.3_median": covered, "columns_mean": covered, "chance": budget / 197}
    return Record("coverage", f"{method}{budget}", config, 0, results, 1.0)


def test_equal_curves_of_coverage_do_not_hide_each_other(drawn, tmp_path):
    records = [
        coverage_record(method, budget, covered)
        for method, covered in (("kmeans", 0.0), ("kmedian", 0.0), ("leverage", 1.0), ("key-diff", 1.0))
        for budget in (32, 64, 128)
    ]
    coverage_plots.coverage_plot(records, tmp_path / "coverage.png")
    for panel in drawn:
        curves = [line for line in panel.lines if line.get_label() != "chance"]
        points = [point for line in curves for point in zip(*line.get_data(), strict=True)]
        assert len(set(points)) == len(points) == 12
        # lines that are equal are lines one above the other, further apart than they are wide
        heights = sorted({y for _, y in points})
        assert all(upper - lower > 2 for lower, upper in pairwise(heights))
        assert len(heights) == 4
        low, high = panel.get_ylim()
        assert low < 0
        assert high > 100  # a line at either end is not cut in half
        assert list(panel.get_xticks()) == [32, 64, 128]


def test_the_note_about_hidden_points_is_outside_of_the_frame():
    axes = Figure().subplots()
    above = Summary("x", "prescored", {}, {}, 64, "all", {"a": 9.0}, None, 1.0, 1.0)
    _count_hidden(axes, [above], 4.5)
    (note,) = axes.texts
    assert note.xy[1] > 1
    assert note.get_ha() == "right"  # the title is at the left
