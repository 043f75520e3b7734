r"""Loss above exact attention on SmolLM2-135M with all layers routed, second half of the window.

    python experiments/routed/loss.py BOOK.txt --start 200000 --length 8192 \
        --settings rows=512,leaf_size=64 rows=512,leaf_size=128 rows=256,leaf_size=64

`singles=0.0078125` sets the share of single keys, `width=8` how many leaves are seen before the past is seen as
nodes of coarser levels (studies only; the latter says what coarser levels cost, at a length that has few).
`FINE_LEAF`, `TOO_FAR_OFF`, `HELPFUL`, `SPARE` change the constants of `routed_heads`; `TOO_FAR_OFF=inf` gives all
heads coarse leaves. Instead of --start, `--windows 4 --window 2` takes the third of four windows as `prescore
perplexity --windows 4` does; a document of the default corpus goes by its name (`python-reference`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import prescore.attention.routed as routed
import prescore.attention.routed_heads as routed_heads
import prescore.attention.routed_layout as layout
from prescore.config import PrescoreConfig
from prescore.evaluation.documents import load_documents
from prescore.evaluation.language_model import load_language_model
from prescore.evaluation.perplexity import make_windows
from prescore.route import build_tree

CONSTANTS: dict[str, float] = {}


def register(name: str, config: PrescoreConfig, spent: dict[str, float]) -> None:
    """Make `name` an attention implementation of transformers: every layer routed with `config`.

    `spent` sums up the processor time of attention and the heads that read fine leaves.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, mask, scaling=None, **_):  # noqa: ANN001, ANN003, ANN202
        scale = scaling or query.shape[-1] ** -0.5
        begin = time.process_time()
        attended, stats = routed.routed_attention(
            query, key, value, is_causal=True, config=config, scale=scale, tree_builder=build_tree
        )
        spent["cpu_seconds"] = spent.get("cpu_seconds", 0) + time.process_time() - begin
        spent["fine_heads"] = spent.get("fine_heads", 0) + stats["fine_heads"]
        return attended.output.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def narrow(width: int) -> None:
    """See no more than `width` leaves by themselves, however many are read."""

    def make_layout(*arguments, **options) -> layout.Layout:  # noqa: ANN002, ANN003
        made = layout.make_layout(*arguments, **options)
        leaves = made.n_joined * made.large_leaves
        levels = len(layout.node_cuts(width, made.large_leaves, leaves)) - 1
        return dataclasses.replace(made, width=width, n_levels=levels)

    routed.make_layout = make_layout


def main() -> None:
    """Measure exact attention, then every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", help="a text file, or a document of the default corpus by name")
    parser.add_argument("--start", type=int, default=200_000, help="character where the window begins")
    parser.add_argument("--windows", type=int, help="windows in the document, evenly spaced")
    parser.add_argument("--window", type=int, default=0, help="which of them")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--settings", nargs="+", default=["rows=512,leaf_size=64"])
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
    model = language_model.model
    exact = None
    for setting in ["exact", *options.settings]:
        spent: dict[str, float] = {}
        if setting == "exact":
            model.set_attn_implementation("sdpa")
        else:
            fields = dict(field.split("=") for field in setting.split(","))
            layout.SINGLES_PER_KEY = float(fields.pop("singles", layout.SINGLES_PER_KEY))
            if "width" in fields:
                narrow(int(fields.pop("width")))
            for name in ("FINE_LEAF", "TOO_FAR_OFF", "HELPFUL", "SPARE"):
                usual = CONSTANTS.setdefault(name, getattr(routed_heads, name))
                setattr(routed_heads, name, type(usual)(fields.pop(name, usual)))
            config = PrescoreConfig(inner="routed", **{name: int(value) for name, value in fields.items()})
            register("routed-study", config, spent)
            model.set_attn_implementation("routed-study")
        start = time.perf_counter()
        with torch.no_grad():
            logits = language_model.logits(language_model.hidden(tokens))
        half = len(tokens) // 2
        loss = float(cross_entropy(logits[half - 1 : -1].float(), tokens[half:].to(logits.device)))
        exact = loss if exact is None else exact
        figures = {"setting": setting, "loss": round(loss, 4), "above_exact": round(loss - exact, 4)}
        figures.update({name: round(value, 1) for name, value in spent.items()})
        print(json.dumps({**figures, "seconds": round(time.perf_counter() - start, 1)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
