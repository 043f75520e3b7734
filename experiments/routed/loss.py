r"""Loss above exact attention on SmolLM2-135M with all layers routed, second half of the window.

    python experiments/routed/loss.py BOOK.txt --start 200000 --length 8192 \
        --settings rows=512 rows=512,leaf_size=64 rows=512,reach=2.5 rows=512,share=4

Fields are those of `prescore.Routed`. `share` sets how many times `rows` the share of
`prescore.routed.reference.Search` is (2 as shipped), `reach` sets its other field. Instead of --start,
`--windows 4 --window 2` takes the third of four windows as `prescore perplexity --windows 4` does; a document of
the default corpus goes by its name (`python-reference`). Figures beside the loss are means over layers and routed
queries: keys searched, rows read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import prescore.routed.attention as lanes
from prescore import Routed
from prescore.call import make_call
from prescore.bench.language.documents import load_documents
from prescore.bench.language.model import LanguageModel, load_language_model
from prescore.bench.language.perplexity import make_windows
from prescore.integrations.apply import find_adapter, replace_attention
from prescore.integrations.attention import Attend, AttentionContext
from prescore.ops.backend import Needs, pick_backend
from prescore.routed.reference import REACH, Search

FIGURES = ("keys_compared", "far_keys_read")


def routed_attend(config: Routed, spent: dict[str, list[float]]) -> Attend:
    """Causal attention of one window, routed; its processor time and figures are added to `spent`."""

    def attend(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        begin = time.process_time()
        backend = pick_backend(Needs.of(query))
        call = make_call(query, key, value, is_causal=True, scale=context.scale, backend=backend)
        answer = lanes.attend_lanes(call, config)
        spent.setdefault("cpu_seconds", []).append(time.process_time() - begin)
        for name in FIGURES:
            spent.setdefault(name, []).append(answer.figures[name])
        return answer.attended.output

    return attend


@torch.no_grad()
def logits_with(language_model: LanguageModel, tokens: Tensor, attend: Attend | None) -> Tensor:
    """Logits of the window with `attend` in every layer; None = as the model is."""
    model = language_model.model
    numbers = range(len(find_adapter(model).layers(model)) if attend is not None else 0)
    undo = replace_attention(model, dict.fromkeys(numbers, attend)) if attend is not None else lambda: None
    try:
        return language_model.logits(language_model.hidden(tokens))
    finally:
        undo()


def searching(share: float, reach: float) -> Callable[[Routed], Search]:
    """In place of `prescore.routed.attention.search_of`."""
    return lambda config: Search(share * config.rows, reach)


def configured(setting: str) -> Routed:
    """The configuration of `name=value,...`; what is looked for is changed as it says."""
    fields = dict(field.split("=") for field in setting.split(","))
    usual = {"share": lanes.SHARE_PER_ROW, "reach": REACH}
    lanes.search_of = searching(**{name: float(fields.pop(name, value)) for name, value in usual.items()})
    return Routed(**{name: int(value) for name, value in fields.items()})


def main() -> None:
    """Measure exact attention, then every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", help="a text file, or a document of the default corpus by name")
    parser.add_argument("--start", type=int, default=200_000, help="character where the window begins")
    parser.add_argument("--windows", type=int, help="windows in the document, evenly spaced")
    parser.add_argument("--window", type=int, default=0, help="which of them")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--settings", nargs="+", default=["rows=512"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    language_model = load_language_model()
    if options.windows:
        windows = make_windows(
            language_model, load_documents([options.book]), options.length, per_document=options.windows
        )
        tokens = windows[options.window].tokens
    else:
        text = Path(options.book).read_bytes().decode(errors="replace")
        tokens = language_model.encode(text[options.start : options.start + 8 * options.length])[: options.length]
    exact = None
    for setting in ["exact", *options.settings]:
        spent: dict[str, list[float]] = {}
        attend = None if setting == "exact" else routed_attend(configured(setting), spent)
        start = time.perf_counter()
        logits = logits_with(language_model, tokens, attend)
        half = len(tokens) // 2
        loss = float(cross_entropy(logits[half - 1 : -1].float(), tokens[half:].to(logits.device)))
        exact = loss if exact is None else exact
        figures = {"setting": setting, "loss": round(loss, 4), "above_exact": round(loss - exact, 4)}
        for name, each in spent.items():
            figures[name] = round(sum(each) if name == "cpu_seconds" else sum(each) / len(each), 1)
        print(json.dumps({**figures, "seconds": round(time.perf_counter() - start, 1)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
