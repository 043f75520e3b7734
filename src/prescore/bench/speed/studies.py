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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import scaled_dot_product_attention

from prescore import checks
from prescore.attention import prescored_attention, score
from prescore.bench.methods import Baseline, Local, Sizes, parse_method
from prescore.bench.records import Row, Values
from prescore.bench.speed import gpu_model
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
from prescore.scoring.base import Scorer
from prescore.scoring.kmeans import GaussianKMeans, KMeans, KMedian, Minkowski
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
"""Above this length fewer heads are timed, for exact attention and all methods alike; studies at a single length
stop here. One causal head would split unevenly over two threads."""
HEADS, LONG_HEADS = 4, 2
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

CPU = "cpu"
STUDIES = (
    "lengths",
    "top-k",
    "clusters",
    "decode",
    "scoring",
    "short",
    "heads",
    "parts",
    "steps",
    "parallel",
    gpu_model.STUDY,
)
RIVALS = "rivals"
"""A study of models, which stands alone."""
DEFAULT_STUDIES = STUDIES[:6]
_METHOD_FIELDS = "heads dim dtype repeats top_k min_seq_len methods memory"

Measure = Callable[..., Values]


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
        device: Of the tensors.
    """

    settings: Values
    n: Sequence[int] | None = None
    lengths: Sequence[int] = LENGTHS
    causal: Sequence[bool] = (False, True)
    backward: Sequence[bool] = (False, True)
    saved: Sequence[SavedHeads] = ()
    seed: int = 0
    device: str = CPU


def plan_rows(run: Run, studies: Sequence[str]) -> list[Row]:
    """All rows of the named studies; what cannot be measured is refused here."""
    for name in studies:
        checks.one_of("--study", name, (*STUDIES, RIVALS))
        if name == RIVALS:
            raise ValueError(f"--study rivals must be the only study, got {', '.join(studies)}")
        if name in ("parallel", gpu_model.STUDY) and run.device != CPU:
            raise ValueError(f"--device must be cpu for --study {name}, got {run.device!r}")
    for name in run.settings["methods"]:
        make_method(name, run.settings)
    for name in ("heads", gpu_model.STUDY):
        if name in studies and not run.saved:
            raise ValueError(f"--heads must be a directory of saved heads for --study {name}, got none")
    if "heads" in studies and True not in run.causal:
        raise ValueError("--heads must come with --causal, got --no-causal")
    return [
        _row(run, study, *planned) for study in STUDIES if study in studies for planned in plan_study(run, study)
    ]


def plan_study(run: Run, study: str) -> Iterator[tuple[Measure, str, Values]]:
    """What measures each row of a study, the shared settings that it has, and its own fields."""
    longest, rounds = min(max(run.lengths), LONG), max(int(run.settings["repeats"]), FEWEST_ROUNDS)
    both = (False, True)
    if study == "lengths":
        for causal, backward, n in itertools.product(run.causal, run.backward, run.lengths):
            own: Values = {"n": n, "causal": causal, "backward": backward, "n_clusters": None}
            yield measure_methods, _METHOD_FIELDS, own
    elif study in ("top-k", "clusters"):
        name, values = ("n_clusters", CLUSTERS) if study == "clusters" else ("top_k", TOP_K)
        for value in values if study == "clusters" else [top_k for top_k in values if top_k < longest]:
            own = {"n": longest, "causal": False, "backward": False, "n_clusters": None, name: value}
            yield measure_methods, _METHOD_FIELDS, own
    elif study == "short":  # exact attention through `prescored_attention` shows what its checks cost
        chosen = SHORT if run.n is None else [n for n in run.n if n <= SHORT[-1]]
        own = {"methods": ["Exact()", "default"], "repeats": rounds, "min_seconds": SHORT_SECONDS}
        for causal, backward, n in itertools.product(both, both, chosen):
            kind = {"n": n, "causal": causal, "backward": backward}
            yield measure_methods, "heads dim dtype top_k min_seq_len", {**own, **kind}
    elif study == "scoring":
        yield measure_scoring, "heads dim", {"n": longest, "repeats": rounds}
    elif study == "decode":
        for n in [max(run.lengths)] if run.n is not None else sorted({8192, max(run.lengths)}):
            own = {"n": n, "heads": run.settings["heads"] or HEADS, "steps": DECODE_STEPS}
            yield measure_decode, "top_k dim", own
    elif study == "parallel":
        short = [n for n in run.lengths if n <= LONG]
        for causal, backward, n, ranks in itertools.product(run.causal, run.backward, short, RANKS):
            if n % ranks:
                raise ValueError(f"--n must be a multiple of the {ranks} ranks, got {n}")
            own = {"n": n, "ranks": ranks, "causal": causal, "backward": backward}
            yield measure_parallel, "heads dim dtype repeats top_k min_seq_len", own
    elif study == "heads":
        for saved, n in heads_at_lengths(run.saved, run.n):
            own = {"n": n, "heads": saved.name, "digest": saved.digest}
            if False not in run.backward:
                own["backward"] = True
            yield partial(measure_methods, saved=saved), "methods dtype repeats top_k min_seq_len memory", own
    elif study == gpu_model.STUDY:
        for saved, n in heads_at_lengths(run.saved, run.n):
            (_, query_heads, _, dim), (_, kv_heads, _, _), _ = saved.shapes
            own = {"n": n, "heads": saved.name, "digest": saved.digest, "dim": dim, "tiles": gpu_model.TILES}
            own |= {"query_heads": query_heads, "kv_heads": kv_heads}
            yield partial(count_tiles, saved=saved), "", own
    else:  # parts and steps, on one causal layer: the saved ones, or random ones where none are given
        measure = measure_parts if study == "parts" else measure_steps
        repeats = {"repeats": rounds if study == "parts" else ROUTED_STEPS}
        for n in () if run.saved else [longest] if study == "parts" else run.n or STEP_LENGTHS:
            own = {"n": n, "heads": None, "digest": None, "dim": run.settings["dim"], **LAYER, **repeats}
            yield measure, "dtype memory", own
        for saved, n in heads_at_lengths(run.saved, run.n):
            (_, query_heads, _, dim), (_, kv_heads, _, _), _ = saved.shapes
            own = {"n": n, "heads": saved.name, "digest": saved.digest, "dim": dim, **repeats}
            own |= {"query_heads": query_heads, "kv_heads": kv_heads}
            yield partial(measure, saved=saved), "dtype memory", own


def _row(run: Run, study: str, measure: Measure, names: str, own: Values) -> Row:
    """A row with the settings `names` and its own fields; a setting `heads=None` depends on the length."""
    shared = {name: run.settings[name] for name in names.split()}
    if "heads" in shared and shared["heads"] is None:
        shared["heads"] = HEADS if own["n"] <= LONG else LONG_HEADS
    config = {"study": study, **shared, **own}
    if run.device != CPU:  # rows of CPUs keep their keys
        config["device"] = run.device
    cost = config["n"] if study in ("decode", "steps") else config["n"] ** 2 / 8192
    cost *= 3.5 if own.get("backward") else 1.0
    return Row(config, run.seed, partial(measure, config, run.seed), cost)


def make_method(name: str, config: Values) -> Config:
    """The configuration of a method of a row, by its name."""
    changes = {} if config.get("n_clusters") is None else {"scorer.n_clusters": config["n_clusters"]}
    sizes = Sizes(top_k=config["top_k"], leaf=config["min_seq_len"], changes=changes)
    method = parse_method("exact" if name == "Exact()" else name, sizes).config
    if isinstance(method, Local | Baseline):
        raise ValueError(f"--method must be a configuration of the library, got {name!r}")
    return method


def _inputs(config: Values, seed: int, saved: SavedHeads | None) -> tuple[Inputs, float | None]:
    """Query, key and value, saved or random, and their scale."""
    if saved is not None:
        inputs, scale = saved.inputs(config["n"], config["dtype"]), saved.scale
    else:
        heads = config["query_heads"] if "query_heads" in config else config["heads"]
        sizes = {"kv_heads": config.get("kv_heads"), "dtype": config.get("dtype", "float32"), "seed": seed}
        inputs, scale = random_inputs(config["n"], heads, config["dim"], **sizes), None
    query, key, value = (tensor.to(config.get("device", CPU)) for tensor in inputs)
    return (query, key, value), scale


def _exact(inputs: Inputs, causal: bool, scale: float | None) -> Tensor:
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
    inputs, scale = _inputs(config, seed, saved)
    for tensor in inputs:
        tensor.requires_grad_(backward)
    kind: Values = {"is_causal": causal, "scale": scale}
    configs = {name: make_method(name, config) for name in config["methods"]}
    calls = {EXACT: partial(_exact, inputs, causal, scale)}
    calls |= {name: partial(prescored_attention, *inputs, method, **kind) for name, method in configs.items()}
    place = f"at n = {config['n']}" if saved is None else f"on {saved.name}"
    with torch.no_grad():
        exact = calls[EXACT]()
        results = {EXACT: check_exact(f"{EXACT} {place}", inputs, exact, **kind)}
        for name, method in configs.items():  # the same calls are timed
            output = calls[name]()
            checked = check_method(f"{name} {place}", inputs, method, output, **kind, from_model=saved is not None)
            stats = prescored_attention(*inputs, method, **kind, return_aux=True)[1].stats
            routed_share = 1 - (stats.exact_queries or 0) / config["n"]
            total = sum(stats.seconds.values())
            results[name] = {
                **checked,
                "reads_per_query": stats.keys_per_query + stats.centroids_per_query,
                "keys_compared_per_query": (stats.keys_compared or 0.0) * routed_share,
                "stage_seconds": dict(stats.seconds),
                "shares": {stage: spent / total for stage, spent in stats.seconds.items()},
            }
            if saved is not None:
                heads = zip(output.unbind(1), exact.unbind(1), strict=True)
                results[name]["error"] = relative_error(output, exact)
                results[name]["head_errors"] = [relative_error(*pair) for pair in heads]
    times = time_calls(calls, config["repeats"], backward=backward, min_seconds=config.get("min_seconds", 0.0))
    visible = (config["n"] + 1) / 2 if causal else config["n"]
    for name, entry in results.items():
        entry.update(times[name])
        if name != EXACT:
            entry["speedup_bound"] = visible / max(entry["reads_per_query"], 1.0)
            entry["share_of_bound"] = entry["speedup"] / entry["speedup_bound"]
            entry["scoring_of_exact"] = entry["stage_seconds"].get("scoring", 0.0) / times[EXACT]["seconds"]
    return {"shape": [list(tensor.shape) for tensor in inputs], "methods": results}


@torch.no_grad()
def measure_scoring(config: Values, seed: int) -> Values:
    """Times of exact full attention and of every scorer on the same keys."""
    inputs, _ = _inputs(config, seed, None)
    calls: dict[str, Callable[[], Tensor]] = {EXACT: partial(_exact, inputs, False, None)}
    for name, scorer in SCORERS.items():
        calls[name] = partial(score, inputs[1], scorer)
        scores = calls[name]()
        if not bool(torch.isfinite(scores).all()):
            raise RuntimeError(f"scores of {name} must be finite, got {scores}")
    return {"methods": time_calls(calls, config["repeats"])}


@torch.no_grad()
def measure_decode(config: Values, seed: int) -> Values:
    """Seconds of a decode step over the selected keys, and exactly over the full cache."""
    (query, key, value), _ = _inputs(config, seed, None)
    query = query[:, :, -1:]
    method = Selected.paper("kmeans", config["top_k"], inner=Exact())
    state = SelectionState.select(key, value, None, method)
    calls = {
        EXACT: partial(_exact, (query, key, value), False, None),
        "selected": partial(state.attend, query, None),
    }
    wanted = prescored_attention(query, key, value, method)
    checked = check_output(f"a decode step at n = {config['n']}", calls["selected"](), wanted)
    times = time_calls(calls, config["steps"])
    return {
        **{field: {name: entry[field] for name, entry in times.items()} for field in ("seconds", "spread")},
        "reads_per_query": state.n_entries,
        "speedup": times["selected"]["speedup"],
        "error": checked["error"],
    }


def count_tiles(config: Values, seed: int, saved: SavedHeads) -> Values:
    """What tiles of queries of a layer need; see `gpu_model`."""
    query, key, value = saved.inputs(config["n"])
    scale = config["dim"] ** -0.5 if saved.scale is None else saved.scale
    return gpu_model.measure_tiles(config, query, key, value, scale, seed)


@torch.no_grad()
def measure_parts(config: Values, seed: int, saved: SavedHeads | None = None) -> Values:
    """Seconds, multiply-adds and their rate for the parts of a causal call of `Routed()`.

    Parts are differences of calls with less to do: the queries before `exact_until` alone, one query (the key
    index), and no search (`min_weight=1`).
    """
    inputs, scale = _inputs(config, seed, saved)
    default, (query, key, value) = Routed(), inputs
    n, n_heads, both = query.shape[2], query.shape[1], key.shape[3] + value.shape[3]
    start = max(default.exact_until, default.sinks + 2 * default.chunk_size)
    if n <= start:
        raise ValueError(f"n must be more than {start}, where routing starts, got {n}")
    no_search = default.replace(min_weight=1.0)
    kind: Values = {"is_causal": True, "scale": scale}
    attend = partial(prescored_attention, **kind)
    calls = {
        EXACT: partial(_exact, inputs, True, scale),
        "call": partial(attend, *inputs, default),
        "exact queries": partial(attend, *(tensor[:, :, :start] for tensor in inputs), default),
        "no search": partial(attend, *inputs, no_search),
        "index": partial(attend, query[:, :, -1:], key, value, no_search),
    }
    check_exact("exact attention", inputs, calls[EXACT](), **kind)
    check_method("the default", inputs, default, calls["call"](), **kind, from_model=saved is not None)
    spent = {name: entry["seconds"] for name, entry in time_calls(calls, config["repeats"]).items()}
    stats = prescored_attention(*inputs, default, **kind, return_aux=True)[1].stats
    n_exact, n_reads = start * (start + 1) / 2, n * (stats.keys_per_query + stats.centroids_per_query)
    n_compared, n_far = ((n - start) * (number or 0.0) for number in (stats.keys_compared, stats.far_keys_read))
    took_and_work = {
        "exact queries": (spent["exact queries"], n_exact * both),
        "index": (spent["index"], 0.0),  # its work is not counted
        "local and centroids": (
            spent["no search"] - spent["index"] - spent["exact queries"],
            (n_reads - n_far - n_exact) * both,
        ),
        "search and keys": (spent["call"] - spent["no search"], n_compared * key.shape[3] + n_far * both),
    }
    exact_total = n_heads * n * (n + 1) / 2 * both
    exact_rate = exact_total / spent[EXACT]
    parts: dict[str, Values] = {}
    for name, (took, work) in took_and_work.items():
        parts[name] = {"seconds": took, "share": took / spent["call"], "multiply_adds": n_heads * work}
        parts[name]["of_exact_rate"] = n_heads * work / took / exact_rate if work and took > 0 else None
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
def measure_steps(config: Values, seed: int, saved: SavedHeads | None = None) -> Values:
    """Seconds of one step, at each of the last positions; the first step builds the index and is timed apart.

    Exact attention is timed with grouped heads, and packed: the heads of a group as queries of one KV head, which
    reads every key once.
    """
    (query, key, value), scale = _inputs(config, seed, saved)
    n, n_steps, decoder, request = config["n"], config["repeats"], LayerCache(), Request(Routed(), scale)
    if n <= n_steps:
        raise ValueError(f"n must be more than the {n_steps} steps, got {n}")
    times: dict[str, list[float]] = {EXACT: [], "packed": [], "routed": []}
    outputs: dict[str, list[Tensor]] = {EXACT: [], "routed": []}
    reads, paths = [], []
    for n_keys in range(n - n_steps, n + 1):
        newest = query[:, :, n_keys - 1 : n_keys], key[:, :, :n_keys], value[:, :, :n_keys]
        times["packed"].append(seconds(partial(packed_step, newest, scale)))
        spent, exact = timed(partial(_exact, newest, False, scale))
        times[EXACT].append(spent)
        spent, (output, n_reads, path) = timed(partial(_routed_step, decoder, newest, request))
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


def _routed_step(decoder: LayerCache, newest: Inputs, request: Request) -> tuple[Tensor, float, str]:
    """Output, keys and centroids read, and the path of a step, as a layer with a cache takes it."""
    query, key, value = newest
    step = decoder.step(query, CachedKeys(key, value, None, key.shape[2]), request)
    if step.result is None:
        return _exact(newest, False, request.scale), float(key.shape[2]), step.path
    return step.result.output, sum(step.result.count_reads()), step.path


# Context parallel: a row starts as many processes on this machine as it has ranks.


def measure_parallel(config: Values, seed: int) -> Values:
    """Bytes sent and seconds of every configuration, of the rank with the most of each."""
    ranks = config["ranks"]
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, torch.get_num_threads() // ranks)
        start_processes(_run_rank, args=(config, seed, folder, threads), nprocs=ranks, start_method="spawn")
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
    """Every configuration on one rank; all-gather is exact attention, and a ring sends as many bytes."""
    torch.set_num_threads(threads)
    sizes = {"min_seq_len": config["min_seq_len"]}
    methods: dict[str, Config] = {
        "all-gather": Exact(),
        "selected": Selected(top_k=config["top_k"], **sizes),
        "paper": Selected.paper("kmeans", config["top_k"], **sizes),
        "hyper": Hyper.published(**sizes),
        "default": Routed(),
    }
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=config["ranks"])
    try:
        group = as_group(dist.group.WORLD)
        inputs, _ = _inputs(config, seed, None)
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
