"""`prescore ruler`: the tasks of RULER, made and scored by lm_eval, while the attention of a model is replaced."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from prescore.bench.cli import options as cli
from prescore.bench.records import replacing

_SAMPLES = "samples.jsonl"


@dataclass(frozen=True)
class Samples:
    """Options: what is asked."""

    tasks: str = typer.Option(
        "all",
        help="Names separated by commas: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, "
        "niah_multiquery, vt, cwe, fwe, and with their files qa_squad, qa_hotpot.",
    )
    limit: int | None = typer.Option(None, min=1, help="Samples per task and length; RULER: 500.  [default: 20]")
    document: str = typer.Option(
        "python-reference", "--document", "-d", help="The text around needles: a file or a name of the corpus."
    )
    squad: Path | None = typer.Option(None, exists=True, dir_okay=False, help="SQuAD's dev-v2.0.json.")
    hotpot: Path | None = typer.Option(
        None, exists=True, dir_okay=False, help="HotpotQA's hotpot_dev_distractor_v1.json."
    )


def command(
    given: cli.Comparison,
    run: cli.Run,
    asked: Samples,
    top_k: str | None = typer.Option(None, help="Keys kept, count or fraction.  [default: 256]"),
) -> None:
    """Score a model on RULER: exact attention, other methods, and sliding windows of as many keys as they read.

    lm_eval makes the samples, which are saved beside the records, and scores the answers. Nothing is downloaded.

    Example: prescore ruler --method default -n 4096 -n 8192 --tasks niah_single_1,vt --limit 50

    Example: prescore ruler --model smollm2 -n 4096 -d book.txt --out runs/ruler   (--resume goes on)
    """
    from prescore.bench.language import ruler
    from prescore.bench.language.answers import ruler_table
    from prescore.bench.language.documents import load_documents

    files = {
        name: path for name, path in {"squad": asked.squad, "hotpot": asked.hotpot}.items() if path is not None
    }
    names, leaf, lengths = ruler.read_tasks(asked.tasks, files), given.leaf, given.length or [4096]
    if run.quick:
        names, lengths = names if asked.tasks != "all" else ["niah_single_1"], given.length or [cli.QUICK_LENGTH]
        leaf, top_k = leaf or cli.QUICK_LEAF, top_k or cli.QUICK_TOP_K
    methods = given.methods(lengths, ["exact", *(given.method or ["default"])], leaf=leaf, top_k=top_k)
    ruler.check_lengths(names, lengths)
    importlib.import_module("lm_eval")  # refused before anything is opened
    source = ruler.Source(run.seed, load_documents([asked.document], limit=1)[0], files)
    session = run.open("ruler", given.device, writes=("ruler.md",))
    loaded = given.load(check_head=False)
    session.say(f"making samples, which are saved in {session.out / _SAMPLES}")
    count = asked.limit or (1 if run.quick else 20)
    samples = ruler.collect_samples(session.out / _SAMPLES, loaded, names, lengths, count, source)
    row, records = partial(ruler.ruler_row, loaded, layers=cli.read_layers(given.layers)), []
    # sample by sample under all methods, so that the records of a stopped run can be compared
    for _, some in itertools.groupby(samples, lambda sample: sample.number):
        pairs = [(sample, method) for sample in some for method in methods[sample.length]]
        measured = session.run([row(*pair) for pair in pairs])
        with session.reading():
            beside = [(pair[0], ruler.window_beside(record)) for pair, record in zip(pairs, measured, strict=True)]
        windows = [row(sample, method) for sample, method in beside if method is not None]
        records += [*measured, *session.run(windows)]
    cli.say_what_is_exact(session, methods)
    with session.reading():
        table = ruler_table(records)
        session.show(table.to_rich())
        with replacing(session.out / "ruler.md") as working:
            working.write_text(table.to_markdown(), encoding="utf-8")
    session.say(f"records: {session.file.path}; also ruler.md")
