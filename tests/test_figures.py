"""Figures of README and docs are those of the committed records: tables, and figures in sentences and cells."""

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from prescore.bench.records import read_records

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
PAGES = {
    "vision/tables.py": ("vision.md", 60),
    "language/tables.py": ("reproducing.md", 80),
    "planted/tables.py": ("planted.md", 50),
    "selection/heads.py": ("reproducing.md", 25),
}
"""What prints tables from records, the page that shows them, and how many rows there are at least."""


@pytest.mark.parametrize("script", PAGES)
def test_every_row_that_is_printed_from_records_stands_on_its_page(script):
    page, least = PAGES[script]
    made = subprocess.run([sys.executable, EXPERIMENTS / script], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    rows = [line for line in made.stdout.splitlines() if line.startswith("|")]
    assert len(rows) >= least
    shown = (ROOT / "docs" / page).read_text().splitlines()
    assert [row for row in rows if row not in shown] == []


@pytest.mark.parametrize("study", ["vision", "language"])
def test_a_table_that_is_not_known_is_refused(study):
    command = [sys.executable, EXPERIMENTS / study / "tables.py", "magic"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "usage: tables.py [" in refused.stderr


def records(folder, **wanted):
    """Records of a folder whose configuration has these values."""
    found = read_records(EXPERIMENTS / folder / "records.jsonl")
    return [record for record in found if record.config.items() >= wanted.items()]


def above_exact(folder, n_tokens, label):
    """The largest and the mean loss above exact attention over windows."""
    losses = {}
    for record in records(f"language/{folder}", n_tokens=n_tokens):
        own = losses.setdefault((record.config["document"], record.config["digest"]), {})
        own[record.config["method"]["label"]] = record.results["loss"]
    above = [own[label] - own["exact"] for own in losses.values()]
    return statistics.fmean(above), max(above)


def speedups(folder, field="speedup", **wanted):
    """The smallest and the largest ratio to exact attention."""
    found = [record.results for record in records(f"speed/{folder}", **wanted)]
    ratios = [results[field] if field in results else results["methods"]["default"][field] for results in found]
    return min(ratios), max(ratios)


def long_speeds(n, *methods):
    """Seconds of exact attention, and the ratios of methods on the same heads."""
    (record,) = records("speed/long", n=n)
    found = record.results["methods"]
    return [found["exact"]["seconds"], *(found[name]["speedup"] for name in methods)]


def top1(folder, **wanted):
    found = [record.results["top1"] for record in records(f"vision/{folder}", **wanted)]
    assert found
    return statistics.fmean(found)


def needles(label):
    """Needles found at 8192 tokens."""
    found = records("language/needles", n_tokens=8192)
    own = [record.results["by_depth"] for record in found if record.config["method"]["label"] == label]
    return sum(sum(depth["hits"]) for by_depth in own for depth in by_depth)


PROTECTED = {"budget": 64, "keep_prefix": True}
FIGURES = [
    (
        "README.md",
        r"SmolLM2-135M, 8192 tokens, ten windows.* default \**(\S+?)\** .* worst (\S+) \|.*: (\S+) \|",
        lambda: (*above_exact("default", 8192, "default"), above_exact("default", 8192, "sliding window")[0]),
    ),
    (
        "README.md",
        r"the same, 16,384 tokens.* default (\S+), worst (\S+) \|.*: (\S+) \|",
        lambda: (*above_exact("default", 16384, "default"), above_exact("default", 16384, "sliding window")[0]),
    ),
    (
        "README.md",
        r"gemma3-270m .*16,384 tokens.* default \**(\S+?)\**, worst (\S+) \|.*: (\S+) \|",
        lambda: (
            *above_exact("default-gemma", 16384, "default"),
            above_exact("default-gemma", 16384, "local only")[0],
        ),
    ),
    (
        "README.md",
        r"five layers of a 0.5B model .* default \**(\S+) to (\S+) / (\S+) to (\S+) times",
        lambda: [
            ratio
            for dtype in ("float32", "bfloat16")
            for ratio in speedups("subclusters", study="heads", dtype=dtype)
        ],
    ),
    (
        "README.md",
        r"random tensors, 4 heads, .* default (\S+) / (\S+) times",
        lambda: [speedups("subclusters", study="lengths", n=n)[0] for n in (8192, 32768)],
    ),
    (
        "README.md",
        r"the same five layers, 16,384 keys \| default \**(\S+) to (\S+) times",
        lambda: speedups("subclusters", "speedup_packed", study="steps"),
    ),
    (
        "README.md",
        r"`Selected` centroids \**(\S+) %\** \| random keys (\S+) %, Algorithm 1 .*?(\S+) %",
        lambda: (
            top1("bars", method="centroids", budget=64),
            top1("grid-1000", method="random", **PROTECTED),
            top1("grid-1000", method="kmeans", n_clusters=4, **PROTECTED),
        ),
    ),
    (
        "README.md",
        r"250 needles, .* default \**(\d+)\** \| exact attention: (\d+)",
        lambda: map(needles, ("default", "exact")),
    ),
    (
        "docs/default.md",
        r"\| \*\*8,192\*\* \| \*\*all\*\* \| 10 \| \| \*\*(\S+) \(worst (\S+)\)",
        lambda: above_exact("default", 8192, "default"),
    ),
    (
        "docs/default.md",
        r"\| random tensors, 4 heads \| (\S+)x \| (\S+)x \| (\S+)x \| (\S+)x \| (\S+)x \| (\S+)x \|",
        lambda: [speedups("short", study="lengths", n=n)[0] for n in (1024, 2048, 2049, 2304, 2560, 3072)],
    ),
    (
        "docs/reproducing.md",
        r"\| 65,536 \| (\S+) s \| (\S+)x \| (\S+)x \| (\S+)x \| (\S+)x \|",
        lambda: long_speeds(65536, "hyper", "paper:kmeans", "paper:kmedian", "paper:leverage"),
    ),
    *(
        (
            "docs/default.md",
            rf"\| {name} \| \S+ s \| \S+ s \| \*\*(\S+)x\*\* \|",
            lambda name=name: speedups("subclusters", study="heads", dtype="float32", heads=name)[:1],
        )
        for name in ("smooth", "mixed", "retrieval", "middle", "late")
    ),
]
"""A page, a line of it whose groups are figures, and the same figures from records."""


@pytest.mark.parametrize(("page", "line", "values"), FIGURES, ids=[figure[1][:40] for figure in FIGURES])
def test_a_figure_is_that_of_its_record(page, line, values):
    found = re.search(line, (ROOT / page).read_text())
    assert found, f"{page} has no line {line}"
    for shown, value in zip(found.groups(), values(), strict=True):
        digits = len(shown.partition(".")[2].rstrip("x*"))
        assert float(shown.rstrip("x*")) == pytest.approx(value, abs=0.51 * 10**-digits), found[0]
