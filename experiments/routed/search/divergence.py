"""How far the default moves a language model's next-token distributions, in texts that constants were chosen on.

    python divergence.py BOOK.txt [--length 8192] [--texts 4] [--part 0.38] [--threads 1]
    python divergence.py BOOK.txt --sink-part 1 --reach 4 --rows 1024      # other constants; a part above 0

Texts are those of `prescore retrieval --task many-needles` with the seed 101, made of the first part of a book;
the four of *Moby-Dick* touch no reported window of `prescore perplexity --experiment default`. Prints the mean
divergence (Kullback and Leibler's, in nats) of the default's distributions from exact attention's, over the
answers to all needles and over every sixteenth position in the second half of the text; losses of a few answers
are far noisier.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from prescore import Routed
from prescore.bench.language.documents import Document, load_documents
from prescore.bench.language.methods import EXACT, Method, measured_attention
from prescore.bench.language.model import LanguageModel, load_language_model
from prescore.bench.language.retrieval import MANY_NEEDLES, Problem, Task, make_problem
from prescore.routed import decode, reference as far, attention as lanes
from prescore.routed import native as call, native as steps

SEED = 101


def set_constants(reach: float, sink_part: float) -> None:
    """In place of those that the library has."""
    usual = lanes.search_of
    lanes.search_of = decode.search_of = lambda config: replace(usual(config), reach=reach)
    far.SINK_PART = call.SINK_PART = steps.SINK_PART = sink_part


def distributions(model: LanguageModel, text: Problem, method: Method) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Logarithms of the probabilities of every token, at the answers and in the text; what it cost."""
    with measured_attention(model.model, method) as cost:
        hidden = model.hidden(text.tokens)
        costs = cost()
    answers = [place - 1 for answer in text.answers for place in range(answer.begin, answer.end)]
    body = list(range(len(text.tokens) // 2, text.questions, 16))
    return *(model.logits(hidden[places]).log_softmax(-1) for places in (answers, body)), costs


def main() -> None:
    """Measure some texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--part", type=float, default=0.38)
    parser.add_argument("--min-weight", type=float, default=Routed().min_weight)
    parser.add_argument("--reach", type=float, default=far.REACH)
    parser.add_argument("--sink-part", type=float, default=far.SINK_PART)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    set_constants(options.reach, options.sink_part)
    model, book = load_language_model("smollm2"), load_documents([options.book])[0]
    haystack = Document(book.name, book.text[: int(options.part * len(book.text))])
    make = partial(make_problem, model, haystack, Task(MANY_NEEDLES, options.length), seed=SEED)
    methods = (EXACT, Method("default", Routed(min_weight=options.min_weight)))
    found = []
    for sample in range(options.texts):
        text = make(sample=sample)
        (*truth, _), (*own, cost) = (distributions(model, text, method) for method in methods)
        apart = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(truth, own, strict=True)]
        costs = (cost["reads_per_query"], cost["attention_processor_seconds"])
        found.append(torch.tensor([*apart, *costs], dtype=torch.float64))
        means = torch.stack(found).mean(0).tolist()
        print(  # noqa: T201
            "texts {}: divergence at answers {:.5f}, in the text {:.5f}; rows {:.0f}, core-seconds {:.1f}".format(
                len(found), *means
            )
        )


if __name__ == "__main__":
    main()
