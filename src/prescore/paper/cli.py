"""`prescore paper`: a sub-command for every item of the paper, and the list of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from prescore.bench.cli import options as cli
from prescore.bench.cli.perplexity import Losses, Texts, measure_losses, save_losses, write_text
from prescore.bench.cli.vision import DIGIT_BUDGETS, VisionOptions
from prescore.paper import items
from prescore.paper.items import Item

if TYPE_CHECKING:
    from prescore.bench.methods import Method
    from prescore.bench.records import Record, Row, Values
    from prescore.bench.tables import Table

_EXAMPLE = "Example: prescore paper {0} --quick --out runs/{0}"
_EXAMPLES = {
    items.LANGUAGE: "Example: prescore paper {0} -n 2048 -d book.txt --seeds 3 --out runs/{0}",
    items.VISION: "Example: prescore paper {0} --model deit.safetensors --images val --seeds 3 --out runs/{0}",
    items.SWEEP: "Example: prescore paper {0} --set scorer.n_clusters=8,16,32 --set scorer.noise=0,0.1 -n 1024",
    items.REUSE: "Example: prescore paper {0} -n 1280 --top-k 256 --refresh-every 64 -d book.txt --out runs/{0}",
    items.HEADS: "Example: prescore paper {0} --heads HEADS --seeds 3 --out runs/{0}",
}


class _Group(TyperGroup):
    """The sub-commands; an unknown one is refused with the nearest name."""

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        """The sub-command that the first word names."""
        items.find(words[0])
        return super().resolve_command(context, words)


def add_to(app: typer.Typer) -> None:
    """Add `paper` and its sub-commands to the application."""
    group = typer.Typer(cls=_Group, invoke_without_command=True)
    group.callback()(show_items)
    for item in items.ITEMS.values():
        command = COMMANDS[item.kind](item)
        command.__doc__ = f"{item.paper}. {item.what}\n\n{_EXAMPLES.get(item.kind, _EXAMPLE).format(item.name)}"
        group.command(name=item.name)(cli.with_groups(command))
    app.add_typer(group, name="paper", help="Everything of the paper: alone the list of its items.")


def show_items(context: typer.Context, json_lines: bool = typer.Option(False, "--json")) -> None:
    """Everything of the paper, item by item, with its command, its time here and its record."""
    if context.invoked_subcommand is not None:
        return
    if json_lines:
        for item in items.ITEMS.values():
            print(json.dumps(dataclasses.asdict(item)))
        return
    from rich.console import Console

    console = Console()
    wide = console if console.is_terminal else Console(width=max(console.width, 160))
    wide.print(items.listing().to_rich())


def _folder(item: Item, run: cli.Run) -> cli.Run:
    """The same run, which writes below runs/paper/ITEM unless --out says where."""
    return replace(run, out=cli.run_directory(f"paper/{item.name}", run.out, run.resume))


def _show(session: cli.Session, name: str, tables: Sequence[Table]) -> None:
    """Print tables, and write each as CSV."""
    from prescore.bench.language.tables import csv_text

    session.show(*(table.to_rich() for table in tables))
    for number, table in enumerate(tables):
        path = session.out / (f"{name}-{number + 1}.csv" if len(tables) > 1 else f"{name}.csv")
        write_text(path, csv_text([table.columns, *table.rows]))


def _measure(
    item: Item,
    run: cli.Run,
    command: str,
    rows: Sequence[Row],
    tables: Callable[[Sequence[Record]], Sequence[Table]],
    plot: Callable[[Sequence[Record], Path], None],
    device: str = "cpu",
) -> None:
    """Run rows, then write their tables as CSV and a plot."""
    session = _folder(item, run).open(command, device, writes=[f"{item.name}*"])
    records = session.run(rows)
    with session.reading():
        _show(session, item.name, tables(records))
        plot(records, session.out / f"{item.name}.png")
    session.say(f"records: {session.file.path}; also {item.name}*.csv, {item.name}.png")


# Losses of language models.


def _language(item: Item) -> Callable[..., None]:
    def command(
        given: cli.Comparison,
        texts: Texts,
        run: cli.Run,
        coupling: str | None = typer.Option(
            None, help="corrected (of appendix-a), early (of appendix-i), or a line of appendix-f."
        ),
        sinks: int = typer.Option(0, min=0, help="First tokens that the paper's methods keep."),
    ) -> None:
        from prescore.paper.grids import default_lengths, experiment_methods

        leaf = given.leaf or (cli.QUICK_LEAF if run.quick else None)
        options: Values = {"leaf": leaf, "sinks": sinks, "coupling": coupling, "quick": run.quick}

        def methods_at(length: int) -> list[Method]:
            return experiment_methods(
                item.name, length, scorers=given.method or (), changes=given.fields, **options
            )

        def lengths(trained: int | None) -> list[int]:
            return [cli.QUICK_LENGTH] if run.quick else default_lengths(item.name, trained)

        losses = Losses(item.name, methods_at, lengths, _writer(item), experiment=item.name)
        measure_losses(losses, given, texts, _folder(item, run))

    return command


def _writer(item: Item) -> Callable[[cli.Session, Sequence[Record], str], None]:
    def write(session: cli.Session, records: Sequence[Record], model: str) -> None:
        """The paper's figures beside ours, CSV files of both, and plots."""
        from prescore.bench.language import tables
        from prescore.paper.tables import LEAST_LOSS, informative, paper_csv, paper_tables, plot_experiment

        kept, dull = informative(records)
        if dull and kept:
            session.say(f"left out, as exact attention loses less than {LEAST_LOSS} nats: {'; '.join(dull)}")
        summaries = tables.summarise(kept or records)
        if item.kind == items.SWEEP:
            made = [tables.loss_table(summaries, f"sweep: {tables.describe_run(summaries, model)}")]
        else:
            made = paper_tables(item.name, summaries)
        _show(session, f"{item.name}-beside", made)
        files = {f"{item.name}.csv": tables.full_csv(summaries)}
        if (as_printed := paper_csv(summaries)) is not None:
            files[f"{item.name}-as-printed.csv"] = as_printed
        save_losses(
            session,
            item.name,
            files,
            summaries,
            model,
            lambda inside, path, title: plot_experiment(item.name, inside, path, title),
        )

    return write


def _sweep(item: Item) -> Callable[..., None]:
    def command(
        given: cli.Comparison,
        texts: Texts,
        run: cli.Run,
        top_k: list[str] | None = typer.Option(None, help="Keys kept, count or fraction; repeatable."),
    ) -> None:
        from prescore.paper.grids import read_sweep, sweep_methods

        leaf = given.leaf or (cli.QUICK_LEAF if run.quick else None)
        budgets = [cli.read_budget(text) for text in top_k or ([cli.QUICK_TOP_K] if run.quick else ["256"])]
        values = read_sweep(given.changes or ())

        def methods_at(length: int) -> list[Method]:
            return sweep_methods(given.method or ["paper:kmeans"], length, values, leaf=leaf, top_k=budgets)

        def lengths(trained: int | None) -> list[int]:
            return [cli.QUICK_LENGTH if run.quick else min(trained or 4096, 4096)]

        losses = Losses(item.name, methods_at, lengths, _writer(item), experiment=item.name)
        measure_losses(losses, given, texts, _folder(item, run))

    return command


def _reuse(item: Item) -> Callable[..., None]:
    def command(
        given: cli.Language,
        texts: Texts,
        run: cli.Run,
        method: list[str] | None = typer.Option(
            None, help="[paper:]SCORER[-RULE][-sample][+centroids]; repeatable.  [default: paper:kmeans]"
        ),
        length: int | None = typer.Option(
            None, "--length", "-n", min=4, help="Tokens of the prompt and all steps; --first is the first step."
        ),
        top_k: list[str] | None = typer.Option(None, help="Keys kept, count or fraction; repeatable."),
        refresh_every: list[int] | None = typer.Option(
            None, min=1, help="Tokens after which keys are selected again; repeatable.  [default: never, 64, 16]"
        ),
        sinks: int = typer.Option(4, min=0, help="First tokens that the methods keep."),
    ) -> None:
        from prescore.bench.language.grid import grid_methods
        from prescore.paper import reuse

        n_tokens = length or (160 if run.quick else 1024 + reuse.STEPS)
        steps = min(16 if run.quick else reuse.STEPS, n_tokens // 2)
        budgets = [cli.read_budget(text) for text in top_k or (["32"] if run.quick else ["256"])]
        names = method or ["paper:kmeans"]
        methods = grid_methods(names, n_tokens, top_k=budgets, changes={**given.fields, "sinks": sinks})
        methods = [own for own in methods if own.label not in ("exact", "local only")]
        documents = texts.load(run.quick)
        session = _folder(item, run).open("reuse", given.device, writes=[f"{item.name}*"])
        loaded = given.load()
        texts = replace(texts, first=texts.first or n_tokens - steps)
        windows = texts.read(session, loaded, documents, [n_tokens], run.quick)[n_tokens]
        refreshes = refresh_every or (reuse.QUICK_REFRESHES if run.quick else reuse.REFRESHES)
        seeds = range(run.seed, run.seed + texts.seeds)
        records = session.run(reuse.reuse_rows(loaded, windows, methods, refreshes, seeds))
        with session.reading():
            _show(session, item.name, [reuse.reuse_table(records)])
            reuse.reuse_plot(records, session.out / f"{item.name}.png")
        session.say(f"records: {session.file.path}; also {item.name}.csv, {item.name}.png")

    return command


# The planted model.


@dataclass(frozen=True)
class Planted:
    """Options of the planted model."""

    n: list[int] | None = typer.Option(None, "-n", "--n", help="Keys; repeatable.  [default: 4096, 16384]")
    d: list[int] | None = typer.Option(None, "-d", "--d", help="Dimensions; repeatable.  [default: 32]")
    epsilon: list[float] | None = typer.Option(
        None, help="Heaviness, group size 1/epsilon; repeatable.  [default: 0.1]"
    )
    c_signal: list[float] | None = typer.Option(None, help="Signal noise constant; repeatable.  [default: 0.1]")
    c_noise: list[float] | None = typer.Option(None, help="Noise constant; repeatable.  [default: 0.1]")
    method: list[str] | None = typer.Option(None, help="Scorer; repeatable.  [default: all, see `prescore info`]")
    rule: list[str] | None = typer.Option(None, help="Rule of clustering scorers; repeatable.  [default: all]")
    seeds: int | None = typer.Option(None, min=1, help="Seeds per setting, from --seed up.  [default: 10]")
    degree: list[int] | None = typer.Option(
        None, min=1, max=4, help="Degree of the polynomial attention kernel; repeatable.  [default: 2]"
    )
    norm: float = typer.Option(100.0, help="Norm M of the noise rows in Appendix B.")


def _planted(item: Item) -> Callable[..., None]:
    def command(given: Planted, run: cli.Run) -> None:
        from prescore.paper.planted import tables
        from prescore.paper.planted.study import QUICK, Sweep, planted_rows

        base = QUICK if run.quick else Sweep()
        lists: Values = {"n": given.n, "d": given.d, "epsilon": given.epsilon, "c_signal": given.c_signal}
        lists |= {"c_noise": given.c_noise, "methods": given.method, "rules": given.rule, "degrees": given.degree}
        lists["seeds"] = range(run.seed, run.seed + (given.seeds or len(base.seeds)))
        chosen: Values = {name: tuple(values) for name, values in lists.items() if values}
        # settings are checked before a run is opened
        rows = planted_rows(replace(base, **chosen, norm=given.norm))
        rows = [row for row in rows if not item.topics or row.config.get("topic") in item.topics]
        session = _folder(item, run).open("planted", writes=["planted-*.png", f"{item.name}*.csv"])
        records = session.run(rows)
        with session.reading():
            settings = tables.recall_settings(records)
            made = [tables.recall_table(records, setting) for setting in settings]
            _show(session, item.name, [*made, tables.claim_table(records), tables.probability_table(records)])
            for setting in settings:
                name = f"planted {tables.describe_setting(setting)}.png".replace(" ", "-").replace("=", "")
                tables.planted_plot(records, setting, session.out / name)
            if not settings:
                tables.claim_plot(records, session.out / f"planted-{item.name}.png")
        session.say(f"records: {session.file.path}; plots beside them")

    return command


# Vision transformers.


def _vision(item: Item) -> Callable[..., None]:
    def command(
        given: VisionOptions,
        run: cli.Run,
        method: list[str] | None = typer.Option(
            None, help="As of `prescore vision`; repeatable.  [default: the item's]"
        ),
        prefix: str = typer.Option(
            "protected", help="Whether class tokens are always read: protected, free or both."
        ),
    ) -> None:
        from prescore.bench.vision.accuracy import accuracy_rows
        from prescore.bench.vision.tables import accuracy_plot
        from prescore.paper.vision import METHODS, QUICK_METHODS, beside_published

        methods = method or (QUICK_METHODS if run.quick else METHODS)[item.name]
        budgets = given.samples or (None if given.model else DIGIT_BUDGETS)
        grid = given.grid(run, prefix, methods=methods, budgets=budgets)
        rows = accuracy_rows(given.study(run.quick, may_train=not run.quick), **grid)
        _measure(item, run, "vision", rows, lambda r: [beside_published(r)], accuracy_plot, given.device)

    return command


def _coverage(item: Item) -> Callable[..., None]:
    def command(
        given: VisionOptions,
        run: cli.Run,
        method: list[str] | None = typer.Option(
            None, help="SCORER[-RULE][-sample]; repeatable.  [default: the paper's and baselines]"
        ),
        epsilon: list[float] | None = typer.Option(
            None, min=0.0, max=1.0, help="An entry above this is heavy; repeatable.  [default: 0.01 0.1 0.3]"
        ),
        prefix: str = typer.Option("free", help="Whether class tokens are always read: protected, free or both."),
    ) -> None:
        from prescore.paper import coverage

        methods = method or (list(coverage.QUICK_METHODS) if run.quick else None)
        budgets = given.samples or (None if given.model else DIGIT_BUDGETS[:3])
        grid = given.grid(run, prefix, methods=methods, budgets=budgets, thresholds=epsilon)
        study = given.study(run.quick, may_train=not run.quick)
        rows = coverage.coverage_rows(study.observe, study.described, n_prefix=study.model.n_prefix, **grid)
        table = coverage.coverage_table
        _measure(item, run, "coverage", rows, lambda r: [table(r)], coverage.coverage_plot, given.device)

    return command


# Saved heads, and speed.


def _heads(item: Item) -> Callable[..., None]:
    def command(
        run: cli.Run,
        heads: Path | None = typer.Option(
            None, file_okay=False, exists=True, help="Directory of saved attention inputs of a model."
        ),
        seeds: int = typer.Option(1, min=1, help="Seeds of every selection, from --seed up."),
    ) -> None:
        from prescore.bench.speed.heads import find_heads
        from prescore.paper import selections

        if heads is None:
            raise ValueError(
                "--heads must be a directory of saved heads, got none; "
                "prescore save-heads --out HEADS -d BOOK.txt -n 16384 makes them"
            )
        layers = find_heads(heads)[: 1 if run.quick else None]
        rows = selections.selection_rows(layers, range(run.seed, run.seed + seeds))
        _measure(item, run, selections.COMMAND, rows, selections.selection_tables, selections.selection_plot)

    return command


@dataclass(frozen=True)
class Timing:
    """Options of what is timed."""

    n: list[int] | None = typer.Option(None, "-n", "--n", min=16, help="Keys; repeatable.")
    dim: list[int] | None = typer.Option(None, "-d", "--dim", min=1, help="Dimensions of a head; repeatable.")
    n_heads: int | None = typer.Option(None, min=1, help="Heads.  [default: 4, above 32768 keys 2]")
    repeats: int = typer.Option(3, min=1, help="Timed calls, of which the median counts.")


def _speed(item: Item) -> Callable[..., None]:
    def command(
        given: Timing,
        run: cli.Run,
        method: list[str] | None = typer.Option(
            None, help="default, hyper or paper:SCORER; repeatable.  [default: the paper's and the default]"
        ),
        causal: bool | None = typer.Option(None, help="Only causal, or only full.  [default: both]"),
        backward: bool | None = typer.Option(None, help="Only forward + backward, or only forward."),
    ) -> None:
        from prescore.bench.memory import KEPT, choose_freed_memory
        from prescore.bench.speed import studies
        from prescore.bench.speed.tables import length_plot
        from prescore.paper import speed

        is_scoring, dims = item.name == "scoring", given.dim or (speed.DIMS[1:2] if run.quick else speed.DIMS)
        settings: Values = {"heads": given.n_heads, "dim": given.dim[0] if given.dim else 64, "dtype": "float32"}
        settings |= {"repeats": 1 if run.quick else given.repeats, "top_k": speed.KEPT, "min_seq_len": speed.LEAF}
        settings |= {"methods": method or list(speed.METHODS), "memory": choose_freed_memory(KEPT)}
        lengths = speed.SCORING_LENGTHS if is_scoring else speed.LENGTHS
        plan = studies.Run(
            settings,
            given.n or (lengths[:1] if run.quick else lengths),
            causal=(True, False) if causal is None else (causal,),
            backward=(False, True) if backward is None and not run.quick else (bool(backward),),
            seed=run.seed,
        )
        rows = speed.cost_rows(plan, dims, run.quick) if is_scoring else list(studies.length_rows(plan))
        plot = speed.scoring_plot if is_scoring else partial(length_plot, field="speedup")
        _measure(item, run, "speed", rows, speed.speed_tables, plot)

    return command


COMMANDS: Mapping[str, Callable[[Item], Callable[..., None]]] = {
    items.LANGUAGE: _language,
    items.SWEEP: _sweep,
    items.REUSE: _reuse,
    items.PLANTED: _planted,
    items.VISION: _vision,
    items.COVERAGE: _coverage,
    items.HEADS: _heads,
    items.SPEED: _speed,
}
"""What makes the command of an item, by its kind."""
