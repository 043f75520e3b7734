"""Markdown tables of a run beside the paper's figures: `python tables.py [EXPERIMENT DIRECTORY [DOCUMENT]]`.

Without arguments: the tables of docs/reproducing.md, from the records beside this file.
Everything is read from DIRECTORY/records.jsonl; an unfinished run gives the rows it has. Figures are losses above
exact attention on the same documents, in nats per token, so that models can be compared.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from printed import APPENDIX_A, APPENDIX_I, EXACT, TABLE_1, TOP_K, nats

from prescore.bench.language.tables import READS, Summary, describe_run, keeps_every_key, summarise
from prescore.bench.records import read_records
from prescore.bench.tables import MISSING, Table, as_text, percent


def main(experiment: str, directory: str, document: str = "") -> None:
    """Print the tables of an experiment, over the documents whose name begins with `document`."""
    records = read_records(Path(directory) / "records.jsonl")
    records = [record for record in records if record.config["document"].startswith(document)]
    summaries = summarise(records)
    print(f"{len(records)} records: {describe_run(summaries, records[0].config['model'])}\n")  # noqa: T201
    for s in summaries:
        if s.is_exact or s.is_local:
            print(f"{s.label}: loss {s.loss:.3f}, perplexity {s.perplexity:.2f}, at {s.n_tokens} tokens")  # noqa: T201
    print()  # noqa: T201
    for table in TABLES[experiment](summaries):
        print(table.to_markdown())  # noqa: T201


def appendix_a(summaries: Sequence[Summary]) -> Iterator[Table]:
    """With samples and without: budgets by scorers, ours and the paper's; a cell is PPL / PPL* (blockwise)."""
    documents = max(len(s.losses) for s in summaries)
    found = {grid_cell(s): s for s in summaries if "scorer" in s.axes and len(s.losses) == documents}
    shown = {s.axes["paper_top_k"]: s.axes["top_k"] for s in found.values()}
    scorers = [name for name in dict.fromkeys(key[0] for key in found) if name != "none"]
    columns = ("top_k (paper's)", *(name for scorer in scorers for name in (scorer, f"{scorer}, paper")))
    for samples in sorted({key[1] for key in found}, reverse=True):
        rows = []
        for place, top_k in enumerate(TOP_K):
            cells = [f"{shown.get(top_k, '?')} ({top_k})"]
            for scorer in scorers:
                # one scorer was run for all where nothing is selected, or everything
                whose = {0: "none", TOP_K[-1]: "kmeans"}.get(top_k, scorer)
                own = [found.get((whose, samples, top_k, rule)) for rule in (False, True)]
                cells.append(" / ".join(above(s.above_exact if s else None) for s in own))
                printed = APPENDIX_A[scorer, samples][place]
                cells.append(" / ".join(above(nats(p) - nats(EXACT)) for p in printed if p is not None))
            rows.append(tuple(cells))
        yield Table(f"{'with' if samples else 'without'} residual samples: loss above exact", columns, tuple(rows))


def grid_cell(s: Summary) -> tuple[str, int, int, bool]:
    """Where a method stands in the grid of Appendix A."""
    axes = s.axes
    return axes["scorer"], axes["paper_sample_size"], axes["paper_top_k"], axes["leaf_inclusive"]


def table1(summaries: Sequence[Summary]) -> Iterator[Table]:
    """The five rows and the floor."""
    rows = []
    for s in summaries:
        key = (s.axes.get("scorer") == "kmeans", s.axes.get("leaf_inclusive"))
        printed = EXACT if s.is_exact else TABLE_1.get(key) if s.axes else None
        cells = [s.label, f"{s.loss:.3f}", as_text(s.perplexity, 4), above(s.above_exact)]
        half_width = s.above_exact_half_width
        cells += [f"{half_width:.2f}" if half_width else "", percent(s.gap_closed)]
        cells += [as_text(s.reads_per_query, 4), MISSING if printed is None else f"{nats(printed):.3f}"]
        rows.append((*cells, above(printed and nats(printed) - nats(EXACT))))
    columns = ("method", "loss", "perplexity", "above exact", "± 95 %", "gap closed", READS)
    columns += ("paper's loss", "above its exact")
    yield Table("Table 1", columns, tuple(rows))


def appendix_f(summaries: Sequence[Summary]) -> Iterator[Table]:
    """Couplings by budget."""
    own = [s for s in summaries if s.axes]
    cells = {(s.axes["coupling"], s.axes["scorer"], s.axes["top_k"]): s for s in own}
    budgets = sorted({key[2] for key in cells if key[2]})
    # a budget that keeps every key is run for one scorer and holds for the others
    every = {(key[0], key[2]): s for key, s in cells.items() if keeps_every_key(s)}
    rows = []
    for coupling, scorer in dict.fromkeys(key[:2] for key in cells if key[1] != "none"):
        line = [cells.get((coupling, scorer, b)) or every.get((coupling, b)) for b in budgets]
        rows.append((f"{coupling}, {scorer}", *(above(getattr(s, "above_exact", None)) for s in line)))
    yield Table("Couplings: loss above exact", ("coupling, scorer", *(f"top {b}" for b in budgets)), tuple(rows))
    for s in summaries:
        if s.axes.get("scorer") == "none":
            print(f"without a selection ({s.label}): {above(s.above_exact)} above exact\n")  # noqa: T201


def appendix_i(summaries: Sequence[Summary]) -> Iterator[Table]:
    """Gaussian kernel k-means by budget, with samples and without, ours and the paper's."""
    found = {(s.axes["paper_sample_size"], s.axes["paper_top_k"]): s for s in summaries if s.axes}
    rows = []
    for top_k, printed in APPENDIX_I.items():
        cells = [f"{found[256, top_k].axes['top_k']} ({top_k})"]
        for samples, paper in zip((256, 0), printed, strict=True):
            cells += [above(found[samples, top_k].above_exact), above(nats(paper) - nats(EXACT))]
        rows.append(tuple(cells))
    columns = ("with samples", "with samples, paper", "no samples", "no samples, paper")
    yield Table("Gaussian kernel k-means, early coupling", ("top_k (paper's)", *columns), tuple(rows))


def baselines(summaries: Sequence[Summary]) -> Iterator[Table]:
    """Every method at equal keys read: loss above exact, keys and centroids read, processor seconds, by length."""
    lengths = sorted({s.n_tokens for s in summaries})
    by_name: dict[str, dict[int, Summary]] = {}
    for s in summaries:
        by_name.setdefault(s.label, {})[s.n_tokens] = s
    rows = []
    for name, by_length in by_name.items():
        cells = []
        for length in lengths:
            s = by_length.get(length)
            values = (above(s.above_exact), f"{s.reads_per_query:.0f}", seconds(s)) if s else (MISSING,) * 3
            cells += values
        rows.append((name, *cells))
    columns = tuple(f"{length}: {word}" for length in lengths for word in ("above exact", "read", "attention"))
    yield Table("Equal keys read", ("method", *columns), tuple(rows))


def universal_set(summaries: Sequence[Summary]) -> Iterator[Table]:
    """By threshold: loss above exact, keys read per query."""
    rows = [(s.label, above(s.above_exact), f"{s.reads_per_query:.0f}", seconds(s)) for s in summaries]
    yield Table("Universal set", ("method", "above exact", "keys read", "attention"), tuple(rows))


def seconds(summary: Summary) -> str:
    """Processor seconds of attention."""
    return MISSING if summary.processor_seconds is None else f"{summary.processor_seconds:.1f} s"


def above(value: float | None) -> str:
    """A difference in nats."""
    return MISSING if value is None else f"{value:+.3f}"


TABLES = {"appendix-a": appendix_a, "table1": table1, "appendix-f": appendix_f, "appendix-i": appendix_i}
TABLES |= {"baselines": baselines, "universal-set": universal_set}

PAGE = [
    ("appendix-a", "appendix-a"),
    ("appendix-a", "appendix-a", "sample.jsonl#66f36490"),
    ("table1", "table1"),
    ("table1", "table1-longbench"),
    ("appendix-f", "appendix-f"),
    ("appendix-i", "appendix-i"),
    ("baselines", "baselines"),
    ("universal-set", "universal-set"),
]
"""The tables of docs/reproducing.md: kind, folder, and the document where it is one of several."""

if __name__ == "__main__":
    given = sys.argv[1:]
    if given and (given[0] not in TABLES or not 2 <= len(given) <= 3):
        sys.exit(f"usage: tables.py [{'|'.join(TABLES)} DIRECTORY [DOCUMENT]], got {' '.join(given)}")
    for kind, folder, *document in [] if given else PAGE:
        main(kind, str(Path(__file__).parent / folder), *document)
    if given:
        main(*given)
