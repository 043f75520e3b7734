"""Tables and figures of the documents, written from the records in this folder: `make figures`.

A table stands between `<!-- figure: NAME ARGUMENT ... -->` and `<!-- end -->`, a figure in a sentence between
`<!-- = NAME ARGUMENT ... -->` and `<!-- -->`. `NAME` is a function of this file with `@figure`; its arguments are
words, in which `_` is a space. The text between marks is written anew, all other text stays.
"""

from __future__ import annotations

import json
import re
import runpy
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from prescore.bench.language.tables import Summary, half_width, summarise
from prescore.bench.records import Record, Values, read_records
from prescore.bench.tables import MISSING, Table
from prescore.bench.vision.tables import accuracy_table
from prescore.paper import printed
from prescore.paper import tables as paper
from prescore.paper.coverage import coverage_table
from prescore.paper.planted.tables import claim_table, probability_table, recall_settings, recall_table
from prescore.paper.reuse import reuse_table
from prescore.paper.selections import selection_table, universal_set_table
from prescore.paper.speed import length_table

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = re.compile(r"<!-- (?:(?P<kind>figure:|=) (?P<call>[^>]*?) |(?P<end>end) |)-->")

Figure = Callable[..., Table | str]
FIGURES: dict[str, Figure] = {}


class FigureError(ValueError):
    """A mark that cannot be filled; the message names its file and line."""


def figure(make: Figure) -> Figure:
    """Marks may name this function."""
    FIGURES[make.__name__] = make
    return make


def documents() -> list[Path]:
    """All pages that may have marks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(HERE.rglob("*.md"))]


def regenerated(text: str, page: str, used: set[str]) -> str:
    """A page with everything between its marks written anew; adds to `used` the names of its marks."""
    parts, kept, tables = [], 0, set()
    opened: re.Match[str] | None = None

    def line_of(mark: re.Match[str]) -> str:
        return f"{page}:{text.count(chr(10), 0, mark.start()) + 1}"

    for mark in MARK.finditer(text):
        where = line_of(mark)
        if mark["kind"] is None:
            if opened is None or (opened["kind"] == "figure:") != (mark["end"] is not None):
                raise FigureError(f"{where}: {mark[0]} must close a mark of its kind")
            parts.append(filled(opened, line_of(opened)))
            kept, opened = mark.start(), None
            continue
        if opened is not None:
            raise FigureError(f"{line_of(opened)}: {opened[0]} must be closed before {mark[0]}")
        if mark["call"] in tables:
            raise FigureError(f"{where}: {mark[0]} must stand once in a page")
        if mark["kind"] == "=" and not text[text.rfind("\n", 0, mark.start()) + 1 : mark.start()].strip():
            raise FigureError(f"{where}: {mark[0]} must not begin a line, which Markdown takes for a block")
        if mark["kind"] == "figure:":
            tables.add(mark["call"])
        used.add(mark["call"].split()[0])
        parts.append(text[kept : mark.end()])
        opened = mark
    if opened is not None:
        raise FigureError(f"{line_of(opened)}: {opened[0]} must be closed")
    return "".join((*parts, text[kept:]))


def filled(mark: re.Match[str], where: str) -> str:
    """What belongs behind an opening mark."""
    name, *arguments = mark["call"].split()
    if name not in FIGURES:
        raise FigureError(f"{where}: {mark[0]} must name one of {', '.join(sorted(FIGURES))}")
    try:
        made = FIGURES[name](*(argument.replace("_", " ") for argument in arguments))
    except (TypeError, ValueError, LookupError) as error:
        raise FigureError(f"{where}: {mark[0]} has no records, {type(error).__name__}: {error}") from error
    if mark["kind"] == "figure:":
        return "\n" + (replace(made, title="", note="").to_markdown() if isinstance(made, Table) else f"{made}\n")
    if not isinstance(made, str):
        raise FigureError(f"{where}: {mark[0]} is a table, and must stand in a mark `figure:`")
    return made


def main() -> int:
    """Write every page anew; returns the exit code."""
    used: set[str] = set()
    changed = []
    for path in documents():
        before = path.read_text()
        after = regenerated(before, path.relative_to(ROOT).as_posix(), used)
        if after != before:
            path.write_text(after)
            changed.append(path.relative_to(ROOT).as_posix())
    unused = sorted(FIGURES.keys() - used)
    print(f"changed: {', '.join(changed) or 'nothing'}")
    if unused:
        print(f"in no page: {', '.join(unused)}", file=sys.stderr)
    return bool(unused)


# Records.


@cache
def read(folder: str) -> list[Record]:
    """All records of a folder."""
    return read_records(HERE / folder / "records.jsonl")


def select(folder: str, **wanted: Any) -> list[Record]:
    """Records of a folder whose configuration has these values; None = the field is missing, or None."""
    found = [r for r in read(folder) if all(r.config.get(name) == value for name, value in wanted.items())]
    if not found:
        raise LookupError(f"none in {folder} with {wanted}")
    return found


def one(folder: str, **wanted: Any) -> Values:
    """The results of the only record with these values."""
    (record,) = select(folder, **wanted)
    return record.results


def label_of(record: Record) -> str:
    """The method of a language record."""
    return str(record.config["method"]["label"])


def low_high(values: Iterable[float], form: str) -> str:
    """The lowest and the highest value, one alone where both look the same."""
    known = list(values)
    low, high = format(min(known), form), format(max(known), form)
    return low if low == high else f"{low} to {high}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table without a title: the page says what it is."""
    return Table("", tuple(columns), tuple(map(tuple, rows)), left=left)


# Losses of the default.

TEXTS = {
    "Middlemarch": "*Middlemarch*",
    "Moby-Dick": "*Moby-Dick*",
    "python-reference": "Python's reference",
    "python-source": "Python's source code",
    "sample.jsonl": "a LongBench v2 record",
}
COMPARED = ("default", "sliding window", "local only")


def windows(folder: str, n_tokens: int) -> dict[str, list[dict[str, Values]]]:
    """By text, results by method of each window."""
    found: dict[tuple[str, str], dict[str, Values]] = defaultdict(dict)
    for record in select(f"language/{folder}", n_tokens=n_tokens):
        text = next(name for begin, name in TEXTS.items() if record.config["document"].startswith(begin))
        found[text, record.config["digest"]][label_of(record)] = record.results
    by_text: dict[str, list[dict[str, Values]]] = {}
    for (text, _), window in sorted(found.items()):
        by_text.setdefault(text, []).append(window)
    return by_text


def above(inside: Sequence[dict[str, Values]], label: str) -> list[float]:
    """Losses above exact attention."""
    return [window[label]["loss"] - window["exact"]["loss"] for window in inside]


@figure
def loss(folder: str, n_tokens: str, label: str, what: str = "mean", digits: str = "4") -> str:
    """The mean or worst loss above exact attention over all windows of a length."""
    values = above([window for inside in windows(folder, int(n_tokens)).values() for window in inside], label)
    value = {"mean": statistics.fmean(values), "worst": max(values)}[what]
    return f"{value:+.{digits}f}"


@figure
def held_out(folder: str) -> Table:
    """By length and text: loss above exact attention, keys read, processor seconds."""
    rows: list[Sequence[str]] = []
    for n_tokens in sorted({record.config["n_tokens"] for record in read(f"language/{folder}")}, reverse=True):
        by_text = windows(folder, n_tokens)
        everything = [window for inside in by_text.values() for window in inside]
        for text, inside in (*by_text.items(), ("**all**", everything)):
            cells = [f"{n_tokens:,}", text, str(len(inside)), f"{mean_of(inside, 'exact', 'loss'):.3f}"]
            for label in COMPARED:
                values = above(inside, label)
                worst = f" (worst {max(values):+.4f})" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):+.4f}{worst}")
            cells.append(f"{mean_of(inside, 'default', 'reads_per_query'):.0f}")
            for name in ("exact", "default"):
                cells.append(f"{mean_of(inside, name, 'attention_processor_seconds'):.0f}")
            rows.append(cells)
    columns = ["tokens", "text", "windows", "exact loss", "default above", "sliding window that reads as much"]
    columns += ("local only", "keys and centroids read", "exact attention, core-seconds", "default")
    return table(columns, rows, left=2)


@figure
def long_losses() -> Table:
    """Losses and times of one model by length, one window each."""
    rows = []
    for n_tokens in sorted({record.config["n_tokens"] for record in read("language/long")}):
        for text, (window,) in windows("long", n_tokens).items():
            seconds = [window[label]["attention_processor_seconds"] for label in ("exact", "default")]
            cells = [f"{n_tokens:,}", text, f"{window['exact']['loss']:.4f}"]
            cells += [f"{above([window], 'default')[0]:+.4f}", f"{window['default']['reads_per_query']:.0f}"]
            rows.append([*cells, *(f"{part:.0f}" for part in seconds), f"{seconds[0] / seconds[1]:.1f}x"])
    columns = ["tokens", "text", "exact loss", "default above", "keys and centroids read"]
    return table([*columns, "exact attention, core-seconds", "default", "ratio"], rows, left=2)


LONG_COSTS = {
    "processor_seconds": "processor seconds",
    "attention_seconds": "seconds in attention",
    "peak_megabytes": "peak memory, MB",
}


def long_lines() -> list[Values]:
    """Lines of the study of a long text: one for each chunk, the last for the whole."""
    return [json.loads(line) for line in (HERE / "routed/long_text.jsonl").read_text().splitlines()]


@figure
def long_text() -> Table:
    """A model that reads a long text: costs at some numbers of tokens read."""
    lines = [line for line in long_lines()[:-1] if line["read"] in (16384, 32768, 65536, 98304, 131072)]
    rows = [[f"{line['read']:,}", *(f"{line[name]:,.0f}" for name in LONG_COSTS)] for line in lines]
    return table(["tokens read", *LONG_COSTS.values()], rows)


@figure
def long_errors() -> str:
    """The least and the largest error of a layer, by audit, of the whole text."""
    return low_high(long_lines()[-1]["layer_error"], ".3f")


def mean_of(inside: Sequence[dict[str, Values]], label: str, field: str) -> float:
    """A result of a method over windows."""
    return statistics.fmean(window[label][field] for window in inside)


# The front page.

LENGTHS = {"baselines": (4096,), "default": (8192, 16384)}
"""Folders of SmolLM2 in float32 with losses and times of exact attention and of the default, and lengths."""


@figure
def first_token(engine: str, model: str, n: str) -> str:
    """Seconds to the first token of a prompt."""
    results = one(RIVALS, part="time", engine=engine, model=model, n=int(n))
    return f"{results['seconds_to_first_token']:.1f}"


@figure
def rival_loss(engine: str, model: str) -> str:
    """What an engine loses on 4,096 tokens, above exact attention in bfloat16."""
    own, exact = (
        one(RIVALS, part="loss", engine=name, model=model)["loss"] for name in (engine, "exact bfloat16")
    )
    return f"{own - exact:+.4f}"


def curves() -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Core-seconds of attention, and loss above exact attention, by method and length."""
    seconds: dict[str, list[tuple[int, float]]] = defaultdict(list)
    losses: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for folder, lengths in LENGTHS.items():
        for n in lengths:
            inside = [window for text in windows(folder, n).values() for window in text]
            for label in ("exact", "default"):
                seconds[label].append((n, round(mean_of(inside, label, "attention_processor_seconds"), 1)))
            for label in COMPARED if folder == "default" else ("default",):
                losses[label].append((n, round(statistics.fmean(above(inside, label)), 4)))
    return {"seconds": dict(seconds), "losses": dict(losses)}


@figure
def time_and_loss(path: str) -> str:
    """A picture of times and losses by length; drawn again where its data changed."""
    from PIL import Image

    data = json.dumps(curves())
    if not (ROOT / path).exists() or Image.open(ROOT / path).info.get("Description") != data:
        draw_time_and_loss(ROOT / path, data)
    return f"![time of attention, and loss above exact attention, against the length of the prompt]({path})"


def draw_time_and_loss(path: Path, data: str) -> None:
    """The picture, which carries its data."""
    import matplotlib.pyplot as plt

    names = {"exact": "exact attention", "default": "default", "sliding window": "sliding window, as many keys"}
    names["local only"] = "local keys only"
    colors = {"exact": "#444444", "default": "#0b6fb8", "sliding window": "#c76a00", "local only": "#b03060"}
    pictures, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    titles = ("core-seconds of attention", "loss above exact attention, nats")
    for ax, title, by_method in zip(axes, titles, json.loads(data).values(), strict=True):
        for label, points in by_method.items():
            ax.plot(*zip(*points, strict=True), "o-", color=colors[label], label=names[label], linewidth=2)
            n, value = points[-1]
            shown = f"{value:.0f}" if ax is axes[0] else f"{value:.3f}".replace("-0.000", "0.000")
            ax.annotate(shown, (n, value), (6, 0), textcoords="offset points", va="center", color=colors[label])
        ax.set(title=title, xlabel="tokens of the prompt", ylim=(0, None) if ax is axes[0] else (-0.02, 0.45))
        ax.set_xticks([4096, 8192, 16384], ["4,096", "8,192", "16,384"])
        ax.set_xlim(3500, 18800)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="upper left")
    pictures.savefig(path, dpi=120, metadata={"Description": data})
    plt.close(pictures)


@figure
def min_weights() -> Table:
    """What `min_weight` costs on tuning windows."""
    lines = (HERE / "routed/frontier/candidates.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    smollm2 = [("divergence", ".4f"), ("loss", "+.4f"), ("reads_per_query", ".0f")]
    smollm2 += [("attention_processor_seconds", ".1f")]
    fields = [("smollm2", *field) for field in smollm2]
    fields += [("gemma-3-270m-q4_k_m", *field) for field in (smollm2[0], smollm2[2])]
    rows: list[Sequence[str]] = []
    for candidate in ("1/256", "1/1024", "1/4096", "1/16384"):
        cells = [f"**{candidate}**" if candidate == "1/4096" else candidate]
        for model, field, form in fields:
            own = [r[field] for r in results if (r["candidate"], r["model"]) == (candidate, model)]
            cells.append(format(statistics.fmean(own), form))
        rows.append(cells)
    reads = "keys and centroids read"
    columns = ("`min_weight`", "SmolLM2: divergence", "loss above exact", reads, "core-seconds")
    return table((*columns, "gemma: divergence", reads), rows)


def hits(n_tokens: int, label: str) -> dict[float, int]:
    """Needles found, by depth."""
    found: dict[float, int] = defaultdict(int)
    for record in select("language/needles", n_tokens=n_tokens):
        if label_of(record) == label:
            for depth in record.results["by_depth"]:
                found[depth["depth"]] += sum(depth["hits"])
    return found


@figure
def needles_found(n_tokens: str, label: str) -> str:
    """Needles found at all depths."""
    return str(sum(hits(int(n_tokens), label).values()))


@figure
def needles() -> Table:
    """Needles found by depth."""
    rows: list[Sequence[str]] = []
    for n_tokens in (4096, 8192):
        exact, default = hits(n_tokens, "exact"), hits(n_tokens, "default")
        total = 5 * 50
        points = 100 * (sum(default.values()) - sum(exact.values())) / total
        first = (f"{n_tokens}: exact, of 50", *map(str, exact.values()), f"{sum(exact.values())} of {total}")
        last = f"{sum(default.values())} ({points:+.1f} points)"
        rows += [first, ("default", *map(str, default.values()), last)]
    return table(("tokens", *(f"depth {depth}" for depth in exact), "all"), rows)


@figure
def ruler() -> Table:
    """Mean score in per cent, over the prompts that exact attention and the default read."""
    labels = ("exact", "default", "sliding window")
    rows: list[Sequence[str]] = []
    for folder in ("smollm2-bfloat16", "gemma3-270m-bfloat16"):
        scores: dict[str, dict[str, float]] = defaultdict(dict)
        for record in read(f"ruler/{folder}"):
            scores[record.config["digest"]][label_of(record)] = record.results["score"]
        shared = [scores for scores in scores.values() if scores.keys() >= set(labels[:2])]
        known = [[scores[label] for scores in shared if label in scores] for label in labels]
        cells = (f"{100 * statistics.fmean(values):.1f} % of {len(values)}" for values in known)
        rows.append((folder.removesuffix("-bfloat16"), *cells))
    return table(("model", *labels), rows)


# Speed of the default.

LAYERS = ("smooth", "mixed", "retrieval", "middle", "late")
CALLS = "speed/subclusters"


def speedups(folder: str, **wanted: Any) -> list[float]:
    """Exact attention's time over the default's, of every record; without `backward` of causal forward passes."""
    given = {"causal": True, "backward": False} if wanted["study"] == "lengths" else {"backward": None}
    found = [r for r in read(folder) if all(r.config.get(k) == v for k, v in (given | wanted).items())]
    return [record.results["methods"]["default"]["speedup"] for record in found]


def times_faster(folder: str, **wanted: Any) -> str:
    """The lowest and highest ratio, or a dash where none was measured."""
    found = speedups(folder, **wanted)
    return low_high(found, ".2f").replace(" to ", "x to ") + "x" if found else MISSING


def by_length(name: str, folder: str, lines: dict[str, Values], lengths: Sequence[int]) -> Table:
    """Ratios: a line for each configuration, a column for each length."""
    rows = [(label, *(times_faster(folder, n=n, **wanted) for n in lengths)) for label, wanted in lines.items()]
    return table((name, *(f"{n:,}" for n in lengths)), rows)


@figure
def random_tensors() -> Table:
    """The default on random tensors."""
    lines: dict[str, Values] = {}
    for causal, backward in ((True, False), (True, True), (False, False), (False, True)):
        label = f"{'causal' if causal else 'full'}, {'forward + backward' if backward else 'forward'}"
        lines[label] = {"study": "lengths", "causal": causal, "backward": backward}
    return by_length("exact time / default time", CALLS, lines, (2304, 4096, 8192, 16384, 32768))


@figure
def short_inputs() -> Table:
    """The default around `exact_until`."""
    lines = {"random tensors, 4 heads": {"study": "lengths"}, "real layers, 14 heads over 2": {"study": "heads"}}
    lengths = (1024, 2048, 2049, 2304, 2560, 3072)
    return by_length("exact time / default time, causal, forward", "speed/short", lines, lengths)


@figure
def layers_backward() -> Table:
    """Forward + backward on real layers."""
    lines = {name: {"study": "heads", "heads": name, "backward": True} for name in LAYERS}
    name = "exact time / default time, causal, forward + backward"
    return by_length(name, CALLS, lines, (2304, 4096, 8192, 16384))


@figure
def levels() -> Table:
    """Instruction sets, beside torch with no more instructions."""
    lengths = (2304, 4096, 8192, 16384, 32768)
    rows: list[Sequence[str]] = []
    for level in ("baseline", "avx2"):
        lines = {f"`{level}`": {"study": "lengths"}}
        lines[f"`{level}`, real layer *mixed*, one run each"] = {"study": "heads", "heads": "mixed"}
        made = by_length("tokens", f"speed/levels/{level}", lines, lengths)
        rows += made.rows
    rows += by_length("tokens", CALLS, {"`avx512_bf16`": {"study": "lengths"}}, lengths).rows
    return table(made.columns, rows)


@figure
def layers(folder: str) -> Table:
    """Times and ratio of saved layers by dtype, the largest error of a dtype, keys read in the first."""
    found = [r for r in select(f"speed/{folder}", study="heads") if not r.config.get("backward")]
    order = [*LAYERS, *dict.fromkeys(record.config["heads"] for record in found)]
    dtypes = [
        dtype for dtype in ("float32", "bfloat16", "float16") if any(r.config["dtype"] == dtype for r in found)
    ]
    rows = []
    for name in [name for name in dict.fromkeys(order) if any(r.config["heads"] == name for r in found)]:
        methods = {r.config["dtype"]: r.results["methods"] for r in found if r.config["heads"] == name}
        times = [
            f"{m['exact']['seconds']:.2f} / {m['default']['seconds']:.2f} s: {m['default']['speedup']:.1f}x"
            for m in map(methods.__getitem__, dtypes)
        ]
        error = max(m["default"]["error"] for m in methods.values())
        rows.append((name, *times, f"{error:.5f}", f"{methods[dtypes[0]]['default']['reads_per_query']:.0f}"))
    columns = ("layer", *(f"{dtype}: exact / default" for dtype in dtypes), "error", "keys and centroids read")
    return table(columns, rows)


@figure
def layers_speedup(dtype: str, passes: str = "forward") -> str:
    """The lowest and highest ratio on the five layers at 16,384 tokens."""
    backward = True if passes == "backward" else None
    return low_high(speedups(CALLS, study="heads", n=16384, dtype=dtype, backward=backward), ".1f")


@figure
def layers_compared() -> str:
    """Far keys that the search compares on the five layers, in per cent."""
    shares = []
    for record in select(CALLS, study="heads", dtype="float32", n=16384, backward=None):
        far = sum((position // 256 - 1) * 256 - 16 for position in range(2048, 16384)) / 16384
        shares.append(100 * record.results["methods"]["default"]["keys_compared_per_query"] / far)
    return low_high(shares, ".0f")


@figure
def random_reads(n: str) -> str:
    """Keys and centroids that a causal query of random tensors reads."""
    methods = one(CALLS, study="lengths", n=int(n), causal=True, backward=False)["methods"]
    return f"{methods['default']['reads_per_query']:,.0f}"


@figure
def steps() -> Table:
    """One decode step: exact attention, the same with packed heads, and the default."""
    lines = {"five real layers, 16,384 keys": select(CALLS, study="steps")}
    for n in (8192, 32768):
        lines[f"random, {n:,} keys"] = select("speed", study="steps", heads=None, n=n)
    rows = []
    for label, found in lines.items():
        results = [record.results for record in found]
        cells = [low_high((1000 * r["seconds"][name] for r in results), ".2f") for name in STEPS]
        ratios = [low_high((r[name] for r in results), ".1f") for name in ("speedup", "speedup_packed")]
        errors = low_high((r["error"] for r in results), ".4f")
        rows.append((label, *(f"{cell} ms" for cell in cells), *(f"{ratio}x" for ratio in ratios), errors))
    columns = ("one step, 14 heads over 2", "exact", "exact, packed heads", "default", "over exact", "over packed")
    return table((*columns, "error"), rows)


STEPS = ("exact", "packed", "routed")


@figure
def step_speedup() -> str:
    """The lowest and highest ratio of a step on the five layers, over exact attention with packed heads."""
    return low_high((record.results["speedup_packed"] for record in select(CALLS, study="steps")), ".1f")


# The paper's language experiments, beside its figures.


def summaries(folder: str) -> list[Summary]:
    """Every method of a folder, on the documents that do not repeat themselves."""
    records, _ = paper.informative(read(f"language/{folder}"))
    return summarise(records)


@figure
def appendix_a(scorers: str, samples: str) -> Table:
    """Budgets by scorers, PPL / PPL*, on the first context."""
    measured = summaries("appendix-a")
    names = [name for name in dict.fromkeys(s.axes.get("scorer", "none") for s in measured) if name != "none"]
    shown = [name for name in names if scorers in ("all", name)]
    return paper.by_budget(measured, {name: (name, int(samples)) for name in shown})


@figure
def table1(folder: str) -> Table:
    """The five rows of Table 1 and the floor."""
    return paper.table1(summaries(folder))


@figure
def gain(folder: str, before: str, after: str) -> str:
    """By how many nats one method is better than another, ± 95 % over documents or seeds, and in how many runs."""
    runs = {s.label: s.runs for s in summaries(folder)}
    first = runs[before]
    # a method without draws has one run, which stands for every seed
    gains = {key: first[key if key in first else (key[0], 0)] - loss for key, loss in runs[after].items()}
    width, better = half_width(gains), sum(gained > 0 for gained in gains.values())
    mean = f"{round(statistics.fmean(gains.values()), 2) + 0:.2f}" + ("" if width is None else f" ± {width:.2f}")
    return f"{mean} nats, better in {better} of {len(gains)} runs"


@figure
def budget_seconds() -> str:
    """Processor seconds of attention in one forward, k-means with the flag and samples, by budget, ascending."""
    found = {s.axes["top_k"]: s for s in summaries("appendix-a") if s.label.endswith("8 samples, blockwise")}
    *times, last = (f"{found[top_k].processor_seconds:.1f} s for {top_k}" for top_k in sorted(found))
    return f"{', '.join(times)} and {last} keys"


@figure
def appendix_f() -> Table:
    """Couplings by budget."""
    return paper.couplings(summaries("appendix-f"))


@figure
def coupling_cost(coupling: str, top_k: str) -> str:
    """What a coupling of k-means costs at a budget, in nats."""
    label = f"kmeans + Hyper, top {top_k}, 8 samples"
    losses = {s.label: s.loss for s in summaries("appendix-f")}
    return f"{losses[f'{label}, {coupling}'] - losses[label]:.2f}"


@figure
def appendix_i() -> Table:
    """Gaussian kernel k-means by budget, with samples and without."""
    columns = {name: ("gaussian-kmeans", samples) for name, samples in (("with samples", 256), ("no samples", 0))}
    return paper.by_budget(summaries("appendix-i"), columns)


@figure
def equal_reads(folder: str) -> Table:
    """Loss above exact attention, keys and centroids read, processor seconds, by length."""
    return paper.equal_reads(summaries(folder))


@figure
def swept() -> Table:
    """Loss above exact attention by noise and delta, with half of its interval over seeds."""
    cells = {(s.axes["scorer.noise"], s.axes["min_fraction"]): s for s in summaries("sweep") if s.axes}
    deltas = sorted({delta for _, delta in cells})
    rows = [
        (f"{noise:g}", *(paper.above(cells[noise, delta]) for delta in deltas))
        for noise in sorted({noise for noise, _ in cells})
    ]
    return table(("noise", *(f"delta {delta:g}" for delta in deltas)), rows)


@figure
def reused() -> Table:
    """Loss above exact attention of steps over a selection that is made once, or again."""
    return reuse_table(read("language/reuse"))


@figure
def paper_loss(folder: str, label: str) -> str:
    """The loss of exact attention, or what a method is above it."""
    (s,) = (s for s in summaries(folder) if s.label == label)
    return f"{s.loss:.3f}" if s.is_exact else paper.signed(s.above_exact)


@figure
def measured(*folders: str) -> str:
    """Commits and days of records, or the version where no commit was recorded."""
    commits: dict[str, list[str]] = defaultdict(list)
    for record in (record for folder in folders for record in read(folder)):
        made_by = record.versions.get("commit") or record.versions.get("prescore")
        commits[record.created[:10]] += [made_by] if made_by else []  # other engines have neither
    return "; ".join(f"{', '.join(dict.fromkeys(own))} of {day}" for day, own in sorted(commits.items()) if own)


# Speed of the paper's methods, and what scorers select.


@figure
def long_speeds() -> Table:
    """Exact time over method time, by mask, pass and length; rows that were run apart are one line."""
    return length_table(read("speed/long"))


@figure
def scoring() -> Table:
    """Milliseconds of scorers alone, and their share of exact attention without a causal mask."""
    cells: dict[str, list[str]] = defaultdict(list)
    records = select("speed/scoring", study="scoring")
    for record in records:
        methods = record.results["methods"]
        for name, own in methods.items():
            share = "" if name == "exact" else f" ({100 * own['seconds'] / methods['exact']['seconds']:.0f} %)"
            cells[name].append(f"{1000 * own['seconds']:.0f}{share}")
    sizes = (f"{record.config['n']:,} x {record.config['dim']}" for record in records)
    return table(("ms (share of exact)", *sizes), ((name, *row) for name, row in cells.items()))


@figure
def preset_times(study: str) -> str:
    """Milliseconds of the preset with k-means over its budgets (`top-k`) or its clusters, shortest and longest."""
    records = select("speed/scoring", study=study)
    times = [1000 * record.results["methods"]["paper:kmeans"]["seconds"] for record in records]
    return f"{min(times):.0f} to {max(times):.0f} ms"


@figure
def universal_set_heads() -> Table:
    """Keys of leverage at least eps, and the share of the entries above eps on them, layers across."""
    return universal_set_table(read("selection"))


@figure
def selections() -> Table:
    """What the best keys of a scorer hold, means over layers."""
    return selection_table(read("selection"))


# The planted model.

CLAIMS = {
    "theorem-1": ("Lemma 1", "Lemma 2", "Theorem 1", "(P1)", "(P2)"),
    "theorem-2": ("Theorem 2",),
    "appendix-c": ("Appendix C",),
    "corollary-1": ("Corollary 1",),
    "claim-1": ("Claim 1",),
    "appendix-b": ("Appendix B",),
    "appendix-d": ("Appendix D",),
    "universal-set": ("rho", "universal set"),
}


@figure
def claims(name: str) -> Table:
    """What a claim bounds, measured, with the seeds that met the bound: a column for each reading.

    All at n = 4,096 (Claim 1: 1,024), d = 32 and eps = 0.1. Where there is one reading, a line is a variant of the
    claim and a column a quantity.
    """
    n = 1024 if name == "claim-1" else 4096
    records = [r for r in select("planted", n=n, d=32) if r.config["epsilon"] in (0.1, 1.0, None)]
    rows = [row for row in claim_table(records).rows if row[0].startswith(CLAIMS[name])]
    readings = list(dict.fromkeys(row[1] for row in rows))
    cells = {row[:4]: f"{row[4]}, {row[5]}" for row in rows}
    if len(readings) > 1:
        lines = list(dict.fromkeys((claim, quantity, bound) for claim, _, quantity, bound, *_ in rows))
        made = [(c, f"{q} {b}", *(cells.get((c, r, q, b), MISSING) for r in readings)) for c, q, b in lines]
        return table(("claim", "quantity and bound", *readings), made, left=2)
    quantities = list(dict.fromkeys(row[2:4] for row in rows))
    variants = dict.fromkeys(row[0] for row in rows)
    made = [(c, *(cells.get((c, readings[0], *q), MISSING) for q in quantities)) for c in variants]
    return table(("claim", *(" ".join(q) for q in quantities)), made)


@figure
def seeds_held(claim: str, quantity: str, reading: str) -> str:
    """In how many draws of the planted model, at all numbers of keys, a claim held."""
    checks = [
        check["held"]
        for record in read("planted")
        if record.config["part"] == "claims" and record.config["reading"] == reading
        for check in record.results["checks"]
        if check["claim"] == claim and check["quantity"].startswith(quantity)
    ]
    return f"{sum(checks)} of {len(checks)}"


_CONCLUSIONS = (
    *(
        "min signal leverage / max",
        "signal groups",
        "noise rows",
        "signal rows that",
        "signal rows isolated, k = d /",
    ),
    *("cost of the truth", "D_min, squared", "squared distance of signal and noise /"),
)


@figure
def probabilities() -> Table:
    """In how many draws the conclusions of the claims held that were measured at every number of keys."""
    made = probability_table(read("planted"))
    rows = (row for row in made.rows if row[1].startswith(_CONCLUSIONS) and MISSING not in row[2:5])
    return replace(made, rows=tuple(rows))


@figure
def planted_recall() -> Table:
    """Planted keys found by every scorer."""
    records = read("planted")
    (setting,) = recall_settings(records)
    return recall_table(records, setting)


# Vision transformers.

GRID = "vision/grid-1000"


def accuracies() -> dict[tuple[str, int | None, int, bool], float]:
    """Top-1 of the first seed by method, clusters, budget, and whether the class token is protected."""
    fields = ("method", "n_clusters", "budget", "keep_prefix")
    found = [r for r in read(GRID) if r.config["method"] != "exact" and r.seed == 0]
    return {tuple(r.config[name] for name in fields): r.results["top1"] for r in found}


def both(values: Iterable[float | None], form: str) -> str:
    """Class token protected / free, those that were measured."""
    return " / ".join(format(value, form) for value in values if value is not None) or MISSING


@figure
def vision_grid() -> Table:
    """Top-1 by method and clusters; for every budget, class token protected / free."""
    found = accuracies()
    budgets = sorted({cell[2] for cell in found})
    rows = []
    for method, clusters in sorted({cell[:2] for cell in found}, key=lambda name: (name[0], name[1] or 0)):
        pairs = ([found.get((method, clusters, budget, keep)) for keep in (True, False)] for budget in budgets)
        rows.append((method, str(clusters or ""), *(both(pair, ".1f") for pair in pairs)))
    return table(("method", "clusters", *map(str, budgets)), rows)


@figure
def top1(method: str, budget: str = "", clusters: str = "") -> str:
    """Top-1 on 1,000 images, class token protected."""
    if method == "exact":
        return f"{read(GRID)[0].results['top1_exact']:.1f}"
    return f"{accuracies()[method, int(clusters) if clusters else None, int(budget), True]:.1f}"


@figure
def vision_seeds() -> Table:
    """Top-1 of methods that draw for every image, with the spread over seeds or images."""
    return accuracy_table(read("vision/seeds-100"))


@figure
def vision_times() -> Table:
    """Time in attention over that of exact attention, by method and budget."""
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for record in read("vision/times"):
        ratio = record.results["attention_seconds"] / record.results["attention_seconds_exact"]
        if record.config["method"] != "exact":
            cells[record.config["method"]][record.config["budget"]] = f"{ratio:.1f}"
    budgets = sorted({budget for row in cells.values() for budget in row})
    rows = [(method, *(row.get(budget, MISSING) for budget in budgets)) for method, row in cells.items()]
    return table(("method", *map(str, budgets)), rows)


@figure
def beside_published() -> Table:
    """The paper's top-1 beside ours."""
    found, rows = accuracies(), []
    ours = {"kmeans": ("kmeans", "kmeans-farthest-sample", "published")}
    for small, theirs in printed.TOP_1.items():
        what = small.partition(", ")[2]
        large = next(
            by_budget for name, by_budget in printed.TOP_1.items() if name[:5] == "ViT-L" and what in name
        )
        method, _, clusters = what.partition(", ")
        for budget, value in theirs.items() if small.startswith("ViT-S") else ():
            keys = [(m, int(clusters[0]) if clusters else None, budget, True) for m in ours.get(method, (method,))]
            cells = " / ".join(f"{found[key]:.1f}" for key in keys if key in found)
            rows.append((what, str(budget), value, large[budget], cells))
    return table(("", "keys", "paper, ViT-S/16", "paper, ViT-L/16", "DeiT-tiny"), rows)


@figure
def coverage() -> Table:
    """Share of heavy entries on selected keys, and of the heaviest columns, beside chance."""
    return coverage_table(read("vision/coverage"))


# Context parallel, GPUs, other engines, servers.


@figure
def planned_bytes() -> Table:
    """Bytes that a rank sends in one layer, from the plan that the ranks follow."""
    plan = runpy.run_path(str(HERE / "parallel" / "planned.py"))
    rows = []
    for name, exchange, config in plan["CONFIGURATIONS"]:
        full, causal = (plan["planned_bytes"](plan["layer"](is_causal), config) for is_causal in (False, True))
        mega = [round(number / 1e6) for number in (max(full), max(causal), statistics.fmean(causal))]
        rows.append((name, exchange, f"{mega[0]}", f"{mega[1]} / {mega[2]}"))
    return table(("configuration", "exchange", "full, MB", "causal, MB: busiest rank / mean"), rows, left=2)


@figure
def counted_bytes() -> Table:
    """Megabytes of the busiest rank and their share of an all-gather, counted by the ranks."""
    names = {"`Exact()`": "all-gather", "`Selected(top_k=2048)`": "selected"}
    names["`Selected.paper(top_k=2048)`, clusters fitted on a sample"] = "paper"
    rows = []
    for n in (16384, 32768):
        for label, name in names.items():
            cells = [f"{n:,}", label]
            for ranks, causal in ((2, False), (2, True), (4, False), (4, True)):
                own = one("parallel/bytes", n=n, ranks=ranks, causal=causal)["methods"][name]
                share = "" if name == "all-gather" else f" ({own['of_all_gather']:.2f})"
                cells.append(f"{own['bytes'] / 1e6:.2f}{share}")
            rows.append(cells)
    columns = (f"{ranks} ranks, {mask}" for ranks in (2, 4) for mask in ("full", "causal"))
    return table(("tokens", "configuration", *columns), rows, left=2)


@figure
def tiles() -> Table:
    """What one query and tiles of queries search and read, on five layers."""
    last = [record.results["bands"][-1] for record in read("gpu")]
    rows = []
    for label, name, unit in (("subclusters searched", "searched", 100), ("far keys read", "hits", 1)):
        cells = [low_high((unit * band[f"{name}_{n}"] for band in last), ".0f") for n in ("one", "step", 32, 64)]
        rows.append((label, *(f"{cell} %" if unit == 100 else cell for cell in cells)))
    columns = ("one query", "a step of 7 heads", "32 positions of a head", "64 positions")
    return table((f"at {last[0]['far_keys']:,} far keys", *columns), rows)


@figure
def predicted_gpus() -> Table:
    """FlashAttention's time over the predicted one, mean of five layers: prompts, and steps of a batch of 8."""
    model = runpy.run_path(str(HERE / "gpu" / "gpu_model.py"))
    columns = [(gpu, dim) for gpu in model["GPUS"] for dim in (64, 128)]
    rows = []
    for label, ratio, more in (("prompts", model["ratio"], ()), ("steps, batch 8", model["step_ratio"], (8,))):
        for n in model["LENGTHS"]:
            cells = (f"{ratio(read('gpu'), gpu, n, dim, *more):.2f}x" for gpu, dim in columns)
            rows.append((label, f"{n:,}", *cells))
    return table(("", "tokens", *(f"{gpu}, {dim} dims" for gpu, dim in columns)), rows)


@figure
def gpu_model() -> str:
    """All tables of the model of GPUs."""
    tables = runpy.run_path(str(HERE / "gpu" / "gpu_model.py"))["gpu_tables"](read("gpu"))
    return "\n".join(made.to_markdown() for made in tables).rstrip("\n")


ENGINES = {
    "exact bfloat16": "transformers, bfloat16",
    "exact int8": "transformers, int8 weights",
    "prescore bfloat16": "the default, bfloat16",
    "prescore int8": "the default, int8 weights",
    "openvino": "OpenVINO, int8 weights",
    "openvino xattention": "OpenVINO, int8 weights, XAttention",
    "llama.cpp": "llama.cpp, 4-bit weights",
}
RIVALS, RIVALS_INT8 = "speed/rivals", "speed/rivals-int8"


@figure
def rival_times() -> Table:
    """Time to the first token, decode steps and memory of every engine."""
    return _times_of(RIVALS)


@figure
def rival_int8_times() -> Table:
    """The same with int8 weights everywhere."""
    return _times_of(RIVALS_INT8)


def _times_of(folder: str) -> Table:
    names = {"smollm2": "SmolLM2", "gemma3-270m": "gemma3-270m", "model-0.5b": "0.5B model"}
    order = list(ENGINES)
    found = [(r.config, r.results) for r in select(folder, part="time") if r.config["engine"] in order]
    found.sort(key=lambda own: (list(names).index(own[0]["model"]), own[0]["n"], order.index(own[0]["engine"])))
    rows = []
    for config, own in found:
        cells = (f"{own['seconds_to_first_token']:.1f} s", f"{own['tokens_per_second']:.1f}")
        prompt = f"{names[config['model']]}, {config['n']:,} tokens"
        rows.append((prompt, ENGINES[config["engine"]], *cells, f"{own['peak_megabytes']:.0f} MB"))
    return table(("prompt", "engine", "first token", "tokens/s", "memory"), rows, left=2)


@figure
def rival_losses() -> Table:
    """Losses of every engine on the same tokens, and above exact attention in bfloat16."""
    models = ("smollm2", "gemma3-270m")
    losses = {(r.config["engine"], r.config["model"]): r.results["loss"] for r in select(RIVALS, part="loss")}
    rows = []
    for engine, label in ENGINES.items():
        pairs = [
            (losses[engine, model], losses[engine, model] - losses["exact bfloat16", model]) for model in models
        ]
        rows.append((label, *(cell for loss, more in pairs for cell in (f"{loss:.4f}", f"{more:+.4f}"))))
    return table(("engine", "SmolLM2", "above the first line", "gemma3-270m", "above the first line"), rows)


def served() -> list[Values]:
    """What vLLM did, a request or a batch each."""
    return [json.loads(line) for line in (HERE / "serving/vllm.jsonl").read_text().splitlines()]


@figure
def vllm_loss(label: str) -> str:
    """The loss of a prompt of 8000 tokens."""
    (loss,) = (
        line["loss"] for line in served() if line["label"] == label and line["tokens"] == 8000 and "loss" in line
    )
    return f"{loss:.4f}"


@figure
def vllm_times() -> Table:
    """The own attention of vLLM beside the default: first token, throughput, steps."""
    rows = []
    for tokens, at_once in ((8000, False), (8000, True), (16000, False), (16000, True)):
        cells = [f"{tokens:,} tokens, {'all at once' if at_once else 'one by one'}"]
        columns: list[list[str]] = [[], [], []]
        for label in ("exact, 2 threads", "default, 2 threads"):
            own = [r for r in served() if (r["tokens"], r["requests"] > 1, r["label"]) == (tokens, at_once, label)]
            first, seconds, rate = (
                statistics.fmean(line[name] for line in own)
                for name in ("first_token_seconds", "batch_seconds", "tokens_per_second")
            )
            columns[0].append(f"{first:.1f} s")
            columns[1].append(f"{own[0]['requests'] * (tokens + 64) / seconds:.0f}")
            columns[2].append("" if at_once else f"{rate:.1f}")
        rows.append(sum(columns, cells))
    heads = ("first token: vLLM's own attention", "default", "tokens/s: own", "default", "steps/s: own", "default")
    return table(("prompts", *heads), rows)


if __name__ == "__main__":
    sys.exit(main())
