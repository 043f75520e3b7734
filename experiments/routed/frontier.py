"""How candidates for the default move next-token distributions, on the windows that constants are chosen on.

    python experiments/routed/frontier.py --model smollm2 --length 8192 --out frontier.jsonl BOOK.txt RECORD.jsonl
    python experiments/routed/frontier.py --table frontier.jsonl

Texts are of three kinds: a novel, the context of a LongBench record, and Python's own sources. Windows are tuning
windows (`held_out_windows`), which touch no reported window of `prescore perplexity`. Prints and records, for each
candidate, model and text: the mean divergence (Kullback and Leibler's, in nats) of its distributions from exact
attention's over every eighth position of the last quarter; the difference of losses there; seconds of attention;
keys read and compared by a query. Candidates that are in the file already are left out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from prescore import Routed
from prescore.bench.language.documents import Document
from prescore.bench.language.held_out import TokenizedText, held_out_windows
from prescore.bench.language.model import LanguageModel, load_language_model
from prescore.bench.methods import EXACT, Method
from prescore.bench.observed import observed
from prescore.routed import native, reference

SEED = 0
CONSTANTS = (
    "LIGHT_WEIGHT",
    "SEARCH_STDS",
    "HEAVY_STDS",
    "CLUSTER_REACH",
    "HEAVY_WEIGHT",
    "SINK_WEIGHT",
    "MAX_MASS_GAIN",
    "MASS_KEYS",
    "MASS_SHARE",
)
CANDIDATES: dict[str, tuple[Routed, dict[str, float]]] = {
    **{f"1/{n}": (Routed(min_weight=1 / n), {}) for n in (256, 1024, 2048, 4096, 8192, 16384)},
    **{
        f"1/4096, stds {near}, heavy {heavy}, reach {reach}": (
            Routed(min_weight=1 / 4096),
            {"SEARCH_STDS": near, "HEAVY_STDS": heavy, "CLUSTER_REACH": reach},
        )
        for near, heavy, reach in (
            (3.0, 4.2, 1.0),
            (3.0, 4.2, 1.35),
            (2.75, 4.0, 1.5),
            (2.5, 4.0, 1.6),
            (2.25, 4.0, 1.8),
        )
    },
    **{
        f"1/4096, stds {near}, reach {reach}, {keys} keys counted": (
            Routed(min_weight=1 / 4096),
            {"SEARCH_STDS": near, "CLUSTER_REACH": reach, "MASS_KEYS": keys, "MASS_SHARE": 0.25},
        )
        for near, reach, keys in (
            (2.75, 1.5, 8192),
            (2.5, 1.6, 4096),
            (2.25, 1.5, 4096),
            (2.25, 1.8, 4096),
            (2.25, 1.8, 8192),
            (2.0, 2.0, 4096),
        )
    },
    **{f"1/4096, light {w}": (Routed(min_weight=1 / 4096), {"LIGHT_WEIGHT": w}) for w in (4, 64, 256)},
    "1/4096, all far keys counted": (Routed(min_weight=1 / 4096), {"MASS_SHARE": 1.0}),
    "1/4096, 16,384 far keys counted": (Routed(min_weight=1 / 4096), {"MASS_SHARE": 0.0}),
    "1/4096, heavy 3.7": (Routed(min_weight=1 / 4096), {"HEAVY_STDS": 3.7}),
    "1/4096, clusters of 64": (Routed(min_weight=1 / 4096, cluster_size=64), {}),
    "1/4096, chunks of 128": (Routed(min_weight=1 / 4096, chunk_size=128), {}),
    "1/4096, chunks of 512": (Routed(min_weight=1 / 4096, chunk_size=512), {}),
}


def texts_of(paths: list[Path]) -> dict[str, str]:
    """Texts by name; of a record file the first context."""
    texts = {}
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        texts[path.stem] = json.loads(text.splitlines()[0])["context"] if path.suffix == ".jsonl" else text
    modules = (argparse, inspect, json, torch.nn.functional, torch.nn.modules.module, torch.nn.modules.activation)
    sources = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules]
    return {**texts, "python sources": "\n".join(sources)}


def window(model: LanguageModel, name: str, text: str, length: int) -> Tensor | None:
    """A tuning window of a text; none where it is too short."""
    drawn = held_out_windows(TokenizedText.of(model, Document(name, text)), length, tuning_seed=SEED)
    return drawn[0].tokens if drawn else None


def run(model: LanguageModel, tokens: Tensor, method: Method) -> tuple[Tensor, dict[str, float]]:
    """Logarithms of next-token probabilities at every eighth position of the last quarter, and the cost."""
    with observed(model.model, method.config) as observer:
        hidden = model.hidden(tokens)
        costs = observer.results()
    places = range(len(tokens) * 3 // 4, len(tokens) - 1, 8)
    return model.logits(hidden[list(places)]).log_softmax(-1), costs


def measure(options: argparse.Namespace) -> None:
    """Measure all candidates that the file does not have."""
    torch.set_num_threads(options.threads)
    out = Path(options.out)
    done = (
        {(r["model"], r["text"], r["candidate"]) for r in map(json.loads, out.read_text().splitlines())}
        if out.exists()
        else set()
    )
    model = load_language_model(options.model)
    name = Path(options.model).stem
    defaults = {constant: getattr(reference, constant) for constant in CONSTANTS if hasattr(reference, constant)}
    for text_name, text in texts_of(options.texts).items():
        wanted = [label for label in options.only or CANDIDATES if (name, text_name, label) not in done]
        if not wanted:
            continue
        tokens = window(model, text_name, text, options.length)
        if tokens is None:
            sys.stdout.write(f"{text_name} is too short for a tuning window of {options.length} tokens\n")
            continue
        exact, costs = run(model, tokens, EXACT)
        truth = tokens[list(range(len(tokens) * 3 // 4 + 1, len(tokens), 8))][:, None]
        for label in wanted:
            config, constants = CANDIDATES[label]
            for module in (reference, native):
                for constant, number in {**defaults, **constants}.items():
                    setattr(module, constant, number)
            ours, cost = run(model, tokens, Method(label, config))
            record = {
                **{"model": name, "text": text_name, "candidate": label, "length": len(tokens)},
                "divergence": float((exact.exp() * (exact - ours)).sum(-1).mean()),
                "loss": float((exact.gather(1, truth) - ours.gather(1, truth)).mean()),
                **{key: value for key, value in cost.items() if isinstance(value, (int, float))},
                "exact_seconds": costs.get("attention_seconds"),
            }
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            sys.stdout.write(json.dumps(record) + "\n")


def table(path: Path) -> None:
    """A row for each candidate, means over the texts of each model."""
    rows: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for record in map(json.loads, path.read_text().splitlines()):
        rows[record["candidate"]][record["model"]].append(record)
    for label, models in rows.items():
        for name, records in models.items():
            means = [
                sum(r[key] for r in records) / len(records) for key in ("divergence", "loss", "attention_seconds")
            ]
            sys.stdout.write(
                f"| {label} | {name}, {len(records)} texts | {means[0]:.5f} | {means[1]:+.5f} | {means[2]:.2f} |\n"
            )


def main() -> None:
    """Measure, or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--out", default="frontier.jsonl")
    parser.add_argument("--only", action="append", choices=list(CANDIDATES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    table(options.table) if options.table else measure(options)


if __name__ == "__main__":
    main()
