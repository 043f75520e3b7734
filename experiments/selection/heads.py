"""Which keys scorers select on real heads: LevAttention's universal set, and the variants that Appendix H names.

    python heads.py FOLDER_OF_HEADS [--out DIRECTORY]   # measures what has no record yet

FOLDER_OF_HEADS holds safetensors files with `query [1, Hq, N, D]`, `key` and `value [1, Hkv, N, D]` after
rotation. The keys are the first 12,288 of 16,384; the queries are 64 positions after them, so every query sees all
of these keys. Weights are the softmax over them. Sinks are among the keys and not protected.

- *universal set*: keys of leverage at least eps. Measured: its size, and the share of entries above eps on it.
- *selection*: the n / 8 best keys of a scorer. Measured: keys in common with Algorithm 1 (k-means, nearest, fitted
  on all keys), attention weight on them, entries above 0.01 on them, relative squared error of the output that
  reads them alone, processor seconds of scoring.
- *skewed keys*: 16 random keys are 100 times as long. Measured: the share of the selected keys that were selected
  on the keys as they are too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from prescore import KeyDiff, KMeans, KMedian, Leverage, LewisWeights, Uniform, score
from prescore.bench.records import RecordFile, Row, Values, measure, row_key
from prescore.bench.speed.heads import SavedHeads, find_heads
from prescore.scoring.base import Scorer

N_KEYS, N_QUERIES, SHARE = 12288, 64, 8
EPS = (0.1, 0.05, 0.02, 0.01, 0.005)
HEAVY = 0.01
CHUNK = 1024
SKETCH = 256
SKEWED, FACTOR = 16, 100.0
COMMAND = "heads"


def algorithm_1(keys: Tensor, seed: int = 0, **options: Any) -> Tensor:
    """k-means scores of `keys [n, d]`, nearest rule."""
    return score(keys[None, None], KMeans(**options), generator=seed)[0, 0]


def streaming(keys: Tensor, seed: int = 0) -> Tensor:
    """Sequential k-means: one pass over chunks of keys, each moves the centres it is nearest to; no key is kept.

    The first chunk is clustered as usual. A centre is the mean of the keys that were nearest to it when they came.
    """
    rows = normalize(keys, dim=-1)
    n_clusters = keys.shape[-1] + 1
    centres = rows[torch.randperm(CHUNK, generator=torch.Generator().manual_seed(seed))[:n_clusters]].clone()
    counts = torch.zeros(n_clusters, dtype=rows.dtype)
    for _ in range(10):
        counts.zero_()
        centres = _moved(rows[:CHUNK], centres, counts, fresh=True)
    for begin in range(CHUNK, len(rows), CHUNK):
        centres = _moved(rows[begin : begin + CHUNK], centres, counts)
    return -torch.cdist(rows, centres).amin(-1)


def _moved(rows: Tensor, centres: Tensor, counts: Tensor, *, fresh: bool = False) -> Tensor:
    """Centres after these rows; `counts` is what each holds, changed in place."""
    labels = torch.cdist(rows, centres).argmin(-1)
    sums = torch.zeros_like(centres).index_add_(0, labels, rows)
    new = torch.bincount(labels, minlength=len(centres)).to(rows.dtype)
    old, total = counts.clone(), counts + new
    counts.copy_(total)
    weighted = sums if fresh else sums + centres * old[:, None]
    return torch.where(total[:, None] > 0, weighted / total.clamp_min(1)[:, None], centres)


def int8(keys: Tensor, seed: int = 0) -> Tensor:
    """Algorithm 1 on keys rounded to int8, each with its own scale: the distances are those of int8 products."""
    rows = normalize(keys, dim=-1)
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return algorithm_1((rows / scale).round() * scale, seed)


def centred(keys: Tensor, seed: int = 0) -> Tensor:
    """Algorithm 1 on the keys less their mean."""
    return algorithm_1(keys - keys.mean(0), seed)


def clipped(keys: Tensor, seed: int = 0) -> Tensor:
    """Algorithm 1 on raw keys, none longer than the median length."""
    lengths = keys.norm(dim=-1, keepdim=True)
    return algorithm_1(keys * (lengths.median() / lengths.clamp_min(1e-12)).clamp_max(1.0), seed, normalize=False)


def by_scorer(scorer: str | Scorer, keys: Tensor, seed: int = 0) -> Tensor:
    """The scores of one of the library's scorers."""
    return score(keys[None, None], scorer, generator=seed)[0, 0]


SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Algorithm 1: k-means on all keys": algorithm_1,
    "minibatch: fitted on 1040 sampled keys": partial(algorithm_1, fit_size=1040),
    "streaming: centres updated chunk by chunk": streaming,
    "quantized distances: int8 keys": int8,
    "keys as they are, not normalised": partial(algorithm_1, normalize=False),
    "keys less their mean, normalised": centred,
    "keys clipped at the median length": clipped,
    "k-median": partial(by_scorer, KMedian()),
    "leverage": partial(by_scorer, Leverage()),
    "ApproxLeverage: sketch of 256 rows": partial(by_scorer, Leverage(sketch_size=SKETCH)),
    "Lewis weights, p = 1": partial(by_scorer, LewisWeights(1.0)),
    "key-diff": partial(by_scorer, KeyDiff()),
    "random keys": partial(by_scorer, Uniform()),
}
ROBUST = [name for name in SELECTIONS if name.startswith(("Algorithm 1", "keys as", "keys clipped"))]


def heads_of(saved: SavedHeads) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Keys `[n, d]`, values and queries `[Hq / Hkv, P, d]`, scaled, of every KV head."""
    query, key, value = saved.inputs(saved.length)
    scale = query.shape[-1] ** -0.5 if saved.scale is None else saved.scale
    positions = torch.linspace(N_KEYS, saved.length - 1, N_QUERIES).long()
    groups = query[0].unflatten(0, (key.shape[1], -1))[:, :, positions] * scale
    for keys, values, queries in zip(key[0], value[0], groups, strict=True):
        yield keys[:N_KEYS], values[:N_KEYS], queries


def measure_universal_set(saved: SavedHeads, eps: float, sketch_size: int | None) -> Values:
    """Size of the set, and the share of the entries above eps on it, over the heads of a layer."""
    sizes, held, total = [], 0, 0
    for keys, _, queries in heads_of(saved):
        inside = by_scorer(Leverage(sketch_size=sketch_size), keys) >= eps
        heavy = (queries @ keys.mT).softmax(-1) > eps
        sizes.append(int(inside.sum()))
        held, total = held + int((heavy & inside).sum()), total + int(heavy.sum())
    return {"size": statistics.fmean(sizes), "heavy": total, "recall": held / total if total else None}


def measure_selection(saved: SavedHeads, name: str) -> Values:
    """What the n / 8 best keys of a scorer hold, means over the heads of a layer."""
    rows: dict[str, list[float]] = defaultdict(list)
    for keys, values, queries in heads_of(saved):
        begin = time.process_time()
        chosen = SELECTIONS[name](keys).topk(N_KEYS // SHARE).indices
        rows["seconds"].append(time.process_time() - begin)
        wanted = algorithm_1(keys).topk(N_KEYS // SHARE).indices
        rows["in_common"].append(float(torch.isin(chosen, wanted).double().mean()))
        logits = queries @ keys.mT
        weights = logits.softmax(-1)
        heavy = weights > HEAVY
        rows["mass"].append(float(weights[..., chosen].sum(-1).mean()))
        rows["recall"].append(float(heavy[..., chosen].sum() / heavy.sum().clamp_min(1)))
        exact, read = weights @ values, logits[..., chosen].softmax(-1) @ values[chosen]
        rows["error"].append(float((read - exact).square().sum() / exact.square().sum()))
        if name in ROBUST:
            some = torch.randperm(N_KEYS, generator=torch.Generator().manual_seed(1))[:SKEWED]
            longer = keys.index_copy(0, some, FACTOR * keys[some])
            skewed = SELECTIONS[name](longer).topk(N_KEYS // SHARE).indices
            rows["in_common_skewed"].append(float(torch.isin(skewed, chosen).double().mean()))
    return {name: statistics.fmean(values) for name, values in rows.items()}


def all_rows(folder: Path) -> Iterator[Row]:
    """Every row of the study, layer by layer."""
    for saved in find_heads(folder):
        subject = {"heads": saved.name, "digest": saved.digest, "n_keys": N_KEYS, "n_queries": N_QUERIES}
        for sketch_size in (None, SKETCH):
            for eps in EPS:
                config = {"part": "universal set", **subject, "eps": eps, "sketch_size": sketch_size}
                yield Row(config, 0, partial(measure_universal_set, saved, eps, sketch_size))
        for name in SELECTIONS:
            config = {"part": "selection", **subject, "selection": name, "share": 1 / SHARE}
            yield Row(config, 0, partial(measure_selection, saved, name))


def main() -> None:
    """Measure what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = RecordFile(options.out / "records.jsonl", resume=True)
    for row in all_rows(options.folder):
        if row_key(COMMAND, row.config, row.seed) not in file:
            file.append(measure(COMMAND, row, argv=["experiments/selection/heads.py", "HEADS"], threads=1))
    file.close()


if __name__ == "__main__":
    main()
