"""Teacher-forced decoding after a long prompt: how often the likeliest token is exact attention's.

    python experiments/routed/decode_agreement.py BOOK.txt --prompt 8192 --steps 64 --windows 2

Prompt and steps under `prescore.apply(model)`, against one exact forward over all tokens. Steps are routed as the
prompt is: from `Routed.exact_until` keys on. `--exact-until` moves that for both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import prescore
from prescore.bench.language.documents import Document, decode
from prescore.bench.language.model import LanguageModel, load_language_model
from prescore.bench.language.perplexity import make_windows


@torch.no_grad()
def steps(loaded: LanguageModel, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits at every position from the prompt's last on, the true tokens fed one at a time."""
    model = loaded.model
    seen = model(input_ids=tokens[None, :prompt], use_cache=True, logits_to_keep=1)
    logits, cache = [seen.logits[0, -1]], seen.past_key_values
    for position in range(prompt, len(tokens) - 1):
        seen = model(input_ids=tokens[None, position : position + 1], past_key_values=cache, use_cache=True)
        logits.append(seen.logits[0, -1])
    return torch.stack(logits)


def main() -> None:
    """Compare both ways on every window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--exact-until", type=int, default=prescore.Routed().exact_until)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_language_model()
    text = decode(options.book.read_bytes(), options.book.name)
    length = options.prompt + options.steps
    windows = make_windows(
        loaded, [Document(options.book.name, text)], length, first=options.prompt, per_document=options.windows
    )
    config = prescore.Routed(exact_until=options.exact_until)
    for window in windows:
        hidden = loaded.hidden(window.tokens)
        exact = loaded.logits(hidden[options.prompt - 1 : -1])
        with prescore.apply(loaded.model, config):
            ours = steps(loaded, window.tokens, options.prompt)
        same = (ours.argmax(-1) == exact.argmax(-1)).float().mean()
        truth = window.tokens[options.prompt :]
        losses = [float(torch.nn.functional.cross_entropy(x.float(), truth)) for x in (exact, ours)]
        figures = {"window": window.document, "exact_until": options.exact_until, "agreement": float(same)}
        print(json.dumps({**figures, "loss_exact": losses[0], "loss": losses[1]}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
