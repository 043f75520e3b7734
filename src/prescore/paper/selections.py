"""Appendix H on real heads: LevAttention's universal set, and the variants of pre-scoring that it names.

The keys are the first three quarters of saved attention inputs; the queries are 64 positions after them, so every
query sees all of these keys. Weights are the softmax over them. Sinks are among the keys and not protected.

- *universal set*: keys of leverage at least eps. Measured: its size, and the share of entries above eps on it.
- *selection*: the n / 8 best keys of a scorer. Measured: keys in common with Algorithm 1 (k-means, nearest, fitted
  on all keys), attention weight on them, entries above 0.01 on them, relative squared error of the output that
  reads them alone, processor seconds of scoring.
- *skewed keys*: 16 random keys are 100 times as long. Measured: the share of the selected keys that were selected
  on the keys as they are too.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from prescore.attention import score
from prescore.bench.language.tables import half_width
from prescore.bench.plots import COLOURS, bars, figure
from prescore.bench.records import Record, Row, Values
from prescore.bench.speed.heads import SavedHeads
from prescore.bench.tables import MISSING, Table
from prescore.paper.planted.model import lewis_weights
from prescore.scoring.base import Scorer
from prescore.scoring.key_diff import KeyDiff
from prescore.scoring.kmeans import KMeans, KMedian
from prescore.scoring.leverage import Leverage
from prescore.scoring.uniform import Uniform

N_QUERIES, SHARE = 64, 8
EPS = (0.1, 0.05, 0.02, 0.01, 0.005)
HEAVY = 0.01
CHUNK = 1024
SKETCH = 256
SKEWED, FACTOR = 16, 100.0
COMMAND = "heads"
"""The name of its records."""


def algorithm_1(keys: Tensor, seed: int = 0, **options: Any) -> Tensor:
    """k-means scores of `keys [n, d]`, nearest rule."""
    return score(keys[None, None], KMeans(**options), generator=seed)[0, 0]


def streaming(keys: Tensor, seed: int = 0) -> Tensor:
    """Sequential k-means: one pass over chunks of keys, each moves the centres it is nearest to; no key is kept.

    The first chunk is clustered as usual. A centre is the mean of the keys that were nearest to it when they came.
    """
    rows = normalize(keys, dim=-1)
    n_clusters = keys.shape[-1] + 1
    chunk = min(CHUNK, len(rows))
    centres = rows[torch.randperm(chunk, generator=torch.Generator().manual_seed(seed))[:n_clusters]].clone()
    counts = torch.zeros(n_clusters, dtype=rows.dtype)
    for _ in range(10):
        counts.zero_()
        centres = _moved(rows[:chunk], centres, counts, fresh=True)
    for begin in range(chunk, len(rows), chunk):
        centres = _moved(rows[begin : begin + chunk], centres, counts)
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


def other_seed(keys: Tensor, seed: int = 0) -> Tensor:
    """The control: what the seed alone changes."""
    return algorithm_1(keys, seed + 1000)


def by_scorer(scorer: Scorer, keys: Tensor, seed: int = 0) -> Tensor:
    """The scores of one of the library's scorers."""
    return score(keys[None, None], scorer, generator=seed)[0, 0]


SELECTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "Algorithm 1: k-means on all keys": algorithm_1,
    "Algorithm 1 with another seed": other_seed,
    "minibatch: fitted on 1040 sampled keys": partial(algorithm_1, fit_size=1040),
    "streaming: centres updated chunk by chunk": streaming,
    "quantized distances: int8 keys": int8,
    "keys as they are, not normalised": partial(algorithm_1, normalize=False),
    "keys less their mean, normalised": centred,
    "keys clipped at the median length": clipped,
    "k-median": partial(by_scorer, KMedian()),
    "leverage": partial(by_scorer, Leverage()),
    "ApproxLeverage: sketch of 256 rows": partial(by_scorer, Leverage(sketch_size=SKETCH)),
    "Lewis weights, p = 1": lambda keys, _: lewis_weights(keys, 1.0),
    "key-diff": partial(by_scorer, KeyDiff()),
    "random keys": partial(by_scorer, Uniform()),
}
ROBUST = [name for name in SELECTIONS if name.startswith(("Algorithm 1:", "keys as", "keys clipped"))]


def heads_of(saved: SavedHeads) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Keys `[n, d]`, values and queries `[Hq / Hkv, P, d]`, scaled, of every KV head."""
    query, key, value = saved.inputs(saved.length)
    n_keys, scale = keys_of(saved), query.shape[-1] ** -0.5 if saved.scale is None else saved.scale
    positions = torch.linspace(n_keys, saved.length - 1, N_QUERIES).long()
    by_kv_head = query[0].unflatten(0, (key.shape[1], -1))[:, :, positions] * scale
    for keys, values, queries in zip(key[0], value[0], by_kv_head, strict=True):
        yield keys[:n_keys], values[:n_keys], queries


def keys_of(saved: SavedHeads) -> int:
    """How many keys are scored: three quarters of the positions."""
    return saved.length * 3 // 4


def measure_universal_set(saved: SavedHeads, eps: float, sketch_size: int | None, seed: int = 0) -> Values:
    """Size of the set, and the share of the entries above eps on it, over the heads of a layer."""
    sizes, held, total = [], 0, 0
    for keys, _, queries in heads_of(saved):
        inside = by_scorer(Leverage(sketch_size=sketch_size), keys, seed) >= eps
        heavy = (queries @ keys.mT).softmax(-1) > eps
        sizes.append(int(inside.sum()))
        held, total = held + int((heavy & inside).sum()), total + int(heavy.sum())
    return {"size": statistics.fmean(sizes), "heavy": total, "recall": held / total if total else None}


def measure_selection(saved: SavedHeads, name: str, seed: int = 0) -> Values:
    """What the n / 8 best keys of a scorer hold, means over the heads of a layer."""
    by_head = [measure_head(*head, name, seed) for head in heads_of(saved)]
    return {field: statistics.fmean(results[field] for results in by_head) for field in by_head[0]}


def measure_head(keys: Tensor, values: Tensor, queries: Tensor, name: str, seed: int) -> dict[str, float]:
    """The same for one head."""
    n_kept = max(1, len(keys) // SHARE)
    begin = time.process_time()
    chosen = SELECTIONS[name](keys, seed).topk(n_kept).indices
    results = {"seconds": time.process_time() - begin}
    wanted = algorithm_1(keys, seed).topk(n_kept).indices
    results["in_common"] = float(torch.isin(chosen, wanted).double().mean())
    logits = queries @ keys.mT
    weights = logits.softmax(-1)
    heavy = weights > HEAVY
    results["mass"] = float(weights[..., chosen].sum(-1).mean())
    results["recall"] = float(heavy[..., chosen].sum() / heavy.sum().clamp_min(1))
    exact, read = weights @ values, logits[..., chosen].softmax(-1) @ values[chosen]
    results["error"] = float((read - exact).square().sum() / exact.square().sum())
    if name in ROBUST:
        some = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))[:SKEWED]
        longer = keys.index_copy(0, some, FACTOR * keys[some])
        skewed = SELECTIONS[name](longer, seed).topk(n_kept).indices
        results["in_common_skewed"] = float(torch.isin(skewed, chosen).double().mean())
    return results


def selection_rows(layers: Sequence[SavedHeads], seeds: Sequence[int]) -> list[Row]:
    """Every row of the study, layer by layer."""
    rows = []
    for saved, seed in itertools.product(layers, seeds):
        subject = {"heads": saved.name, "digest": saved.digest, "n_keys": keys_of(saved), "n_queries": N_QUERIES}
        for sketch_size, eps in itertools.product((None, SKETCH), EPS):
            config = {"part": "universal set", **subject, "eps": eps, "sketch_size": sketch_size}
            rows.append(Row(config, seed, partial(measure_universal_set, saved, eps, sketch_size, seed)))
        for name in SELECTIONS:
            config = {"part": "selection", **subject, "selection": name, "share": 1 / SHARE}
            rows.append(Row(config, seed, partial(measure_selection, saved, name, seed), cost=4))
    return rows


# Tables and a plot.

_FIELDS = {
    "in_common": "in common",
    "mass": "weight",
    "recall": "entries > 0.01",
    "error": "error",
    "seconds": "cpu s",
    "in_common_skewed": "with skewed keys",
}


def selection_tables(records: Sequence[Record]) -> list[Table]:
    """Both tables."""
    return [selection_table(records), universal_set_table(records)]


def universal_set_table(records: Sequence[Record]) -> Table:
    """Keys of leverage at least eps, and the share of the entries above eps on them, layers across."""
    rows: dict[tuple[str, str], dict[str, list[Values]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        config = record.config
        if config["part"] == "universal set":
            line = "sketched" if config["sketch_size"] else "exact", f"{config['eps']:g}"
            rows[line][Path(config["heads"]).stem].append(record.results)
    names = list(dict.fromkeys(name for by_layer in rows.values() for name in by_layer))
    made = [(*line, *(_set_cell(by_layer.get(name, [])) for name in names)) for line, by_layer in rows.items()]
    note = "keys of leverage at least eps (share of the softmax weights above eps on them); the paper prints none"
    return Table("Universal set on real heads", ("leverage", "eps", *names), tuple(made), note)


def _set_cell(results: Sequence[Values]) -> str:
    if not results:
        return MISSING
    shares = [r["recall"] for r in results if r["recall"] is not None]
    share = f"{100 * statistics.fmean(shares):.0f} %" if shares else "no entry"
    return f"{statistics.fmean(r['size'] for r in results):.0f} ({share})"


def selection_table(records: Sequence[Record]) -> Table:
    """What the best keys of a scorer hold, means over layers and seeds."""
    rows = []
    for name, runs in _by_selection(records).items():
        shown = ({run: r[field] for run, r in runs.items() if field in r} for field in _FIELDS)
        rows.append((name, *map(_with_interval, shown)))
    note = "means ± 95 % over layers x seeds; in common: with Algorithm 1; the paper gives no figures"
    return Table("Selections on real heads", ("selection", *_FIELDS.values()), tuple(rows), note)


def _with_interval(values: Mapping[tuple[str, int | None], float]) -> str:
    if not values:
        return ""
    half = half_width(values)
    return f"{statistics.fmean(values.values()):.2f}" + ("" if half is None else f" ± {half:.2f}")


def selection_plot(records: Sequence[Record], path: str | Path) -> None:
    """Attention weight on the keys that each scorer selects, with the spread over layers and seeds."""
    values = {name: [r["mass"] for r in runs.values()] for name, runs in _by_selection(records).items()}
    with figure(path, (8, 1.2 + 0.3 * len(values))) as (_, axes):
        bars(axes, values, [COLOURS[0]] * len(values))
        axes.set(title="Attention weight on an eighth of the keys", xlabel="share of the weight")


def _by_selection(records: Sequence[Record]) -> dict[str, dict[tuple[str, int | None], Values]]:
    """By selection, the results of every layer and seed."""
    results: dict[str, dict[tuple[str, int | None], Values]] = defaultdict(dict)
    for record in records:
        if record.config["part"] == "selection":
            results[record.config["selection"]][record.config["heads"], record.seed] = record.results
    return results
