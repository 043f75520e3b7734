"""RULER on language models whose attention is replaced: lm_eval makes the samples and scores the answers.

Eleven of the thirteen tasks are made from nothing but a seed and, for five of them, a local text in place of the
essays that lm_eval downloads. The two tasks of question answering need their files. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prescore import checks
from prescore.bench.language.documents import Document
from prescore.bench.language.generation import generate_measured
from prescore.bench.language.model import LanguageModel
from prescore.bench.methods import SINKS, Baseline, Local, Method, sliding_window
from prescore.bench.records import Record, Row, Values, replacing
from prescore.bench.tables import number
from prescore.config import Exact
from prescore.integrations.apply import Layers

_RULER = "lm_eval.tasks.ruler"
DOCUMENT = "document"
_SENTENCE_END = r"(?<=[.!?])\s+"
_USUAL = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
READS = "prompt_reads_per_query"


class _Task(NamedTuple):
    """Where lm_eval makes a task: module, function, and the function in it that takes the number of samples.

    Attributes:
        module, function, sampler: As above.
        max_new_tokens: Tokens of an answer.
        shortest: Tokens that a prompt needs at least: below it lm_eval would search for a fit forever.
        delimiter: Between the prompt and the words that an answer begins with.
        needs: `document` or a file of questions.
    """

    module: str
    function: str
    sampler: str
    max_new_tokens: int
    shortest: int = 512
    delimiter: str = " "
    needs: str = ""


def _niah(function: str, needs: str = "") -> _Task:
    return _Task("niah_utils", function, "generate_samples", 128, needs=needs)


TASKS = {
    **{name: _niah(name) for name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3")},
    "vt": _Task("vt_utils", "get_vt_dataset", "sys_vartrack_w_noise_random", 30, shortest=1024),
    "cwe": _Task("cwe_utils", "get_cw_dataset", "sys_word_pair_random", 120, shortest=1024, delimiter="\n\n"),
    "fwe": _Task("fwe_utils", "fwe_download", "sys_kwext", 50),
    **{
        name: _niah(name, DOCUMENT)
        for name in ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
    },
    "qa_squad": _Task("qa_utils", "get_squad", "generate_samples", 32, shortest=1024, needs="squad"),
    "qa_hotpot": _Task("qa_utils", "get_hotpotqa", "generate_samples", 32, shortest=1024, needs="hotpot"),
}
"""By RULER's names; lm_eval puts `ruler_` before those of the last two groups."""


@dataclass(frozen=True)
class Sample:
    """One prompt with the words that a right answer has.

    Attributes:
        model: Whose tokenizer measured the prompt.
        task: One of `TASKS`.
        length: Tokens of prompt and answer at most.
        seed, number: Which of the task's samples it is.
        source: A short name of the text or file that it was made from; empty = of none.
        prompt: The text.
        outputs: Words of a right answer: all of them, or for question answering any one.
    """

    model: str
    task: str
    length: int
    seed: int
    source: str
    number: int
    prompt: str
    outputs: list[str]

    @property
    def identity(self) -> tuple[str, str, int, int, str, int]:
        """Everything but the text."""
        return (self.model, self.task, self.length, self.seed, self.source, self.number)

    @property
    def digest(self) -> str:
        """A short name of the prompt."""
        return hashlib.sha256(self.prompt.encode("utf-8", "surrogatepass")).hexdigest()[:12]


class Source(NamedTuple):
    """What samples are drawn from.

    Attributes:
        seed: Of all draws.
        document: The text around needles, for tasks that have one.
        files: The questions, for tasks that have them: `squad` and `hotpot`, the development sets of SQuAD 2.0 and
            of HotpotQA (distractor) in their own JSON.
    """

    seed: int
    document: Document
    files: Mapping[str, Path]

    def describe(self, task: _Task) -> str:
        """A short name of the text or file of a task; empty = it has none."""
        if not task.needs:
            return ""
        return self.document.digest if task.needs == DOCUMENT else self.files[task.needs].name


def read_tasks(text: str, files: Iterable[str] = ()) -> list[str]:
    """Names of tasks, separated by commas; `all` = those that need no file, or a file that is given."""
    if text == "all":
        return [name for name, task in TASKS.items() if task.needs in ("", DOCUMENT, *files)]
    names = [name.strip().removeprefix("ruler_") for name in text.split(",")]
    for name in names:
        checks.one_of("tasks", name, tuple(TASKS))
        needs = TASKS[name].needs
        if needs not in ("", DOCUMENT, *files):
            raise ValueError(f"tasks must come with the files that they need, got {name} without --{needs}")
    return list(dict.fromkeys(names))


def check_lengths(names: Sequence[str], lengths: Sequence[int]) -> None:
    """Refuse a length at which a task has no room."""
    for name, length in itertools.product(names, lengths):
        if length < TASKS[name].shortest:
            raise ValueError(f"length must be at least {TASKS[name].shortest} for the task {name}, got {length}")


def make_samples(
    language_model: LanguageModel, name: str, length: int, count: int, source: Source
) -> list[Sample]:
    """The first samples of a task at a length, by lm_eval; more of them begin with the same ones.

    Args:
        language_model: Its tokenizer measures the length of prompts.
        name: One of `TASKS`.
        length: Tokens of a prompt and its answer.
        count: How many.
        source: What they are drawn from.
    """
    task = TASKS[name]
    check_lengths([name], [length])
    _check_tokenizer(language_model, name)
    with _quiet():
        module = importlib.import_module(f"{_RULER}.{task.module}")
        replaced = _replacements(module, task, language_model, count, source)
        random.seed(f"{name} {length} {source.seed}")
        importlib.import_module("numpy").random.seed(source.seed)
        if hasattr(module, "RNG"):
            module.RNG.seed(source.seed)
        with _replaced(replaced):
            made = getattr(module, task.function)(max_seq_lengths=[length])["test"]
        delimit = importlib.import_module("lm_eval.api.utils").maybe_delimit
    identity = (language_model.name, name, length, source.seed, source.describe(task))
    return [
        Sample(*identity, index, delimit(row["input"], row["gen_prefix"], task.delimiter), list(row["outputs"]))
        for index, row in enumerate(made)
    ]


def _replacements(
    module: Any, task: _Task, language_model: LanguageModel, count: int, source: Source
) -> list[tuple[Any, str, Any]]:
    """What lm_eval would download, and how many samples it would make, by module and name."""
    sampler = getattr(module, task.sampler)

    def some(*arguments: Any, **options: Any) -> Any:
        return sampler(*arguments, **options | {"num_samples": min(count, options.get("num_samples", count))})

    replaced: list[tuple[Any, str, Any]] = [
        (module, task.sampler, some),
        (module, "get_tokenizer", lambda *_: language_model.tokenizer),
    ]
    if task.needs == DOCUMENT:
        prepare, words = importlib.import_module(f"{_RULER}.prepare_niah"), source.document.text.split()
        replaced.append((module, "get_haystack", lambda type_haystack: words))
        replaced.append((prepare, "cached_sent_tokenize", partial(re.split, _SENTENCE_END)))
    elif task.needs:
        content = json.loads(source.files[task.needs].read_text(encoding="utf-8"))
        replaced.append((module, "download_json", lambda url: content))
        for read in (module.read_squad, module.read_hotpotqa):
            read.cache_clear()
    return replaced


def collect_samples(
    path: Path,
    language_model: LanguageModel,
    names: Sequence[str],
    lengths: Sequence[int],
    count: int,
    source: Source,
) -> list[Sample]:
    """Samples of all tasks at all lengths from a file; what it lacks is made and saved there.

    All methods, and a run that is continued, read the same prompts. The order is by number, so that a run that is
    stopped has as many samples of each task.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    saved = {sample.identity: sample for sample in (Sample(**json.loads(line)) for line in lines)}
    n_saved, chosen = len(saved), []
    for length, name in itertools.product(lengths, names):
        first = (language_model.name, name, length, source.seed, source.describe(TASKS[name]))
        samples = [saved[(*first, index)] for index in range(count) if (*first, index) in saved]
        if len(samples) < count:
            samples = make_samples(language_model, name, length, count, source)
            saved |= {sample.identity: sample for sample in samples}
        chosen += samples
    if len(saved) > n_saved:
        with replacing(path) as working:
            lines = [json.dumps(asdict(sample)) for sample in saved.values()]
            working.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sorted(chosen, key=lambda sample: sample.number)


def score(sample: Sample, answer: str) -> float:
    """Share of the right words that are in an answer, by lm_eval; for question answering whether one is."""
    common = importlib.import_module(f"{_RULER}.common_utils")
    judge = common.process_results_part if TASKS[sample.task].module == "qa_utils" else common.process_results
    return float(judge({"max_length": sample.length, "outputs": sample.outputs}, [answer])[str(sample.length)])


def ruler_row(
    language_model: LanguageModel, sample: Sample, method: Method, *, layers: Layers | None = None
) -> Row:
    """One sample under a method as a row: the prompt is read and an answer decoded greedily."""

    def measure() -> Values:
        from transformers import DynamicCache

        from prescore.integrations.transformers.cache import PrescoredCache

        model, tokenizer = language_model.model, language_model.tokenizer
        config = None if isinstance(method.config, Exact) else method.config
        is_plain = config is None or isinstance(config, Local | Baseline)
        of_text = model.config.get_text_config(decoder=True)
        with language_model.extended(sample.length) as scaling:
            made = generate_measured(
                model,
                _tokens(language_model, sample)[None].to(language_model.device),
                DynamicCache(config=of_text) if is_plain else PrescoredCache(of_text),
                config,
                layers="all" if layers is None else layers,
                max_new_tokens=TASKS[sample.task].max_new_tokens,
            )
        answer = tokenizer.decode(made.tokens, skip_special_tokens=True)
        kept = ("prompt_tokens", "new_tokens", READS, "prefill_attention_seconds", "prefill_ran", "decode_paths")
        results = {"score": score(sample, answer), "answer": answer, **{name: made.results[name] for name in kept}}
        return results if scaling is None else {**results, "position_scaling": scaling}

    config: Values = {
        "part": "ruler",
        "model": language_model.name,
        "dtype": language_model.dtype,
        "task": sample.task,
        "n_tokens": sample.length,
        "sample": sample.number,
        "digest": sample.digest,
        "layers": "all" if layers is None else layers,
        "method": method.describe(),
    }
    return Row(config, sample.seed, measure, cost=float(sample.length))


def window_beside(record: Record) -> Method | None:
    """The sliding window that reads as many keys as a method did in this record; None where it read all."""
    if record.results.get(READS) is None:
        return None
    reads, method = number(record, record.results[READS], READS), record.config["method"]
    length = int(number(record, record.results["prompt_tokens"], "prompt_tokens"))
    if reads >= (length + 1) / 2:
        return None
    return sliding_window(length, reads, method["config"].get("sinks", SINKS), compared_with=method["label"])


def _check_tokenizer(language_model: LanguageModel, name: str) -> None:
    """Refuse one for which lm_eval would look for a sample that fits forever: these two tasks have long parts."""
    count = len(language_model.encode(_USUAL, special=False))
    if name in ("vt", "cwe") and 2 * count > len(_USUAL):
        raise ValueError(
            f"tasks must leave out {name} where a token is fewer than two letters, got {count} tokens for "
            f"{len(_USUAL)} letters"
        )


def _tokens(language_model: LanguageModel, sample: Sample) -> Tensor:
    """The prompt `[N]`, after the beginning-of-text token where the tokenizer has one: Gemma fails without it."""
    tokens, first = language_model.encode(sample.prompt), language_model.tokenizer.bos_token_id
    if first is None or int(tokens[0]) == first:
        return tokens
    return torch.cat((torch.tensor([first], dtype=tokens.dtype, device=tokens.device), tokens))


@contextlib.contextmanager
def _replaced(names: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Names of lm_eval's modules with other values inside the block."""
    earlier = [(module, name, getattr(module, name)) for module, name, _ in names]
    for module, name, value in names:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in earlier:
            setattr(module, name, value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm_eval prints while it makes samples, and downloads a sentence splitter when it is imported."""
    nltk, output = importlib.import_module("nltk"), io.StringIO()
    offline = _replaced([(nltk, "download", lambda *_: None)])
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), offline:
        yield
