"""`prescore perplexity`: loss on long documents while the attention of a language model is replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from prescore.cli.options import Json, Out, Resume, Seed, Session, Threads, open_session

if TYPE_CHECKING:
    from prescore.evaluation.documents import Document
    from prescore.evaluation.language_model import LanguageModel
    from prescore.evaluation.methods import Method
    from prescore.records import Record, Row

Model = Annotated[str, typer.Option(help="`smollm2`, a directory, a GGUF file, or a name on the hub.")]
Documents = Annotated[
    list[str] | None,
    typer.Option(
        "--document",
        "-d",
        help="Text file, directory or LongBench .jsonl; repeatable. (default: Python's own docs)",
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="Such as cpu or cuda.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="FIELD=VALUE of every configuration, in JSON; repeatable.")
]
Layers = Annotated[str, typer.Option(help="Layers replaced: all, first:N, last:N, even, odd, or numbers 0,3,7.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


def command(
    experiment: Annotated[
        str | None,
        typer.Option(help="table1, appendix-a, figure-glm3, appendix-f, appendix-i, longest, cost or default."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="exact, local, default, hyper, random, a scorer or a baseline; repeatable."),
    ] = None,
    top_k: Annotated[list[str] | None, typer.Option(help="Keys kept, count or fraction; repeatable.")] = None,
    sample_size: Annotated[list[int] | None, typer.Option(help="Residual samples; repeatable.")] = None,
    leaf: Annotated[int | None, typer.Option(min=1, help="Exact causal leaves. (default: length / 8)")] = None,
    leaf_rule: Annotated[
        str, typer.Option(help="exclusive (PPL), inclusive (PPL*, the blockwise flag) or both.")
    ] = "exclusive",
    coupling: Annotated[
        str | None, typer.Option(help="corrected (default of appendix-a) or early (of appendix-i).")
    ] = None,
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that paper methods keep.")] = 0,
    length: Annotated[list[int] | None, typer.Option("--length", "-n", help="Tokens read; repeatable.")] = None,
    first: Annotated[int | None, typer.Option(help="First position in the loss. (default: the middle)")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Tokens passed over at the start of a document.")] = 0,
    windows: Annotated[int, typer.Option(min=1, help="Windows read in each document, evenly spaced over it.")] = 1,
    document: Documents = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Documents at most.")] = None,
    skip_short: Annotated[
        bool, typer.Option("--skip-short", help="Leave out documents that are too short.")
    ] = False,
    model: Model = "smollm2",
    layers: Layers = "all",
    changes: Changes = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """Measure the loss of a language model on long documents under exact, local-only and replaced attention.

    Example: prescore perplexity --method kmeans --method default --top-k 64 --top-k 256 -n 4096 --out runs/first

    Example: prescore perplexity --experiment appendix-a -d book.txt --out runs/appendix-a   (--resume goes on)
    """
    from prescore.evaluation.documents import load_documents
    from prescore.evaluation.experiments import default_lengths
    from prescore.evaluation.language_model import load_language_model
    from prescore.evaluation.perplexity import loss_row, make_windows
    from prescore.report.language_summary import summarise

    chosen = Request(
        experiment, method, top_k, sample_size, leaf, leaf_rule, coupling, sinks, read_changes(changes)
    )
    chosen.check()
    texts = load_documents(document, limit=None if document is None else documents)
    quiet_loading()
    session = open_session("perplexity", out=out, json=json, resume=resume, threads=threads, device=device)
    loaded = load_language_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    lengths = length or default_lengths(experiment, loaded.trained_length)
    if document is None:
        texts = long_enough(session, loaded, texts, offset + windows * max(lengths), documents)
    rows: list[Row] = []
    for n_tokens in lengths:
        read = make_windows(
            loaded, texts, n_tokens, first=first, offset=offset, per_document=windows, skip_short=skip_short
        )
        for each in chosen.methods(n_tokens):
            for window in read:
                rows.append(
                    loss_row(loaded, window, each, experiment=experiment, layers=read_layers(layers), seed=seed)
                )
    summarise(list(session.file))  # a damaged figure is refused before hours are spent beside it
    records = session.run(rows)
    write_results(session, records, experiment, loaded)


def long_enough(
    session: Session, loaded: LanguageModel, texts: list[Document], wanted: int, most: int | None
) -> list[Document]:
    """The documents of the default corpus that hold the longest window; nobody asked for those that do not."""
    from prescore.evaluation.perplexity import has_tokens

    found = [text for text in texts if has_tokens(loaded, text, wanted)]
    if not found:
        raise ValueError(
            f"length must be at most that of a document of the default corpus, got {wanted} tokens; "
            "give a longer one by --document"
        )
    left_out = [text.name for text in texts if text not in found]
    if left_out:
        session.say(f"left out, with fewer than {wanted} tokens: {', '.join(left_out)}")
    return found[:most]


_OWN_OPTIONS = {
    "method": "--method",
    "top_k": "--top-k",
    "sinks": "--sinks",
    "sample_size": "--sample-size",
    "leaf_inclusive": "--leaf-rule",
}
_VARIED = {
    **dict.fromkeys(("coupling", "block_size", "rows", "leaf_size"), "the experiment"),
    "min_seq_len": "--leaf",
}


class Request:
    """What the options ask for, as methods at a length."""

    def __init__(
        self,
        experiment: str | None,
        names: list[str] | None,
        top_k: list[str] | None,
        samples: list[int] | None,
        leaf: int | None,
        leaf_rule: str,
        coupling: str | None,
        sinks: int,
        changes: dict[str, Any],
    ) -> None:
        self.experiment, self.names, self.leaf, self.coupling = experiment, names, leaf, coupling
        # an experiment fixes these itself
        self.given = {
            "method": names,
            "top-k": top_k,
            "sample-size": samples,
            "leaf-rule": leaf_rule != "exclusive",
        }
        self.budgets = [read_budget(text) for text in top_k or ["256"]]
        self.samples, self.leaf_rule, self.sinks, self.changes = samples, leaf_rule, sinks, changes

    def check(self) -> None:
        """Refuse what cannot be, before anything is loaded."""
        from prescore import checks
        from prescore.evaluation.experiments import COUPLINGS, EXPERIMENTS

        checks.one_of("leaf_rule", self.leaf_rule, ("exclusive", "inclusive", "both"))
        if self.experiment is not None:
            checks.one_of("experiment", self.experiment, tuple(EXPERIMENTS))
            beside = [name for name, given in self.given.items() if given]
            if beside:
                raise ValueError(
                    f"an experiment must be given without {', '.join(self.given)}, got {beside[0]} too"
                )
        if self.sinks and self.experiment in ("cost", "default"):
            raise ValueError(f"sinks must be left to the experiment {self.experiment}, got {self.sinks}")
        taken = dict(_OWN_OPTIONS) if self.experiment is None else dict(_OWN_OPTIONS, **_VARIED)
        # where an option was not given and no experiment varies its field, the field may be set
        not_given = {"sample_size": self.samples is None, "sinks": not self.sinks}
        for name, value in self.changes.items():
            if name in taken and not (self.experiment is None and not_given.get(name)):
                raise ValueError(f"set must leave {name} to {taken[name]}, got {name}={value!r}")
        if self.coupling is not None:
            checks.one_of("coupling", self.coupling, tuple(COUPLINGS))
            checks.one_of("experiment with a coupling", self.experiment, ("appendix-a", "appendix-i"))
        self.methods(4096)

    def methods(self, length: int) -> list[Method]:
        """Exact and local-only first, then the experiment's methods or every combination asked for."""
        from prescore.evaluation.experiments import Scale, default_leaf, experiment_methods
        from prescore.evaluation.methods import exact, local

        leaf = self.leaf or default_leaf(self.experiment, length)
        if self.experiment is not None:
            scale = Scale(length, leaf, self.sinks, self.changes)
            options = {} if self.coupling is None else {"coupling": self.coupling}
            return experiment_methods(self.experiment, scale, **options)
        found = [exact(), local(leaf)]
        for name in self.names or ["hyper", "kmeans", "leverage", "default"]:
            for changes in self._combinations(name, leaf, length):
                found += self._named(name, leaf, changes)
        return list({repr(method.describe()): method for method in found}.values())

    def _named(self, name: str, leaf: int, changes: dict[str, Any]) -> list[Method]:
        from dataclasses import replace

        from prescore.evaluation.methods import named

        free = name in ("exact", "local", "default", "hyper")
        budgets = self.budgets[:1] if free else self.budgets
        made = [named(name, leaf=leaf, top_k=top_k, overrides=changes) for top_k in budgets]
        if made[0].kind != "prescored":
            return [
                replace(m, label=f"{m.label}, top {k}" if len(budgets) > 1 else m.label)
                for m, k in zip(made, budgets, strict=True)
            ]
        words = [f"{field}={changes[field]}" for field in ("sample_size", "leaf_inclusive") if field in changes]
        words += [f"sinks={changes['sinks']}"] if changes.get("sinks") and name != "random" else []
        axes = {field: made[0].settings[field] for field in ("sample_size", "leaf_inclusive", "sinks")}
        axes["series"] = ", ".join([made[0].label, *words])
        return [
            replace(
                m,
                label=", ".join([m.label, *([f"top {k}"] if len(budgets) > 1 else []), *words]),
                axes={**m.axes, **axes},
            )
            for m, k in zip(made, budgets, strict=True)
        ]

    def _combinations(self, name: str, leaf: int, length: int) -> list[dict[str, Any]]:
        """Changes of the configuration: leaf rules by sample sizes, for what runs HyperAttention."""
        from prescore.evaluation.methods import method_names
        from prescore.registry import list_scorers

        if name not in method_names() or name not in ("hyper", *list_scorers()):
            return [dict(self.changes)]
        rules = {"exclusive": [False], "inclusive": [True], "both": [False, True]}[self.leaf_rule]
        size = max(1, length // 128)
        base = {"block_size": size, "sample_size": size, "sinks": self.sinks}
        sizes: list[int | None] = [*self.samples] if self.samples else [None]
        return [
            {
                **base,
                **({"leaf_inclusive": True} if rule else {}),
                **({} if samples is None else {"sample_size": samples}),
                **self.changes,
            }
            for rule in rules
            for samples in sizes
        ]


def write_results(session: Session, records: list[Record], experiment: str | None, loaded: LanguageModel) -> None:
    """The table on the terminal, CSV files and the plot in the run's directory."""
    from prescore.report.language_plots import plot_experiment
    from prescore.report.language_summary import summarise
    from prescore.report.language_tables import describe_run, full_csv, loss_table, paper_csv

    summaries = summarise(records)
    title = f"{experiment or 'perplexity'}: {describe_run(summaries, loaded.name)}"
    note = "gap closed = (local - loss) / (local - exact); attention = inside the attention functions, one forward"
    session.show(loss_table(summaries, title, note).to_rich())
    name = experiment or "perplexity"
    written = {f"{name}.csv": full_csv(summaries)}
    plots: list[str] = []
    # what the paper prints and most pictures have no place for a length: each gets files of its own
    lengths = sorted({summary.n_tokens for summary in summaries})
    apart = len(lengths) > 1 and experiment != "longest"
    for length in lengths if apart else [None]:
        inside = [summary for summary in summaries if length in (None, summary.n_tokens)]
        stem = name if length is None else f"{name}-{length}"
        shaped = None if experiment is None else paper_csv(experiment, inside)
        if shaped is not None:
            written[f"{stem}-as-printed.csv"] = shaped
        plots.append(f"{stem}.png")
        shown = f"{name}: {describe_run(inside, loaded.name)}"
        plot_experiment(experiment, inside, session.out / plots[-1], shown)
    for file, text in written.items():
        (session.out / file).write_text(text, encoding="utf-8")
    session.say(f"records: {session.file.path}; also {', '.join([*written, *plots])}")


def quiet_loading() -> None:
    """Let transformers load without bars of its own: the command shows its own progress."""
    from prescore.integrations.timm_import import mend_torchvision

    mend_torchvision()
    import transformers.utils.logging

    library: Any = transformers.utils.logging
    library.disable_progress_bar()


def read_budget(text: str) -> int | float:
    """`256` keys or `0.25` of them."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"top_k must be a count or a fraction, got {text!r}") from None


def read_layers(text: str) -> str | list[int]:
    """A pattern, or numbers with commas."""
    numbers = text.split(",")
    if all(number.strip().lstrip("-").isdigit() for number in numbers):
        return [int(number) for number in numbers]
    return text


def read_changes(changes: list[str] | None) -> dict[str, Any]:
    """`FIELD=VALUE` pairs; a value that is not JSON is a word."""
    import dataclasses
    import json

    from prescore import checks
    from prescore.config import PrescoreConfig

    known = sorted(field.name for field in dataclasses.fields(PrescoreConfig))
    found: dict[str, Any] = {}
    for change in changes or []:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"set must be FIELD=VALUE, got {change!r}")
        checks.one_of("field to set", name.strip(), known)
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = value
    return found
