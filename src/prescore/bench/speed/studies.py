"""The studies of `prescore speed`: their rows, each of which times exact attention on the same inputs."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import scaled_dot_product_attention

from prescore import checks
from prescore.attention import prescored_attention, score
from prescore.bench.records import Row, Values
from prescore.bench.speed.heads import SavedHeads, heads_at_lengths
from prescore.bench.speed.timing import (
    EXACT,
    MOST_MISMATCHED,
    Inputs,
    check_exact,
    check_method,
    check_output,
    random_inputs,
    seconds,
    time_calls,
    timed,
)
from prescore.config import Config, Exact, Hyper, Routed, Selected
from prescore.integrations.decode import CachedKeys, LayerCache, Request, SelectionState
from prescore.parallel.comm import Group, as_group
from prescore.registry import get_scorer
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import ClusteringScorer, GaussianKMeans, KMeans, KMedian, Minkowski
from prescore.scoring.leverage import Leverage

METHODS = ("hyper", "paper:kmeans", "paper:kmedian", "paper:leverage", "default")
SCORERS: dict[str, Scorer] = {
    "kmeans": KMeans(),
    "kmedian": KMedian(),
    "minkowski p=1.5": Minkowski(p=1.5),
    "minkowski p=3": Minkowski(p=3.0),
    "gaussian-kmeans": GaussianKMeans(),
    "leverage": Leverage(),
}
"""Every clustering scorer with the paper's settings, and leverage."""

LENGTHS, QUICK_LENGTHS = tuple(2**power for power in range(10, 18)), (1024, 2048, 4096)
LONG = 32768
"""Above this length one head is timed, for all methods; studies at a single length stop here."""
HEADS, LONG_HEADS = 4, 1
SHORT = (64, 128, 256, 512, 1024, 2048, 4096)
SHORT_SECONDS = 0.2
"""Short calls are repeated until exact attention has run this long."""
TOP_K = (256, 512, 1024, 2048, 4096, 8192)
CLUSTERS = (8, 16, 32, 65, 128, 256)
STEP_LENGTHS = (8192, 32768, 131072)
DECODE_STEPS, ROUTED_STEPS = 20, 50
FEWEST_ROUNDS = 5
"""Rounds of calls that take little time, at least."""
RANKS = (2, 4)
LAYER = {"query_heads": 14, "kv_heads": 2}
"""Heads of the random layer of the studies parts and steps."""


@dataclass(frozen=True)
class Run:
    """What one run of the command measures.

    Attributes:
        settings: Record fields that studies share: `heads` (None = by length), `dim`, `dtype`, `repeats`,
            `top_k`, `min_seq_len`, `methods`, `memory`.
        n: Requested lengths; None = each study's own.
        lengths: Lengths of the study `lengths`.
        causal, backward: One or both.
        saved: Saved heads, for the studies heads, parts and steps.
        seed: Of all randomness.
    """

    settings: Values
    n: Sequence[int] | None = None
    lengths: Sequence[int] = LENGTHS
    causal: Sequence[bool] = (False, True)
    backward: Sequence[bool] = (False, True)
    saved: Sequence[SavedHeads] = ()
    seed: int = 0

    @property
    def longest(self) -> int:
        """Length of the studies that have one."""
        return min(max(self.lengths), LONG)

    @property
    def rounds(self) -> int:
        """Rounds of calls that take little time."""
        return max(int(self.settings["repeats"]), FEWEST_ROUNDS)

    def row(self, study: str, measure: Callable[[Values, int], Values], names: str, **own: Any) -> Row:
        """A row with the settings `names` and its own fields; a setting `heads=None` depends on the length."""
        shared = {name: self.settings[name] for name in names.split()}
        if "heads" in shared and shared["heads"] is None:
            shared["heads"] = HEADS if own["n"] <= LONG else LONG_HEADS
        config = {"study": study, **shared, **own}
        cost = config["n"] if study in ("decode", "steps") else config["n"] ** 2 / 8192
        cost *= 3.5 if own.get("backward") else 1.0
        return Row(config, self.seed, partial(measure, config, self.seed), cost)


def plan_rows(run: Run, studies: Sequence[str]) -> list[Row]:
    """All rows of the named studies; what cannot be measured is refused here."""
    for name in studies:
        checks.one_of("--study", name, STUDIES)
    for name in run.settings["methods"]:
        method_config(name, run.settings)
    if "heads" in studies:
        if not run.saved:
            raise ValueError("--heads must be a directory of saved heads for --study heads, got none")
        if True not in run.causal or False not in run.backward:
            raise ValueError("--heads must come with causal and forward, got another choice")
    return [row for name, study in STUDIES.items() if name in studies for row in study(run)]


def method_config(name: str, config: Values) -> Config:
    """The configuration of a method: the default, HyperAttention, or the paper's preset with a scorer."""
    if name in ("default", "Exact()"):
        return Routed() if name == "default" else Exact()
    if name == "hyper":
        return Hyper.published(min_seq_len=config["min_seq_len"])
    preset, _, scorer_name = name.partition(":")
    if preset != "paper":
        raise ValueError(f"--method must be default, hyper or paper:SCORER, got {name!r}")
    scorer = get_scorer(scorer_name)
    clusters = {"n_clusters": config.get("n_clusters")} if issubclass(scorer, ClusteringScorer) else {}
    return Selected.paper(scorer(**clusters), config["top_k"], min_seq_len=config["min_seq_len"])


# Whole calls: lengths, top-k, clusters, short and heads.

_METHOD_FIELDS = "heads dim dtype repeats top_k min_seq_len methods memory"


def lengths(run: Run) -> Iterator[Row]:
    """Every method at every length."""
    for causal, backward, n in itertools.product(run.causal, run.backward, run.lengths):
        own = {"n": n, "causal": causal, "backward": backward, "n_clusters": None}
        yield run.row("lengths", measure_methods, _METHOD_FIELDS, **own)


def sweep(run: Run, study: str, field: str, values: Sequence[int]) -> Iterator[Row]:
    """Every method against one field, full, forward."""
    for value in values:
        own = {"n": run.longest, "causal": False, "backward": False, "n_clusters": None, field: value}
        yield run.row(study, measure_methods, _METHOD_FIELDS, **own)


def short(run: Run) -> Iterator[Row]:
    """Short inputs: exact attention through `prescored_attention` shows what its checks cost."""
    own: Values = {"methods": ["Exact()", "default"], "repeats": run.rounds, "min_seconds": SHORT_SECONDS}
    chosen = SHORT if run.n is None else [n for n in run.n if n <= SHORT[-1]]
    for causal, backward, n in itertools.product((False, True), (False, True), chosen):
        names = "heads dim dtype top_k min_seq_len"
        yield run.row("short", measure_methods, names, n=n, causal=causal, backward=backward, **own)


def saved_heads(run: Run) -> Iterator[Row]:
    """Every method on saved heads of a model, causal, forward."""
    for saved, n in heads_at_lengths(run.saved, run.n):
        names = "methods dtype repeats top_k min_seq_len memory"
        measure = partial(measure_methods, saved=saved)
        yield run.row("heads", measure, names, n=n, heads=saved.name, digest=saved.digest)


def measure_methods(config: Values, seed: int, saved: SavedHeads | None = None) -> Values:
    """Times of exact attention and of every method on the same inputs, what they read, and their errors.

    On random inputs `error` is the largest difference from the reference; on saved heads it is the relative
    squared error of the layer's output against exact attention.
    """
    causal, backward = config.get("causal", True), config.get("backward", False)
    if saved is None:
        inputs, scale = _random(config, seed), None
    else:
        inputs, scale = saved.inputs(config["n"], config["dtype"]), saved.scale
    for tensor in inputs:
        tensor.requires_grad_(backward)
    configs = {name: method_config(name, config) for name in config["methods"]}
    calls = {EXACT: partial(_exact, inputs, causal, scale)}
    for name, method in configs.items():
        calls[name] = partial(prescored_attention, *inputs, method, is_causal=causal, scale=scale)
    kind: Values = {"is_causal": causal, "scale": scale}
    place = f"at n = {config['n']}" if saved is None else f"on {saved.name}"
    with torch.no_grad():
        exact = calls[EXACT]()
        results = {EXACT: check_exact(f"{EXACT} {place}", inputs, exact, **kind)}
        for name, method in configs.items():  # the same calls are timed
            output = calls[name]()
            checked = check_method(f"{name} {place}", inputs, method, output, **kind, from_model=saved is not None)
            results[name] = {**checked, **_call_stats(inputs, method, **kind)}
            if saved is not None:
                results[name]["error"] = relative_error(output, exact)
                heads = zip(output.unbind(1), exact.unbind(1), strict=True)
                results[name]["head_errors"] = [relative_error(*pair) for pair in heads]
    times = time_calls(calls, config["repeats"], backward=backward, min_seconds=config.get("min_seconds", 0.0))
    for name, entry in results.items():
        entry.update(times[name])
        if name != EXACT:
            visible = (config["n"] + 1) / 2 if causal else config["n"]
            entry["speedup_bound"] = visible / max(entry["reads_per_query"], 1.0)
            entry["share_of_bound"] = entry["speedup"] / entry["speedup_bound"]
            entry["scoring_of_exact"] = entry["stage_seconds"].get("scoring", 0.0) / times[EXACT]["seconds"]
    return {"shape": [list(tensor.shape) for tensor in inputs], "methods": results}


def relative_error(output: Tensor, wanted: Tensor) -> float:
    """`|output - wanted|^2 / |wanted|^2`."""
    wide = wanted.double()
    return float((output.double() - wide).square().sum() / wide.square().sum().clamp_min(1e-300))


def _exact(inputs: Inputs, causal: bool, scale: float | None) -> Tensor:
    grouped = inputs[0].shape[1] != inputs[1].shape[1]
    return scaled_dot_product_attention(*inputs, is_causal=causal, scale=scale, enable_gqa=grouped)


def _random(config: Values, seed: int) -> Inputs:
    return random_inputs(config["n"], config["heads"], config["dim"], dtype=config["dtype"], seed=seed)


def _call_stats(inputs: Inputs, config: Config, **kind: Any) -> Values:
    """What a query reads and compares on average, seconds by stage, and the stages' shares."""
    stats = prescored_attention(*inputs, config, **kind, return_aux=True)[1].stats
    total = sum(stats.seconds.values())
    routed_share = 1 - (stats.exact_queries or 0) / inputs[0].shape[2]
    return {
        "reads_per_query": stats.keys_per_query + stats.centroids_per_query,
        "keys_compared_per_query": (stats.keys_compared or 0.0) * routed_share,
        "stage_seconds": dict(stats.seconds),
        "shares": {stage: spent / total for stage, spent in stats.seconds.items()},
    }


# Scorers alone.


def scoring(run: Run) -> Iterator[Row]:
    """Every scorer against exact full attention."""
    yield run.row("scoring", measure_scoring, "heads dim", n=run.longest, repeats=run.rounds)


@torch.no_grad()
def measure_scoring(config: Values, seed: int) -> Values:
    """Times of exact full attention and of every scorer on the same keys."""
    inputs = random_inputs(config["n"], config["heads"], config["dim"], seed=seed)
    calls: dict[str, Callable[[], Tensor]] = {EXACT: partial(scaled_dot_product_attention, *inputs)}
    for name, scorer in SCORERS.items():
        calls[name] = partial(score, inputs[1], scorer)
        scores = calls[name]()
        if not bool(torch.isfinite(scores).all()):
            raise RuntimeError(f"scores of {name} must be finite, got {scores}")
    return {"methods": time_calls(calls, config["repeats"])}


# Single decode steps.


def decode(run: Run) -> Iterator[Row]:
    """One step over selected keys against one over the full cache."""
    longest = max(run.lengths)
    for n in [longest] if run.n is not None else sorted({8192, longest}):
        heads = run.settings["heads"] or HEADS
        yield run.row("decode", measure_decode, "top_k dim", n=n, heads=heads, steps=DECODE_STEPS)


@torch.no_grad()
def measure_decode(config: Values, seed: int) -> Values:
    """Seconds of a decode step over the selected keys, and exactly over the full cache."""
    query, key, value = random_inputs(config["n"], config["heads"], config["dim"], seed=seed)
    query = query[:, :, -1:]
    method = Selected.paper("kmeans", config["top_k"], inner=Exact())
    state = SelectionState.select(key, value, None, method)
    wanted = prescored_attention(query, key, value, method)
    checked = check_output(f"a decode step at n = {config['n']}", state.attend(query, None), wanted)
    calls = {
        EXACT: partial(scaled_dot_product_attention, query, key, value),
        "selected": partial(state.attend, query, None),
    }
    times = time_calls(calls, config["steps"])
    return {
        **{field: {name: entry[field] for name, entry in times.items()} for field in ("seconds", "spread")},
        "reads_per_query": state.n_entries,
        "speedup": times["selected"]["speedup"],
        "error": checked["error"],
    }


def parts(run: Run) -> Iterator[Row]:
    """Parts of a routed call."""
    yield from _layer_rows(run, "parts", [run.longest], run.rounds)


def steps(run: Run) -> Iterator[Row]:
    """Routed decode steps, token by token."""
    yield from _layer_rows(run, "steps", STEP_LENGTHS if run.n is None else run.n, ROUTED_STEPS)


def _layer_rows(run: Run, study: str, random: Sequence[int], repeats: int) -> Iterator[Row]:
    """Rows of one causal layer each: the saved ones, or random ones where none are given."""
    fields: Values = {"repeats": repeats, "heads": None, "digest": None, "dim": run.settings["dim"], **LAYER}
    for n in random if not run.saved else ():
        yield run.row(study, partial(measure_layer, saved=None), "dtype memory", **fields, n=n)
    for saved, n in heads_at_lengths(run.saved, run.n):
        (_, query_heads, _, dim), (_, kv_heads, _, _), _ = saved.shapes
        fields |= {"heads": saved.name, "digest": saved.digest, "dim": dim}
        fields |= {"query_heads": query_heads, "kv_heads": kv_heads}
        yield run.row(study, partial(measure_layer, saved=saved), "dtype memory", **fields, n=n)


def measure_layer(config: Values, seed: int, *, saved: SavedHeads | None) -> Values:
    """The study `parts` or `steps` on one layer."""
    n, dtype, scale = config["n"], config["dtype"], config["dim"] ** -0.5
    if saved is None:
        sizes = {"kv_heads": config["kv_heads"], "dtype": dtype, "seed": seed}
        inputs = random_inputs(n, config["query_heads"], config["dim"], **sizes)
    else:
        inputs, scale = saved.inputs(n, dtype), scale if saved.scale is None else saved.scale
    if config["study"] == "parts":
        return measure_parts(inputs, scale, config["repeats"], from_model=saved is not None)
    return measure_steps(inputs, scale, config["repeats"])


@torch.no_grad()
def measure_parts(inputs: Inputs, scale: float, repeats: int, *, from_model: bool) -> Values:
    """Seconds, multiply-adds and their rate for the parts of a causal call of `Routed()`.

    Parts are differences of calls with less to do: the queries before `exact_until` alone, one query (the key
    index), and no search (`min_weight=1`).
    """
    config, (query, key, value) = Routed(), inputs
    n, both = query.shape[2], key.shape[3] + value.shape[3]
    start = max(config.exact_until, config.sinks + 2 * config.chunk_size)
    if n <= start:
        raise ValueError(f"n must be more than {start}, where routing starts, got {n}")
    no_search = config.replace(min_weight=1.0)
    first, last = [tensor[:, :, :start] for tensor in inputs], [query[:, :, -1:], key, value]
    attend = partial(prescored_attention, is_causal=True, scale=scale)
    calls = {
        EXACT: partial(_exact, inputs, True, scale),
        "call": partial(attend, *inputs, config),
        "exact queries": partial(attend, *first, config),
        "no search": partial(attend, *inputs, no_search),
        "index": partial(attend, *last, no_search),
    }
    kind: Values = {"is_causal": True, "scale": scale}
    check_exact("exact attention", inputs, calls[EXACT](), **kind)
    check_method("the default", inputs, config, calls["call"](), **kind, from_model=from_model)
    spent = {name: entry["seconds"] for name, entry in time_calls(calls, repeats).items()}
    stats = prescored_attention(*inputs, config, **kind, return_aux=True)[1].stats
    n_exact, n_reads = start * (start + 1) / 2, n * (stats.keys_per_query + stats.centroids_per_query)
    n_compared, n_far = ((n - start) * (number or 0.0) for number in (stats.keys_compared, stats.far_keys_read))
    n_heads = query.shape[1]
    exact_total = n_heads * n * (n + 1) / 2 * both
    exact_rate = exact_total / spent[EXACT]
    no_far = spent["no search"] - spent["index"] - spent["exact queries"]
    parts: dict[str, Values] = {}
    for name, took, work in (
        ("exact queries", spent["exact queries"], n_heads * (n_exact * both)),
        ("index", spent["index"], 0.0),  # not counted
        ("local and centroids", no_far, n_heads * ((n_reads - n_far - n_exact) * both)),
        (
            "search and keys",
            spent["call"] - spent["no search"],
            n_heads * (n_compared * key.shape[3] + n_far * both),
        ),
    ):
        rate = work / took / exact_rate if work and took > 0 else None
        parts[name] = {
            "seconds": took,
            "share": took / spent["call"],
            "multiply_adds": work,
            "of_exact_rate": rate,
        }
    total = sum(part["multiply_adds"] for part in parts.values())
    return {
        "exact_seconds": spent[EXACT],
        "exact_multiply_adds": exact_total,
        "call_seconds": spent["call"],
        "call_multiply_adds": total,
        "speedup": spent[EXACT] / spent["call"],
        "call_of_exact_rate": total / spent["call"] / exact_rate,
        "parts": parts,
    }


@torch.no_grad()
def measure_steps(inputs: Inputs, scale: float, n_steps: int) -> Values:
    """Seconds of one step, at each of the last positions; the first step builds the index and is timed apart.

    Exact attention is timed with grouped heads, and packed: the heads of a group as queries of one KV head, which
    reads every key once.
    """
    n, config, decoder = inputs[0].shape[2], Routed(), LayerCache()
    if n <= n_steps:
        raise ValueError(f"n must be more than the {n_steps} steps, got {n}")
    index_seconds, _ = timed(partial(_routed_step, decoder, _newest(inputs, n - n_steps), config, scale))
    times: dict[str, list[float]] = {EXACT: [], "packed": [], "routed": []}
    outputs: dict[str, list[Tensor]] = {EXACT: [], "routed": []}
    reads, paths = [], set()
    for position in range(n - n_steps, n):
        newest = _newest(inputs, position + 1)
        times["packed"].append(seconds(partial(packed_step, newest, scale)))
        spent, exact = timed(partial(_exact, newest, False, scale))
        times[EXACT].append(spent)
        spent, (output, n_reads, path) = timed(partial(_routed_step, decoder, newest, config, scale))
        times["routed"].append(spent)
        outputs[EXACT].append(exact)
        outputs["routed"].append(output)
        reads.append(n_reads)
        paths.add(path)
    # a step is a query of the full call
    checked = check_method(
        f"a routed step at n = {n}", newest, config, output, is_causal=True, scale=scale, from_model=True
    )
    median = {name: statistics.median(spent) for name, spent in times.items()}
    return {
        "seconds": median,
        "mean_seconds": {name: statistics.fmean(spent) for name, spent in times.items()},
        "spread": {name: max(spent) - min(spent) for name, spent in times.items()},
        "index_seconds": index_seconds,
        "path": sorted(paths),
        "reads_per_query": statistics.fmean(reads),
        "speedup": median[EXACT] / median["routed"],
        "speedup_packed": median["packed"] / median["routed"],
        "error": relative_error(torch.cat(outputs["routed"], 2), torch.cat(outputs[EXACT], 2)),
        "mismatched_queries": checked["mismatched_queries"],
    }


def _newest(inputs: Inputs, n_keys: int) -> Inputs:
    """The newest query of `n_keys` positions, and views of their keys and values."""
    query, key, value = inputs
    return query[:, :, n_keys - 1 : n_keys], key[:, :, :n_keys], value[:, :, :n_keys]


def packed_step(newest: Inputs, scale: float) -> Tensor:
    """Exact attention of one query with the heads of a group as queries of their KV head."""
    query, key, value = newest
    packed = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    return scaled_dot_product_attention(packed, key, value, scale=scale).flatten(1, 2)[:, :, None]


def _routed_step(decoder: LayerCache, newest: Inputs, config: Routed, scale: float) -> tuple[Tensor, float, str]:
    """Output, keys and centroids read, and the path of a step, as a layer with a cache takes it."""
    query, key, value = newest
    step = decoder.step(query, CachedKeys(key, value, None, key.shape[2]), Request(config, scale))
    if step.result is None:
        return _exact(newest, False, scale), float(key.shape[2]), step.path
    return step.result.output, sum(step.result.count_reads()), step.path


# Context parallel: a row starts as many processes on this machine as it has ranks.


def parallel(run: Run) -> Iterator[Row]:
    """Bytes and times of several ranks."""
    kinds = itertools.product(run.causal, run.backward, [n for n in run.lengths if n <= LONG], RANKS)
    for causal, backward, n, ranks in kinds:
        if n % ranks:
            raise ValueError(f"--n must be a multiple of the {ranks} ranks, got {n}")
        own = {"n": n, "ranks": ranks, "causal": causal, "backward": backward}
        yield run.row("parallel", measure_parallel, "heads dim dtype repeats top_k min_seq_len", **own)


def parallel_configs(config: Values) -> dict[str, Config]:
    """What is compared; all-gather is exact attention over gathered keys, and a ring sends as many bytes."""
    return {
        "all-gather": Exact(),
        "selected": Selected(top_k=config["top_k"], min_seq_len=config["min_seq_len"]),
        "paper": Selected.paper("kmeans", config["top_k"], min_seq_len=config["min_seq_len"]),
        "hyper": Hyper.published(min_seq_len=config["min_seq_len"]),
        "default": Routed(),
    }


def measure_parallel(config: Values, seed: int) -> Values:
    """Bytes sent and seconds of every configuration, of the rank with the most of each."""
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, torch.get_num_threads() // config["ranks"])
        start_processes(
            _run_rank, args=(config, seed, folder, threads), nprocs=config["ranks"], start_method="spawn"
        )
        by_rank = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    methods: Values = {}
    for name, entry in by_rank[0].items():
        n_bytes = [results[name]["bytes"] for results in by_rank]
        slowest = max(results[name]["seconds"] for results in by_rank)
        sent = {"bytes": max(n_bytes), "mean_bytes": statistics.mean(n_bytes)}
        methods[name] = {**entry, **sent, "seconds": slowest}
    for entry in methods.values():
        entry["of_all_gather"] = entry["bytes"] / methods["all-gather"]["bytes"]
    return {"methods": methods}


def _run_rank(rank: int, config: Values, seed: int, folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=config["ranks"])
    try:
        group = as_group(dist.group.WORLD)
        inputs = _random(config, seed)
        methods = parallel_configs(config)
        results = {name: _measure_on_ranks(config, method, group, inputs) for name, method in methods.items()}
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure_on_ranks(config: Values, method: Config, group: Group, inputs: Inputs) -> Values:
    """One configuration on this rank's shard; rank 0 compares the output of all ranks with one process first."""
    causal, backward = config["causal"], config["backward"]
    shard = [t.chunk(group.size, dim=2)[group.rank].clone().requires_grad_(backward) for t in inputs]
    query, key, value = shard
    call = partial(prescored_attention, query, key, value, method, is_causal=causal, group=group)
    with torch.no_grad():
        output, aux = call(return_aux=True)
        full = torch.cat(list(group.gather(output)), dim=2)
        checked = {"mismatched_queries": 0.0}
        if group.rank == 0:
            wanted = prescored_attention(*inputs, method, is_causal=causal)
            name = f"{method!r} on {group.size} ranks"
            checked = check_output(name, full, wanted, most=MOST_MISMATCHED * wanted[..., 0].numel())
    sent, times = group.sent, []
    for _ in range(config["repeats"]):
        dist.barrier()
        times.append(seconds(call, backward=backward))
    return {
        "exchange": aux.stats["exchange"],
        "bytes": (group.sent - sent) // config["repeats"],
        "seconds": statistics.median(times),
        "mismatched_queries": checked["mismatched_queries"],
    }


STUDIES: dict[str, Callable[[Run], Iterator[Row]]] = {
    "lengths": lengths,
    "top-k": lambda run: sweep(run, "top-k", "top_k", [top_k for top_k in TOP_K if top_k < run.longest]),
    "clusters": lambda run: sweep(run, "clusters", "n_clusters", CLUSTERS),
    "decode": decode,
    "scoring": scoring,
    "short": short,
    "heads": saved_heads,
    "parts": parts,
    "steps": steps,
    "parallel": parallel,
}
DEFAULT_STUDIES = tuple(STUDIES)[:6]
