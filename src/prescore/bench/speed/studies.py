"""What `prescore speed` measures: rows, each of which times exact attention on the same inputs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prescore import checks
from prescore.attention import Options, prescored_attention
from prescore.bench.methods import Baseline, Local, Sizes, parse_method
from prescore.bench.records import Row, Values
from prescore.bench.speed.heads import SavedHeads, heads_at_lengths
from prescore.bench.speed.timing import (
    EXACT,
    Inputs,
    check_exact,
    check_method,
    random_inputs,
    seconds,
    time_calls,
    timed,
)
from prescore.config import Config, Routed
from prescore.integrations.decode import CachedKeys, LayerCache

METHODS = ("hyper", "paper:kmeans", "paper:kmedian", "paper:leverage", "default")
LENGTHS, QUICK_LENGTHS = tuple(2**power for power in range(10, 16)), (1024, 2048, 4096)
LONG = 32768
"""Above this length fewer random heads are timed, for exact attention and all methods alike. One causal head would
split unevenly over two threads."""
HEADS, LONG_HEADS = 4, 2
STEP_LENGTHS, STEPS = (8192, 32768), 50
STEP_HEADS = {"query_heads": 14, "kv_heads": 2}
"""Heads of the random layer of the study steps."""

CPU = "cpu"


@dataclass(frozen=True)
class Run:
    """What one run of the command measures.

    Attributes:
        settings: Record fields that studies share: `heads` (None = by length), `dim`, `dtype`, `repeats`,
            `top_k`, `min_seq_len`, `methods`, `memory`.
        lengths: Requested lengths; None = those of each study.
        causal, backward: One or both.
        saved: Saved heads, for the studies heads and steps.
        seed: Of all randomness.
        device: Of the tensors.
    """

    settings: Values
    lengths: Sequence[int] | None = None
    causal: Sequence[bool] = (False, True)
    backward: Sequence[bool] = (False, True)
    saved: Sequence[SavedHeads] = ()
    seed: int = 0
    device: str = CPU


def plan_rows(run: Run, studies: Sequence[str]) -> list[Row]:
    """All rows of the named studies; what cannot be measured is refused here."""
    for name in studies:
        checks.one_of("--study", name, tuple(STUDIES))
    for name in run.settings["methods"]:
        make_method(name, run.settings)
    if "heads" in studies and not run.saved:
        raise ValueError("--heads must be a directory of saved heads for --study heads, got none")
    if "heads" in studies and True not in run.causal:
        raise ValueError("--heads must come with --causal, got --no-causal")
    return [row for name, rows_of in STUDIES.items() if name in studies for row in rows_of(run)]


def length_rows(run: Run) -> Iterator[Row]:
    """Random heads at each length, with each mask and pass."""
    for causal, backward, n in itertools.product(run.causal, run.backward, run.lengths or LENGTHS):
        config = {**run.settings, "heads": heads_of(run, n), "n": n, "causal": causal, "backward": backward}
        config["n_clusters"] = None  # experiments/speed varies it, and records say so
        yield row(run, "lengths", measure_methods, config)


def heads_of(run: Run, n: int) -> int:
    """Random heads at a length."""
    return int(run.settings["heads"] or (HEADS if n <= LONG else LONG_HEADS))


def head_rows(run: Run) -> Iterator[Row]:
    """Saved heads, causal, forward unless only backward is asked for."""
    shared = {name: value for name, value in run.settings.items() if name not in ("heads", "dim")}
    for saved, n in heads_at_lengths(run.saved, run.lengths):
        config = {**shared, "n": n, "heads": saved.name, "digest": saved.digest}
        if False not in run.backward:
            config["backward"] = True
        yield row(run, "heads", partial(measure_methods, saved=saved), config)


def step_rows(run: Run) -> Iterator[Row]:
    """Decode steps of the default on saved heads, or on a random layer where none are given."""
    shared = {"dtype": run.settings["dtype"], "memory": run.settings["memory"], "repeats": STEPS}
    for n in () if run.saved else run.lengths or STEP_LENGTHS:
        config = {"n": n, "heads": None, "digest": None, "dim": run.settings["dim"], **STEP_HEADS}
        yield row(run, "steps", measure_steps, {**shared, **config})
    for saved, n in heads_at_lengths(run.saved, run.lengths):
        config = {"n": n, "heads": saved.name, "digest": saved.digest, **saved.sizes}
        yield row(run, "steps", partial(measure_steps, saved=saved), {**shared, **config})


STUDIES: dict[str, Callable[[Run], Iterator[Row]]] = {
    "lengths": length_rows,
    "heads": head_rows,
    "steps": step_rows,
}


def row(run: Run, study: str, measure: Callable[..., Values], config: Values) -> Row:
    """A row of a study, which `measure` measures by its settings and the seed."""
    config = {"study": study, **config}
    if run.device != CPU:  # rows of CPUs keep their keys
        config["device"] = run.device
    cost = config["n"] if study == "steps" else config["n"] ** 2 / 8192 * (3.5 if config.get("backward") else 1.0)
    return Row(config, run.seed, partial(measure, config, run.seed), cost)


def make_method(name: str, config: Values) -> Config:
    """The configuration of a method of a row, by its name."""
    changes = {} if config.get("n_clusters") is None else {"scorer.n_clusters": config["n_clusters"]}
    sizes = Sizes(top_k=config["top_k"], leaf=config["min_seq_len"], changes=changes)
    method = parse_method(name, sizes).config
    if isinstance(method, Local | Baseline):
        raise ValueError(f"--method must be a configuration of the library, got {name!r}")
    return method


def make_inputs(config: Values, seed: int, saved: SavedHeads | None) -> tuple[Inputs, float | None]:
    """Query, key and value, saved or random, and their scale."""
    if saved is not None:
        inputs, scale = saved.inputs(config["n"], config["dtype"]), saved.scale
    else:
        heads = config["query_heads"] if "query_heads" in config else config["heads"]
        sizes = {"kv_heads": config.get("kv_heads"), "dtype": config.get("dtype", "float32"), "seed": seed}
        inputs, scale = random_inputs(config["n"], heads, config["dim"], **sizes), None
    query, key, value = (tensor.to(config.get("device", CPU)) for tensor in inputs)
    return (query, key, value), scale


def exact_call(inputs: Inputs, causal: bool, scale: float | None) -> Tensor:
    """Torch's fused exact attention."""
    grouped = inputs[0].shape[1] != inputs[1].shape[1]
    return scaled_dot_product_attention(*inputs, is_causal=causal, scale=scale, enable_gqa=grouped)


def relative_error(output: Tensor, wanted: Tensor) -> float:
    """`|output - wanted|^2 / |wanted|^2`."""
    wide = wanted.double()
    return float((output.double() - wide).square().sum() / wide.square().sum().clamp_min(1e-300))


def measure_methods(config: Values, seed: int, saved: SavedHeads | None = None) -> Values:
    """Times of exact attention and of every method on the same inputs, what they read, and their errors.

    On random inputs `error` is the largest difference from the reference; on saved heads it is the relative
    squared error of the layer's output against exact attention.
    """
    causal, backward = config.get("causal", True), config.get("backward", False)
    inputs, scale = make_inputs(config, seed, saved)
    for tensor in inputs:
        tensor.requires_grad_(backward)
    kind: Values = {"is_causal": causal, "scale": scale}
    configs = {name: make_method(name, config) for name in config["methods"]}
    calls = {EXACT: partial(exact_call, inputs, causal, scale)}
    calls |= {name: partial(prescored_attention, *inputs, method, **kind) for name, method in configs.items()}
    with torch.no_grad():
        results = check_calls(calls, configs, inputs, kind, saved)
    times = time_calls(calls, config["repeats"], backward=backward)
    visible = (config["n"] + 1) / 2 if causal else config["n"]
    for name, entry in results.items():
        entry.update(times[name])
        if name != EXACT:
            entry["speedup_bound"] = visible / max(entry["reads_per_query"], 1.0)
            entry["share_of_bound"] = entry["speedup"] / entry["speedup_bound"]
            entry["scoring_of_exact"] = entry["stage_seconds"].get("scoring", 0.0) / times[EXACT]["seconds"]
    return {"shape": [list(tensor.shape) for tensor in inputs], "methods": results}


def check_calls(
    calls: Mapping[str, Callable[[], Tensor]],
    configs: Mapping[str, Config],
    inputs: Inputs,
    kind: Values,
    saved: SavedHeads | None,
) -> dict[str, Values]:
    """The error of each call that is timed, against its reference, and what it read."""
    n = inputs[0].shape[2]
    where = f"at n = {n}" if saved is None else f"on {saved.name}"
    exact = calls[EXACT]()
    results = {EXACT: check_exact(f"{EXACT} {where}", inputs, exact, **kind)}
    for name, method in configs.items():
        output = calls[name]()
        checked = check_method(f"{name} {where}", inputs, method, output, **kind, from_model=saved is not None)
        stats = prescored_attention(*inputs, method, **kind, return_aux=True)[1].stats
        total = sum(stats.seconds.values())
        results[name] = {
            **checked,
            "reads_per_query": stats.keys_per_query + stats.centroids_per_query,
            "keys_compared_per_query": (stats.keys_compared or 0.0) * (1 - (stats.exact_queries or 0) / n),
            "stage_seconds": dict(stats.seconds),
            "shares": {stage: spent / total for stage, spent in stats.seconds.items()},
        }
        if saved is not None:
            heads = zip(output.unbind(1), exact.unbind(1), strict=True)
            results[name]["error"] = relative_error(output, exact)
            results[name]["head_errors"] = [relative_error(*pair) for pair in heads]
    return results


@torch.no_grad()
def measure_steps(config: Values, seed: int, saved: SavedHeads | None = None) -> Values:
    """Seconds of one step, at each of the last positions; the first step builds the index and is timed apart.

    Exact attention is timed with grouped heads, and packed: the heads of a group as queries of one KV head, which
    reads every key once.
    """
    (query, key, value), scale = make_inputs(config, seed, saved)
    n, n_steps, decoder = config["n"], config["repeats"], LayerCache()
    if n <= n_steps:
        raise ValueError(f"n must be more than the {n_steps} steps, got {n}")
    times: dict[str, list[float]] = {EXACT: [], "packed": [], "routed": []}
    outputs: dict[str, list[Tensor]] = {EXACT: [], "routed": []}
    reads, paths = [], []
    for n_keys in range(n - n_steps, n + 1):
        newest = query[:, :, n_keys - 1 : n_keys], key[:, :, :n_keys], value[:, :, :n_keys]
        times["packed"].append(seconds(partial(packed_step, newest, scale)))
        spent, exact = timed(partial(exact_call, newest, False, scale))
        times[EXACT].append(spent)
        spent, (output, n_reads, path) = timed(partial(_routed_step, decoder, newest, scale))
        times["routed"].append(spent)
        outputs[EXACT].append(exact)
        outputs["routed"].append(output)
        reads.append(n_reads)
        paths.append(path)
    # a step is a query of the full call
    checked = check_method(
        f"a routed step at n = {n}", newest, Routed(), output, is_causal=True, scale=scale, from_model=True
    )
    routed, wanted = (torch.cat(outputs[name][1:], 2) for name in ("routed", EXACT))
    median = {name: statistics.median(spent[1:]) for name, spent in times.items()}
    return {
        "seconds": median,
        "mean_seconds": {name: statistics.fmean(spent[1:]) for name, spent in times.items()},
        "spread": {name: max(spent[1:]) - min(spent[1:]) for name, spent in times.items()},
        "index_seconds": times["routed"][0],
        "path": sorted(set(paths[1:])),
        "reads_per_query": statistics.fmean(reads[1:]),
        "speedup": median[EXACT] / median["routed"],
        "speedup_packed": median["packed"] / median["routed"],
        "error": relative_error(routed, wanted),
        "mismatched_queries": checked["mismatched_queries"],
    }


def packed_step(newest: Inputs, scale: float | None) -> Tensor:
    """Exact attention of one query with the heads of a group as queries of their KV head."""
    query, key, value = newest
    packed = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    return scaled_dot_product_attention(packed, key, value, scale=scale).flatten(1, 2)[:, :, None]


def _routed_step(decoder: LayerCache, newest: Inputs, scale: float | None) -> tuple[Tensor, float, str]:
    """Output, keys and centroids read, and the path of a step, as a layer with a cache takes it."""
    query, key, value = newest
    step = decoder.step(query, CachedKeys(key, value, None, key.shape[2]), Routed(), Options(scale=scale))
    if step.result is None:
        return exact_call(newest, False, scale), float(key.shape[2]), step.path
    return step.result.output, sum(step.result.count_reads()), step.path
