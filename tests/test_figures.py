"""Figures of README and docs are those of the committed records: tables, and figures in sentences and cells."""

import json
import re
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from prescore.bench.records import read_records
from prescore.bench.speed.gpu_model import GPUS, predict

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
PAGES = {
    "vision/tables.py": ("vision.md", 60),
    "language/tables.py": ("reproducing.md", 80),
    "planted/tables.py": ("planted.md", 50),
    "selection/heads.py": ("reproducing.md", 25),
    "speed/tables.py": ("reproducing.md methods.md", 15),
    "parallel/planned.py": ("parallel.md", 9),
}
"""What prints tables from records, the pages that show them, and how many lines there are at least."""


@cache
def printed_by(script):
    """The tables that a script prints."""
    made = subprocess.run([sys.executable, EXPERIMENTS / script], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return tables(made.stdout)


@pytest.mark.parametrize("script", PAGES)
def test_every_table_that_is_printed_from_records_stands_on_its_page(script):
    pages, least = PAGES[script]
    printed = printed_by(script)
    assert sum(map(len, printed)) >= least
    shown = [table for page in pages.split() for table in tables((ROOT / "docs" / page).read_text())]
    assert [table for table in printed if table not in shown] == []


def tables(text):
    """Runs of lines that begin with a bar."""
    return ["".join(lines).splitlines() for lines in re.findall(r"(?m)(?:^\|.*\n?)+", text)]


@pytest.mark.parametrize("study", ["vision", "language"])
def test_a_table_that_is_not_known_is_refused(study):
    command = [sys.executable, EXPERIMENTS / study / "tables.py", "magic"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "usage: tables.py [" in refused.stderr


read = cache(read_records)


def records(folder, **wanted):
    """Records of a folder whose configuration has these values; None = it has no such field, or None."""
    found = read(EXPERIMENTS / folder / "records.jsonl")
    return [record for record in found if all(record.config.get(name) == value for name, value in wanted.items())]


def above_exact(folder, n_tokens, label):
    """The largest and the mean loss above exact attention over windows."""
    losses = {}
    for record in records(f"language/{folder}", n_tokens=n_tokens):
        own = losses.setdefault((record.config["document"], record.config["digest"]), {})
        own[record.config["method"]["label"]] = record.results["loss"]
    above = [own[label] - own["exact"] for own in losses.values()]
    return statistics.fmean(above), max(above)


def speedups(folder, field="speedup", *, backward=False, **wanted):
    """The smallest and the largest ratio to exact attention, causal."""
    kinds = {(True, backward), (None, backward or None)}  # of random tensors, and of saved heads
    found = records(f"speed/{folder}", **wanted)
    found = [r.results for r in found if (r.config.get("causal"), r.config.get("backward")) in kinds]
    ratios = [results[field] if field in results else results["methods"]["default"][field] for results in found]
    return min(ratios), max(ratios)


def long_speedup(n, method):
    """Ratio to exact attention of a causal forward pass."""
    found = records("speed/long", n=n, causal=True, backward=False)
    (results,) = [record.results["methods"] for record in found if method in record.config["methods"]]
    return results[method]["speedup"]


def top1(folder, **wanted):
    found = [record.results["top1"] for record in records(f"vision/{folder}", **wanted)]
    assert found
    return statistics.fmean(found)


def needles(label):
    """Needles found at 8192 tokens."""
    found = records("language/needles", n_tokens=8192)
    own = [record.results["by_depth"] for record in found if record.config["method"]["label"] == label]
    return sum(sum(depth["hits"]) for by_depth in own for depth in by_depth)


def ruler_scores(folder):
    """Mean score in per cent by method, of the prompts that every method read."""
    scores = {}
    for record in records(f"ruler/{folder}"):
        own = scores.setdefault(record.config["digest"], {})
        own[record.config["method"]["label"]] = record.results["score"]
    labels = ("exact", "default", "sliding window")
    shared = [own for own in scores.values() if own.keys() >= set(labels)]
    return [100 * statistics.fmean(own[label] for own in shared) for label in labels]


def presets(folder, *fields, n=32768, backward=False, causal=True):
    """Results of the paper's preset with k-means, in percent."""
    found = records(folder, study="lengths", n=n, causal=causal, backward=backward)
    (own,) = [r.results["methods"]["paper:kmeans"] for r in found if "paper:kmeans" in r.config["methods"]]
    own = {**own, **own["shares"]}
    return [100 * sum(own[name] for name in field.split("+")) for field in fields]


def first_context(folder, label):
    """Loss above exact attention in the first LongBench context, and of exact attention itself."""
    own = by_label(records(f"language/{folder}", document="sample.jsonl#66f36490821e116aacb2cc22"))
    return own[label]["loss"] - (0 if label == "exact" else own["exact"]["loss"])


def coupled(name, *budgets):
    """What a coupling costs k-means with as many keys."""
    labels = [f"kmeans + Hyper, top {budget}, 8 samples" for budget in budgets]
    return [
        first_context("appendix-f", f"{label}, {name}") - first_context("appendix-f", label) for label in labels
    ]


def is_exact(record):
    return record.config["method"]["label"] == "exact"


def step(before, after):
    """How much better one line of Table 1 is than another."""
    return above_exact("table1", 8192, before)[0] - above_exact("table1", 8192, after)[0]


HYPER, KMEANS = "HyperAttention, 64 samples", "kmeans + Hyper, top 512, 64 samples"
BLOCKWISE = "kmeans + Hyper, top 2048, 64 samples, blockwise"
PROTECTED = {"budget": 64, "keep_prefix": True}
FIGURES = [
    (
        "README.md",
        r"SmolLM2-135M, 8192 tokens, ten windows.* default \**(\S+?)\** .* worst (\S+) \|.*: (\S+) \|",
        lambda: (*above_exact("default", 8192, "default"), above_exact("default", 8192, "sliding window")[0]),
    ),
    (
        "README.md",
        r"the same, 16,384 tokens.* default \**(\S+?)\** .*worst (\S+) \|.*: (\S+) \|",
        lambda: (*above_exact("default", 16384, "default"), above_exact("default", 16384, "sliding window")[0]),
    ),
    (
        "README.md",
        r"gemma3-270m .*16,384 tokens.* default \**(\S+?)\** .*worst (\S+) \|.*: (\S+) \|",
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
        r"the same, forward \+ backward, float32 \| default \**(\S+) to (\S+) times",
        lambda: speedups("subclusters", study="heads", n=16384, backward=True),
    ),
    (
        "README.md",
        r"prompt of 16,384 tokens.* default \**(\S+) s\** \(.*\) \| .*: (\S+) s; .*: (\S+) s \|",
        lambda: [
            records("speed/rivals", part="time", engine=engine, n=16384)[0].results["seconds_to_first_token"]
            for engine in ("prescore int8", "exact bfloat16", "openvino")
        ],
    ),
    (
        "README.md",
        r"random tensors, 4 heads, .* default (\S+) / (\S+) times.*all keys: (\S+) / (\S+) times",
        lambda: [
            *(speedups("subclusters", study="lengths", n=n)[0] for n in (8192, 32768)),
            *(long_speedup(n, "paper:kmeans") for n in (8192, 32768)),
        ],
    ),
    (
        "README.md",
        r"the same five layers, 16,384 keys \| default \**(\S+) to (\S+) times",
        lambda: speedups("subclusters", "speedup_packed", study="steps"),
    ),
    (
        "README.md",
        r"`Selected` centroids \**(\S+) %\** \| random keys (\S+) %, .*Algorithm 1 .*?(\S+) %, .*?(\S+) % \|",
        lambda: (
            top1("bars", method="centroids", budget=64),
            top1("grid-1000", method="random", **PROTECTED),
            top1("grid-1000", method="kmeans", n_clusters=4, **PROTECTED),
            top1("grid-1000", method="published", n_clusters=4, **PROTECTED),
        ),
    ),
    (
        "README.md",
        r"250 needles .* default \**(\d+)\** \| exact attention: (\d+)",
        lambda: map(needles, ("default", "exact")),
    ),
    (
        "docs/evaluation.md",
        r"Exact attention scores (\S+) % .* default (\S+) % .*, a sliding window of as many\s+keys (\S+) %",
        lambda: ruler_scores("smollm2-bfloat16"),
    ),
    (
        "docs/evaluation.md",
        r"exact attention\s+(\S+) % \(43 to 89\), default (\S+) %, a sliding window of as many keys (\S+) %;",
        lambda: ruler_scores("gemma3-270m-bfloat16"),
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
        r"HyperAttention from (\S+) to (\S+) nats above exact attention",
        lambda: [above_exact("baselines", 4096, f"HyperAttention{sinks}")[0] for sinks in ("", ", 4 sinks")],
    ),
    (
        "docs/reproducing.md",
        r"means of three contexts; exact (\S+), \*\*local only (\S+)\*\*",
        lambda: (
            statistics.fmean(r.results["loss"] for r in records("language/appendix-a") if is_exact(r)),
            above_exact("appendix-a", 1024, "local only")[0],
        ),
    ),
    (
        "docs/reproducing.md",
        r"contexts alone; exact (\S+), \*\*local only (\S+)\*\*",
        lambda: [first_context("appendix-a", label) for label in ("exact", "local only")],
    ),
    (
        "docs/reproducing.md",
        r"Exact (\S+), local only (\S+), HyperAttention without a selection (\S+)\. Diff",
        lambda: [
            first_context("appendix-f", label) for label in ("exact", "local only", "HyperAttention, 8 samples")
        ],
    ),
    (
        "docs/reproducing.md",
        r"twice costs (\S+) nats at 16 [^.]*\.(?:.*\n)*?.*by n\*\* costs (\S+) nats.*, (\S+) at 64 and (\S+) at",
        lambda: [*coupled("overlap counted", 16), *coupled("residual by n", 16, 64, 256)],
    ),
    (
        "docs/reproducing.md",
        r"cuts them: worse by (\S+) nats at 16\n.* at most (\S+) elsewhere",
        lambda: coupled("blocks over all keys", 16, 64),
    ),
    (
        "docs/reproducing.md",
        r"worth (\S+) nats \(paper 0.76\), with it (\S+) \(paper\n.*alone is worth (\S+) \(paper 0.39\)",
        lambda: [step(HYPER, KMEANS), step(f"{HYPER}, blockwise", BLOCKWISE), step(HYPER, f"{HYPER}, blockwise")],
    ),
    (
        "docs/methods.md",
        r"causal forward (\d+) / (\d+) /\s+(\d+) % .* backward (\d+) / (\d+) % .* tokens, (\d+) %\s+.* (\d+) %",
        lambda: [
            presets("speed/long", "share_of_bound", n=n, causal=causal, backward=backward)[0]
            for causal, backward, n in (
                *((True, False, n) for n in (8192, 32768, 65536)),
                *((True, True, n) for n in (32768, 65536)),
                *((False, backward, 16384) for backward in (False, True)),
            )
        ],
    ),
    (
        "docs/methods.md",
        r"scoring (\d+) %, hashing and sorting (\d+) %, operator (\d+) %",
        lambda: presets("speed/long", "scoring", "hashing+sorting", "attending"),
    ),
    (
        "docs/start.md",
        r"2048 selected of 131,072 keys takes (\S+) ms, exact attention (\S+) ms",
        lambda: [
            1000 * records("speed", study="decode")[0].results["seconds"][name] for name in ("selected", "exact")
        ],
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
        assert agrees(shown.rstrip("x*"), value), found[0]


def agrees(shown, value):
    """Whether a printed figure is this value, rounded; None is a value of which no record is kept."""
    digits = len(shown.partition(".")[2])
    return value is None or float(shown.replace(",", "")) == pytest.approx(value, abs=0.51 * 10**-digits)


# Tables that no script prints. A function gets the rows of a table up to one, and gives the figures of that one,
# from its second column on.

TEXTS = {
    "*Middlemarch*": "Middlemarch",
    "*Moby-Dick*": "Moby-Dick",
    "Python's reference": "python-reference",
    "Python's source code": "python-source",
    "a LongBench v2 record": "sample.jsonl",
    "all": "",
}


def first_number(text):
    return int(re.search(r"\d[\d,]*", text)[0].strip(",").replace(",", ""))


def by_label(found):
    return {record.config["method"]["label"]: record.results for record in found}


def held_out(rows, *folders):
    """Windows, exact loss, mean and worst loss above it of default, sliding window and local; keys read, times."""
    n_tokens, text = first_number(rows[-1][0]), rows[-1][1].strip("*") if "all" in rows[-1][1] else rows[-1][1]
    windows = {}
    for record in (found for folder in folders for found in records(f"language/{folder}", n_tokens=n_tokens)):
        if record.config["document"].startswith(TEXTS[text]):
            windows.setdefault(record.config["digest"], []).append(record)
    found = list(map(by_label, windows.values()))
    values = [len(found)] + [statistics.fmean(own["exact"]["loss"] for own in found)] * (text != "all")
    for label in ("default", "sliding window", "local only"):
        above = [own[label]["loss"] - own["exact"]["loss"] for own in found if label in own]
        values += [statistics.fmean(above), max(above)][: len(found)] if above else [None, None][: len(found)]
    if text == "all":
        return values
    means = [("default", "reads_per_query")]
    means += [(label, "attention_processor_seconds") for label in ("exact", "default")]
    return values + [statistics.fmean(own[label][field] for own in found) for label, field in means]


def needles_by_depth(rows):
    """Needles found at each depth and in all; then of how many, or the difference to exact attention in points."""
    is_exact = "exact" in rows[-1][0]
    n_tokens = first_number(rows[-1][0] if is_exact else rows[-2][0])
    hits = {}
    for record in records("language/needles", n_tokens=n_tokens):
        counts = [sum(depth["hits"]) for depth in record.results["by_depth"]]
        hits.setdefault(record.config["method"]["label"], []).append(counts)
    depths = {label: [sum(column) for column in zip(*counts, strict=True)] for label, counts in hits.items()}
    if is_exact:
        return [*depths["exact"], sum(depths["exact"]), 250]
    return [*depths["default"], sum(depths["default"]), (sum(depths["default"]) - sum(depths["exact"])) / 2.5]


def weights(rows):
    """Divergence, loss, keys read and times of a candidate on SmolLM2; divergence and keys read on gemma."""
    lines = (EXPERIMENTS / "routed/frontier/candidates.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    found = [result for result in found if result["candidate"] == rows[-1][0].strip("*")]
    fields = ("divergence", "loss", "reads_per_query", "attention_processor_seconds")
    wanted = [("smollm2", field) for field in fields]
    wanted += [("gemma-3-270m-q4_k_m", field) for field in ("divergence", "reads_per_query")]
    return [statistics.fmean(own[field] for own in found if own["model"] == model) for model, field in wanted]


METHODS = {"default": "default", "paper": "paper:kmeans", "HyperAttention": "hyper"}


def lengths(rows):
    """Ratios by length; the first row of a group says which mask and pass it has."""
    group = next(row[0] for row in reversed(rows) if row[0].startswith("**"))
    wanted = {"causal": "causal" in group, "backward": "backward" in group, "study": "lengths"}
    label = rows[-1][0].split(": ")[-1]
    folder = "speed/subclusters" if label == "default" else "speed"
    values = []
    for length, cell in zip((2048, 4096, 8192, 16384, 32768), rows[-1][1:], strict=True):
        other = [first_number(cell.partition("at ")[2])] if "at " in cell else []
        if cell:
            (record,) = records(folder, n=(*other, length)[0], **wanted)
            values += [record.results["methods"][METHODS[label.partition(",")[0]]]["speedup"], *other]
    return values


def short_lengths(rows):
    """Ratios on random tensors, or the smallest and largest on real layers."""
    study = {"study": "heads"} if "real" in rows[-1][0] else {"study": "lengths"}
    found = [speedups("short", n=n, **study) for n in (1024, 2048, 2049, 2304, 2560, 3072)]
    return [ratio for pair in found for ratio in pair[: 2 if "real" in rows[-1][0] else 1]]


SPEED_FIELDS = ("seconds", "speedup", "error", "reads_per_query")


def real_layers(rows):
    """Times, ratio, error and keys read of one layer, or of several in each cell."""
    dtype, names = rows[-1][0].split(": ") if ":" in rows[-1][0] else ("float32", rows[-1][0])
    values = []
    wanted = {"study": "heads", "dtype": dtype, "backward": None}
    found = [records("speed/subclusters", heads=name, **wanted) for name in names.split(" / ")]
    for method, field in [("exact", "seconds"), *(("default", name) for name in SPEED_FIELDS)]:
        values += [record.results["methods"][method][field] for (record,) in found]
    return values


def real_layers_backward(rows):
    """Ratios of forward + backward by length."""
    return [speedups("subclusters", n=n, heads=rows[-1][0], backward=True)[0] for n in (2304, 4096, 8192, 16384)]


def wide_heads(rows):
    """Ratios on random heads in three dtypes."""
    heads = f"random-{first_number(rows[-1][0])}"
    return [speedups("wide", heads=heads, dtype=dtype)[0] for dtype in ("float32", "bfloat16", "float16")]


def steps(rows):
    """Milliseconds, ratios and error of a step: smallest and largest of the real layers, or one of random keys."""
    is_real = "real" in rows[-1][0]
    wanted = {} if is_real else {"heads": None, "n": first_number(rows[-1][0].partition("random")[2])}
    folder = "speed/subclusters" if is_real else "speed"
    found = [record.results for record in records(folder, study="steps", **wanted)]
    columns = [[1000 * own["seconds"][name] for own in found] for name in ("exact", "packed", "routed")]
    columns += [[own[name] for own in found] for name in ("speedup", "speedup_packed", "error")]
    counts = [len(NUMBER.findall(cell)) for cell in rows[-1][1:]]
    return [value for own, n in zip(columns, counts, strict=True) for value in (min(own), max(own))[:n]]


PARTS = {
    "queries before `exact_until`": "exact queries",
    "key index": "index",
    "local keys": "local",
    "far keys read": "keys",
}


def parts(rows):
    """Milliseconds and percent of exact attention's rate, on two layers."""
    values = []
    for heads in ("smooth", "retrieval"):
        (record,) = records("speed", study="parts", heads=heads)
        part = record.results["parts"][PARTS.get(rows[-1][0], rows[-1][0])]
        values += [1000 * part["seconds"], 100 * part["of_exact_rate"]]
    return values


LEVEL_LENGTHS = (2304, 4096, 8192, 16384, 32768)


def levels(rows):
    """Ratios by length; a dash was not measured."""
    label = rows[-1][0]
    wanted = {"study": "heads", "heads": "mixed"} if "mixed" in label else {"study": "lengths"}
    folder = "subclusters" if "avx512" in label else f"levels/{label.split('`')[1]}"
    measured = [n for n, cell in zip(LEVEL_LENGTHS, rows[-1][1:], strict=True) if cell != "-"]
    return [speedups(folder, n=n, **wanted)[0] for n in measured]


ENGINES = {
    "transformers, bfloat16": "exact bfloat16",
    "transformers, int8 weights": "exact int8",
    "the default, bfloat16": "prescore bfloat16",
    "the default, int8 weights": "prescore int8",
    "OpenVINO, int8 weights": "openvino",
    "OpenVINO, int8 weights, XAttention": "openvino xattention",
    "llama.cpp, 4-bit weights": "llama.cpp",
}


def rival_losses(rows):
    engine = ENGINES[rows[-1][0].replace(" 2026.4.1", "")]
    values = []
    for model in ("smollm2", "gemma3-270m"):
        (record,) = records("speed/rivals", part="loss", engine=engine, model=model)
        values.append(record.results["loss"])
    return values


def rival_times(*prompts):
    """Seconds to the first token, tokens per second and megabytes of each model and number of tokens."""

    def derive(rows):
        values = []
        for model, n in prompts:
            engine = ENGINES[rows[-1][0]]
            (record,) = records("speed/rivals", part="time", engine=engine, model=model, n=n)
            names = ("seconds_to_first_token", "tokens_per_second", "peak_megabytes")
            values += [record.results[name] for name in names]
        return values

    return derive


def exchanged(rows):
    """Megabytes of the busiest rank and their share of an all-gather."""
    name = {"`Exact()`": "all-gather", "`Selected(top_k=2048)`": "selected"}.get(rows[-1][1], "paper")
    values = [2048] * ("2048" in rows[-1][1])
    for ranks, causal in ((2, False), (2, True), (4, False), (4, True)):
        (record,) = records("parallel/bytes", n=first_number(rows[-1][0]), ranks=ranks, causal=causal)
        own = record.results["methods"][name]
        values += [own["bytes"] / 1e6] + [own["of_all_gather"]] * (name != "all-gather")
    return values


def rank_losses(rows):
    """Losses, megabytes sent, peak and its growth of exact attention, the paper's method and the default."""
    ranks = rows[-1][0].split()[0]
    own = by_label(records("parallel/process" if ranks == "one" else f"parallel/ranks-{ranks}"))
    own = [own[label] for label in ("exact", "paper:kmeans, sample_size=64", "default") if label in own]
    values = [result["loss"] for result in own]
    if ranks != "one":
        values += [result["bytes_sent_per_layer"] / 1e6 for result in own]
        values += [result["peak_megabytes"] for result in own]
        values += [result["peak_megabytes"] - result["start_megabytes"] for result in own]
    return values


def vits(rows):
    """The paper's figures, which `PUBLISHED` has, and ours."""
    keys = first_number(rows[-1][1])
    name = next(row[0] for row in reversed(rows) if row[0])
    clusters = 6 if "6" in name else 4
    own = {"budget": keys, "keep_prefix": True, "n_clusters": clusters}
    if "exact" in name:
        return [keys, None, None, top1("grid-1000", method="exact")]
    if "trained" in name:
        return [keys, *(None for _ in NUMBER.findall(" ".join(rows[-1][2:])))]
    if "k-means" in name:
        rules = ("kmeans", "kmeans-farthest-sample", "published")[: 3 if clusters == 4 else 2]
        return [keys, None, None, *(top1("grid-1000", method=rule, **own) for rule in rules)]
    method = "leverage" if "Lev" in name else "key-norm"
    return [keys, None, None, top1("grid-1000", method=method, **own | {"n_clusters": None})]


def vit_speeds(rows):
    """Ratio to exact attention and top-1 by budget."""
    method = {"k-means, nearest": "kmeans", "`centroids`": "centroids"}.get(rows[-1][0], rows[-1][0])
    values = []
    for budget in (65, 129, 257):
        (record,) = records("vision/speed-577", method=method, budget=budget)
        values += [record.results["attention_seconds_exact"] / record.results["attention_seconds"]]
        values += [record.results["top1"]]
    return values


def vit_default(rows):
    """Top-1, agreement with exact attention and divergence from it."""
    method = re.search(r"`?(exact|routed|random)", rows[-1][0])[1]
    (record,) = records("vision/default-577", method=method, budget=first_number(rows[-1][1]))
    return [record.config["budget"], *(record.results[name] for name in ("top1", "agreement", "kl"))]


def served(rows):
    """Seconds to the first token, tokens and steps per second of vLLM's own attention and the default."""
    n_tokens, at_once = first_number(rows[-1][0]), "at once" in rows[-1][0]
    lines = map(json.loads, (EXPERIMENTS / "serving/vllm.jsonl").read_text().splitlines())
    found = [line for line in lines if line["tokens"] == n_tokens and (line["requests"] > 1) == at_once]
    firsts, rates, steps = [], [], []
    for label in ("exact", "default"):
        own = [line for line in found if line["label"] == f"{label}, 2 threads"]
        firsts.append(statistics.fmean(line["first_token_seconds"] for line in own))
        seconds = statistics.fmean(line["batch_seconds"] for line in own)
        rates.append(own[0]["requests"] * (n_tokens + 64) / seconds)
        steps.append(statistics.fmean(line["tokens_per_second"] for line in own))
    return [*firsts, *rates, *([] if at_once else steps)]


def tiles(rows):
    """Smallest and largest of the layers: what one query needs, and unions of tiles."""
    name, unit = ("searched", 100) if "searched" in rows[-1][0] else ("hits", 1)
    bands = [record.results["bands"][-1] for record in records("gpu")]
    return [unit * end(band[f"{name}_{n}"] for band in bands) for n in (1, 16, 64, 128) for end in (min, max)]


def predicted(rows):
    """FlashAttention's time over the predicted one."""
    values = []
    for gpu, n_rows in (("A100", 32), ("H100", 32), ("H100", 64), ("B200", 32), ("MI300X", 64)):
        asked = GPUS[gpu], first_number(rows[-1][0]), n_rows
        times = [predict(record.config, record.results, *asked) for record in records("gpu")]
        exact = sum(own["FlashAttention"] for own in times)
        values.append(exact / (sum(sum(own.values()) for own in times) - exact))
    return values


NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
HELD_OUT = "| tokens | text | windows |"
TABLES = [
    ("default.md", HELD_OUT, 0, lambda rows: held_out(rows, "default", "default-32768")),
    ("default.md", HELD_OUT, 1, lambda rows: held_out(rows, "default-gemma")),
    ("default.md", "| `min_weight` |", 0, weights),
    ("default.md", "| tokens | depth 0.1 |", 0, needles_by_depth),
    ("default.md", "| exact time / method time |", 0, lengths),
    ("default.md", "| exact time / default time, causal, forward |", 0, short_lengths),
    ("default.md", "| 16,384 tokens, 14 heads over 2", 0, real_layers),
    ("default.md", "| exact time / default time | float32", 0, wide_heads),
    ("default.md", "| exact time / default time, causal, forward + backward", 0, real_layers_backward),
    ("default.md", "| one step, 14 heads over 2", 0, steps),
    ("default.md", "| part of a causal call", 0, parts),
    ("default.md", "| tokens | 2304 |", 0, levels),
    ("deployment.md", "| engine | loss: SmolLM2 |", 0, rival_losses),
    ("gpu.md", "| at 15,616 far keys |", 0, tiles),
    ("gpu.md", "| tokens | A100, 32 rows |", 0, predicted),
    (
        "deployment.md",
        "| engine | SmolLM2, 8192 tokens: first token |",
        0,
        rival_times(("smollm2", 8192), ("gemma3-270m", 16384)),
    ),
    ("deployment.md", "| engine | gemma3-270m, 32,768 tokens", 0, rival_times(("gemma3-270m", 32768))),
    ("deployment.md", "| engine | gemma3-270m, 8192 tokens", 0, rival_times(("gemma3-270m", 8192))),
    ("parallel.md", "| tokens | configuration |", 0, exchanged),
    ("parallel.md", "| | loss: exact |", 0, rank_losses),
    ("serving.md", "| prompts |", 0, served),
    ("vision.md", "| | keys | paper, ViT-S/16 |", 0, vits),
    ("vision.md", "| | budget 65 | 129 | 257 |", 0, vit_speeds),
    ("vision.md", "| | budget | top-1 |", 0, vit_default),
]
"""A page, how a table begins, which of the tables that begin so, and the figures of a row from records."""


@pytest.mark.parametrize(
    ("page", "header", "place", "values"), TABLES, ids=[f"{t[0]}-{t[1]}{t[2]}" for t in TABLES]
)
def test_every_figure_of_a_table_is_that_of_its_record(page, header, place, values):
    found = [table for table in tables((ROOT / "docs" / page).read_text()) if table[0].startswith(header)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[place][2:]]
    wrong = []
    for end in range(1, len(rows) + 1):
        row = rows[end - 1]
        shown = [figure for cell in row[1:] for figure in NUMBER.findall(cell)]
        wanted = list(values(rows[:end]))
        assert len(shown) == len(wanted), (row, wanted)
        pairs = zip(shown, wanted, strict=True)
        wrong += [(row[0], figure, value) for figure, value in pairs if not agrees(figure, value)]
    assert wrong == []


NOT_DERIVED = {
    "| figure | conditions |": "its rows are in FIGURES",
    "| SmolLM2, prompt of 7936 tokens, then 256 steps": "version 0.2, no record",
    "| tokens x inputs x outputs | bfloat16 |": "no record",
    "| weights | exact attention | routed |": "no record",
    "| in the paper | command | record |": "the paper's figures",
    "| you want": "settings and versions",
    "| torch | transformers |": "settings and versions",
    "| model | recognised by |": "settings and versions",
}
"""Tables with decimal figures that no test derives from records, and why."""


def test_every_table_with_decimal_figures_is_derived_or_says_why_not():
    decimal = re.compile(r"(?<![\w.=`(/-])[-+]?\d+\.\d+(?![.\d`])")
    left = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        known = (*(header for name, header, *_ in TABLES if name == page.name), *NOT_DERIVED)
        made = [
            table for script, (pages, _) in PAGES.items() if page.name in pages for table in printed_by(script)
        ]
        for table in tables(page.read_text()):
            if decimal.search("".join(table[2:])) and table not in made and not table[0].startswith(known):
                left.add((page.name, table[0]))
    assert left == set()


def test_the_table_of_claims_names_the_versions_of_its_records():
    """Every folder that a cell names together with commits or versions has records of these and of no others."""
    (table,) = [found for found in tables((ROOT / "docs/reproducing.md").read_text()) if "| record |" in found[0]]
    wrong = []
    for line in table[2:]:
        cell = line.strip("|").split("|")[2]
        for name in re.findall(r"`([\w/-]+)`", cell) if "(" in cell else []:
            places = [EXPERIMENTS / part / name for part in ("language", "vision", "..")]
            files = [place / "records.jsonl" for place in places if (place / "records.jsonl").exists()]
            for record in (record for file in files for record in read(file)):
                version = record.versions.get("commit") or record.versions["prescore"].removesuffix(".0")
                wrong += [(name, version)] * (version not in cell or record.created[:10] not in cell)
    assert set(wrong) == set()
